"""`keepsight fit`: every stage, stopped in each of them, and what the card says in the end."""

from pathlib import Path

import pytest

from keepsight.commands import data, train
from keepsight.commands import eval as evaluation
from keepsight.files import file_digest
from keepsight.models.hub import plan_upload
from keepsight.models.lookahead_files import FILES
from tests.commands.commands import CommandLine

pytestmark = pytest.mark.usefixtures("here")
TRAINING = [
    *("model.id=tiny", "model.device=cpu", "model.dtype=float32", "lookahead.tokens=4"),
    *("train.steps=3", "train.held_out=2", "train.replays=1", "train.report_to=[]"),
]
FIT = [
    *("fit", *TRAINING, "mixture=mixture.yaml", "limit=8", "max_new_tokens=4"),
    *("tasks=niah_single", "lengths=320", "tests=1", "methods=full,lookaheadkv", "budgets=40"),
]


def test_stopped_in_every_stage_it_ends_as_if_it_had_not_been(
    keepsight: CommandLine, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (data, train, evaluation):
        with monkeypatch.context() as patch:
            patch.setattr(module, "run", lambda _: (_ for _ in ()).throw(KeyboardInterrupt))
            assert "run the same command again to resume" in keepsight.fails(*FIT, "out=fitted")
    printed = keepsight(*FIT, "out=fitted")
    assert [line for line in printed.splitlines() if line.startswith("===")] == [
        *("=== answers", "=== training", "=== evaluation")
    ]
    fitted, trained = here / "fitted" / "adapter", here / "trained"
    keepsight("train", *TRAINING, "data=fitted/data", "out=trained")
    for name in ("adapter_model.safetensors", "lookahead_tokens.safetensors"):
        assert file_digest(fitted / name) == file_digest(trained / name)
    card = (fitted / "README.md").read_text()
    assert card.count("## Evaluation") == 1 and "| LookaheadKV |" in card.replace("lookaheadkv", "LookaheadKV")
    upload = plan_upload(fitted, "ada/tiny")
    assert {*FILES, "README.md", "evaluation.png", "training.png"} == {*upload.files}
    monkeypatch.setattr(evaluation, "run", lambda _: None)
    keepsight(*FIT, "out=fitted")
    assert (fitted / "README.md").read_text() == card


def test_bad_values_end_before_anything_is_written(keepsight: CommandLine, here: Path) -> None:
    assert keepsight.fails(*FIT, "out=new", "limit=0") == "limit=0 must be at least 1"
    assert keepsight.fails("fit", "tiny") == "out= is required; see --help"
    assert not (here / "new").exists()
