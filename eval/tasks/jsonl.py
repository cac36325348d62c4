"""The `jsonl` task: samples from a folder of JSON Lines files in LongBench's or RULER's field layout.

A `tasks.json` in the folder, or beside it, has an entry for each file: `layout` (longbench or ruler), `prompt` (a
template), `metric`, `max_new_tokens` (for RULER also by task family, such as `{"niah": 128}`), and optionally
`longbench_task` or `like`, the LongBench task whose conventions the file follows. Without a `tasks.json`, files that
are named after LongBench's tasks are read as those.
"""

import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from typing_extensions import override

from keepsight.errors import UserError
from keepsight.eval.tasks import helmet, judged, longproc, milebench, ruler  # noqa: F401 - for their metrics
from keepsight.eval.tasks.benchmark import (
    NO_TEMPLATE,
    Benchmark,
    TaskRequest,
    file_rows,
    ruler_family,
    text_field,
    texts_field,
)
from keepsight.eval.tasks.longbench import longbench_tasks
from keepsight.eval.tasks.metrics import METRICS
from keepsight.eval.tasks.samples import RenderedSample
from keepsight.eval.tasks.task_format import TaskEntry, TaskRow, load
from keepsight.files import JsonObject, read_json

_log = logging.getLogger(__name__)

# The fields of each layout that a template may name.
_TEMPLATE_FIELDS = {"longbench": ("context", "input"), "ruler": ("input", "answer_prefix")}
# LongBench scores the first line of the answers of its few-shot tasks (eval.py).
_FEW_SHOT = frozenset({"trec", "triviaqa", "samsum", "lsht"})
RULER_METRIC = "RULER: string_match_part for qa_1/qa_2, else string_match_all over outputs"
# Names that tasks.json may use beside those in METRICS.
_METRIC_NAMES = {
    "number after #### equal": "number_after_hashes",
    "value in prediction": "value_in_prediction",
    "number in prediction": "number_in_prediction",
    "topic in prediction": "topic_in_prediction",
    "choice letter accuracy": "choice_letter",
    "answer string in prediction, or qa_f1": "answer_in_prediction",
}


@dataclass
class Jsonl(Benchmark):
    """Real samples.

    Attributes:
        dir: Folder of JSONL files in LongBench's or RULER's layout. It needs a tasks.json in it or beside it, unless
            the files are named after LongBench's tasks.
        files: Names of files to read, without .jsonl; by default all that can be scored.
    """

    dir: str | None = None
    files: list[str] = field(default_factory=list)

    @override
    def require(self, task: str, judge: str) -> None:
        if self.dir is None:
            raise UserError(
                "tasks=[jsonl] needs jsonl.dir=FOLDER with JSONL files and a tasks.json",
                field="jsonl.dir",
                code="missing",
            )
        if not Path(self.dir).is_dir():
            raise UserError(
                f"{self.dir}: no such folder; jsonl.dir takes a folder of .jsonl files",
                field="jsonl.dir",
                code="missing",
            )

    @override
    def samples(self, task: str, request: TaskRequest) -> list[RenderedSample]:
        self.require(task, request.judge)
        assert self.dir is not None
        samples: list[RenderedSample] = []
        for file in _choose_files(Path(self.dir), self.files):
            convert = _longbench_row if file.layout == "longbench" else _ruler_row
            rows = file_rows(file.path)
            samples += load(file.task, file.entry(), rows, partial(convert, file), request, request.max_tokens)
        return samples


@dataclass(frozen=True)
class _File:
    """A file with its checked entry of tasks.json, which `where` names in messages.

    `metric` is a key of `METRICS` or `RULER_METRIC`; `max_new_tokens` may be one for each task family of RULER.
    """

    path: Path
    where: str
    layout: str
    template: str
    metric: str
    max_new_tokens: Mapping[str, int] | int
    chat: bool

    @property
    def task(self) -> str:
        """The file's name without its ending."""
        return self.path.name.removesuffix(".jsonl")

    def entry(self) -> TaskEntry:
        """What the file's samples share; a metric may need references of another form than a row has."""
        prompt = self.template.removesuffix("{answer_prefix}")
        return TaskEntry(self.task, prompt, self.metric, 0, chat=self.chat, tries_metric=True)

    def limit(self, where: str, task: str) -> int:
        """Length limit of the answers of a task, in tokens."""
        if isinstance(self.max_new_tokens, int):
            return self.max_new_tokens
        if ruler_family(task) not in self.max_new_tokens:
            families = f"max_new_tokens ({self.where}): {', '.join(self.max_new_tokens)}"
            raise UserError(
                f"{where}: RULER task {task!r} is not of the families in {families}", field="task", code="unknown"
            )
        return self.max_new_tokens[ruler_family(task)]


def _choose_files(folder: Path, names: Sequence[str] | None) -> list[_File]:
    """The named files in their order, or all that can be scored, sorted by name."""
    present = {path.name.removesuffix(".jsonl"): path for path in sorted(folder.glob("*.jsonl"))}
    if not present:
        raise UserError(f"{folder}: holds no .jsonl file", field="jsonl.dir", code="missing")
    source, tasks = _read_tasks(folder, present)
    files = []
    for name in dict.fromkeys(name.removesuffix(".jsonl") for name in names or present):
        if name not in present:
            raise UserError(
                f"jsonl.files: {folder} has no {name}.jsonl; it has {', '.join(present)}",
                field="jsonl.files",
                code="unknown",
            )
        reason = _hindrance(name, tasks)
        if reason is None:
            files.append(_describe(present[name], source, tasks[name]))
        elif names:
            raise UserError(
                f"jsonl.files: {name} cannot be read: {reason}; {_supported()} ({source})",
                field="jsonl.files",
                code="data",
            )
        else:
            _log.warning("jsonl: %s is left out: %s", name, reason)
    if not files:
        raise UserError(
            f"{source}: none of {', '.join(present)} can be read; {_supported()}", field="jsonl.files", code="data"
        )
    return files


def _read_tasks(folder: Path, present: Mapping[str, Path]) -> tuple[Path, dict[str, Any]]:
    """tasks.json and its path; where there is none, LongBench's own entries."""
    for path in (folder / "tasks.json", folder.resolve().parent / "tasks.json"):
        if path.is_file():
            tasks = read_json(path)
            if not isinstance(tasks, dict) or not all(isinstance(entry, dict) for entry in tasks.values()):
                raise UserError(f"{path}: expected an object with one object per file", field=path.name, code="type")
            return path, tasks

    entries = {}
    for name, task in longbench_tasks().items():
        entries[name] = {
            "layout": "longbench",
            "prompt": task.template,
            "metric": task.metric,
            "max_new_tokens": task.tokens,
        }
    if not entries.keys() & present.keys():
        use = "it gives each file's template and metric, unless the file is named after a task of LongBench"
        raise UserError(f"{folder}: no tasks.json in it or beside it; {use}", field="tasks.json", code="missing")
    return folder, entries


def _hindrance(name: str, tasks: Mapping[str, Any]) -> str | None:
    """The reason why a file cannot be scored, if there is one."""
    if name not in tasks:
        return "neither tasks.json nor LongBench has an entry of this name"
    layout = str(tasks[name].get("layout"))
    metric = str(tasks[name].get("metric"))
    if layout not in _TEMPLATE_FIELDS:
        return f"layout {layout!r} is not supported"
    if metric in METRICS or metric in _METRIC_NAMES or (layout == "ruler" and metric == RULER_METRIC):
        return None
    return f"metric {metric!r} is not supported"


def _supported() -> str:
    metrics = [*METRICS, *map(repr, _METRIC_NAMES)]
    return f"supported layouts: {', '.join(_TEMPLATE_FIELDS)}; metrics: {', '.join(metrics)}"


def _describe(path: Path, source: Path, entry: Mapping[str, Any]) -> _File:
    """An entry of tasks.json, checked; its layout and metric are known to be supported."""
    name = path.name.removesuffix(".jsonl")
    layout = entry["layout"]
    where = f"{source}: {name}"
    likeness = {name, str(entry.get("longbench_task")), str(entry.get("like"))}
    metric = str(_METRIC_NAMES.get(entry["metric"], entry["metric"]))
    if likeness & _FEW_SHOT and f"{metric}_first_line" in METRICS:
        metric = f"{metric}_first_line"
    template = _check_template(where, layout, entry.get("prompt"))
    limits: Any = entry.get("max_new_tokens")
    numbers = list(limits.values()) if layout == "ruler" and isinstance(limits, dict) else [limits]
    if not numbers or any(type(number) is not int or number < 1 for number in numbers):
        raise UserError(
            f"{where}: max_new_tokens must be a whole number of at least 1, got {limits!r}",
            field="max_new_tokens",
            code="type",
        )
    return _File(path, where, layout, template, metric, limits, chat=not likeness & NO_TEMPLATE)


def _check_template(where: str, layout: str, template: Any) -> str:
    fields = _TEMPLATE_FIELDS[layout]
    listed_fields = " and ".join(f"{{{field}}}" for field in fields)
    if not isinstance(template, str):
        raise UserError(
            f"{where}: prompt must be a text with {listed_fields}, got {template!r}", field="prompt", code="type"
        )
    template_fields = re.findall(r"{([A-Za-z_][^{}\s]*)}", template)
    for field_name in template_fields:
        if field_name not in fields:
            raise UserError(
                f"{where}: prompt has the unknown field {{{field_name}}}; known: {listed_fields}",
                field=field_name,
                code="unknown",
            )
    if not template_fields:
        raise UserError(f"{where}: prompt must hold {listed_fields}, or one of them", field="prompt", code="missing")
    if layout == "ruler" and not (template_fields == [*fields] and template.endswith("{answer_prefix}")):
        raise UserError(
            f"{where}: RULER's prompt must hold {{input}} and end with {{answer_prefix}}",
            field="prompt",
            code="missing",
        )
    return template


def _longbench_row(file: _File, where: str, row: JsonObject, _: int) -> TaskRow:
    classes: tuple[str, ...] = ()
    if file.metric == "classification":
        classes = texts_field(where, row, "all_classes")
    return TaskRow(
        id=str(row.get("_id", where.rpartition(":")[2])),
        fields={"context": text_field(where, row, "context"), "input": text_field(where, row, "input")},
        references=texts_field(where, row, "answers"),
        max_new_tokens=file.limit(where, file.task),
        classes=classes,
    )


def _ruler_row(file: _File, where: str, row: JsonObject, _: int) -> TaskRow:
    # RULER's own files hold one task each and are named after it; rows of several tasks name theirs.
    task = text_field(where, row, "task") if "task" in row else file.task
    name = f"{task}-{row['index']}" if "index" in row else where.rpartition(":")[2]
    metric = file.metric
    if metric == RULER_METRIC:
        metric = "string_match_part" if ruler_family(task) == "qa" else "string_match_all"
    return TaskRow(
        id=name,
        fields={"input": text_field(where, row, "input")},
        references=texts_field(where, row, "outputs"),
        metric=metric,
        max_new_tokens=file.limit(where, task),
        answer_prefix=text_field(where, row, "answer_prefix"),
    )
