"""The tables of README, RESULTS.md and the cards are those of `results/*.csv`, and each row names its run."""

import runpy
from pathlib import Path

import pytest

from tests.typed import ROOT

TABLES = runpy.run_path(str(ROOT / "docs" / "tables.py"))


@pytest.mark.parametrize("page", TABLES["PAGES"], ids=lambda page: page.relative_to(ROOT).as_posix())
def test_a_page_holds_the_tables_of_the_files(page: Path) -> None:
    text = page.read_text("utf-8")
    assert TABLES["PLACE"].search(text) and TABLES["with_tables"](text) == text, "python docs/tables.py makes them"


def test_each_row_of_the_files_has_a_run_and_a_processor() -> None:
    rows_of = TABLES["rows_of"]
    runs = {row["run"] for row in rows_of("runs")}
    files = [path.stem for path in (ROOT / "results").glob("*.csv") if path.stem != "runs"]
    rows = [row for file in files for row in rows_of(file)]
    assert len(rows) > 300 and all(row["processor"] and None not in row for row in rows)
    assert {row["run"] for row in rows} == runs - {"untrained"}


def test_pages_are_short() -> None:
    lengths = {page: len(page.read_text("utf-8").splitlines()) for page in TABLES["PAGES"]}
    assert lengths[ROOT / "README.md"] <= 180 and lengths.pop(ROOT / "RESULTS.md") <= 200
    assert all(length <= 180 for length in lengths.values())
