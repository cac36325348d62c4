"""What a training is resumed from: whole checkpoints, of the same settings, by one process at a time."""

import errno
import os
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from keepsight.errors import UserError
from keepsight.files import file_digest, one_writer, read_json, whole_lines, write_json
from keepsight.train.checkpoints import SEAL, check_seal, last_checkpoint, sealing
from keepsight.train.trainer import ModuleTrainer, TrainingRun
from tests.train.runs import checkpoints, crash, disturbed, objective, same, samples, settings, tensors, train

FILES = (
    "fidelity.jsonl",
    "lookahead.safetensors",
    "optimizer.pt",
    "rng_state.pth",
    "scheduler.pt",
    "trainer_state.json",
)


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Tensor], Path]:
    """Tensors and folder of an uninterrupted training."""
    trained, work = objective(), tmp_path_factory.mktemp("straight")
    train(trained, settings(), work, samples())
    return tensors(trained), work


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A training that was killed in step 8, after checkpoints 3 and 6."""
    work = tmp_path_factory.mktemp("killed")
    with pytest.raises(RuntimeError, match="power failure"):
        train(disturbed(8, crash), settings(), work, samples())
    assert checkpoints(work) == ["checkpoint-3", "checkpoint-6"]
    return work


@pytest.fixture
def work(killed: Path, tmp_path: Path) -> Path:
    """A copy of `killed` that a test may spoil."""
    return Path(shutil.copytree(killed, tmp_path / "work"))


def refused(work: Path, *said: str, **changes: object) -> None:
    with pytest.raises(UserError) as caught:
        train(objective(), settings(**changes), work, samples())
    message = str(caught.value)
    assert "\n" not in message
    assert all(each in message for each in said), message


def test_every_file_of_a_checkpoint_is_sealed(killed):
    assert sorted(read_json(killed / "checkpoint-6" / SEAL)) == sorted(FILES)


@pytest.mark.parametrize("name", FILES)
def test_a_missing_file_is_named(work, name):
    (work / "checkpoint-6" / name).unlink()
    refused(work, f"checkpoint-6/{name}: missing since it was written; delete this checkpoint's folder")


@pytest.mark.parametrize("name", FILES)
def test_one_changed_bit_is_noticed(work, name):
    content = bytearray((work / "checkpoint-6" / name).read_bytes())
    content[len(content) // 2] ^= 1
    (work / "checkpoint-6" / name).write_bytes(content)
    refused(work, f"checkpoint-6/{name}: changed or cut off since it was written")


@pytest.mark.parametrize("changed", [{"other": torch.ones(1)}, {"tokens": torch.ones(8, 32)}])
def test_weights_of_another_shape_are_named(work, changed):
    """Sealed anew, as someone who exchanges files does."""
    path = work / "checkpoint-6" / "lookahead.safetensors"
    save_file(load_file(path) | changed, path)
    seal = path.with_name(SEAL)
    write_json(seal, read_json(seal) | {path.name: file_digest(path)})
    (name,) = changed
    refused(work, f"{path}: tensor '{name}' ", "is surplus" if name == "other" else "has shape [8, 32]")


def test_the_checkpoint_before_a_damaged_one_is_as_good(straight, work):
    shutil.rmtree(work / "checkpoint-6")
    resumed = objective()
    train(resumed, settings(), work, samples())
    assert same(tensors(resumed), straight[0])


def test_other_folders_are_no_checkpoints(straight, work):
    for name in ("checkpoint-x", "checkpoint-", "checkpoint-9-old", "checkpoint-99"):
        (work / name).mkdir()
    (work / "checkpoint-x" / "trainer_state.json").write_text("{}")
    assert last_checkpoint(work) == work / "checkpoint-6"
    resumed = objective()
    train(resumed, settings(), work, samples())
    assert same(tensors(resumed), straight[0])
    assert (work / "checkpoint-x" / "trainer_state.json").exists()


def test_all_settings_that_differ_are_listed(work):
    refused(
        work,
        *("train.learning_rate=0.01, now it is 0.02", "train.seed=0, now it is 1", "train.clip=1.0, now it is 0.5"),
        *(str(work / "settings.json"), "choose another out="),
        **{"learning_rate": 2e-2, "seed": 1, "clip": 0.5},
    )


def test_another_number_of_processes_is_refused(work):
    path = work / "settings.json"
    write_json(path, read_json(path) | {"launch.processes": 2})
    refused(work, "launch.processes=2, now it is 1")


def test_another_target_dtype_or_start_is_refused(tmp_path):
    def begun(**changes: object) -> ModuleTrainer:
        start = {"model.version": "a", "model.dtype": "float32", "command.init": None} | changes
        return ModuleTrainer(objective(), settings(steps=3), TrainingRun(tmp_path, samples(), start))

    begun().fit()
    for name, other in {"model.version": "b", "model.dtype": "bfloat16", "command.init": "sha256:1"}.items():
        with pytest.raises(UserError, match=f"{name}=.*, now it is {other!r}"):
            begun(**{name: other}).fit()


def test_settings_that_are_gone_or_of_another_shape_are_named(work):
    (work / "settings.json").write_text("[3]")
    refused(work, f"{work / 'settings.json'}: expected an object, got list")
    (work / "settings.json").unlink()
    refused(work, f"{work / 'settings.json'}: no such file")


def test_settings_of_a_training_without_a_checkpoint_bind_nobody(straight, tmp_path):
    with pytest.raises(RuntimeError, match="power failure"):
        train(disturbed(2, crash), settings(learning_rate=2e-2), tmp_path, samples())
    resumed = objective()
    train(resumed, settings(), tmp_path, samples())
    assert same(tensors(resumed), straight[0])


def test_measurements_are_those_of_the_checkpoint(straight, work):
    (work / "fidelity.jsonl").unlink()
    train(objective(), settings(), work, samples())
    assert whole_lines(work / "fidelity.jsonl") == whole_lines(straight[1] / "fidelity.jsonl")


def test_after_a_resume_the_logged_losses_are_those_of_an_uninterrupted_training(work, tmp_path):
    whole, _ = train(objective(), settings(), tmp_path / "whole", samples())
    resumed, _ = train(objective(), settings(), work, samples())
    losses = [[row["loss"] for row in each.state.log_history if "loss" in row] for each in (whole, resumed)]
    assert len(losses[0]) == 3
    assert losses[0] == losses[1]


def test_a_finished_training_that_is_run_again_writes_nothing_elsewhere(tmp_path, monkeypatch):
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    changes = {"report_to": ["tensorboard"], "steps": 3}
    first, _ = train(objective(), settings(**changes), tmp_path / "work", samples())
    logs = sorted((tmp_path / "work").rglob("events.*"))
    again, _ = train(objective(), settings(**changes), tmp_path / "work", samples())
    assert again.metrics == first.metrics
    assert sorted((tmp_path / "work").rglob("events.*")) == logs
    assert list((tmp_path / "here").iterdir()) == []


@pytest.mark.parametrize(("kept", "left"), [(1, [8]), (3, [3, 6, 8])])
def test_as_many_checkpoints_as_asked_for_are_kept(kept, left, tmp_path):
    train(objective(), settings(checkpoints=kept), tmp_path, samples())
    assert checkpoints(tmp_path) == [f"checkpoint-{step}" for step in left]


def test_how_many_checkpoints_are_kept_may_change_when_resumed(straight, work):
    resumed = objective()
    train(resumed, settings(checkpoints=1, flops=1.0), work, samples())
    assert same(tensors(resumed), straight[0])
    assert checkpoints(work) == ["checkpoint-8"]


def test_another_process_is_kept_out(work):
    with one_writer(work):
        refused(work, f"{work}: process {os.getpid()} on ", "is writing here; wait for it to end")


@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "No space left on device"), RuntimeError("write failed")])
def test_a_checkpoint_that_cannot_be_written_leaves_the_one_before(work, error):
    said = r"checkpoint-8: the checkpoint cannot be written .*; once that is mended"
    with pytest.raises(UserError, match=said), sealing(work / "checkpoint-8", 2):
        (work / "checkpoint-8").mkdir()
        (work / "checkpoint-8" / "optimizer.pt").write_bytes(b"half")
        raise error
    assert checkpoints(work) == ["checkpoint-3", "checkpoint-6"]
    check_seal(work / "checkpoint-6")
