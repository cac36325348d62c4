"""Make training data: a mixture's prompts, answered by the target, in resumable shards."""

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from tqdm import tqdm
from transformers import PreTrainedTokenizerBase

from keepsight.data_gen.answers import Backend, Rendered, answers, render_prompt
from keepsight.data_gen.mixture import Mixture
from keepsight.data_gen.prompts import CountTokens
from keepsight.data_gen.shard_writer import ShardWriter
from keepsight.data_gen.shards import DataSettings, TrainingSample
from keepsight.errors import UserError
from keepsight.files import free_bytes, one_writer, read_json
from keepsight.models.distributed import launched
from keepsight.models.targets import Target

_BYTES_A_TOKEN = 4
"""What a token takes in a shard at least: its number, a comma, a space, and a letter of the text."""


def generate_data(
    target: Target,
    mixture: Mixture,
    mixture_values: dict[str, Any],
    out: Path,
    *,
    limit: int,
    seed: int,
    max_new_tokens: int,
    shard_size: int,
    backend: Backend,
) -> dict[str, Any]:
    """Answer `limit` prompts and write them to `out`, resuming where an earlier run stopped.

    Several processes of one launch divide the shards among themselves.

    Args:
        target: Model that answers, greedily; only its tokenizer and configuration are used here.
        mixture: Draws prompt i from (seed, i) alone.
        mixture_values: The mixture as plain values, for the manifest.
        out: Data folder.
        limit: Number of samples.
        seed: Random seed of the draws.
        max_new_tokens: Longest answer in tokens.
        shard_size: Samples per shard.
        backend: Who answers.

    Returns:
        The manifest.

    Raises:
        UserError: a prompt and its answer do not fit the target's context, the samples do not fit the disk, or `out`
            holds other data or is being written to.
    """
    settings = DataSettings(
        target.name, target.version, target.template_digest, mixture_values, seed, limit, shard_size, max_new_tokens
    )
    _check_context(target, mixture, max_new_tokens)
    _check_room(out, mixture, limit)
    processes, count_tokens = launched(), _counter(target.tokenizer)

    def prompts(indices: list[int]) -> list[Rendered]:
        drawn = (render_prompt(index, mixture.prompt(seed, index, count_tokens), target.tokenizer) for index in indices)
        return [_checked(prompt, target, max_new_tokens) for prompt in drawn]

    with one_writer(out) if processes.is_main_process else nullcontext():
        with processes.main_process_first():
            writer = ShardWriter(out, settings)
        with tqdm(total=limit, desc="answers", unit="sample", disable=not processes.is_main_process) as progress:
            for number, shard in enumerate(settings.shards()):
                if number % processes.num_processes == processes.process_index:
                    _fill(writer, shard, target, prompts, backend, progress)
                else:
                    progress.update(len(shard))
        processes.wait_for_everyone()
        with processes.main_process_first():
            return writer.complete() if processes.is_main_process else read_json(out / "manifest.json")


def _fill(
    writer: ShardWriter,
    shard: range,
    target: Target,
    prompts: Callable[[list[int]], list[Rendered]],
    backend: Backend,
    progress: "tqdm[Any]",
) -> None:
    """Answer what a shard lacks."""
    missing = writer.missing(shard)
    progress.update(len(shard) - len(missing))
    for ready in answers(backend, prompts(missing), writer.settings.max_new_tokens):
        writer.append(shard, [_training_sample(prompt, ids, target) for prompt, ids in ready])
        progress.update(len(ready))
    writer.finish(shard)


def _counter(tokenizer: PreTrainedTokenizerBase) -> CountTokens:
    """What counts tokens; sources keep it, so it must not hold the model."""
    return lambda text: len(tokenizer(text, add_special_tokens=False)["input_ids"])


def _training_sample(prompt: Rendered, ids: list[int], target: Target) -> TrainingSample:
    decode = target.tokenizer.decode
    return TrainingSample(
        prompt.index,
        prompt.source,
        prompt.ids,
        ids,
        str(decode(prompt.ids)),
        str(decode(ids, skip_special_tokens=True)),
    )


def _checked(prompt: Rendered, target: Target, max_new_tokens: int) -> Rendered:
    context = target.model.config.get_text_config().max_position_embeddings
    if len(prompt.ids) + max_new_tokens > context:
        raise UserError(
            f"prompt {prompt.index} ({prompt.source}) has {len(prompt.ids)} tokens, with {max_new_tokens} for the "
            f"answer more than the context of {context}; lower the mixture's max_tokens"
        )
    return prompt


def _check_context(target: Target, mixture: Mixture, max_new_tokens: int) -> None:
    """Refuse answers so long that not even the shortest prompts fit the context with them."""
    context = target.model.config.get_text_config().max_position_embeddings
    shortest = min(entry.min_tokens for entry in mixture.entries)
    if shortest + max_new_tokens > context:
        raise UserError(
            f"max_new_tokens={max_new_tokens} and prompts of {shortest} tokens are together more than the context of "
            f"{context}; lower the mixture's max_tokens, or max_new_tokens="
        )


def _check_room(out: Path, mixture: Mixture, limit: int) -> None:
    """Refuse a limit that would fill the disk even if every prompt were as short as the mixture allows."""
    weights = [entry.weight for entry in mixture.entries]
    shortest = sum(entry.weight * entry.min_tokens for entry in mixture.entries) / sum(weights)
    needed, there = limit * shortest * _BYTES_A_TOKEN, sum(path.stat().st_size for path in out.glob("shard-*"))
    if needed > (free := free_bytes(out)) + there:
        raise UserError(
            f"limit={limit}: that many samples take more than {needed / 1e9:.0f} GB, and {out} has {free / 1e9:.0f} GB "
            "left; lower limit="
        )
