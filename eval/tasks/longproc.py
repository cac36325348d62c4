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
from pathlib import Path
from typing import Any, ClassVar

from typing_extensions import override

from keepsight.errors import UserError
from keepsight.eval.tasks.benchmark import Benchmark, Protocol, TaskRequest, file_rows, rows_of_task, text_field
from keepsight.eval.tasks.metrics import metric, normalise
from keepsight.eval.tasks.samples import RenderedSample
from keepsight.eval.tasks.task_format import TaskEntry, TaskRow, load
from keepsight.files import JsonObject

_METRICS = {
    "path_traversal": "same_route",
    "html_to_tsv": "same_rows",
    "tom_tracking": "same_beliefs",
    "countdown": "reaches_target",
    "travel_planning": "same_trip",
    "pseudo_to_code": "passes_tests",
}
_MISSING_TASKS = (("travel_planning", "0.5k"), ("pseudo_to_code", "8k"))
_ITEMS = {
    "countdown": "nums, a list of whole numbers, and target, one",
    "travel_planning": "ground_truth_cities and ground_truth_durations, texts such as Oslo**Rome and 4**3",
    "pseudo_to_code": "testcases, pairs of input lines and expected output lines",
}
_TOKENS = {"0.5k": 1024, "2k": 3072, "8k": 9216}


def _task_names() -> tuple[str, ...]:
    names = []
    for task in _METRICS:
        for size in _TOKENS:
            if (task, size) not in _MISSING_TASKS:
                names.append(f"{task}_{size}")
    return tuple(names)


@dataclass
class LongProc(Benchmark):
    """LongProc's tasks as longproc_TASK_SIZE, such as longproc_countdown_2k.

    Attributes:
        dir: Folder of JSONL files of what LongProc's load_longproc_data returns: task, input_prompt (or prompt),
            reference_output and item in each row.
        run_programs: Compile and run the C++ programs that the model writes for pseudo_to_code, with your permissions
            on this machine.
    """

    TASKS: ClassVar[tuple[str, ...]] = _task_names()

    dir: str | None = None
    run_programs: bool = False

    @override
    def groups(self, protocol: Protocol) -> Mapping[str, list[str]]:
        present = {str(row.get("task")) for _, row in self._rows()}
        tasks = []
        for task in self.TASKS:
            has_rows = task in present or not self.dir
            is_run = self.run_programs or not task.startswith("pseudo_to_code")
            if has_rows and is_run:
                tasks.append(task)
        return {"": tasks}

    @override
    def require(self, task: str, judge: str) -> None:
        if self.dir is None:
            raise UserError(
                "longproc tasks need longproc.dir=FOLDER with what LongProc's load_longproc_data returns",
                field="longproc.dir",
                code="missing",
            )
        if task.startswith("pseudo_to_code") and not (self.run_programs and shutil.which("g++")):
            advice = "install g++, and allow it with longproc.run_programs=true"
            raise UserError(
                f"longproc_{task} compiles and runs what the model writes: {advice}",
                field="longproc.run_programs",
                code="conflict",
            )

    @override
    def samples(self, task: str, request: TaskRequest) -> list[RenderedSample]:
        self.require(task, request.judge)
        rows = rows_of_task(self._rows(), task)
        family, _, size = task.rpartition("_")
        entry = TaskEntry(f"longproc_{task}", "{input}", _METRICS[family], _TOKENS[size])
        return load(f"longproc {task}", entry, rows, partial(_converted, family), request)

    def _rows(self) -> Iterator[tuple[str, JsonObject]]:
        if self.dir:
            for path in sorted(Path(self.dir).glob("*.jsonl")):
                yield from file_rows(path)


def _converted(family: str, where: str, row: JsonObject, number: int) -> TaskRow:
    prompt_field = "input_prompt" if "input_prompt" in row else "prompt"
    prompt = text_field(where, row, prompt_field)
    return TaskRow(str(row.get("id", number)), {"input": prompt}, (_reference(family, where, row),))


def _reference(family: str, where: str, row: JsonObject) -> str:
    try:
        if family == "countdown":
            return _countdown_reference(row["item"])
        if family == "pseudo_to_code":
            return _tests_reference(row["item"])
        if family == "travel_planning":
            return _trip_reference(row["item"])
    except (KeyError, TypeError, ValueError, AttributeError):
        raise UserError(f"{where}: field 'item' must hold {_ITEMS[family]}", field="item", code="type") from None
    return text_field(where, row, "reference_output")


def _countdown_reference(item: Mapping[str, Any]) -> str:
    """Such as `26 42 6 22 -> 40`."""
    numbers = item["nums"]
    target = item["target"]
    if not all(type(number) is int for number in (*numbers, target)):
        raise TypeError("not whole numbers")
    return f"{' '.join(map(str, numbers))} -> {target}"


def _tests_reference(item: Mapping[str, Any]) -> str:
    """The tests as JSON: pairs of lists of lines, those read and those to be printed."""
    tests = item["testcases"]
    lines: list[Any] = []
    for input_lines, output_lines in tests:
        lines += [*input_lines, *output_lines]
    if not tests or not all(type(line) is str for line in lines):
        raise TypeError("not lines of text")
    return json.dumps(tests)


def _trip_reference(item: Mapping[str, Any]) -> str:
    """Such as `Oslo 4, Rome 3`."""
    cities = list(filter(None, item["ground_truth_cities"].split("**")))
    durations = list(filter(None, item["ground_truth_durations"].split("**")))
    return ", ".join(f"{city} {int(days)}" for city, days in zip(cities, durations, strict=True))


# Metrics


def _tagged(text: str, tag: str) -> str | None:
    """The text between <tag> and </tag>."""
    start = text.find(f"<{tag}>")
    end = text.find(f"</{tag}>")
    if start < 0 or end < 0:
        return None
    return text[start + len(tag) + 2 : end].strip()


@metric("same_route")
def _same_route(prediction: str, reference: str) -> float:
    """path_traversal: whether <Route> holds the reference."""
    return float(_tagged(prediction, "Route") == reference.strip())


_TOM_WORDS = r"\b(?:a|an|the|on|in|at|step|thinks|think|believes|believe|is|are|of|location|know|knows|belief)\b"
_NO_MARKS = str.maketrans("", "", string.punctuation + "’")


@metric("same_beliefs")
def _same_beliefs(prediction: str, reference: str) -> float:
    """tom_tracking: whether the last trace names the same belief at every step, up to little words and punctuation."""
    trace = prediction[max(prediction.rfind("- Step 0:"), 0) :]
    return float(_beliefs(trace) == _beliefs(reference))


def _beliefs(text: str) -> list[str]:
    beliefs = []
    for line in text.strip().split("\n"):
        if re.match(r"- Step \d+:", line):
            step = line.split("-", 1)[1].lower().translate(_NO_MARKS)
            beliefs.append(" ".join(re.sub(_TOM_WORDS, " ", step).split()))
    return beliefs


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
    _, city, _ = flights[0]
    arrival = 1
    stays = []
    for day, _, next_city in flights:
        stays.append(f"{city} {int(day) - arrival + 1}")
        city = next_city
        arrival = int(day)
    stays.append(f"{city} {int(ends[-1]) - arrival + 1}")
    stays_wanted = reference.split(", ")
    return float(stays[: len(stays_wanted)] == stays_wanted)


@metric("reaches_target")
def _reaches_target(prediction: str, reference: str) -> float:
    """countdown: whether three right equations in <Solution> use each number once (`26 42 6 22 -> 40`)."""
    numbers_text, _, target_text = reference.partition(" -> ")
    numbers = list(map(int, numbers_text.split()))
    target = int(target_text)
    lines = (_tagged(prediction, "Solution") or "").split("\n")
    for line in lines:
        equation = re.fullmatch(r"\s*(-?\d{1,99})\s*([-+*/])\s*(-?\d{1,99})\s*=\s*(-?\d{1,99})\s*", line)
        if equation is None:
            return 0.0
        left = int(equation[1])
        right = int(equation[3])
        result = int(equation[4])
        if not _is_right(left, equation[2], right, result):
            return 0.0
        for number in (left, right):
            if number not in numbers:
                return 0.0
            numbers.remove(number)
        numbers.append(result)
    return float(len(lines) == 3 and numbers[0] == target)


def _is_right(left: int, sign: str, right: int, result: int) -> bool:
    if sign == "/":
        return right != 0 and Fraction(left, right) == result
    return {"+": left + right, "-": left - right, "*": left * right}[sign] == result


@metric("same_rows")
def _same_rows(prediction: str, reference: str) -> float:
    """html_to_tsv: F1 over the rows of the two tables, whatever their order; cells are normalised."""
    block = re.search(r"```tsv([\s\S]*)```", prediction)
    if block is not None:
        text = block[1]
    elif "```tsv" in prediction:
        text = prediction.split("```tsv")[1]
    else:
        text = prediction
    try:
        columns_expected, expected = _table(reference)
        columns, rows = _table(text)
    except csv.Error:  # such as a carriage return inside a line
        return 0.0
    if not expected or not rows or columns != columns_expected:
        return 0.0
    precision = sum(row in expected for row in rows) / len(rows)
    recall = sum(row in rows for row in expected) / len(expected)
    if precision + recall == 0:
        return 0.0
    return 2 * precision * recall / (precision + recall)


def _table(text: str) -> tuple[int, list[tuple[str, ...]]]:
    """Columns of the header, and the rows: a broken last one is left out, the cells of other broken ones are N/A."""
    header, *rows = list(csv.reader(text.strip().split("\n"), delimiter="\t")) or [[]]
    if rows and len(rows[-1]) != len(header):
        rows.pop()
    table = []
    for row in rows:
        cells = row if len(row) == len(header) else ["N/A"] * len(header)
        table.append(tuple(normalise(cell).replace(" ", "") for cell in cells))
    return len(header), table


_HEADERS = (
    "cstdio iostream vector algorithm numeric cmath cstring set map queue stack list fstream climits cassert iomanip "
    "sstream bitset"
)
_MAX_TESTS = 10
_SECONDS = 3


@metric("passes_tests")
def _passes_tests(prediction: str, reference: str) -> float:
    """pseudo_to_code: whether the C++ program in a code block prints what each of its first 10 tests wants.

    The reference is the tests as JSON: pairs of lists of lines, those read and those to be printed.
    """
    block = re.search(r"```(?:cpp|c\+\+)([\s\S]*)```", prediction)
    if block is None:
        return 0.0
    headers = ""
    for name in _HEADERS.split():
        headers += f"#include <{name}>\n"
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "answer.cpp")
        program = Path(folder, "answer")
        source.write_text(f"{headers}using namespace std;\n{block[1]}", encoding="utf-8", errors="replace")
        compiler = ["g++", "-std=c++11", "-O", "-o", str(program), str(source)]
        try:
            subprocess.run(compiler, capture_output=True, timeout=60, check=True)
            for input_lines, output_lines in json.loads(reference)[:_MAX_TESTS]:
                if not _prints(program, input_lines, output_lines):
                    return 0.0
        except (subprocess.SubprocessError, OSError):
            return 0.0
    return 1.0


def _prints(program: Path, input_lines: list[str], output_lines: list[str]) -> bool:
    text = "\n".join(input_lines).encode() + b"\n"
    finished = subprocess.run([program], input=text, capture_output=True, timeout=_SECONDS, check=False)
    return finished.stdout == "\n".join(output_lines).encode() + b"\n"
