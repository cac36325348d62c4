"""Evaluation samples: a prompt, what its answer is scored against, and how it is rendered to token ids."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import TYPE_CHECKING, Any

from keepsight.errors import UserError
from keepsight.models.chat import encode, has_chat_template, prompt_text

if TYPE_CHECKING:
    from torch import Tensor


HELMET_JUDGED = ("helmet-answer", "helmet-summary")
"""The metrics of samples that are judged with HELMET's prompts: answers to questions, and summaries."""


@dataclass(frozen=True)
class Sample:
    """A prompt with its references.

    Attributes:
        id: Unique within its task and length.
        task: Name in the `task` column, such as `niah_single` or a file's name.
        length: Value of the `length` column: the nominal prompt length in tokens.
        prompt: The text of the user's turn.
        question: The end of `prompt` that asks about the text before it; empty when the two cannot be separated.
        references: Accepted answers.
        metric: A key of `keepsight.eval.tasks.metrics.METRICS`.
        max_new_tokens: Length limit of the answer, in tokens.
        answer_prefix: Text that begins the assistant's turn; the model continues it.
        system: The system prompt; empty for the chat template's own.
        chat: Whether the prompt goes through the chat template, if the model has one (LongBench's few-shot and code
            tasks do not).
        spans: Texts that must occur in the rendered prompt for the sample to be answerable.
        classes: The class names of a classification task.
        clean: Post-processing of the answer before it is scored, a key of `keepsight.eval.tasks.metrics.CLEAN`.
        depth: Position in the context of the needle of the first reference, 0 the beginning and 1 the end.
        earlier: The user's turns before this one, if any. `prompt` then follows the answer to the last of them.
        judge: `Judge.name` of the judge that scores the answer; empty where `metric` does.
    """

    id: str
    task: str
    length: int
    prompt: str
    references: tuple[str, ...]
    metric: str
    max_new_tokens: int
    answer_prefix: str = ""
    question: str = ""
    system: str = ""
    chat: bool = True
    spans: tuple[str, ...] = ()
    classes: tuple[str, ...] = ()
    clean: str = "none"
    depth: float | None = None
    earlier: tuple[str, ...] = ()
    judge: str = ""

    @property
    def key(self) -> tuple[str, int, str]:
        """Unique among the samples of an evaluation run."""
        return self.task, self.length, self.id

    @property
    def context(self) -> str:
        """The prompt without its question."""
        return self.prompt.removesuffix(self.question)


@dataclass(frozen=True, kw_only=True)
class RenderedSample(Sample):
    """A sample with its prompt as token ids; see `render` and `render_apart`.

    Attributes:
        prompt_ids: [N] int64, the compressed part of the input: the whole prompt, or the text before the question.
        question_ids: [q] int64, read with the compressed cache; empty when the prompt is whole. A later turn of a
            conversation has the prompt of the first, and here what stands between the answer before and its own.
        pictures: The images in the prompt, a `keepsight.eval.tasks.pictures.Pictures`; None for none.
        is_cut: Whether the prompt was too long and lost its middle, as in LongBench.
        draw: Which of several sampled answers it is about, counted from 0.
    """

    prompt_ids: "Tensor" = field(compare=False, repr=False)
    question_ids: "Tensor" = field(compare=False, repr=False)
    pictures: Any = field(default=None, compare=False, repr=False)
    is_cut: bool = field(default=False, compare=False, repr=False)
    draw: int = field(default=0, compare=False, repr=False)


def render(sample: Sample, tokenizer: Any) -> RenderedSample:
    """The sample with its whole prompt as token ids; see `render_all`."""
    return render_all([sample], tokenizer)[0]


def render_in_bucket(sample: Sample, tokenizer: Any) -> RenderedSample:
    """`render`, with the smallest of 512, 1024, 2048, ... that is at least the prompt's tokens as `length`."""
    rendered = render(sample, tokenizer)
    return replace(rendered, length=bucket(len(rendered.prompt_ids)))


def bucket(tokens: int) -> int:
    """The smallest of 512, 1024, 2048, ... that is at least `tokens`."""
    return max(512, 1 << (tokens - 1).bit_length())


def render_all(samples: Sequence[Sample], tokenizer: Any) -> list[RenderedSample]:
    """The samples with their whole prompts as token ids: chat template, if there is one, then the answer prefix.

    UserError: the chat template refuses a prompt, or a required span is not in the rendered prompt.
    """
    rendered = []
    for has_special, group in groupby(samples, lambda sample: _has_special(sample, tokenizer)):
        batch = list(group)
        texts = [_text(sample, tokenizer) for sample in batch]
        for sample, ids in zip(batch, _encode(texts, tokenizer, special=has_special), strict=True):
            _check_spans(sample, ids, tokenizer)
            rendered.append(RenderedSample(**vars(sample), prompt_ids=ids, question_ids=ids[:0]))
    return rendered


def _check_spans(sample: Sample, ids: "Tensor", tokenizer: Any) -> None:
    rendered = tokenizer.decode(ids) if sample.spans else ""
    for span in sample.spans:
        if span not in rendered:
            raise UserError(
                f"sample {sample.task}/{sample.id}: the answer span {span!r} was cut from the prompt",
                field="prompt",
                code="range",
            )


def render_apart(sample: RenderedSample, tokenizer: Any) -> RenderedSample:
    """The sample with its prompt in two parts, context and question with all after it; UserError if inseparable."""
    text = _text(sample, tokenizer)
    prompt = sample.prompt.strip()  # templates may strip a turn
    question = sample.question.strip()
    start = text.rfind(prompt)
    if start < 0 or not question or not sample.context.strip():
        advice = "does not say where its question starts; evaluate it with question=seen"
        raise UserError(f"sample {sample.task}/{sample.id} {advice}", field="question", code="missing")
    context = text[: start + len(prompt) - len(question)].rstrip()
    (prompt_ids,) = _encode([context], tokenizer, special=_has_special(sample, tokenizer))
    (question_ids,) = _encode([text[len(context) :]], tokenizer, special=False)
    return replace(sample, prompt_ids=prompt_ids, question_ids=question_ids)


def render_turns(samples: Sequence[Sample], tokenizer: Any) -> list[RenderedSample]:
    """The turns of one conversation in order; a later one's prompt is whole once the answers before it are known."""
    answer = "\N{OBJECT REPLACEMENT CHARACTER}"
    first = render(samples[0], tokenizer)
    rendered = [first]
    for sample in samples[1:]:
        conversation = [
            {"role": "user", "content": sample.earlier[-1]},
            {"role": "assistant", "content": answer},
            {"role": "user", "content": sample.prompt},
        ]
        after_answer = prompt_text(tokenizer, conversation).partition(answer)[2]
        (question_ids,) = _encode([after_answer], tokenizer, special=False)
        turn = RenderedSample(**vars(sample), prompt_ids=first.prompt_ids, question_ids=question_ids)
        rendered.append(turn)
    return rendered


def _encode(texts: list[str], tokenizer: Any, *, special: bool) -> "list[Tensor]":
    import torch

    return [torch.tensor(ids, dtype=torch.long) for ids in encode(tokenizer, texts, special=special)]


def _text(sample: Sample, tokenizer: Any) -> str:
    """The prompt as the model reads it, answer prefix included."""
    if not sample.chat:
        return sample.prompt + sample.answer_prefix
    turns = [{"role": "user", "content": sample.prompt}]
    if sample.system:
        turns.insert(0, {"role": "system", "content": sample.system})
    return prompt_text(tokenizer, turns, sample.answer_prefix)


def _has_special(sample: Sample, tokenizer: Any) -> bool:
    """Whether the tokenizer adds its special tokens to the sample's text."""
    return not sample.chat or not has_chat_template(tokenizer)
