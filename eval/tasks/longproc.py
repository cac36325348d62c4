"""LongProc (arXiv:2501.05414): long procedures to be written out.

Metrics as in https://github.com/princeton-pli/LongProc, `longproc/*_evaluator.py`.
"""

import csv
import json
import re
import shutil
import string
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fractions import Fraction
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import ClassVar

from typing_extensions import override

from keepsight.errors import UserError
from keepsight.eval.tasks.benchmark import Benchmark, Protocol, TaskRequest, file_rows, text_field
from keepsight.eval.tasks.metrics import metric, normalise
from keepsight.eval.tasks.samples import RenderedSample, Sample, render_in_bucket
from keepsight.files import Row

_METRICS = {
    "path_traversal": "same_route",
    "html_to_tsv": "same_rows",
    "tom_tracking": "same_beliefs",
    "countdown": "reaches_target",
    "travel_planning": "same_trip",
    "pseudo_to_code": "passes_tests",
}
_NOT_THERE = (("travel_planning", "0.5k"), ("pseudo_to_code", "8k"))
_ITEMS = {
    "countdown": "nums, a list of whole numbers, and target, one",
    "travel_planning": "ground_truth_cities and ground_truth_durations, texts such as Oslo**Rome and 4**3",
    "pseudo_to_code": "testcases, pairs of input lines and expected output lines",
}
_TOKENS = {"0.5k": 1024, "2k": 3072, "8k": 9216}


@dataclass
class LongProc(Benchmark):
    """LongProc's tasks as longproc_TASK_SIZE, such as longproc_countdown_2k.

    Attributes:
        dir: Folder of JSONL files of what LongProc's load_longproc_data returns: task, input_prompt (or prompt),
            reference_output and item in each row.
        run_programs: Compile and run the C++ programs that the model writes for pseudo_to_code, with your permissions
            on this machine.
    """

    TASKS: ClassVar[tuple[str, ...]] = tuple(
        f"{task}_{size}" for task in _METRICS for size in _TOKENS if (task, size) not in _NOT_THERE
    )

    dir: str | None = None
    run_programs: bool = False

    @override
    def groups(self, protocol: Protocol) -> Mapping[str, list[str]]:
        present = {str(row.get("task")) for _, row in self._rows()} if self.dir else {*self.TASKS}
        allowed = {task for task in present if self.run_programs or not task.startswith("pseudo_to_code")}
        return {"": [task for task in self.TASKS if task in allowed]}

    @override
    def require(self, task: str, judge: str) -> None:
        if self.dir is None:
            raise UserError("longproc tasks need longproc.dir=FOLDER with what LongProc's load_longproc_data returns")
        if task.startswith("pseudo_to_code") and not (self.run_programs and shutil.which("g++")):
            advice = "install g++, and allow it with longproc.run_programs=true"
            raise UserError(f"longproc_{task} compiles and runs what the model writes: {advice}")

    @override
    def samples(self, task: str, request: TaskRequest) -> list[RenderedSample]:
        self.require(task, request.judge)
        rows = ((where, row) for where, row in self._rows() if row.get("task", task) == task)

        return request.collect(f"longproc {task}", rows, partial(_sample, task), render=render_in_bucket)

    def _rows(self) -> Iterator[tuple[str, Row]]:
        for path in sorted(Path(self.dir or "").glob("*.jsonl")):
            yield from file_rows(path)


def _sample(task: str, where: str, row: Row, number: int) -> Sample:
    family, _, size = task.rpartition("_")
    return Sample(
        id=str(row.get("id", number)),
        task=f"longproc_{task}",
        length=0,
        prompt=text_field(where, row, "input_prompt" if "input_prompt" in row else "prompt"),
        references=(_reference(family, where, row),),
        metric=_METRICS[family],
        max_new_tokens=_TOKENS[size],
    )


def _reference(family: str, where: str, row: Row) -> str:
    try:
        if family == "countdown":
            numbers, target = row["item"]["nums"], row["item"]["target"]
            if all(type(each) is int for each in (*numbers, target)):
                return f"{' '.join(map(str, numbers))} -> {target}"
            raise TypeError
        if family == "pseudo_to_code":
            cases = row["item"]["testcases"]
            if cases and all(type(line) is str for given, wanted in cases for line in (*given, *wanted)):
                return json.dumps(cases)
            raise TypeError
        if family == "travel_planning":
            texts = (row["item"][f"ground_truth_{name}"] for name in ("cities", "durations"))
            cities, days = ([part for part in text.split("**") if part] for text in texts)
            return ", ".join(f"{city} {int(stay)}" for city, stay in zip(cities, days, strict=True))
    except (KeyError, TypeError, ValueError, AttributeError):
        raise UserError(f"{where}: field 'item' must hold {_ITEMS[family]}") from None
    return text_field(where, row, "reference_output")


def _tagged(text: str, tag: str) -> str | None:
    """The text between <tag> and </tag>."""
    start, end = text.find(f"<{tag}>"), text.find(f"</{tag}>")
    return text[start + len(tag) + 2 : end].strip() if start >= 0 and end >= 0 else None


metric("same_route")(lambda prediction, reference: _tagged(prediction, "Route") == reference.strip())  # path_traversal

_TOM_WORDS = r"\b(?:a|an|the|on|in|at|step|thinks|think|believes|believe|is|are|of|location|know|knows|belief)\b"
_NO_MARKS = str.maketrans("", "", string.punctuation + "’")


@metric("same_beliefs")
def _same_beliefs(prediction: str, reference: str) -> float:
    """tom_tracking: whether the last trace names the same belief at every step, up to little words and punctuation."""
    trace = prediction[max(prediction.rfind("- Step 0:"), 0) :]
    return float(_beliefs(trace) == _beliefs(reference))


def _beliefs(text: str) -> list[str]:
    steps = (line.split("-", 1)[1] for line in text.strip().split("\n") if re.match(r"- Step \d+:", line))
    return [" ".join(re.sub(_TOM_WORDS, " ", step.lower().translate(_NO_MARKS)).split()) for step in steps]


@metric("same_trip")
def _same_trip(prediction: str, reference: str) -> float:
    """travel_planning: whether <Plan> begins with the reference's cities (`Oslo 4, Rome 3`), for as many days.

    The plan has lines with days such as `Day 1-4`, and flights; a day of travel counts for both cities.
    """
    plan = _tagged(prediction, "Plan") or ""
    ends = re.findall(r"^.*?\d+-(\d{1,9})", plan, re.MULTILINE)
    flights = re.findall(r"^.*Day (\d{1,9}).*from (\w+) to (\w+)", plan, re.MULTILINE)
    if not ends or not flights:
        return 0.0
    days = [1, *(int(day) for day, _, _ in flights), int(ends[-1])]
    cities = [flights[0][1], *(city for _, _, city in flights)]
    stays = [f"{city} {end - start + 1}" for city, (start, end) in zip(cities, pairwise(days), strict=True)]
    wanted = reference.split(", ")
    return float(stays[: len(wanted)] == wanted)


@metric("reaches_target")
def _reaches_target(prediction: str, reference: str) -> float:
    """countdown: whether three right equations in <Solution> use each number once (`26 42 6 22 -> 40`)."""
    given, _, result = reference.partition(" -> ")
    numbers, target = [int(number) for number in given.split()], int(result)
    lines = (_tagged(prediction, "Solution") or "").split("\n")
    for line in lines:
        found = re.fullmatch(r"\s*(-?\d{1,99})\s*([-+*/])\s*(-?\d{1,99})\s*=\s*(-?\d{1,99})\s*", line)
        if found is None or not _is_right(int(found[1]), found[2], int(found[3]), int(found[4])):
            return 0.0
        for used in (int(found[1]), int(found[3])):
            if used not in numbers:
                return 0.0
            numbers.remove(used)
        numbers.append(int(found[4]))
    return float(len(lines) == 3 and numbers[0] == target)


def _is_right(left: int, sign: str, right: int, result: int) -> bool:
    if sign == "/":
        return right != 0 and Fraction(left, right) == result
    return {"+": left + right, "-": left - right, "*": left * right}[sign] == result


@metric("same_rows")
def _same_rows(prediction: str, reference: str) -> float:
    """html_to_tsv: F1 over the rows of the two tables, whatever their order; cells are normalised."""
    found = re.search(r"```tsv([\s\S]*)```", prediction)
    text = found[1] if found else prediction.split("```tsv")[1] if "```tsv" in prediction else prediction
    try:
        (width, expected), (own_width, answered) = _table(reference), _table(text)
    except csv.Error:  # such as a carriage return inside a line
        return 0.0
    if not expected or not answered or width != own_width:
        return 0.0
    precision = sum(row in expected for row in answered) / len(answered)
    recall = sum(row in answered for row in expected) / len(expected)
    return 2 * precision * recall / (precision + recall) if precision + recall else 0.0


def _table(text: str) -> tuple[int, list[tuple[str, ...]]]:
    """Columns of the header, and the rows: a broken last one is left out, the cells of other broken ones are N/A."""
    header, *rows = list(csv.reader(text.strip().split("\n"), delimiter="\t")) or [[]]
    if rows and len(rows[-1]) != len(header):
        rows.pop()
    whole = [row if len(row) == len(header) else ["N/A"] * len(header) for row in rows]
    return len(header), [tuple(normalise(cell).replace(" ", "") for cell in row) for row in whole]


_HEADERS = (
    "cstdio iostream vector algorithm numeric cmath cstring set map queue stack list fstream climits cassert iomanip "
    "sstream bitset"
)
_TESTS, _SECONDS = 10, 3


@metric("passes_tests")
def _passes_tests(prediction: str, reference: str) -> float:
    """pseudo_to_code: whether the C++ program in a code block prints what each of its first 10 tests wants.

    The reference is the tests as JSON: pairs of lists of lines, those read and those to be printed.
    """
    found = re.search(r"```(?:cpp|c\+\+)([\s\S]*)```", prediction)
    if found is None:
        return 0.0
    headers = "".join(f"#include <{name}>\n" for name in _HEADERS.split())
    with tempfile.TemporaryDirectory() as folder:
        source, program = Path(folder, "answer.cpp"), Path(folder, "answer")
        source.write_text(f"{headers}using namespace std;\n{found[1]}", encoding="utf-8", errors="replace")
        try:
            compiler = ["g++", "-std=c++11", "-O", "-o", str(program), str(source)]
            subprocess.run(compiler, capture_output=True, timeout=60, check=True)
            return float(all(_prints(program, *case) for case in json.loads(reference)[:_TESTS]))
        except (subprocess.SubprocessError, OSError):
            return 0.0


def _prints(program: Path, given: list[str], wanted: list[str]) -> bool:
    lines = "\n".join(given).encode() + b"\n"
    said = subprocess.run([program], input=lines, capture_output=True, timeout=_SECONDS, check=False)
    return said.stdout == "\n".join(wanted).encode() + b"\n"
