"""Tables as Markdown, LaTeX and CSV."""

import csv
from pathlib import Path

import pytest

from keepsight.eval.report import summary
from keepsight.eval.report.intervals import estimate
from keepsight.eval.report.tables import Column, Table
from keepsight.files import write_csv
from tests.eval.report.results import row

SHARE = estimate([1.0, 1.0, 0.0, 0.0], "a", can_be_share=True)
TABLE = Table(
    "scores",
    "Scores of 100 % & more.",
    (Column("budget", "budget"), Column("method", "method", is_text=True), Column("gain", "τ gain", 2, is_signed=True)),
    [
        {"budget": None, "method": "full", "gain": None},
        {"budget": 64, "method": "a|b_c", "gain": SHARE},
        {"budget": 0.5, "method": "{x}", "gain": -0.001},
    ],
)


def test_markdown_is_aligned_and_escaped() -> None:
    assert TABLE.markdown().splitlines() == [
        "Scores of 100 % & more.",
        "",
        "| budget | method |               τ gain |",
        "| -----: | ------ | -------------------: |",
        "|    all | full   |                    – |",
        r"|     64 | a\|b_c | +0.50 [+0.15, +0.85] |",
        "|  0.500 | {x}    |                +0.00 |",
    ]


def test_latex_is_escaped() -> None:
    lines = TABLE.latex().splitlines()
    assert lines[2] == r"\caption{Scores of 100 \% \& more.}"
    assert lines[4:6] == [r"\begin{tabular}{rlr}", r"\toprule"]
    assert lines[6] == r"budget & method & $\tau$ gain \\"
    assert lines[8:11] == [
        r"all & full & -- \\",
        r"64 & a|b\_c & +0.50 {\scriptsize [+0.15, +0.85]} \\",
        r"0.500 & \{x\} & +0.00 \\",
    ]


def test_csv_has_columns_for_the_ends(tmp_path: Path) -> None:
    TABLE.save(tmp_path)
    assert (tmp_path / "scores.csv").read_text("utf-8").splitlines() == [
        "budget,method,gain,gain_low,gain_high",
        ",full,,,",
        "64,a|b_c,0.5,0.150036,0.849964",
        "0.5,{x},-0.001,,",
    ]


def test_what_separates_cells_and_lines_stays_in_its_cell(tmp_path: Path) -> None:
    table = Table("t", "c", (Column("method", "method", is_text=True),), [{"method": "a\\|b\rc"}])
    assert table.markdown().splitlines()[-1] == r"| a\\\|b\rc |"
    table.save(tmp_path)
    with (tmp_path / "t.csv").open(newline="", encoding="utf-8") as lines:
        assert [*csv.reader(lines)] == [["method"], ["a\\|b\nc"]]


@pytest.mark.parametrize("text", ["=1+1", "@x", "+1+cmd|' /C calc'!A0", "-2+3", "\n=1"])
def test_no_text_is_a_formula_of_a_spreadsheet(tmp_path: Path, text: str) -> None:
    table = Table("t", "c", (Column("method", "method", is_text=True), Column("n", "n")), [{"method": text, "n": -1.5}])
    table.save(tmp_path)
    found = summary.summary_rows(summary.summarize([row(text, 64, 1.0, task=text, excess_nll=-0.5)]))
    write_csv(tmp_path / "summary.csv", summary.COLUMNS, found)
    for path, numbers in ((tmp_path / "t.csv", {"n": "-1.5"}), (tmp_path / "summary.csv", {"excess_nll": "-0.5000"})):
        with path.open(newline="", encoding="utf-8") as lines:
            (cells,) = csv.DictReader(lines)
        assert cells["method"] == f"'{text}" and numbers.items() <= cells.items()
