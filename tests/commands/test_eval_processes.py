"""`keepsight eval` in several processes: samples divided over processes, parts merged, stopped and gone on with."""

import re
from contextlib import AbstractContextManager, nullcontext
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from keepsight.files import append_lines, one_writer, read_json, write_lines
from tests.commands.commands import RUN_FILES, CommandLine, files_of_run, results_of
from tests.eval.rows import CLOCKS, comparable
from tests.launch import launch

pytestmark = pytest.mark.usefixtures("here")
TINY = ["model.id=tiny", "model.device=cpu"]
TASK = ["tasks=[niah_multikey]", "lengths=[600]", "max_new_tokens=6", "question=multi", "budgets=[40]", "samples=3"]
EVAL = ["eval", *TINY, *TASK]


def rows_without_times(out: Path) -> list[dict[str, Any]]:
    """Results in a fixed order, without what clocks decide."""
    rows = [row | CLOCKS for row in results_of(out)]
    return sorted(rows, key=lambda row: (row["sample"], row["method"]))


def test_two_processes_give_what_one_gives_and_go_on_where_others_stopped(keepsight: CommandLine, here: Path) -> None:
    one = here / "one"
    two = here / "two"
    methods = "methods=[snapkv,adakv]"
    keepsight(*EVAL, methods, "out=one")
    expected = rows_without_times(one)
    samples = [f"1000-{number}-{key}" for number, key in product(range(3), range(4))]
    assert [row["sample"] for row in expected] == sorted(3 * samples)
    assert {row["question"] for row in expected} == {"multi"}
    assert len({tuple(row["references"]) for row in expected}) == 12
    assert read_json(one / "settings.json")["question"] == "multi"

    # As three killed processes leave it: one file is missing, one is torn.
    rows = results_of(one)
    two.mkdir()
    (two / "settings.json").write_bytes((one / "settings.json").read_bytes())
    write_lines(two / "results.jsonl", rows[:3])
    append_lines(two / "results-2.jsonl", rows[12:20])
    (two / "results-1.jsonl").write_text('{"task": "niah_mul')
    result = launch(here, "-m", "keepsight", *EVAL, methods, "out=two")
    assert result.returncode == 0, result.stderr
    assert files_of_run(two) == RUN_FILES
    assert rows_without_times(two) == comparable(expected)
    assert result.stdout.count("report: two/report.html") == 1
    assert result.stdout.count("first prompt, ") == 1
    measured_before = [row for row in results_of(two) if row in rows]
    assert measured_before == rows[:3] + rows[12:18], "not measured again"

    # And back in one process.
    write_lines(two / "results-0.jsonl", rows[-9:])
    write_lines(two / "results.jsonl", rows[:9])
    keepsight(*EVAL, methods, "out=two")
    assert files_of_run(two) == RUN_FILES
    assert rows_without_times(two) == comparable(expected)


@pytest.mark.slow
@pytest.mark.parametrize("refused", ["by both", "by the first"])
def test_a_refusal_is_one_line_of_a_process_and_ends_both(here: Path, refused: str) -> None:
    if refused == "by both":
        methods = "methods=[snapkw]"
        expected = "method 'snapkw' is unknown"
        lock: AbstractContextManager[None] = nullcontext()
    else:
        methods = "methods=[snapkv]"
        expected = "two: .*is writing here"
        lock = one_writer(here / "two")
    with lock:
        result = launch(here, "-m", "keepsight", *EVAL, methods, "out=two")
    (line,) = {line for line in result.stderr.splitlines() if line.startswith("keepsight: error: ")}
    assert re.search(expected, line)
    assert result.returncode == 1, "torchrun's own"
    assert re.search(r"exitcode +: 2 ", result.stderr), result.stderr
