"""Benchmarks whose answers a judge scores (`keepsight.eval.judge`): MT-Bench and LongBench-Write."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import ClassVar

from typing_extensions import override

from keepsight.errors import UserError
from keepsight.eval.tasks.benchmark import (
    Benchmark,
    Protocol,
    TaskRequest,
    file_rows,
    hub_rows,
    text_field,
    texts_field,
)
from keepsight.eval.tasks.metrics import metric
from keepsight.eval.tasks.samples import RenderedSample
from keepsight.eval.tasks.task_format import TaskEntry, TaskRow, load
from keepsight.files import JsonObject

_WITH_REFERENCES = ("math", "reasoning", "coding")
_ANSWER_TOKENS = 1024
_LONGEST_ANSWER = 32768


@dataclass
class MtBench(Benchmark):
    """MT-Bench (arXiv:2306.05685): questions in two turns, each compressed with all before it; needs `judge.url`.

    Attributes:
        file: FastChat's question.jsonl; the Hub's copy by default.
        references: FastChat's reference_answer/gpt-4.jsonl, for math, reasoning and coding questions; by default the
            questions' field `reference`.
    """

    file: str | None = None
    references: str | None = None

    @override
    def require(self, task: str, judge: str) -> None:
        _require_judge("mt_bench", judge)
        next(self._rows(), None)

    @override
    def samples(self, task: str, request: TaskRequest) -> list[RenderedSample]:
        self.require(task, request.judge)
        answers = dict(_reference_answers(Path(self.references))) if self.references else {}
        rows = list(self._rows())
        entry = TaskEntry("mt_bench", "", "mt_bench", _ANSWER_TOKENS, length=request.context, judge=request.judge)
        samples = load("mt_bench", entry, rows, partial(_conversation, answers), request)
        with_references = set()
        for _, row in rows:
            if row.get("category") in _WITH_REFERENCES:
                with_references.add(str(row.get("question_id")))
        missing = 0
        for sample in samples:
            if sample.id in with_references and not sample.earlier and not sample.references:
                missing += 1
        if missing:
            request.notes["mt_bench references"] = (
                f"{missing} questions of {', '.join(_WITH_REFERENCES)} lack reference answers and are judged without"
            )
        return samples

    def _rows(self) -> Iterator[tuple[str, JsonObject]]:
        if self.file is not None:
            yield from file_rows(Path(self.file))
            return
        name = "HuggingFaceH4/mt_bench_prompts"
        rows = hub_rows(name, "train")
        if rows is None:
            raise UserError(
                f"{name}: the Hub cannot be reached; name FastChat's question.jsonl: mt_bench.file=FILE",
                field="mt_bench.file",
                code="service",
            )
        for row in rows:
            fields = {"question_id": row["prompt_id"], "turns": row["prompt"], "reference": row["reference"]}
            yield f"{name}:{row['prompt_id']}", {**row, **fields}


def _reference_answers(path: Path) -> Iterator[tuple[str, tuple[str, ...]]]:
    """The answers of FastChat's file by question."""
    for where, row in file_rows(path):
        try:
            yield str(row["question_id"]), texts_field(where, row["choices"][0], "turns")
        except (AttributeError, LookupError, TypeError):
            raise UserError(
                f"{where}: expected question_id and choices[0].turns, as FastChat writes",
                field="question_id",
                code="missing",
            ) from None


def _conversation(answers: Mapping[str, tuple[str, ...]], where: str, row: JsonObject, _: int) -> TaskRow:
    name = str(row.get("question_id"))
    turns = texts_field(where, row, "turns")
    references = answers.get(name, ())
    if not references and row.get("reference"):
        references = texts_field(where, row, "reference")
    if row.get("category") not in _WITH_REFERENCES or len(references) < len(turns):
        references = ()
    return TaskRow(name, {}, references, turns=turns[:2])


@dataclass
class LongWriter(Benchmark):
    """LongBench-Write (arXiv:2408.07055): texts of a wanted length.

    longwriter is their quality, which needs `judge.url`; longwriter_length is how near they come to their length.

    Attributes:
        file: LongWriter's longbench_write.jsonl or longbench_write_en.jsonl.
        max_new_tokens: Longest text in tokens; 0 for 32768, or the rest of the model's context.
    """

    TASKS: ClassVar[tuple[str, ...]] = ("", "length")

    file: str | None = None
    max_new_tokens: int = 0

    @override
    def groups(self, protocol: Protocol) -> Mapping[str, list[str]]:
        return {}

    @override
    def require(self, task: str, judge: str) -> None:
        if self.file is None:
            raise UserError(
                "longwriter tasks need longwriter.file=FILE, LongWriter's longbench_write.jsonl",
                field="longwriter.file",
                code="missing",
            )
        if not task:
            _require_judge("longwriter", judge)

    @override
    def samples(self, task: str, request: TaskRequest) -> list[RenderedSample]:
        self.require(task, request.judge)
        assert self.file is not None
        entry = TaskEntry(
            task="longwriter",
            prompt="{input}",
            metric="longbench-write",
            max_new_tokens=self.max_new_tokens or _LONGEST_ANSWER,
            length=request.context,
            judge=request.judge,
            within_context=True,
        )
        if task:
            entry = replace(entry, task="longwriter_length", metric="wanted_length", judge="")
        return load("longwriter", entry, file_rows(Path(self.file)), partial(self._converted, task), request)

    def _converted(self, task: str, where: str, row: JsonObject, number: int) -> TaskRow:
        if type(row.get("length")) is not int or row["length"] < 1:
            raise UserError(
                f"{where}: field 'length' must be a whole number of words of at least 1", field="length", code="type"
            )
        references = (str(row["length"]),) if task else ()
        return TaskRow(str(row.get("id", number + 1)), {"input": text_field(where, row, "prompt")}, references)


@metric("wanted_length")
def _wanted_length(prediction: str, reference: str) -> float:
    """How near a text comes to its number of words, a Chinese character being one; 0 at 4 times or a third of it.

    LongWriter's S_l, eval_length.py and count_words in pred.py.
    """
    words_wanted = int(reference)
    if words_wanted < 1:
        raise ValueError(f"{words_wanted} words")
    words = len(re.findall(r"[\u4e00-\u9fff]|\b[a-zA-Z]+\b", prediction))
    if words == 0:
        return 0.0
    if words > words_wanted:
        return max(0.0, 1 - (words / words_wanted - 1) / 3)
    return max(0.0, 1 - (words_wanted / words - 1) / 2)


def _require_judge(task: str, judge: str) -> None:
    if not judge:
        raise UserError(
            f"task {task} needs a judge: judge.url=http://HOST:PORT/v1 judge.model=NAME",
            field="judge.url",
            code="missing",
        )
