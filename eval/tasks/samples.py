"""One evaluation sample: a prompt, what its answer is scored against, and how it becomes token ids."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from keepsight.errors import UserError
from keepsight.models.chat import chat_text


class CutSpanError(UserError):
    """A prompt without the text that its answer needs: scoring it would blame the method for the prompt."""


@dataclass(frozen=True)
class Sample:
    """A prompt with its references, as every task of `keepsight.eval` makes them.

    Attributes:
        id: Unique within its task and length.
        task: What the `task` column shows, such as `niah_single` or a file's name.
        length: What the `length` column shows: the nominal prompt length in tokens of the target's tokenizer.
        prompt: The text of the user's turn.
        question: The end of `prompt` that asks about what stands before it; empty when the two cannot be told apart.
        references: Accepted answers.
        metric: A key of `keepsight.eval.tasks.metrics.METRICS`.
        max_new_tokens: Length limit of the answer, in tokens.
        answer_prefix: Text that begins the assistant's turn; the target continues it.
        chat: Whether the prompt goes through the chat template (LongBench's few-shot and code tasks do not).
        spans: Texts that must stand in the rendered prompt for the sample to be answerable.
        classes: The class names of a classification task.
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
    chat: bool = True
    spans: tuple[str, ...] = ()
    classes: tuple[str, ...] = ()

    @property
    def key(self) -> tuple[str, int, str]:
        """What tells it from all other samples of an evaluation."""
        return self.task, self.length, self.id

    @property
    def context(self) -> str:
        """The prompt without its question."""
        return self.prompt.removesuffix(self.question)


def answerable(samples: Iterable[Sample], tokenizer: Any) -> tuple[list[Sample], list[str]]:
    """The samples whose prompts hold what their answers need, and why each other one is refused."""
    kept, refused = [], []
    for sample in samples:
        try:
            render(sample, tokenizer)
        except CutSpanError as error:
            refused.append(str(error))
        else:
            kept.append(sample)
    return kept, refused


def render(sample: Sample, tokenizer: Any) -> list[int]:
    """The sample's prompt as token ids: chat template, then the answer prefix.

    Raises:
        CutSpanError: a span that the answer needs is not in the rendered prompt.
        UserError: there is no chat template.
    """
    ids: list[int] = tokenizer(_text(sample, tokenizer), add_special_tokens=not sample.chat)["input_ids"]
    rendered = tokenizer.decode(ids)
    for span in sample.spans:
        if span not in rendered:
            raise CutSpanError(f"sample {sample.task}/{sample.id}: the answer span {span!r} was cut from the prompt")
    return ids


def render_apart(sample: Sample, tokenizer: Any) -> tuple[list[int], list[int]]:
    """The sample's prompt in two: what comes before the question, and the question with all that follows it.

    Raises:
        CutSpanError: as `render`.
        UserError: the sample's question cannot be told from its context.
    """
    render(sample, tokenizer)
    text, prompt, question = _text(sample, tokenizer), sample.prompt.strip(), sample.question.strip()
    place = text.rfind(prompt)  # templates may strip a turn
    if place < 0 or not question or not sample.context.strip():
        raise UserError(
            f"sample {sample.task}/{sample.id} does not say where its question starts; evaluate it with question=seen"
        )
    context = text[: place + len(prompt) - len(question)].rstrip()
    rest = text[len(context) :]
    return (
        tokenizer(context, add_special_tokens=not sample.chat)["input_ids"],
        tokenizer(rest, add_special_tokens=False)["input_ids"],
    )


def _text(sample: Sample, tokenizer: Any) -> str:
    """The prompt as the target reads it, answer prefix included."""
    if not sample.chat:
        return sample.prompt + sample.answer_prefix
    return chat_text(tokenizer, [{"role": "user", "content": sample.prompt}]) + sample.answer_prefix
