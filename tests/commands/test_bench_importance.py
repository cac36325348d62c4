"""`keepsight bench importance` end to end on a tiny model."""

import csv
from itertools import product
from pathlib import Path

import pytest

from keepsight.files import read_jsonl
from tests.commands.commands import CommandLine

pytestmark = pytest.mark.usefixtures("here")
TINY = ("bench", "importance", "model.id=tiny", "model.device=cpu", "model.dtype=float32", "adapter=adapter", "out=out")
SMALL = ("tasks=[niah_single]", "lengths=[320]", "samples=2", "max_new_tokens=4", "budgets=[40,80,9999]")


@pytest.mark.usefixtures("drawn")
def test_methods_and_drafts_have_a_row_for_each_budget(keepsight: CommandLine, here: Path) -> None:
    oracle = "{name: oracle, pool: none, label: itself}"
    draft = "{name: specpc, window: 8, kernel: 4, label: drafted}"
    options = (*SMALL, f"methods=[lookaheadkv,snapkv,{oracle},{draft}]", "draft.layers=[0,2]", "by=[layer,head]")
    printed = keepsight(*TINY, *options)
    rows = list(read_jsonl(here / "out" / "importance.jsonl"))
    cells_of_a_sample = list(product(("lookaheadkv", "snapkv", "itself", "drafted"), (40, 80)))
    assert [(row["name"], row["budget"]) for row in rows] == cells_of_a_sample * 2

    shapes = {row["name"]: (len(row["recall"]), len(row["tau"][0]), len(row["points"])) for row in rows}
    layers, heads, points = shapes["snapkv"]
    assert points == 0
    assert shapes["itself"] == shapes["snapkv"]
    assert shapes["drafted"] == (1, 1, 200)

    with (here / "out" / "importance.csv").open() as file:
        means = {(line["method"], line["budget"]): line for line in csv.DictReader(file)}
    assert float(means["itself", "40"]["recall"]) == pytest.approx(1)
    assert 0 < float(means["snapkv", "40"]["recall"]) < 1
    by_layer_and_head = (here / "out" / "importance_by_layer_head.csv").read_text()
    assert by_layer_and_head.count("\n") == 1 + 2 * (3 * layers * heads + 1)
    assert (here / "out" / "importance.png").stat().st_size > 1000
    assert "| itself" in printed

    results = (here / "out" / "importance.jsonl").read_text()
    keepsight(*TINY, *options)
    assert (here / "out" / "importance.jsonl").read_text() == results, "a second run measures nothing twice"


def test_bad_input(keepsight: CommandLine) -> None:
    keepsight.refuses("methods", "model", *TINY, *SMALL, "methods=[quest]")
    keepsight.refuses("question", "conflict", *TINY, *SMALL, "question=unseen")
    keepsight.refuses("budgets", "range", *TINY, *SMALL, "methods=[snapkv]", "budgets=[5000]")
