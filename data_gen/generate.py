"""Make training data: a mixture's prompts, answered by the base model, in resumable shards."""

import logging
import re
from collections.abc import Iterable, Iterator
from contextlib import nullcontext
from datetime import date
from pathlib import Path
from typing import Any

from tqdm import tqdm
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from keepsight.data_gen.backends import Answers, Backend, Decoding, Rendered
from keepsight.data_gen.mixture import Mixture
from keepsight.data_gen.prompts import CountTokens, Prompt
from keepsight.data_gen.store import DataSettings, ShardWriter, Skipped, TrainingSample
from keepsight.errors import BadRow, UserError, printable
from keepsight.files import free_bytes, one_writer, read_json
from keepsight.models.chat import encode, has_chat_template, prompt_text, with_date
from keepsight.models.decoder import context_of
from keepsight.models.distributed import launched
from keepsight.models.targets import Target

logger = logging.getLogger("keepsight")

_BYTES_A_TOKEN = 4
_LONGEST_QUESTION = 64
"""Tokens of a question that the base model writes itself."""


def generate_data(
    target: Target,
    mixture: dict[str, Any],
    out: Path,
    *,
    limit: int,
    seed: int,
    max_new_tokens: int,
    shard_size: int,
    backend: Backend,
    skip: int | None = None,
    temperature: float = 0.0,
    top_p: float = 1.0,
) -> dict[str, Any]:
    """Answer `limit` prompts and write them to `out`, resuming where an earlier run stopped; returns the manifest.

    Several processes of one launch divide the shards among themselves.

    Args:
        target: Base model; only its tokenizer and configuration are used here.
        mixture: Plain values that `Mixture.from_config` accepts; prompt i depends on them, the seed and i alone.
        out: Data folder.
        limit: Number of samples.
        seed: Random seed of prompts and of sampled answers.
        max_new_tokens: Longest answer in tokens.
        shard_size: Samples per shard.
        backend: Generates the answers.
        skip: Maximum number of bad rows in this run and process; None for no limit.
        temperature: Sampling temperature; 0 decodes greedily.
        top_p: Nucleus sampling of the answers.

    Raises:
        UserError: prompts and answers do not fit the context, the samples do not fit the disk, more rows than `skip` or
            all are bad, or `out` has other data or is being written to.
    """
    sources = Mixture.from_config(mixture)
    clock = "strftime_now" in str(target.tokenizer.chat_template)
    settings = DataSettings(
        *(target.name, target.version, target.template_digest, mixture, seed, limit, shard_size, max_new_tokens),
        date=date.today().isoformat() if clock else "",
        temperature=temperature,
        top_p=top_p,
    )
    check_sizes(target.model, sources, out, limit, max_new_tokens)
    processes = launched()
    with one_writer(out) if processes.is_main_process else nullcontext():
        with processes.main_process_first():
            run = _Run(target, sources, ShardWriter(out, settings), backend, skip)
        with tqdm(total=limit, desc="answers", unit="sample", disable=not processes.is_main_process) as progress:
            for number, shard in enumerate(settings.shards()):
                if number % processes.num_processes == processes.process_index:
                    run.fill(shard, progress)
                else:
                    progress.update(len(shard))
        processes.wait_for_everyone()
        with processes.main_process_first():
            manifest = run.writer.complete() if processes.is_main_process else read_json(out / "manifest.json")
    if processes.is_main_process and (skipped := manifest["skipped"]):
        shown = printable(f"such as {skipped[0]['index']}: {skipped[0]['reason']}")
        logger.warning("%s: %d of %d samples were skipped, %s; see manifest.json", out, len(skipped), limit, shown)
        if not manifest["samples"]:
            raise UserError(f"{out}: no sample could be made, {shown}")
    return dict(manifest)


class _Run:
    """One process's part of the work."""

    def __init__(
        self, target: Target, mixture: Mixture, writer: ShardWriter, backend: Backend, skip: int | None
    ) -> None:
        self.target, self.mixture, self.writer, self.backend, self.skip = target, mixture, writer, backend, skip
        self.skipped, tokenizer = 0, target.tokenizer
        # sources keep the counter, which therefore must not refer to the model
        self.count_tokens: CountTokens = lambda text: len(tokenizer(text, add_special_tokens=False)["input_ids"])

    def fill(self, shard: range, progress: "tqdm[Any]") -> None:
        """Answer the prompts of a shard that have no answer yet."""
        missing, settings = self.writer.missing(shard), self.writer.settings
        progress.update(len(shard) - len(missing))

        def skip(bad: dict[int, BadRow]) -> None:
            for index, reason in sorted(bad.items()):
                self.writer.append(shard, [self._bad(index, reason)])
                progress.update()

        drawn, bad = self._drawn(missing)
        skip(bad)
        whole, bad = self._with_questions(drawn)
        skip(bad)
        prompts, bad = self._rendered(whole, settings.max_new_tokens)
        skip(bad)
        decoding = Decoding(settings.max_new_tokens, settings.temperature, settings.top_p, settings.seed)
        for ready in answers(self.backend, prompts, decoding):
            self.writer.append(shard, [self._sample(prompt, made) for prompt, made in ready])
            progress.update(len(ready))
        self.writer.finish(shard)

    def _drawn(self, indices: Iterable[int]) -> tuple[dict[int, Prompt], dict[int, BadRow]]:
        """The mixture's prompts, and why others cannot be used."""
        drawn, bad = dict[int, Prompt](), dict[int, BadRow]()
        for index in indices:
            try:
                drawn[index] = self.mixture.prompt(self.writer.settings.seed, index, self.count_tokens)
            except BadRow as error:
                bad[index] = error
        return drawn, bad

    def _with_questions(self, drawn: dict[int, Prompt]) -> tuple[dict[int, Prompt], dict[int, BadRow]]:
        """The prompts, with the questions that the base model writes itself, and why others have none."""
        asking = {index: prompt.followed_by(prompt.asks) for index, prompt in drawn.items() if prompt.asks}
        whole = {index: prompt for index, prompt in drawn.items() if not prompt.asks}
        rendered, bad = self._rendered(asking, _LONGEST_QUESTION)
        for ready in answers(self.backend, rendered, Decoding(_LONGEST_QUESTION)):
            for asked, made in ready:
                if isinstance(made, BadRow):
                    bad[asked.index] = made
                elif question := question_in(self._text(made), len(made) < _LONGEST_QUESTION):
                    whole[asked.index] = drawn[asked.index].followed_by(question)
                else:
                    bad[asked.index] = BadRow(f"prompt {asked.index} ({asked.source}): the model wrote no question")
        return whole, bad

    def _rendered(self, prompts: dict[int, Prompt], longest: int) -> tuple[list[Rendered], dict[int, BadRow]]:
        """Token ids of prompts, in the order of their indices, and why others have no room for `longest` more."""
        rendered, bad = list[Rendered](), dict[int, BadRow]()
        for index, prompt in sorted(prompts.items()):
            try:
                made = render_prompt(index, prompt, self.target.tokenizer, self.writer.settings.date)
                self._require_room(made, longest)
                rendered.append(made)
            except BadRow as error:
                bad[index] = error
        return rendered, bad

    def _require_room(self, prompt: Rendered, longest: int) -> None:
        context = context_of(self.target.model)
        if len(prompt.ids) + longest > context:
            whole = f"{len(prompt.ids)} tokens, with {longest} for the answer more than the context of {context}"
            raise BadRow(f"prompt {prompt.index} ({prompt.source}) has {whole}; lower the mixture's max_tokens")

    def _text(self, ids: list[int]) -> str:
        return str(self.target.tokenizer.decode(ids, skip_special_tokens=True))

    def _sample(self, prompt: Rendered, made: list[int] | BadRow) -> TrainingSample | Skipped:
        if isinstance(made, BadRow):
            return self._bad(prompt.index, made)
        text = str(self.target.tokenizer.decode(prompt.ids))
        return TrainingSample(prompt.index, prompt.source, prompt.ids, made, text, self._text(made))

    def _bad(self, index: int, error: BadRow) -> Skipped:
        self.skipped += 1
        if self.skip is not None and self.skipped > self.skip:
            raise UserError(f"{error}; fix it, or raise skip={self.skip}")
        return Skipped(index, " ".join(str(error).split()))


def question_in(text: str, is_whole: bool) -> str:
    """The first line of what a model wrote, without its reasoning; empty if that is cut off or has no words."""
    text = re.sub(r"\s*<think>.*?</think>", "", text, count=1, flags=re.DOTALL).lstrip()
    line, end, _ = text.partition("\n")
    has_words = len(re.findall(r"\w\w", line)) > 1 and not line.startswith("<")
    return line.strip() if has_words and (end or is_whole) else ""


def render_prompt(index: int, prompt: Prompt, tokenizer: PreTrainedTokenizerBase, day: str = "") -> Rendered:
    """Apply the chat template on a `day` in ISO 8601, today by default, and tokenise.

    Raw text, and the prompts of a model without a template, stay plain text.

    BadRow: the chat template refuses the prompt, or it or its response has no tokens.
    """
    if prompt.template:
        dated = with_date(str(tokenizer.get_chat_template()), date.fromisoformat(day)) if day else None
        try:
            text = prompt_text(tokenizer, prompt.messages, prompt.answer_prefix, dated)
        except UserError as error:
            raise BadRow(f"prompt {index} ({prompt.source}): {error}") from None
    else:
        text = prompt.messages[0]["content"] + prompt.answer_prefix
    special = not prompt.template or not has_chat_template(tokenizer)
    (ids,) = encode(tokenizer, [text], special=special)
    if not ids:
        raise BadRow(f"prompt {index} ({prompt.source}): it has no tokens")
    response = None
    if prompt.response is not None:
        end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
        response = [*tokenizer(prompt.response, add_special_tokens=False)["input_ids"], *end]
        if not response:
            raise BadRow(f"prompt {index} ({prompt.source}): its response has no tokens")
    return Rendered(index, prompt.source, ids, response)


def answers(backend: Backend, prompts: list[Rendered], decoding: Decoding) -> Iterator[Answers]:
    """The prompts' own responses, truncated to `max_new_tokens`, then a backend's answers to the other prompts."""
    longest = decoding.max_new_tokens
    if ready := [(prompt, prompt.response[:longest]) for prompt in prompts if prompt.response is not None]:
        yield [*ready]
    if asked := [prompt for prompt in prompts if prompt.response is None]:
        yield from backend(asked, decoding)


def check_sizes(model: PreTrainedModel, mixture: Mixture, out: Path, limit: int, max_new_tokens: int) -> None:
    """UserError if prompts with answers exceed the context, or the samples would fill the disk even if all were short.

    The model may be without its weights; the other arguments are those of `generate_data`.
    """
    context = context_of(model)
    for entry in mixture.entries:
        longest = entry.lengths.max_tokens if entry.fills else entry.lengths.min_tokens
        if longest + max_new_tokens > context:
            whole = f"prompts of {longest} tokens with max_new_tokens={max_new_tokens} are more than the context"
            raise UserError(f"{entry.kind}: {whole} of {context}; lower the mixture's max_tokens, or max_new_tokens=")
    lengths = [entry.lengths for entry in mixture.entries]
    shortest = sum(each.weight * each.min_tokens for each in lengths) / sum(each.weight for each in lengths)
    needed, there = limit * shortest * _BYTES_A_TOKEN, sum(path.stat().st_size for path in out.glob("shard-*"))
    if needed > (free := free_bytes(out)) + there:
        gigabytes = f"more than {needed / 1e9:.0f} GB, and {out} has {free / 1e9:.0f} GB left"
        raise UserError(f"limit={limit}: that many samples take {gigabytes}; lower limit=")
