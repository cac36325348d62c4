"""Make training data: a mixture's prompts, answered by the base model, in resumable shards."""

import logging
import re
from collections.abc import Iterable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from datetime import date
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from keepsight.data_gen.backends import Answers, Backend, Decoding, Rendered
from keepsight.data_gen.mixture import Mixture
from keepsight.data_gen.prompts import CountTokens, Prompt
from keepsight.data_gen.store import DataSettings, ShardWriter, Skipped, TrainingSample
from keepsight.errors import BadRow, UserError, printable
from keepsight.files import free_bytes, one_writer, read_json
from keepsight.models.answer_text import answer_text
from keepsight.models.chat import encode, has_chat_template, prompt_text, with_date
from keepsight.models.decoder import context_of
from keepsight.models.distributed import launched
from keepsight.models.targets import Target
from keepsight.progress import progress_bar

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
    answers: str = "mixture",
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
        answers: `mixture` takes the responses that prompts have, and the base model's answers to others; `model` takes
            the base model's alone, `source` the responses alone (LookaheadKV, arXiv 2603.10899, appendix D).

    Raises:
        UserError: prompts and answers do not fit the context, the samples do not fit the disk, more rows than `skip` or
            all are bad, or `out` has other data or is being written to.
    """
    sources = Mixture.from_config(mixture)
    template_has_date = "strftime_now" in str(target.tokenizer.chat_template)
    day = date.today().isoformat() if template_has_date else ""
    settings = DataSettings(
        model=target.name,
        identity=target.identity,
        mixture=mixture,
        seed=seed,
        limit=limit,
        shard_size=shard_size,
        max_new_tokens=max_new_tokens,
        date=day,
        temperature=temperature,
        top_p=top_p,
        answers=answers,
    )
    check_sizes(target.model, sources, out, limit, max_new_tokens)
    processes = launched()
    with one_writer(out) if processes.is_main_process else nullcontext():
        with processes.main_process_first():
            run = _Run(target, sources, ShardWriter(out, settings), backend, skip)
        with progress_bar(total=limit, name="answers", unit="sample", shown=processes.is_main_process) as progress:
            for number, shard in enumerate(settings.shards()):
                if number % processes.num_processes == processes.process_index:
                    run.fill_shard(shard, progress)
                else:
                    progress.update(len(shard))
        processes.wait_for_everyone()
        with processes.main_process_first():
            manifest = run.writer.complete() if processes.is_main_process else read_json(out / "manifest.json")

    if processes.is_main_process and manifest["skipped"]:
        skipped = manifest["skipped"]
        example = printable(f"such as {skipped[0]['index']}: {skipped[0]['reason']}")
        logger.warning("%s: %d of %d samples were skipped, %s; see manifest.json", out, len(skipped), limit, example)
        if not manifest["samples"]:
            raise UserError(f"{out}: no sample could be made, {example}", field="limit", code="data")
    return dict(manifest)


BadRows = dict[int, BadRow]
"""Why prompts cannot be used, by their indices."""


class _Run:
    """One process's share of the work."""

    def __init__(
        self, target: Target, mixture: Mixture, writer: ShardWriter, backend: Backend, skip: int | None
    ) -> None:
        self.target = target
        self.mixture = mixture
        self.writer = writer
        self.backend = backend
        self.skip = skip
        self.skipped = 0
        tokenizer = target.tokenizer
        # sources keep the counter, which therefore must not refer to the model
        self.count_tokens: CountTokens = lambda text: len(tokenizer(text, add_special_tokens=False)["input_ids"])

    def fill_shard(self, shard: range, progress: Any) -> None:
        """Answer the prompts of a shard that have no answer yet."""
        settings = self.writer.settings
        missing = self.writer.missing(shard)
        progress.update(len(shard) - len(missing))

        drawn, bad = self._draw_prompts(missing)
        self._append_skipped(shard, bad, progress)
        complete, bad = self._with_questions(drawn)
        self._append_skipped(shard, bad, progress)
        rendered, bad = self._render(complete, settings.max_new_tokens)
        self._append_skipped(shard, bad, progress)

        decoding = Decoding(settings.max_new_tokens, settings.temperature, settings.top_p, settings.seed)
        for answers in answer_prompts(self.backend, rendered, decoding):
            self.writer.append(shard, [self._sample(prompt, answer) for prompt, answer in answers])
            progress.update(len(answers))
        self.writer.finish(shard)

    def _append_skipped(self, shard: range, bad: BadRows, progress: Any) -> None:
        for index, error in sorted(bad.items()):
            self.writer.append(shard, [self._skipped(index, error)])
            progress.update()

    def _draw_prompts(self, indices: Iterable[int]) -> tuple[dict[int, Prompt], BadRows]:
        """The mixture's prompts, and why others cannot be used."""
        prompts: dict[int, Prompt] = {}
        bad: BadRows = {}
        for index in indices:
            try:
                prompt = self.mixture.prompt(self.writer.settings.seed, index, self.count_tokens)
                prompts[index] = self._with_answers_of(index, prompt)
            except BadRow as error:
                bad[index] = error
        return prompts, bad

    def _with_answers_of(self, index: int, prompt: Prompt) -> Prompt:
        """The prompt with or without its response, as `answers` says; BadRow where it needs one and has none."""
        answers = self.writer.settings.answers
        if answers == "source" and prompt.response is None:
            raise BadRow(
                f"prompt {index} ({prompt.source}) has no response, which answers=source takes",
                field="answers",
                code="data",
            )
        return replace(prompt, response=None) if answers == "model" else prompt

    def _with_questions(self, prompts: dict[int, Prompt]) -> tuple[dict[int, Prompt], BadRows]:
        """The prompts, with the questions that the base model writes itself, and why others have none."""
        complete: dict[int, Prompt] = {}
        instructed: dict[int, Prompt] = {}
        for index, prompt in prompts.items():
            if prompt.question_instruction:
                instructed[index] = prompt.with_question(prompt.question_instruction)
            else:
                complete[index] = prompt

        rendered, bad = self._render(instructed, _LONGEST_QUESTION)
        for answers in answer_prompts(self.backend, rendered, Decoding(_LONGEST_QUESTION)):
            for asked, answer in answers:
                if isinstance(answer, BadRow):
                    bad[asked.index] = answer
                    continue
                question = question_in(self._text(answer), len(answer) < _LONGEST_QUESTION)
                if question:
                    complete[asked.index] = prompts[asked.index].with_question(question)
                else:
                    bad[asked.index] = BadRow(
                        f"prompt {asked.index} ({asked.source}): the model wrote no question",
                        field="question",
                        code="data",
                    )
        return complete, bad

    def _render(self, prompts: dict[int, Prompt], longest_answer: int) -> tuple[list[Rendered], BadRows]:
        """Token ids of prompts, in the order of their indices, and why others have no room for the answer."""
        rendered: list[Rendered] = []
        bad: BadRows = {}
        for index, prompt in sorted(prompts.items()):
            try:
                rendered_prompt = render_prompt(index, prompt, self.target.tokenizer, self.writer.settings.date)
                self._require_room(rendered_prompt, longest_answer)
                rendered.append(rendered_prompt)
            except BadRow as error:
                bad[index] = error
        return rendered, bad

    def _require_room(self, prompt: Rendered, longest_answer: int) -> None:
        context = context_of(self.target.model)
        if len(prompt.ids) + longest_answer > context:
            raise BadRow(
                f"prompt {prompt.index} ({prompt.source}) has {len(prompt.ids)} tokens, with {longest_answer} for the "
                f"answer more than the context of {context}; lower the mixture's max_tokens",
                field="prompt",
                code="range",
            )

    def _text(self, ids: list[int]) -> str:
        return answer_text(self.target.tokenizer, ids)

    def _sample(self, prompt: Rendered, answer: list[int] | BadRow) -> TrainingSample | Skipped:
        if isinstance(answer, BadRow):
            return self._skipped(prompt.index, answer)
        prompt_text = str(self.target.tokenizer.decode(prompt.ids))
        return TrainingSample(prompt.index, prompt.source, prompt.ids, answer, prompt_text, self._text(answer))

    def _skipped(self, index: int, error: BadRow) -> Skipped:
        self.skipped += 1
        if self.skip is not None and self.skipped > self.skip:
            message = f"{error}; fix it, or raise skip={self.skip}"
            raise UserError(message, field=error.field, code=error.code)  # a BadRow would be skipped
        return Skipped(index, " ".join(str(error).split()))


def question_in(text: str, is_complete: bool) -> str:
    """The first line of what a model wrote, without its reasoning; empty if that is cut off or has no words.

    `is_complete` says that the model ended the text itself.
    """
    text = re.sub(r"\s*<think>.*?</think>", "", text, count=1, flags=re.DOTALL).lstrip()
    line, line_end, _ = text.partition("\n")
    has_words = len(re.findall(r"\w\w", line)) > 1 and not line.startswith("<")
    if has_words and (line_end or is_complete):
        return line.strip()
    return ""


def render_prompt(index: int, prompt: Prompt, tokenizer: PreTrainedTokenizerBase, day: str = "") -> Rendered:
    """Apply the chat template on a `day` in ISO 8601, today by default, and tokenise.

    Raw text, and the prompts of a model without a template, stay plain text.

    BadRow: the chat template refuses the prompt, or it or its response has no tokens.
    """
    name = f"prompt {index} ({prompt.source})"
    if prompt.template:
        dated_template = None
        if day:
            dated_template = with_date(str(tokenizer.get_chat_template()), date.fromisoformat(day))
        try:
            text = prompt_text(tokenizer, prompt.messages, prompt.answer_prefix, dated_template)
        except UserError as error:
            raise BadRow(f"{name}: {error}", field=error.field, code=error.code) from None
    else:
        text = prompt.messages[0]["content"] + prompt.answer_prefix
    special = not prompt.template or not has_chat_template(tokenizer)
    (ids,) = encode(tokenizer, [text], special=special)
    if not ids:
        raise BadRow(f"{name}: it has no tokens", field="prompt", code="data")

    if prompt.response is None:
        return Rendered(index, prompt.source, ids, None)
    response_ids = list(tokenizer(prompt.response, add_special_tokens=False)["input_ids"])
    if tokenizer.eos_token_id is not None:
        response_ids.append(tokenizer.eos_token_id)
    if not response_ids:
        raise BadRow(f"{name}: its response has no tokens", field="response", code="data")
    return Rendered(index, prompt.source, ids, response_ids)


def answer_prompts(backend: Backend, prompts: list[Rendered], decoding: Decoding) -> Iterator[Answers]:
    """The prompts' own responses, truncated to `max_new_tokens`, then a backend's answers to the other prompts."""
    responses: Answers = []
    unanswered: list[Rendered] = []
    for prompt in prompts:
        if prompt.response is None:
            unanswered.append(prompt)
        else:
            responses.append((prompt, prompt.response[: decoding.max_new_tokens]))
    if responses:
        yield responses
    if unanswered:
        yield from backend(unanswered, decoding)


def check_sizes(model: PreTrainedModel, mixture: Mixture, out: Path, limit: int, max_new_tokens: int) -> None:
    """UserError if prompts with answers exceed the context, or the samples would fill the disk even if all were short.

    The model may be without its weights; the other arguments are those of `generate_data`.
    """
    context = context_of(model)
    for entry in mixture.entries:
        longest_prompt = entry.lengths.max_tokens if entry.fills else entry.lengths.min_tokens
        if longest_prompt + max_new_tokens > context:
            raise UserError(
                f"{entry.kind}: prompts of {longest_prompt} tokens with max_new_tokens={max_new_tokens} are more than "
                f"the context of {context}; lower the mixture's max_tokens, or max_new_tokens=",
                field="max_new_tokens",
                code="range",
            )

    weighted_tokens = 0.0
    total_weight = 0.0
    for entry in mixture.entries:
        weighted_tokens += entry.lengths.weight * entry.lengths.min_tokens
        total_weight += entry.lengths.weight
    bytes_needed = limit * (weighted_tokens / total_weight) * _BYTES_A_TOKEN
    bytes_of_shards = sum(path.stat().st_size for path in out.glob("shard-*"))
    bytes_left = free_bytes(out)
    if bytes_needed > bytes_left + bytes_of_shards:
        raise UserError(
            f"limit={limit}: that many samples take more than {bytes_needed / 1e9:.0f} GB, and {out} has "
            f"{bytes_left / 1e9:.0f} GB left; lower limit=",
            field="limit",
            code="memory",
        )
