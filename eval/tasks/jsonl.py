"""The `jsonl` task: samples from a folder of JSON Lines files in LongBench's or RULER's field layout."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from typing_extensions import override

from keepsight.errors import UserError
from keepsight.eval.tasks.benchmark import Benchmark, TaskRequest
from keepsight.eval.tasks.rows import bucket, fill_in, ruler_family, text_field, texts_field
from keepsight.eval.tasks.samples import RenderedSample, Sample, render
from keepsight.eval.tasks.task_files import RULER_METRIC, JsonlFile, choose_files
from keepsight.files import read_jsonl


@dataclass
class Jsonl(Benchmark):
    """Real samples.

    Attributes:
        dir: Folder of JSONL files in LongBench's or RULER's layout; tasks.json in it or beside it, unless the files are
            named after LongBench's tasks.
        files: Names to read, without .jsonl; all that can be scored by default.
    """

    dir: str | None = None
    files: list[str] = field(default_factory=list)

    @override
    def samples(self, task: str, request: TaskRequest) -> list[RenderedSample]:
        if self.dir is None:
            raise UserError("tasks=[jsonl] needs jsonl.dir=FOLDER with JSONL files and a tasks.json")
        folder, limit = Path(self.dir), request.samples or None
        made, dropped = read_samples(folder, self.files or None, request.max_tokens, request.tokenizer, limit)
        for name, count in dropped.items():
            if count:
                request.notes[name] = (
                    f"{count} samples are longer than max_tokens={request.max_tokens} and were dropped"
                )
        return made


def read_samples(
    folder: Path, files: Sequence[str] | None, max_tokens: int, tokenizer: Any, limit: int | None = None
) -> tuple[list[RenderedSample], dict[str, int]]:
    """The samples of a folder whose rendered prompt has at most `max_tokens` tokens, in the order of the files.

    A sample's `length` is the smallest of 512, 1024, 2048, ... tokens that holds its rendered prompt.

    Args:
        folder: Holds `NAME.jsonl` files; `tasks.json` is in it or, failing that, in its parent.
        files: The names to read, without ending. None or empty: every file that can be scored, sorted by name;
            why another is left out is logged as a warning.
        max_tokens: The longest prompt to keep, chat template and answer prefix included.
        tokenizer: The target's.
        limit: How many samples to keep of each file: the first ones that fit.

    Returns:
        The samples, and for every file read how many samples were passed over as too long.

    Raises:
        UserError: the folder, a file, its entry in tasks.json, or a row is missing or not what it should be.
    """
    for name, value in (("max_tokens", max_tokens), ("limit", limit)):
        if value is not None and value < 1:
            raise UserError(f"{name}={value}: expected at least 1")
    samples: list[RenderedSample] = []
    too_long: dict[str, int] = {}
    for file in choose_files(folder, files):
        kept, too_long[file.task] = _fitting(_read(file), max_tokens, tokenizer, limit)
        samples += kept
    return samples, too_long


def _fitting(
    samples: Iterator[Sample], max_tokens: int, tokenizer: Any, limit: int | None
) -> tuple[list[RenderedSample], int]:
    """The first `limit` samples that fit, with their length, and the number of longer ones met on the way."""
    kept: list[RenderedSample] = []
    too_long = 0
    for sample in samples:
        rendered = render(sample, tokenizer)
        tokens = len(rendered.prompt_ids)
        if tokens > max_tokens:
            too_long += 1
        else:
            kept.append(replace(rendered, length=bucket(tokens)))
        if len(kept) == limit:
            break
    return kept, too_long


def _read(file: JsonlFile) -> Iterator[Sample]:
    """The samples of a file in its order, their length not yet known (0)."""
    seen: set[str] = set()
    with file.path.open("rb") as lines:
        numbers = (number for number, line in enumerate(lines, start=1) if line.strip())
        for number, row in zip(numbers, read_jsonl(file.path), strict=False):
            sample = _LAYOUTS[file.layout](file, f"{file.path}:{number}", row)
            yield replace(sample, id=_unique(sample.id or str(number), seen))


def _unique(wanted: str, seen: set[str]) -> str:
    """`wanted`, or `wanted-2`, `wanted-3`, ... where it is taken; the name is then taken."""
    name, count = wanted, 1
    while name in seen:
        count += 1
        name = f"{wanted}-{count}"
    seen.add(name)
    return name


def _longbench_sample(file: JsonlFile, where: str, row: Mapping[str, Any]) -> Sample:
    texts = {name: text_field(where, row, name) for name in ("context", "input")}
    return Sample(
        id=str(row["_id"]) if "_id" in row else "",
        task=file.task,
        length=0,
        prompt=fill_in(file.template, texts),
        question=fill_in(file.template.partition("{context}")[2], texts),
        references=texts_field(where, row, "answers"),
        metric=file.metric,
        max_new_tokens=_limit(file, where, file.task),
        chat=file.chat,
        classes=texts_field(where, row, "all_classes") if file.metric == "classification" else (),
    )


def _ruler_sample(file: JsonlFile, where: str, row: Mapping[str, Any]) -> Sample:
    # RULER's own files hold one task each and are named after it; rows of several tasks say which they are of.
    task = text_field(where, row, "task") if "task" in row else file.task
    by_task = "string_match_part" if ruler_family(task) == "qa" else "string_match_all"
    return Sample(
        id=f"{task}-{row['index']}" if "index" in row else "",
        task=file.task,
        length=0,
        prompt=fill_in(file.template.removesuffix("{answer_prefix}"), {"input": text_field(where, row, "input")}),
        references=texts_field(where, row, "outputs"),
        metric=by_task if file.metric == RULER_METRIC else file.metric,
        max_new_tokens=_limit(file, where, task),
        answer_prefix=text_field(where, row, "answer_prefix"),
        chat=file.chat,
    )


_LAYOUTS = {"longbench": _longbench_sample, "ruler": _ruler_sample}


def _limit(file: JsonlFile, where: str, task: str) -> int:
    if isinstance(file.max_new_tokens, int):
        return file.max_new_tokens
    if ruler_family(task) not in file.max_new_tokens:
        known = ", ".join(file.max_new_tokens)
        raise UserError(
            f"{where}: RULER task {task!r} is not of the families in max_new_tokens ({file.where}): {known}"
        )
    return file.max_new_tokens[ruler_family(task)]
