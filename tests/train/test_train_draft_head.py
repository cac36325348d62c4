"""Training draft heads, by the trainer and by the command."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from keepsight.commands import train_heads
from keepsight.commands.config import TrainDraftHead
from keepsight.commands.config_shared import ModelConfig
from keepsight.errors import UserError
from keepsight.models.draft_head import DraftHead, EagleHead
from keepsight.models.targets import load_target
from keepsight.train import draft_head as module
from keepsight.train.dataset import hold_out
from keepsight.train.draft_head import DraftHeadObjective, RunModel, measure_draft_head
from keepsight.train.trainer import ModuleTrainer, TrainingRun
from tests.launch import ROOT, launch
from tests.refused import refused
from tests.tiny import tiny_model, tiny_tokenizer
from tests.train.head_runs import head_objective, head_settings, train_draft_head
from tests.train.runs import at_batch, collated, crash, rows, same, samples, write_data


def tensors(objective: DraftHeadObjective) -> dict[str, Tensor]:
    return {name: value.detach().clone() for name, value in objective.head.state_dict().items()}


def test_it_learns_a_few_samples(tmp_path):
    few = samples(6)
    objective = head_objective("qwen3", head_settings(steps=60, batch_size=4, measure_every=60, clip=1.0))
    before = tensors(objective)
    batch = collated(hold_out(few, 2)[0])
    start = measure_draft_head(objective, [batch])
    trainer, _ = train_draft_head(objective, tmp_path, few)
    end = measure_draft_head(objective, [batch])
    assert sum(end["eval_kl_by_step"]) < 0.4 * sum(start["eval_kl_by_step"])
    assert sum(end["eval_agreement_by_step"]) > sum(start["eval_agreement_by_step"]) + 0.5
    logged = [row["loss"] for row in trainer.state.log_history if "loss" in row]
    assert logged[-1] < logged[0] - 0.8  # of which the model's own entropy is the larger part
    unmoved = [name for name, value in tensors(objective).items() if torch.equal(value, before[name])]
    assert sorted(unmoved) == ["d2t", "t2d"]


def test_a_resumed_training_equals_an_uninterrupted_one(tmp_path):
    whole = head_objective()
    train_draft_head(whole, tmp_path / "whole", samples())
    with pytest.raises(RuntimeError, match="power failure"):
        train_draft_head(at_batch(head_objective(), 5, crash), tmp_path / "parts", samples())
    resumed = head_objective()
    _, finished = train_draft_head(resumed, tmp_path / "parts", samples())
    assert finished
    assert same(tensors(resumed), tensors(whole))
    measured = rows(tmp_path / "parts" / "fidelity.jsonl")
    assert [row["step"] for row in measured] == [0, 4, 8] and len(measured[0]["eval_acceptance_by_position"]) == 4
    assert measured == rows(tmp_path / "whole" / "fidelity.jsonl")
    with refused("draft_head.unroll", "conflict"):
        train_draft_head(head_objective(settings=head_settings(unroll=3)), tmp_path / "parts", samples())


def test_mixed_precision_trains_and_measures(tmp_path):
    objective = head_objective(settings=head_settings(steps=2, precision="bf16"))
    trainer, finished = train_draft_head(objective, tmp_path, samples())
    assert finished
    assert trainer.metrics["eval_kl"] > 0
    assert {value.dtype for value in objective.head.parameters()} == {torch.float32}


def test_a_head_is_not_divided(tmp_path, monkeypatch):
    monkeypatch.setattr("keepsight.train.trainer.launcher_of", lambda accelerator, objective: "zero3")
    with pytest.raises(UserError, match=r"not support zero3; .*zero2.yaml, or one process with model.device_map=auto"):
        ModuleTrainer(head_objective(), head_settings().train, TrainingRun(tmp_path, samples()))


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a base model deep enough for a head and data that it answered."""
    folder = tmp_path_factory.mktemp("place")
    tokenizer = tiny_tokenizer()
    tiny_model(vocab_size=len(tokenizer), num_hidden_layers=7, pad_token_id=0).save_pretrained(folder / "target")
    tokenizer.save_pretrained(str(folder / "target"))
    target = load_target(str(folder / "target"), device="cpu")
    write_data(folder / "data", target)
    return folder


def config(place: Path, out: Path, **changes: Any) -> TrainDraftHead:
    values: dict[str, Any] = {
        "data": str(place / "data"),
        "out": str(out),
        "draft_head": head_settings(steps=6),
    } | changes
    return TrainDraftHead(model=ModelConfig(id=str(place / "target"), device="cpu"), **values)


@pytest.fixture(scope="module")
def trained(place: Path) -> Path:
    train_heads.draft(config(place, place / "head", title="A tiny head", data_notes="From nowhere."))
    return place / "head"


def test_the_command_leaves_a_head_that_loads(place, trained):
    names = {"config.json", "model.safetensors", "keepsight.json", "README.md", "training.png", "training"}
    assert {path.name for path in trained.iterdir()} == {*names, "config.yaml"}
    target = load_target(str(place / "target"), device="cpu")
    head = EagleHead.load(trained, target.model)
    assert isinstance(head, DraftHead)
    assert same(head.state_dict(), load_file(trained / "training" / "checkpoint-6" / "draft_head.safetensors"))
    origin = json.loads((trained / "keepsight.json").read_text())["provenance"]
    assert (origin["base_model"], origin["identity"]["model"]) == ("target", target.version)
    assert origin["training"]["steps"] == 6
    assert head.t2d.sum() == 96
    assert head.t2d[target.end_tokens].all()
    card = (trained / "README.md").read_text()
    assert "# A tiny head" in card
    assert "From nowhere." in card
    assert f"{rows(trained / 'training' / 'fidelity.jsonl')[-1]['eval_accepted_length']:.4f}" in card
    assert (trained / "training.png").read_bytes().startswith(b"\x89PNG")


def test_a_training_can_start_from_a_head(place, trained, tmp_path):
    train_heads.draft(config(place, tmp_path / "more", init=str(trained), draft_head=head_settings(steps=1)))
    first, last = (rows(folder / "training" / "fidelity.jsonl") for folder in (tmp_path / "more", trained))
    assert first[0]["eval_kl"] == pytest.approx(last[-1]["eval_kl"], rel=1e-5)


def test_teacher_files_train_the_same_head_without_running_the_target(place, trained, tmp_path, monkeypatch):
    train_heads.draft(config(place, tmp_path / "first", features=str(tmp_path / "features")))
    monkeypatch.setattr(RunModel, "__call__", lambda *_: crash(None))
    train_heads.draft(config(place, tmp_path / "second", features=str(tmp_path / "features")))
    first = (trained / "model.safetensors").read_bytes()
    for name in ("first", "second"):
        assert (tmp_path / name / "model.safetensors").read_bytes() == first
    wrong = config(place, tmp_path / "third", features=str(tmp_path / "features"))
    wrong.draft_head.max_tokens = 20
    with refused("max_tokens", "conflict"):
        train_heads.draft(wrong)
    wrong.draft_head.max_tokens, wrong.model.dtype = 4096, "bfloat16"
    with refused("dtype", "conflict"):
        train_heads.draft(wrong)


def test_teacher_files_are_made_on_where_a_killed_run_stopped(place, trained, tmp_path, monkeypatch):
    monkeypatch.setattr(module, "_SHARD", 4)
    train_heads.draft(config(place, tmp_path / "first", features=str(tmp_path / "features")))
    shards = sorted((tmp_path / "features").glob("readings-*"))
    assert [path.name for path in shards] == [f"readings-0000{number}.safetensors" for number in range(4)]
    kept = [path.read_bytes() for path in shards]
    shards[2].unlink()
    train_heads.draft(config(place, tmp_path / "second", features=str(tmp_path / "features")))
    assert [path.read_bytes() for path in shards] == kept
    shards[1].write_bytes(b"torn")
    with refused("features", "file"):
        train_heads.draft(config(place, tmp_path / "third", features=str(tmp_path / "features")))


@pytest.mark.slow
@pytest.mark.parametrize("config", [None, "zero2"])
def test_two_processes_divide_the_features_and_train_one_head(config, place, tmp_path):
    """Each reads texts of its own with the base model and takes its own samples; the head is saved once."""
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
    script = str(ROOT / "tests/train/divided_features.py")
    result = launch(tmp_path, script, *(f"{key}={value}" for key, value in given.items()), config=config)
    assert result.returncode == 0, result.stderr
    assert sorted(re.findall(r"texts read: (\d+)", result.stdout)) == ["6", "8"], "of 14, in files of 4, 4, 4 and 2"
    assert len([*(tmp_path / "features").glob("readings-*")]) == 4
    origin = json.loads((tmp_path / "head" / "keepsight.json").read_text())
    assert origin["provenance"]["training"]["samples a step"] == 2
    assert result.stdout.count("head after step 2") == 1
    assert isinstance(EagleHead.load(tmp_path / "head"), DraftHead)
