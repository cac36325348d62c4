"""`keepsight.fit` and `keepsight.evaluate` do what the commands do with the same keys."""

import csv
from pathlib import Path
from typing import Any

import pytest

import keepsight
from keepsight.commands.cli import configuration
from keepsight.commands.config import Eval
from keepsight.commands.functions import _overrides
from keepsight.eval.report.summary import csv_cells
from keepsight.files import read_json
from tests.refused import refused

pytestmark = pytest.mark.usefixtures("here")
MODEL = {"id": "tiny", "device": "cpu"}


def test_keys_are_written_as_they_are_typed() -> None:
    keys = {"model": {"id": "a b"}, "methods": ["full", {"name": "snapkv", "window": 16}], "budgets": [64, 0.5]}
    assert [*_overrides(Eval, keys | {"template": False, "adapter": None, "out": Path("x")})] == [
        *("model.id=a b", 'methods=["full",{name: "snapkv",window: 16}]', "budgets=[64,0.5]"),
        *("template=false", "adapter=null", "out=x"),
    ]


def test_dicts_that_are_values_and_any_text_arrive_as_given() -> None:
    keys = {
        "judge": {"options": {"effort": "low"}},
        "reuse": ["runs/é", 'a "b" \\'],
        "model": {"template": {"think": True}},
    }
    config = configuration("eval", [*_overrides(Eval, keys | {"recipe": "smollm2-135m", "out": "x"})])
    assert config.judge.options == {"effort": "low"} and config.model.template == {"think": True}
    assert config.reuse == keys["reuse"]


def test_evaluate_returns_the_summary(here: Path) -> None:
    methods = ["full", {"name": "snapkv", "window": 8}]
    rows = keepsight.evaluate(
        model=MODEL, tasks=["niah_single"], lengths=[320], samples=2, methods=methods, budgets=[40], out="out", pages=0
    )
    with (here / "out" / "summary.csv").open(encoding="utf-8") as lines:
        assert [{key: str(value) for key, value in row.items()} for row in csv_cells(rows)] == [*csv.DictReader(lines)]
    assert {type(row["score"]) for row in rows} == {type(row["excess_nll"]) for row in rows} == {float}
    assert rows[1]["budget"] == 40 and rows[0]["budget"] is None and rows.to_pandas()["n"].tolist() == [2, 2]
    assert len(rows) == 2 and rows[0]["method"] == "full"
    assert read_json(here / "out" / "settings.json", dict)["methods"] == methods
    with refused("task", "unknown"):
        keepsight.evaluate(model=MODEL, task=["niah"], out="out")


def test_fit_returns_the_folder(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Any] = []
    monkeypatch.setattr("keepsight.commands.fit.run", made.append)
    assert keepsight.fit(model=MODEL, train={"steps": 3}, mixture="mixture.yaml", out="fitted") == Path("fitted")
    assert made[0].model.id == "tiny" and made[0].train.steps == 3
