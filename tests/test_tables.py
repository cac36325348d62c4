"""Tables as Markdown and for a terminal: escapes, alignment, blank cells, and a terminal that is too narrow."""

import os
import shutil
import sys

import pytest

from keepsight.tables import TerminalColumn, TerminalTable, markdown_table, name_column

TABLE = TerminalTable(
    [name_column("method", ("full cache", "snapkv 48")), TerminalColumn("ms", ".1f"), TerminalColumn("n", "d")]
)


def test_markdown_cells_are_plain_or_as_wide_as_their_column() -> None:
    rows = [("a|b", "1"), ("c", "20")]
    assert markdown_table(("name", "n"), rows) == "| name | n |\n| --- | --- |\n| a|b | 1 |\n| c | 20 |\n"
    aligned = markdown_table(("name", "n"), [("a\\|b", "1"), ("c", "20")], ["n"], escape=True)
    assert aligned.splitlines() == [
        "| name   |   n |",
        "| ------ | --: |",
        r"| a\\\|b |   1 |",
        "| c      |  20 |",
    ]


def test_lines_come_as_rows_do_and_blank_cells_stay_blank() -> None:
    taken = []

    def rows():
        for row in (
            {"method": "full cache", "ms": 1.26, "n": 3},
            "a note",
            {"method": "snapkv 48", "n": 12, "other": 1},
        ):
            taken.append(row)
            yield row

    lines = TABLE.lines(rows())
    assert next(lines) == "method          ms       n" and not taken
    assert next(lines) == "full cache     1.3       3" and len(taken) == 1
    assert [*lines] == ["a note", "snapkv 48               12"]


@pytest.mark.parametrize(
    ("width", "name"), [(80, "a long name of a method"), (22, "a long name…"), (5, "a long name…")]
)
def test_names_give_way_in_a_narrow_terminal(width: int, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    monkeypatch.setattr(shutil, "get_terminal_size", lambda: os.terminal_size((width, 24)))
    table = TerminalTable([name_column("method", ["a long name of a method"]), TerminalColumn("tokens/s", ".1f")])
    line = table.line({"method": "a long name of a method", "tokens/s": 12.0})
    assert line.split("  ")[0].strip() == name and line.endswith("12.0")
