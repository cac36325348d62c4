"""The runner of benchmarks: in a folder nothing is measured twice, and a table is the same however often it stopped."""

import csv
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from keepsight.eval.bench.runner import Runner, TableRow, runner_in
from keepsight.models.identity import Identity, MadeWith
from keepsight.tables import TerminalColumn, name_column
from tests.refused import refused

METHODS = {"full": 1.0, "snapkv": 2.0}
COLUMNS = (TerminalColumn("tokens", "d"), name_column("method", METHODS), TerminalColumn("ms", ".1f"))
RATIO = {"of full": "ms"}
MADE_WITH = MadeWith(Identity(model="sha256:" + "0" * 64), {"tokens": 64})


class Stopped(Exception):
    """The end of a run that does not get any further."""


def measured_rows(runner: Runner, lengths: list[int], measured: list[Any], stop_after: int = 100) -> list[TableRow]:
    """The rows of all methods at all lengths; what is measured is added to `measured`, until it has `stop_after`."""

    def measure(milliseconds: float, length: int) -> TableRow:
        if len(measured) == stop_after:
            raise Stopped
        measured.append((length, milliseconds))
        return {"ms": milliseconds * length / 3, "KV": None}

    return list(runner.compare("decode", METHODS, measure, lengths=lengths, ratios=RATIO))


def test_rows_come_by_length_and_method_with_ratios_to_the_first_of_a_length() -> None:
    rows = measured_rows(Runner(), [3, 6], [])
    columns = ("tokens", "method", "ms", "of full")
    assert [tuple(row[column] for column in columns) for row in rows] == [
        (3, "full", 1.0, 1.0),
        (3, "snapkv", 2.0, 2.0),
        (6, "full", 2.0, 1.0),
        (6, "snapkv", 4.0, 2.0),
    ]


@pytest.mark.parametrize("stop_after", [0, 1, 3])
def test_a_stopped_run_measures_what_is_missing(tmp_path: Path, stop_after: int) -> None:
    expected = measured_rows(Runner(), [3, 6], [])
    measured: list[Any] = []
    with pytest.raises(Stopped), runner_in(tmp_path, MADE_WITH) as runner:
        measured_rows(runner, [3, 6], measured, stop_after)
    for _ in range(2):
        with runner_in(tmp_path, MADE_WITH) as runner:
            assert measured_rows(runner, [3, 6], measured) == expected
    assert measured == [(3, 1.0), (3, 2.0), (6, 1.0), (6, 2.0)]
    with runner_in(tmp_path, MADE_WITH) as runner:
        assert len(measured_rows(runner, [3, 9], measured)) == 4
    assert measured[4:] == [(9, 1.0), (9, 2.0)]


def test_a_case_may_have_rows_of_its_own(tmp_path: Path) -> None:
    """As where methods take turns; the columns of the case come first."""
    measured = []

    def measure(length: int) -> Iterator[TableRow]:
        measured.append(length)
        for name in METHODS:
            yield {"method": name, "ms": length}

    cases: list[tuple[TableRow, int]] = [({"tokens": length}, length) for length in (3, 6)]
    for _ in range(2):
        rows = list(Runner(tmp_path).rows("evict", cases, measure))
        assert [list(row.values()) for row in rows] == [
            [3, "full", 3],
            [3, "snapkv", 3],
            [6, "full", 6],
            [6, "snapkv", 6],
        ]
    assert measured == [3, 6]
    assert list(Runner(tmp_path).rows_so_far("evict")) == rows


@pytest.mark.parametrize(
    ("lines", "torn", "again"), [(4, "", []), (3, "", [6]), (3, '{"tok', [6]), (2, "{", [6]), (1, "", [3, 6])]
)
def test_a_case_that_a_kill_has_cut_off_is_measured_again(
    tmp_path: Path, lines: int, torn: str, again: list[int]
) -> None:
    """Within a line, and between two."""
    measured = []

    def measure(length: int) -> list[TableRow]:
        measured.append(length)
        return [{"method": name, "ms": length} for name in METHODS]

    cases: list[tuple[TableRow, int]] = [({"tokens": length}, length) for length in (3, 6)]
    rows = list(Runner(tmp_path).rows("evict", cases, measure))
    path = tmp_path / "evict.jsonl"
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:lines]) + torn)
    measured.clear()
    runner = Runner(tmp_path)
    assert list(runner.rows("evict", cases, measure)) == rows
    assert list(runner.rows_so_far("evict")) == rows
    assert measured == again


def test_a_table_is_printed_line_by_line_and_is_a_csv_at_its_end(tmp_path: Path) -> None:
    rows = [{"tokens": 3, "method": "full", "ms": 1 / 3}, {"tokens": 3, "method": "snapkv", "more": 1}]
    lines = Runner(tmp_path).table("decode", COLUMNS, iter(rows))
    assert next(lines) == "tokens  method      ms"
    assert not (tmp_path / "decode.csv").exists()
    assert list(lines) == ["     3  full       0.3", "     3  snapkv"]
    with (tmp_path / "decode.csv").open(newline="") as table:
        assert list(csv.reader(table)) == [["tokens", "method", "ms"], ["3", "full", "0.333333"], ["3", "snapkv", ""]]


def test_a_command_that_is_refused_leaves_no_folder(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    with pytest.raises(Stopped), runner_in(folder, MADE_WITH):
        raise Stopped
    assert not folder.exists()
    with pytest.raises(Stopped), runner_in(folder, MADE_WITH) as runner:
        measured_rows(runner, [3], [])
        raise Stopped
    assert folder.exists()


def test_a_folder_that_was_there_stays_as_it_was(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").touch()
    with pytest.raises(Stopped), runner_in(tmp_path, MADE_WITH):
        raise Stopped
    assert list(tmp_path.iterdir()) == [tmp_path / "notes.txt"]


def test_rows_of_another_measurement_are_not_mixed_in(tmp_path: Path) -> None:
    with runner_in(tmp_path, MADE_WITH) as runner:
        measured_rows(runner, [3], [])
        with refused("out", "conflict"), runner_in(tmp_path, MADE_WITH):
            pass
    with refused("tokens", "conflict"), runner_in(tmp_path, MadeWith(MADE_WITH.identity, {"tokens": 32})):
        pass
    with refused("model", "conflict"), runner_in(tmp_path, MadeWith(Identity(model="sha256:" + "1" * 64), {})):
        pass
    with runner_in(None, MADE_WITH) as runner:
        assert runner.folder is None
