"""Make training data: a mixture's prompts, answered by the target, in resumable shards."""

from pathlib import Path
from typing import Any

from tqdm import tqdm

from keepsight.data_gen.answers import Rendered, answer, batches, render_prompt
from keepsight.data_gen.mixture import Mixture
from keepsight.data_gen.prompts import CountTokens
from keepsight.data_gen.shards import DataSettings, ShardWriter, TrainingSample
from keepsight.errors import UserError
from keepsight.models.targets import Target


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
    batch_tokens: int,
) -> dict[str, Any]:
    """Answer `limit` prompts and write them to `out`, resuming where an earlier run stopped.

    Args:
        target: Model that answers, greedily.
        mixture: Draws prompt i from (seed, i) alone.
        mixture_values: The mixture as plain values, for the manifest.
        out: Data folder.
        limit: Number of samples.
        seed: Random seed of the draws.
        max_new_tokens: Longest answer in tokens.
        shard_size: Samples per shard.
        batch_tokens: Prompt tokens per batch, padding included.

    Returns:
        The manifest.

    Raises:
        UserError: a prompt and its answer do not fit the target's context, or `out` holds other data.
    """
    settings = DataSettings(
        target.name, target.version, target.template_digest, mixture_values, seed, limit, shard_size, max_new_tokens
    )
    writer = ShardWriter(out, settings)
    tokenizer, count_tokens = target.tokenizer, _counter(target)
    with tqdm(total=limit, desc="answers", unit="sample") as progress:
        for shard in writer.shards():
            missing = writer.missing(shard)
            progress.update(len(shard) - len(missing))
            prompts = [render_prompt(index, mixture.prompt(seed, index, count_tokens), tokenizer) for index in missing]
            for prompt in prompts:
                _check_fits(prompt, target, max_new_tokens)
            for batch in batches(prompts, batch_tokens):
                answers = answer(target, batch, max_new_tokens)
                writer.append(shard, [_training_sample(*pair, target) for pair in zip(batch, answers, strict=True)])
                progress.update(len(batch))
            writer.finish(shard)
    return writer.complete()


def _counter(target: Target) -> CountTokens:
    return lambda text: len(target.tokenizer(text, add_special_tokens=False)["input_ids"])


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


def _check_fits(prompt: Rendered, target: Target, max_new_tokens: int) -> None:
    context = target.model.config.get_text_config().max_position_embeddings
    if len(prompt.ids) + max_new_tokens > context:
        raise UserError(
            f"prompt {prompt.index} ({prompt.source}) has {len(prompt.ids)} tokens, with {max_new_tokens} for the "
            f"answer more than the context of {context}; lower the mixture's max_tokens"
        )
