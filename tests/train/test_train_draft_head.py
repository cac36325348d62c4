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
from tests.train.runs import at_batch, collate_all, crash, rows, same, samples, write_data


def head_tensors(objective: DraftHeadObjective) -> dict[str, Tensor]:
    return {name: tensor.detach().clone() for name, tensor in objective.head.state_dict().items()}


def test_it_learns_a_few_samples(tmp_path):
    few_samples = samples(6)
    objective = head_objective("qwen3", head_settings(steps=60, batch_size=4, measure_every=60, clip=1.0))
    before = head_tensors(objective)
    trained, _ = hold_out(few_samples, 2)
    batch = collate_all(trained)
    start = measure_draft_head(objective, [batch])
    trainer, _ = train_draft_head(objective, tmp_path, few_samples)
    end = measure_draft_head(objective, [batch])
    assert sum(end["eval_kl_by_step"]) < 0.4 * sum(start["eval_kl_by_step"])
    assert sum(end["eval_agreement_by_step"]) > sum(start["eval_agreement_by_step"]) + 0.5
    losses = [row["loss"] for row in trainer.state.log_history if "loss" in row]
    assert losses[-1] < losses[0] - 0.8  # of which the model's own entropy is the larger part
    unmoved = [name for name, tensor in head_tensors(objective).items() if torch.equal(tensor, before[name])]
    assert sorted(unmoved) == ["d2t", "t2d"]


def test_a_resumed_training_equals_an_uninterrupted_one(tmp_path):
    uninterrupted = head_objective()
    train_draft_head(uninterrupted, tmp_path / "uninterrupted", samples())
    with pytest.raises(RuntimeError, match="power failure"):
        train_draft_head(at_batch(head_objective(), 5, crash), tmp_path / "killed", samples())
    resumed = head_objective()
    _, finished = train_draft_head(resumed, tmp_path / "killed", samples())
    assert finished
    assert same(head_tensors(resumed), head_tensors(uninterrupted))
    measurements = rows(tmp_path / "killed" / "fidelity.jsonl")
    assert [row["step"] for row in measurements] == [0, 4, 8]
    assert len(measurements[0]["eval_acceptance_by_position"]) == 4
    assert measurements == rows(tmp_path / "uninterrupted" / "fidelity.jsonl")
    with refused("draft_head.unroll", "conflict"):
        train_draft_head(head_objective(settings=head_settings(unroll=3)), tmp_path / "killed", samples())


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
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a base model deep enough for a head and data that it answered."""
    folder = tmp_path_factory.mktemp("workspace")
    tokenizer = tiny_tokenizer()
    tiny_model(vocab_size=len(tokenizer), num_hidden_layers=7, pad_token_id=0).save_pretrained(folder / "target")
    tokenizer.save_pretrained(str(folder / "target"))
    target = load_target(str(folder / "target"), device="cpu")
    write_data(folder / "data", target)
    return folder


def config(workspace: Path, out: Path, **changes: Any) -> TrainDraftHead:
    values: dict[str, Any] = {
        "data": str(workspace / "data"),
        "out": str(out),
        "draft_head": head_settings(steps=6),
    } | changes
    return TrainDraftHead(model=ModelConfig(id=str(workspace / "target"), device="cpu"), **values)


@pytest.fixture(scope="module")
def trained_head(workspace: Path) -> Path:
    """The head that the command trains."""
    train_heads.draft(config(workspace, workspace / "head", title="A tiny head", data_notes="From nowhere."))
    return workspace / "head"


def test_the_command_leaves_a_head_that_loads(workspace, trained_head):
    assert {path.name for path in trained_head.iterdir()} == {
        "config.json",
        "config.yaml",
        "model.safetensors",
        "keepsight.json",
        "README.md",
        "training.png",
        "training",
    }
    target = load_target(str(workspace / "target"), device="cpu")
    head = EagleHead.load(trained_head, target.model)
    assert isinstance(head, DraftHead)
    assert same(head.state_dict(), load_file(trained_head / "training" / "checkpoint-6" / "draft_head.safetensors"))
    provenance = json.loads((trained_head / "keepsight.json").read_text())["provenance"]
    assert provenance["base_model"] == "target"
    assert provenance["identity"]["model"] == target.version
    assert provenance["training"]["steps"] == 6
    assert head.t2d.sum() == 96
    assert head.t2d[target.end_tokens].all()
    card = (trained_head / "README.md").read_text()
    last_measurement = rows(trained_head / "training" / "fidelity.jsonl")[-1]
    assert "# A tiny head" in card
    assert "From nowhere." in card
    assert f"{last_measurement['eval_accepted_length']:.4f}" in card
    assert (trained_head / "training.png").read_bytes().startswith(b"\x89PNG")


def test_a_training_can_start_from_a_head(workspace, trained_head, tmp_path):
    one_step = head_settings(steps=1)
    train_heads.draft(config(workspace, tmp_path / "more", init=str(trained_head), draft_head=one_step))
    measurements = rows(tmp_path / "more" / "training" / "fidelity.jsonl")
    earlier_measurements = rows(trained_head / "training" / "fidelity.jsonl")
    assert measurements[0]["eval_kl"] == pytest.approx(earlier_measurements[-1]["eval_kl"], rel=1e-5)


def test_teacher_files_train_the_same_head_without_running_the_target(workspace, trained_head, tmp_path, monkeypatch):
    features = str(tmp_path / "features")
    train_heads.draft(config(workspace, tmp_path / "first", features=features))
    monkeypatch.setattr(RunModel, "__call__", lambda *_: crash(None))
    train_heads.draft(config(workspace, tmp_path / "second", features=features))
    expected = (trained_head / "model.safetensors").read_bytes()
    for name in ("first", "second"):
        assert (tmp_path / name / "model.safetensors").read_bytes() == expected
    other = config(workspace, tmp_path / "third", features=features)
    other.draft_head.max_tokens = 20
    with refused("max_tokens", "conflict"):
        train_heads.draft(other)
    other.draft_head.max_tokens = 4096
    other.model.dtype = "bfloat16"
    with refused("dtype", "conflict"):
        train_heads.draft(other)


def test_teacher_files_are_made_on_where_a_killed_run_stopped(workspace, trained_head, tmp_path, monkeypatch):
    monkeypatch.setattr(module, "_SHARD", 4)
    features = tmp_path / "features"
    train_heads.draft(config(workspace, tmp_path / "first", features=str(features)))
    shards = sorted(features.glob("readings-*"))
    assert [path.name for path in shards] == [f"readings-0000{number}.safetensors" for number in range(4)]
    contents = [path.read_bytes() for path in shards]
    shards[2].unlink()
    train_heads.draft(config(workspace, tmp_path / "second", features=str(features)))
    assert [path.read_bytes() for path in shards] == contents
    shards[1].write_bytes(b"torn")
    with refused("features", "file"):
        train_heads.draft(config(workspace, tmp_path / "third", features=str(features)))


@pytest.mark.slow
@pytest.mark.parametrize("config", [None, "zero2"])
def test_two_processes_divide_the_features_and_train_one_head(config, workspace, tmp_path):
    """Each reads texts of its own with the base model and takes its own samples; the head is saved once."""
    values = {
        "model.id": workspace / "target",
        "model.device": "cpu",
        "data": workspace / "data",
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
    arguments = [f"{key}={value}" for key, value in values.items()]
    result = launch(tmp_path, script, *arguments, config=config)
    assert result.returncode == 0, result.stderr
    texts_read = re.findall(r"texts read: (\d+)", result.stdout)
    assert sorted(texts_read) == ["6", "8"], "of 14, in files of 4, 4, 4 and 2"
    assert len([*(tmp_path / "features").glob("readings-*")]) == 4
    origin = json.loads((tmp_path / "head" / "keepsight.json").read_text())
    assert origin["provenance"]["training"]["samples a step"] == 2
    assert result.stdout.count("head after step 2") == 1
    assert isinstance(EagleHead.load(tmp_path / "head"), DraftHead)
