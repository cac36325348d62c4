"""Our own format of tasks, and the one loader of samples in it.

A task is an entry, which its samples share, as `tasks.json` has one for each file; and rows. Each benchmark that comes
as files is a converter: it says what its entry is, and maps one of its rows to a `TaskRow`.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from keepsight.eval.tasks.benchmark import TaskRequest, fill_in
from keepsight.eval.tasks.metrics import score
from keepsight.eval.tasks.pictures import render_pictured
from keepsight.eval.tasks.samples import RenderedSample, Sample, render, render_in_bucket, render_turns
from keepsight.files import JsonObject

_CONTEXT = "{context}"
_DEMOS = "{demos}"


@dataclass(frozen=True)
class TaskEntry:
    """What the samples of a task share.

    Attributes:
        task: The name in the `task` column; a later turn of a conversation has its number behind it.
        prompt: A template with names of fields in braces. What stands behind {context} is the question, unless it has
            demonstrations too.
        metric: A key of `keepsight.eval.tasks.metrics.METRICS`.
        max_new_tokens: Length limit of the answer, in tokens.
        length: Value of the `length` column; None for the power of two that holds the prompt.
        chat: Whether the prompt goes through the chat template.
        judge: `Judge.name` of the judge that scores the answers; empty where `metric` does.
        tries_metric: Whether the metric is tried with each row's first reference; where it cannot read it, the row is
            skipped.
        within_context: Whether the answer is cut to what the prompt leaves of the model's context; otherwise samples
            that do not fit are left out.
    """

    task: str
    prompt: str
    metric: str
    max_new_tokens: int
    length: int | None = None
    chat: bool = True
    judge: str = ""
    tries_metric: bool = False
    within_context: bool = False

    @property
    def question(self) -> str:
        """The template of the question; empty where a prompt has none of its own."""
        question = self.prompt.partition(_CONTEXT)[2]
        return "" if _DEMOS in question else question


@dataclass(frozen=True)
class TaskRow:
    """What a sample has of its own.

    Attributes:
        id: Its name among the samples of the task.
        fields: The texts that fill the prompt's template.
        references: Accepted answers.
        answer_prefix: Text that begins the assistant's turn.
        classes: The class names of a classification task, or the choices.
        turns: The user's turns of a conversation, in place of the template; each becomes a sample.
        parts: The prompt as texts and image files, for a prompt with images; its template is filled all the same.
        metric: The row's metric, where a file has tasks of several.
        max_new_tokens: The row's length limit, likewise.
    """

    id: str
    fields: Mapping[str, str]
    references: tuple[str, ...] = ()
    answer_prefix: str = ""
    classes: tuple[str, ...] = ()
    turns: tuple[str, ...] = ()
    parts: tuple[str | Path, ...] = field(default=(), repr=False)
    metric: str = ""
    max_new_tokens: int = 0


Convert = Callable[[str, JsonObject, int], TaskRow]
"""A row's place, for messages, its fields and its number -> the row in our format; UserError if it cannot be one."""


def load(
    name: str,
    entry: TaskEntry,
    rows: Iterable[tuple[str, JsonObject]],
    convert: Convert,
    request: TaskRequest,
    max_tokens: int | None = None,
    processor: Any = None,
) -> list[RenderedSample]:
    """The samples of a task; `name` is the task's in notes, `max_tokens` as in `TaskRequest.collect`.

    `processor` is the model's, for prompts with images.
    """

    def make(where: str, row: JsonObject, number: int) -> list[RenderedSample]:
        task_row = convert(where, row, number)
        if task_row.turns:
            return render_turns(_turns(entry, task_row), request.tokenizer)
        sample = _sample(entry, task_row)
        if entry.tries_metric:
            score(sample, sample.references[0])
        if task_row.parts:
            return [render_pictured(sample, task_row.parts, request.tokenizer, processor)]
        if entry.length is None:
            return [render_in_bucket(sample, request.tokenizer)]
        rendered = render(sample, request.tokenizer)
        if entry.within_context:
            context_left = request.context - len(rendered.prompt_ids)
            rendered = replace(rendered, max_new_tokens=max(min(sample.max_new_tokens, context_left), 1))
        return [rendered]

    return request.collect(name, rows, make, max_tokens)


def _sample(entry: TaskEntry, row: TaskRow) -> Sample:
    return Sample(
        id=row.id,
        task=entry.task,
        length=entry.length or 0,
        prompt=fill_in(entry.prompt, row.fields),
        question=fill_in(entry.question, row.fields),
        references=row.references,
        metric=row.metric or entry.metric,
        max_new_tokens=row.max_new_tokens or entry.max_new_tokens,
        answer_prefix=row.answer_prefix,
        chat=entry.chat,
        classes=row.classes,
        judge=entry.judge,
    )


def _turns(entry: TaskEntry, row: TaskRow) -> list[Sample]:
    """A sample for each turn of a conversation."""
    samples = []
    for number, turn in enumerate(row.turns):
        samples.append(
            Sample(
                id=row.id,
                task=f"{entry.task}_turn_{number + 1}",
                length=entry.length or 0,
                prompt=turn,
                references=row.references,
                metric=entry.metric,
                max_new_tokens=entry.max_new_tokens,
                earlier=row.turns[:number],
                judge=entry.judge,
            )
        )
    return samples
