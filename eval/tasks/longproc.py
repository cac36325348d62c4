"""LongProc (arXiv:2501.05414): long procedures to be written out; the tasks whose answer needs no program to be run."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

from typing_extensions import override

from keepsight.errors import UserError
from keepsight.eval.tasks.benchmark import Benchmark, TaskRequest
from keepsight.eval.tasks.rows import bucket, text_field
from keepsight.eval.tasks.samples import RenderedSample, Sample, render
from keepsight.files import read_jsonl

_METRICS = {
    "path_traversal": "same_route",
    "html_to_tsv": "same_rows",
    "tom_tracking": "same_beliefs",
    "countdown": "reaches_target",
    "travel_planning": "same_trip",
}
_ITEMS = {
    "countdown": "nums, a list of whole numbers, and target, one",
    "travel_planning": "ground_truth_cities and ground_truth_durations, texts such as Oslo**Rome and 4**3",
}
_TOKENS = {"0.5k": 1024, "2k": 3072, "8k": 9216}


@dataclass
class LongProc(Benchmark):
    """LongProc's tasks as longproc_TASK_SIZE, such as longproc_countdown_2k.

    Attributes:
        dir: Folder of JSONL files of what LongProc's load_longproc_data returns: task, input_prompt (or prompt),
            reference_output and item in each row.
    """

    TASKS: ClassVar[tuple[str, ...]] = tuple(
        f"{task}_{size}" for task in _METRICS for size in _TOKENS if (task, size) != ("travel_planning", "0.5k")
    )

    dir: str | None = None

    @override
    def groups(self, protocol: Any) -> Mapping[str, list[str]]:
        present = {str(row.get("task")) for _, row in self._rows()} if self.dir else {*self.TASKS}
        return {"": [task for task in self.TASKS if task in present]}

    @override
    def samples(self, task: str, request: TaskRequest) -> list[RenderedSample]:
        if self.dir is None:
            raise UserError("longproc tasks need longproc.dir=FOLDER with what LongProc's load_longproc_data returns")
        rows = [(where, row) for where, row in self._rows() if row.get("task") == task]
        made = [_sample(task, place, *row, request) for place, row in enumerate(rows)]
        fitting = [each for each in made if len(each.prompt_ids) + each.max_new_tokens <= request.context]
        if len(fitting) < len(made):
            left_out = len(made) - len(fitting)
            request.notes[f"longproc {task}"] = f"{left_out} samples do not fit the context of {request.context} tokens"
        return fitting[: request.samples or None]

    def _rows(self) -> Iterator[tuple[str, dict[str, Any]]]:
        for path in sorted(Path(self.dir or "").glob("*.jsonl")):
            yield from ((f"{path}: row {number}", row) for number, row in enumerate(read_jsonl(path), start=1))


def _sample(task: str, place: int, where: str, row: Mapping[str, Any], request: TaskRequest) -> RenderedSample:
    family, _, size = task.rpartition("_")
    rendered = render(
        Sample(
            id=str(row.get("id", place)),
            task=f"longproc_{task}",
            length=0,
            prompt=text_field(where, row, "input_prompt" if "input_prompt" in row else "prompt"),
            references=(_reference(family, where, row),),
            metric=_METRICS[family],
            max_new_tokens=_TOKENS[size],
        ),
        request.tokenizer,
    )
    return replace(rendered, length=bucket(len(rendered.prompt_ids)))


def _reference(family: str, where: str, row: Mapping[str, Any]) -> str:
    try:
        if family == "countdown":
            return f"{' '.join(str(int(number)) for number in row['item']['nums'])} -> {int(row['item']['target'])}"
        if family == "travel_planning":
            texts = (row["item"][f"ground_truth_{name}"] for name in ("cities", "durations"))
            cities, days = ([part for part in text.split("**") if part] for text in texts)
            return ", ".join(f"{city} {int(stay)}" for city, stay in zip(cities, days, strict=True))
    except (KeyError, TypeError, ValueError, AttributeError):
        raise UserError(f"{where}: field 'item' must hold {_ITEMS[family]}") from None
    return text_field(where, row, "reference_output")
