"""`train_draft_head.py` on a tiny target that was saved to a folder."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from keepsight.commands import train_draft_head as command
from keepsight.commands.config import ModelConfig
from keepsight.errors import UserError
from keepsight.models.draft_head import DraftHead, EagleHead
from keepsight.models.targets import load_target
from keepsight.train import draft_head as module
from keepsight.train.draft_head import RunModel
from tests.launch import ROOT, launch
from tests.tiny import tiny_model, tiny_tokenizer
from tests.train.draft_head.head_runs import head_settings
from tests.train.runs import crash, rows, same, write_data


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a target deep enough for a head and data that it answered."""
    folder = tmp_path_factory.mktemp("place")
    tokenizer = tiny_tokenizer()
    tiny_model(vocab_size=len(tokenizer), num_hidden_layers=7, pad_token_id=0).save_pretrained(folder / "target")
    tokenizer.save_pretrained(str(folder / "target"))
    target = load_target(str(folder / "target"), device="cpu")
    write_data(folder / "data", target)
    return folder


def config(place: Path, out: Path, **changes: Any) -> command.Config:
    values: dict[str, Any] = {
        "data": str(place / "data"),
        "out": str(out),
        "draft_head": head_settings(steps=6),
    } | changes
    return command.Config(model=ModelConfig(id=str(place / "target"), device="cpu"), **values)


@pytest.fixture(scope="module")
def trained(place: Path) -> Path:
    command.run(config(place, place / "head", title="A tiny head", data_notes="From nowhere."))
    return place / "head"


def test_the_command_leaves_a_head_that_loads(place, trained):
    names = {"config.json", "model.safetensors", "keepsight.json", "README.md", "training.png", "training"}
    assert {path.name for path in trained.iterdir()} == names
    target = load_target(str(place / "target"), device="cpu")
    head = EagleHead.load(trained, target.model)
    assert isinstance(head, DraftHead)
    assert same(head.state_dict(), load_file(trained / "training" / "checkpoint-6" / "draft_head.safetensors"))
    origin = json.loads((trained / "keepsight.json").read_text())["provenance"]
    assert (origin["base_model"], origin["base_version"]) == ("target", target.version)
    assert origin["training"]["steps"] == 6
    assert head.t2d.sum() == 96
    assert head.t2d[target.end_tokens].all()
    card = (trained / "README.md").read_text()
    assert "# A tiny head" in card
    assert "From nowhere." in card
    assert f"{rows(trained / 'training' / 'fidelity.jsonl')[-1]['eval_accepted_length']:.4f}" in card
    assert (trained / "training.png").read_bytes().startswith(b"\x89PNG")


def test_a_training_can_start_from_a_head(place, trained, tmp_path):
    command.run(config(place, tmp_path / "more", init=str(trained), draft_head=head_settings(steps=1)))
    first, last = (rows(folder / "training" / "fidelity.jsonl") for folder in (tmp_path / "more", trained))
    assert first[0]["eval_kl"] == pytest.approx(last[-1]["eval_kl"], rel=1e-5)


def test_the_seed_decides_everything(place, trained, tmp_path):
    torch.manual_seed(99)
    command.run(config(place, tmp_path / "same"))
    command.run(config(place, tmp_path / "other", draft_head=head_settings(steps=6, seed=1)))
    weights = [
        (folder / "model.safetensors").read_bytes() for folder in (trained, tmp_path / "same", tmp_path / "other")
    ]
    assert weights[0] == weights[1] != weights[2]


def test_teacher_files_train_the_same_head_without_running_the_target(place, trained, tmp_path, monkeypatch):
    command.run(config(place, tmp_path / "first", features=str(tmp_path / "features")))
    monkeypatch.setattr(RunModel, "__call__", lambda *_: crash(None))
    command.run(config(place, tmp_path / "second", features=str(tmp_path / "features")))
    first = (trained / "model.safetensors").read_bytes()
    for name in ("first", "second"):
        assert (tmp_path / name / "model.safetensors").read_bytes() == first
    wrong = config(place, tmp_path / "third", features=str(tmp_path / "features"))
    wrong.draft_head.max_tokens = 20
    with pytest.raises(UserError, match=r"these features were made with max_tokens=4096, now it is 20"):
        command.run(wrong)
    wrong.draft_head.max_tokens, wrong.model.dtype = 4096, "bfloat16"
    with pytest.raises(UserError, match=r"made with dtype='torch.float32', now it is 'torch.bfloat16'"):
        command.run(wrong)


def test_teacher_files_are_made_on_where_a_killed_run_stopped(place, trained, tmp_path, monkeypatch):
    monkeypatch.setattr(module, "_SHARD", 4)
    command.run(config(place, tmp_path / "first", features=str(tmp_path / "features")))
    shards = sorted((tmp_path / "features").glob("readings-*"))
    assert [path.name for path in shards] == [f"readings-0000{number}.safetensors" for number in range(4)]
    kept = [path.read_bytes() for path in shards]
    shards[2].unlink()
    command.run(config(place, tmp_path / "second", features=str(tmp_path / "features")))
    assert [path.read_bytes() for path in shards] == kept
    shards[1].write_bytes(b"torn")
    with pytest.raises(UserError, match=r"readings-00001.safetensors: changed since it was written; delete it"):
        command.run(config(place, tmp_path / "third", features=str(tmp_path / "features")))


def test_a_vocabulary_larger_than_the_targets_is_refused(place, tmp_path):
    with pytest.raises(UserError, match=r"draft_head.vocabulary=600 must lie between 1 and 512"):
        command.run(config(place, tmp_path / "head", draft_head=head_settings(vocabulary=600)))
    assert not (tmp_path / "head").exists()


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"unroll": 0}, "draft_head.unroll=0 must be greater than or equal to 1"),
        ({"max_tokens": 1}, "draft_head.max_tokens=1 must be greater than or equal to 3"),
        ({"decay": 0.0}, "draft_head.decay=0.0 must be greater than 0"),
        ({"decay": 1.5}, "draft_head.decay=1.5 must be less than or equal to 1"),
    ],
)
def test_settings_that_train_nothing_are_refused(place, tmp_path, changes, said):
    with pytest.raises(UserError) as caught:
        command.run(config(place, tmp_path / "head", draft_head=head_settings(**changes)))
    assert said in str(caught.value)


def test_more_held_out_samples_than_there_are_is_refused(place, tmp_path):
    with pytest.raises(UserError, match=r"draft_head.train.held_out=14 needs more than the 14 samples"):
        command.run(config(place, tmp_path / "head", draft_head=head_settings(held_out=14)))


def test_missing_data_is_refused(place, tmp_path):
    with pytest.raises(UserError, match=r"no manifest.json; make the data with"):
        command.run(config(place, tmp_path / "head", data=str(tmp_path / "none")))


@pytest.mark.slow
@pytest.mark.parametrize("config", [None, "zero2"])
def test_two_processes_divide_the_features_and_train_one_head(config, place, tmp_path):
    """Each reads texts of its own with the target and takes its own samples; the head is saved once."""
    given = {
        "model.id": place / "target",
        "model.device": "cpu",
        "data": place / "data",
        "features": tmp_path / "features",
        "out": tmp_path / "head",
        "draft_head.vocabulary": 96,
        "draft_head.unroll": 3,
        "draft_head.train.steps": 2,
        "draft_head.train.held_out": 2,
        "draft_head.train.report_to": "[]",
    }
    if config is not None:
        pytest.importorskip("deepspeed")
    script = str(ROOT / "tests/train/draft_head/divided_features.py")
    result = launch(tmp_path, script, *(f"{key}={value}" for key, value in given.items()), config=config)
    assert result.returncode == 0, result.stderr
    assert sorted(re.findall(r"texts read: (\d+)", result.stdout)) == ["6", "8"], "of 14, in files of 4, 4, 4 and 2"
    assert len([*(tmp_path / "features").glob("readings-*")]) == 4
    origin = json.loads((tmp_path / "head" / "keepsight.json").read_text())
    assert origin["provenance"]["training"]["samples a step"] == 2
    assert result.stdout.count("head after step 2") == 1
    assert isinstance(EagleHead.load(tmp_path / "head"), DraftHead)
