"""Tables as Markdown and for a terminal: escapes, alignment, blank cells, and a terminal that is too narrow."""

import os
import shutil
import sys

import pytest

from keepsight.tables import LiveTable, TerminalColumn, markdown_table, name_column, terminal_list, terminal_table

COLUMNS = (name_column("method", ("full cache", "snapkv 48")), TerminalColumn("ms", ".1f"), TerminalColumn("n", "d"))
ROWS = ({"method": "full cache", "ms": 1.26, "n": 3}, {"method": "snapkv 48", "n": 12, "other": 1})


def test_markdown_cells_are_plain_or_as_wide_as_their_column() -> None:
    rows = [("a|b", "1"), ("c", "20")]
    assert markdown_table(rows, ["name", "n"]) == "| name | n |\n| --- | --- |\n| a|b | 1 |\n| c | 20 |\n"
    aligned = markdown_table([("a\\|b", "1"), (" c", "20")], ["name", "n"], numbers=["n"])
    assert aligned.splitlines() == [
        "| name   |   n |",
        "|:-------|----:|",
        r"| a\\\|b |   1 |",
        "| c      |  20 |",
    ]


@pytest.mark.parametrize("numbers", [None, ["n"]])
def test_cells_stay_as_they_are_and_a_table_may_be_empty(numbers: list[str] | None) -> None:
    """Nothing is read as a number, and columns may have one title."""
    rows = [("1e3", "007", ""), ("1_000", "nan", "–")]
    lines = markdown_table(rows, ["a", "n", "n"], numbers=numbers).splitlines()
    titles, _, *cells = [tuple(cell.strip() for cell in line.split("|")[1:-1]) for line in lines]
    assert titles == ("a", "n", "n")
    assert cells == rows
    assert len(markdown_table([], ["a", "n"], numbers=numbers).splitlines()) == 2


def test_a_complete_table_is_as_wide_as_its_cells() -> None:
    columns = [*COLUMNS, TerminalColumn("", is_text=True), TerminalColumn("tokens/s", ".1f")]
    assert terminal_table([{**ROWS[0], "": "of full"}, ROWS[1]], columns).splitlines() == [
        "method       ms   n           tokens/s",
        "full cache  1.3   3  of full",
        "snapkv 48        12",
    ]


def test_a_list_has_a_line_for_each_value() -> None:
    assert terminal_list({"weights": "1 GiB", "  of which stay": "12 MiB"}).splitlines() == [
        "  weights             1 GiB",
        "    of which stay    12 MiB",
    ]


def test_lines_come_as_rows_do_and_blank_cells_stay_blank() -> None:
    rows_read = []

    def rows():
        for row in ROWS:
            rows_read.append(row)
            yield row

    lines = LiveTable(COLUMNS).lines(rows())
    assert next(lines) == "method          ms       n"
    assert len(rows_read) == 0
    assert next(lines) == "full cache     1.3       3"
    assert len(rows_read) == 1
    assert [*lines] == ["snapkv 48               12"]


@pytest.mark.parametrize(
    ("width", "name"), [(80, "a long name of a method"), (22, "a long name…"), (5, "a long name…")]
)
def test_names_give_way_in_a_narrow_terminal(width: int, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    monkeypatch.setattr(shutil, "get_terminal_size", lambda: os.terminal_size((width, 24)))
    columns = (name_column("method", ["a long name of a method"]), TerminalColumn("tokens/s", ".1f"))
    row = {"method": "a long name of a method", "tokens/s": 12.0}
    for line in (LiveTable(columns).line(row), terminal_table([row], columns).splitlines()[1]):
        assert line.split("  ")[0].strip() == name
        assert line.endswith("12.0")
