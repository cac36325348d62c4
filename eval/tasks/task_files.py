"""What `tasks.json` says of the JSON Lines files of a folder, and which of them can be scored.

A `tasks.json` in the folder, or beside it, says of each file: `layout` (longbench or ruler), `prompt` (a template),
`metric`, `max_new_tokens` (for RULER also by task family, such as `{"niah": 128}`), and optionally `longbench_task`
or `like`, the LongBench task whose conventions the file follows. Without a `tasks.json`, files that are named after
LongBench's tasks are read as those.
"""

import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from keepsight.errors import UserError
from keepsight.eval.tasks.longbench_table import longbench_entries
from keepsight.eval.tasks.metrics import METRICS
from keepsight.eval.tasks.protocols import REFERENCE
from keepsight.files import read_json

_log = logging.getLogger(__name__)

# The fields of each layout that a template may name.
_TEMPLATE_FIELDS = {"longbench": ("context", "input"), "ruler": ("input", "answer_prefix")}

# LongBench scores the first line of the answers of its few-shot tasks (eval.py).
_FEW_SHOT = frozenset({"trec", "triviaqa", "samsum", "lsht"})

RULER_METRIC = "RULER: string_match_part for qa_1/qa_2, else string_match_all over outputs"
# What tasks.json may say beside the names in METRICS.
_METRIC_NAMES = {
    "number after #### equal": "number_after_hashes",
    "value in prediction": "value_in_prediction",
    "number in prediction": "number_in_prediction",
    "topic in prediction": "topic_in_prediction",
    "choice letter accuracy": "choice_letter",
    "answer string in prediction, or qa_f1": "answer_in_prediction",
}


@dataclass(frozen=True)
class JsonlFile:
    """One file and what tasks.json says of it.

    Attributes:
        path: The file.
        where: Names the entry of tasks.json in messages.
        layout: `longbench` or `ruler`.
        template: The prompt, with the fields that `_TEMPLATE_FIELDS` names in braces.
        metric: A key of `keepsight.eval.tasks.metrics.METRICS`, or `RULER_METRIC`.
        max_new_tokens: Length limit of the answer in tokens; for RULER it may be one for each task family.
        chat: Whether the prompts go through the chat template.
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


def choose_files(folder: Path, names: Sequence[str] | None) -> list[JsonlFile]:
    """The named files in their order, or all that can be scored, sorted by name.

    Raises:
        UserError: the folder or tasks.json is missing, a named file is missing or cannot be scored, no file can be,
            or an entry of tasks.json is malformed.
    """
    if not folder.is_dir():
        raise UserError(f"{folder}: no such folder; jsonl.dir takes a folder of .jsonl files")
    present = {path.name.removesuffix(".jsonl"): path for path in sorted(folder.glob("*.jsonl"))}
    if not present:
        raise UserError(f"{folder}: holds no .jsonl file")
    source, tasks = _read_tasks(folder, present)
    if not names:
        return _scorable(present, source, tasks)
    chosen = []
    for name in dict.fromkeys(name.removesuffix(".jsonl") for name in names):
        if name not in present:
            raise UserError(f"jsonl.files: {folder} has no {name}.jsonl; it has {', '.join(present)}")
        if reason := _hindrance(name, tasks):
            raise UserError(f"jsonl.files: {name} cannot be read: {reason}; {_supported()} ({source})")
        chosen.append(_describe(present[name], source, tasks[name]))
    return chosen


def _scorable(present: Mapping[str, Path], source: Path, tasks: Mapping[str, Any]) -> list[JsonlFile]:
    hindrances = {name: reason for name in present if (reason := _hindrance(name, tasks))}
    for name, reason in hindrances.items():
        _log.warning("jsonl: %s is left out: %s", name, reason)
    if len(hindrances) == len(present):
        raise UserError(f"{source}: none of {', '.join(present)} can be read; {_supported()}")
    return [_describe(path, source, tasks[name]) for name, path in present.items() if name not in hindrances]


def _read_tasks(folder: Path, present: Mapping[str, Path]) -> tuple[Path, dict[str, Any]]:
    """tasks.json and where it stands; where there is none, what LongBench says of its own files."""
    for source in (folder / "tasks.json", folder.resolve().parent / "tasks.json"):
        if source.is_file():
            break
    else:
        if not (known := longbench_entries()).keys() & present.keys():
            raise UserError(
                f"{folder}: no tasks.json in it or beside it; it gives each file's template and metric, "
                "unless the file is named after a task of LongBench"
            )
        return folder, known
    tasks = read_json(source)
    if not isinstance(tasks, dict) or not all(isinstance(entry, dict) for entry in tasks.values()):
        raise UserError(f"{source}: expected an object that holds an object for each file")
    return source, tasks


def _hindrance(name: str, tasks: Mapping[str, Any]) -> str | None:
    """Why a file cannot be scored here, if so."""
    if name not in tasks:
        return "neither tasks.json nor LongBench has an entry of this name"
    layout, metric = str(tasks[name].get("layout")), str(tasks[name].get("metric"))
    if layout not in _TEMPLATE_FIELDS:
        return f"layout {layout!r} is not supported"
    if metric in METRICS or metric in _METRIC_NAMES or (layout == "ruler" and metric == RULER_METRIC):
        return None
    return f"metric {metric!r} is not supported"


def _supported() -> str:
    metrics = [*METRICS, *map(repr, _METRIC_NAMES)]
    return f"supported layouts: {', '.join(_TEMPLATE_FIELDS)}; metrics: {', '.join(metrics)}"


def _describe(path: Path, source: Path, entry: Mapping[str, Any]) -> JsonlFile:
    """Check an entry of tasks.json; that its layout and metric are supported is known."""
    name, layout = path.name.removesuffix(".jsonl"), entry["layout"]
    where = f"{source}: {name}"
    likeness = {name, str(entry.get("longbench_task")), str(entry.get("like"))}
    metric: str = entry["metric"]
    metric = _METRIC_NAMES.get(metric, metric)
    if likeness & _FEW_SHOT and f"{metric}_first_line" in METRICS:
        metric = f"{metric}_first_line"
    template = _check_template(where, layout, entry.get("prompt"))
    limits = _check_limits(where, layout, entry.get("max_new_tokens"))
    return JsonlFile(path, where, layout, template, metric, limits, chat=not likeness & REFERENCE.no_template)


def _check_template(where: str, layout: str, template: Any) -> str:
    fields = _TEMPLATE_FIELDS[layout]
    known = " and ".join(f"{{{field}}}" for field in fields)
    if not isinstance(template, str):
        raise UserError(f"{where}: prompt must be a text with {known}, got {template!r}")
    found = re.findall(r"{([A-Za-z_][^{}\s]*)}", template)
    if unknown := [field for field in found if field not in fields]:
        raise UserError(f"{where}: prompt has the unknown field {{{unknown[0]}}}; known: {known}")
    if not found:
        raise UserError(f"{where}: prompt must hold {known}, or one of them")
    if layout == "ruler" and not (found == [*fields] and template.endswith("{answer_prefix}")):
        raise UserError(f"{where}: RULER's prompt must hold {{input}} and end with {{answer_prefix}}")
    return template


def _check_limits(where: str, layout: str, limits: Any) -> Mapping[str, int] | int:
    numbers = list(limits.values()) if layout == "ruler" and isinstance(limits, dict) else [limits]
    if not numbers or any(type(number) is not int or number < 1 for number in numbers):
        raise UserError(f"{where}: max_new_tokens must be a whole number of at least 1, got {limits!r}")
    return limits
