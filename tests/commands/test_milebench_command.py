"""`keepsight eval` on prompts with images, from the command line to the report."""

from pathlib import Path

import pytest

from keepsight.models.card import Provenance
from keepsight.models.lookahead import Lookahead
from keepsight.models.lookahead_settings import LookaheadSettings
from keepsight.models.targets import load_target
from tests.commands.commands import CommandLine, results_of
from tests.eval.pictured import row, save_pictured_target, without_videos, write_data_set


def test_milebench(keepsight: CommandLine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    without_videos(monkeypatch)
    save_pictured_target(Path("vl"))
    save_pictured_target(Path("draft"), seed=7)
    module = Lookahead(load_target("vl", device="cpu").model, LookaheadSettings(tokens=4, rank=2))
    module.adapter().save(Path("adapter"), Provenance("vl"), "# Card\n")
    rows = [row(0, "{image#1}{image#2}What is new?", ["a.png", "b2.png"], "a tree", ["a tree", "a house"])]
    write_data_set(Path("data"), "MovingDirection", "multi-choice", rows)
    model = ("model.id=vl", "model.device=cpu", "adapter=adapter", "draft.layers=null", "draft.id=draft")
    task = ("tasks=[milebench]", "milebench.dir=data", "budgets=[32]", "max_new_tokens=4")
    methods = "methods=[full,{name: snapkv, window: 8},lookaheadkv,{name: specpc, window: 8, kernel: 4}]"
    printed = keepsight("eval", *model, *task, methods, "out=out")
    assert "first prompt, milebench_MovingDirection 0" in printed
    full, *evicted = results_of(Path("out"))
    assert full["method"] == "full"
    assert [result["method"] for result in evicted] == ["snapkv window=8", "lookaheadkv", "specpc window=8 kernel=4"]
    for result in evicted:
        assert result["task"] == "milebench_MovingDirection"
        assert result["kept"] == 32
    assert "milebench_MovingDirection" in Path("out/report.html").read_text()
