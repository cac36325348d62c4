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
    keys = {
        "model": {"id": "a b"},
        "methods": ["full", {"name": "snapkv", "window": 16}],
        "budgets": [64, 0.5],
        "template": False,
        "adapter": None,
        "out": Path("x"),
    }
    assert [*_overrides(Eval, keys)] == [
        "model.id=a b",
        'methods=["full",{name: "snapkv",window: 16}]',
        "budgets=[64,0.5]",
        "template=false",
        "adapter=null",
        "out=x",
    ]


def test_dicts_that_are_values_and_any_text_arrive_unchanged() -> None:
    keys = {
        "judge": {"options": {"effort": "low"}},
        "reuse": ["runs/é", 'a "b" \\'],
        "model": {"template": {"think": True}},
        "recipe": "smollm2-135m",
        "out": "x",
    }
    config = configuration("eval", [*_overrides(Eval, keys)])
    assert config.judge.options == {"effort": "low"}
    assert config.model.template == {"think": True}
    assert config.reuse == ["runs/é", 'a "b" \\']


def test_evaluate_returns_the_summary(here: Path) -> None:
    methods = ["full", {"name": "snapkv", "window": 8}]
    rows = keepsight.evaluate(
        model=MODEL, tasks=["niah_single"], lengths=[320], samples=2, methods=methods, budgets=[40], out="out", pages=0
    )
    with (here / "out" / "summary.csv").open(encoding="utf-8") as lines:
        lines_of_summary = [*csv.DictReader(lines)]
    full, snapkv = rows
    assert [{key: str(value) for key, value in row.items()} for row in csv_cells(rows)] == lines_of_summary
    assert full["method"] == "full"
    assert full["budget"] is None
    assert snapkv["budget"] == 40
    for row in rows:
        assert type(row["score"]) is float
        assert type(row["excess_nll"]) is float
    assert rows.to_pandas()["n"].tolist() == [2, 2]
    assert read_json(here / "out" / "settings.json", dict)["methods"] == methods
    with refused("task", "unknown"):
        keepsight.evaluate(model=MODEL, task=["niah"], out="out")


def test_fit_returns_the_folder(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    configs: list[Any] = []
    monkeypatch.setattr("keepsight.commands.fit.run", configs.append)
    folder = keepsight.fit(model=MODEL, train={"steps": 3}, mixture="mixture.yaml", out="fitted")
    assert folder == Path("fitted")
    (config,) = configs
    assert config.model.id == "tiny"
    assert config.train.steps == 3
