"""`keepsight eval` in several processes: samples divided over processes, parts merged, stopped and gone on with."""

import re
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from keepsight.files import append_lines, one_writer, read_json, read_jsonl, write_lines
from tests.commands.commands import RUN_FILES, CommandLine, files_of_run
from tests.eval.rows import CLOCKS, comparable
from tests.launch import launch

pytestmark = pytest.mark.usefixtures("here")
GIVEN = ["model.id=tiny", "model.device=cpu", "methods=[snapkv,adakv]", "budgets=[40]", "samples=3"]
TASK = ["tasks=[niah_multikey]", "lengths=[600]", "max_new_tokens=6", "question=multi"]
EVAL = ["-m", "keepsight", "eval", *GIVEN, *TASK]


def rows_without_times(out: Path) -> list[dict[str, Any]]:
    """Results in a fixed order, without what clocks decide."""
    rows = [row | CLOCKS for row in read_jsonl(out / "results.jsonl")]
    return sorted(rows, key=lambda row: (row["sample"], row["method"]))


def test_two_processes_give_what_one_gives_and_go_on_where_others_stopped(keepsight: CommandLine, here: Path) -> None:
    keepsight("eval", *GIVEN, *TASK, "out=one")
    expected = rows_without_times(here / "one")
    names = [f"1000-{number}-{key}" for number in range(3) for key in range(4)]
    assert [row["sample"] for row in expected] == [name for name in names for _ in range(3)]
    assert {row["question"] for row in expected} == {"multi"}
    assert len({tuple(row["references"]) for row in expected}) == 12
    assert read_json(here / "one" / "settings.json")["question"] == "multi"

    # As three processes leave it that were killed: one part empty, one torn.
    rows = list(read_jsonl(here / "one" / "results.jsonl"))
    (here / "two").mkdir()
    (here / "two" / "settings.json").write_bytes((here / "one" / "settings.json").read_bytes())
    write_lines(here / "two" / "results.jsonl", rows[:3])
    append_lines(here / "two" / "results-2.jsonl", rows[12:20])
    with (here / "two" / "results-1.jsonl").open("w") as stream:
        stream.write('{"task": "niah_mul')
    result = launch(here, *EVAL, "out=two")
    assert result.returncode == 0, result.stderr
    assert files_of_run(here / "two") == RUN_FILES
    assert rows_without_times(here / "two") == comparable(expected)
    assert result.stdout.count("report: two/report.html") == result.stdout.count("first prompt, ") == 1
    kept = [row for row in read_jsonl(here / "two" / "results.jsonl") if row in rows]
    assert kept == rows[:3] + rows[12:18]  # done before, and not done again

    # And back in one process.
    write_lines(here / "two" / "results-0.jsonl", rows[-9:])
    write_lines(here / "two" / "results.jsonl", rows[:9])
    keepsight("eval", *GIVEN, *TASK, "out=two")
    assert files_of_run(here / "two") == RUN_FILES
    assert rows_without_times(here / "two") == comparable(expected)


@pytest.mark.slow
@pytest.mark.parametrize("refused", ["by both", "by the first"])
def test_a_refusal_is_one_line_of_a_process_and_ends_both(here: Path, refused: str) -> None:
    methods = {"by both": "methods=[snapkw]", "by the first": "methods=[snapkv]"}[refused]
    with one_writer(here / "two") if refused == "by the first" else nullcontext():
        result = launch(here, "-m", "keepsight", "eval", *GIVEN[:2], methods, *GIVEN[3:], *TASK, "out=two")
    (line,) = {line for line in result.stderr.splitlines() if line.startswith("keepsight: error: ")}
    assert re.search("method 'snapkw' is unknown" if refused == "by both" else "two: .*is writing here", line)
    assert result.returncode == 1 and re.search(r"exitcode +: 2 ", result.stderr), result.stderr  # torchrun's own is 1
