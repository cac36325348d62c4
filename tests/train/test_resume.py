"""A training that is stopped, killed or started again ends as if nothing had happened; damaged checkpoints."""

import errno
import os
import shutil
import signal
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from keepsight.errors import UserError
from keepsight.files import file_digest, one_writer, read_json, whole_lines, write_json
from keepsight.models.lookahead_settings import LookaheadSettings
from keepsight.train.checkpoints import SEAL, check_seal, last_checkpoint, sealing
from keepsight.train.dataset import hold_out
from keepsight.train.trainer import ModuleTrainer, TrainingRun
from tests.train.runs import (
    SHAPE,
    checkpoints,
    collated,
    crash,
    disturbed,
    objective,
    press_ctrl_c,
    press_ctrl_c_twice,
    rows,
    same,
    samples,
    settings,
    tensors,
    train,
)
from tests.train.runs import measured as fidelity_of


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Tensor], Path]:
    """Tensors and folder of an uninterrupted training."""
    work = tmp_path_factory.mktemp("straight")
    trained = objective()
    _, finished = train(trained, settings(), work, samples())
    assert finished
    return tensors(trained), work


def test_checkpoints_hold_the_adapter_alone(straight):
    _, work = straight
    assert checkpoints(work) == ["checkpoint-6", "checkpoint-8"]
    state = load_file(work / "checkpoint-8" / "lookahead.safetensors")
    assert same(state, straight[0])


@pytest.mark.parametrize("at", [2, 5, 8])
def test_a_resumed_training_equals_an_uninterrupted_one(straight, at, tmp_path):
    """Before the first checkpoint, in the first epoch after one, and in the second epoch."""
    with pytest.raises(RuntimeError, match="power failure"):
        train(disturbed(at, crash), settings(), tmp_path, samples())
    assert checkpoints(tmp_path) == {2: [], 5: ["checkpoint-3"], 8: ["checkpoint-3", "checkpoint-6"]}[at]
    resumed = objective()
    _, finished = train(resumed, settings(), tmp_path, samples())
    assert finished
    assert same(tensors(resumed), straight[0])
    assert rows(tmp_path / "fidelity.jsonl")[-1] == rows(straight[1] / "fidelity.jsonl")[-1]


@pytest.mark.parametrize(
    ("changes", "at"), [({"group_by_length": True}, 8), ({"batch_size": 1, "samples_per_step": 2}, 10)]
)
def test_other_ways_of_batching_resume_alike(changes, at, tmp_path):
    whole = objective()
    train(whole, settings(**changes), tmp_path / "whole", samples())
    with pytest.raises(RuntimeError, match="power failure"):
        train(disturbed(at, crash), settings(**changes), tmp_path / "parts", samples())
    resumed = objective()
    train(resumed, settings(**changes), tmp_path / "parts", samples())
    assert same(tensors(resumed), tensors(whole))


def test_dropout_resumes_alike_and_is_off_while_measuring(tmp_path):
    shape = LookaheadSettings(tokens=4, rank=2, alpha=8, dropout=0.3)
    whole = objective(shape=shape)
    trainer, _ = train(whole, settings(), tmp_path / "whole", samples())
    with pytest.raises(RuntimeError, match="power failure"):
        train(disturbed(5, crash, shape=shape), settings(), tmp_path / "parts", samples())
    resumed = objective(shape=shape)
    train(resumed, settings(), tmp_path / "parts", samples())
    assert same(tensors(resumed), tensors(whole))
    measured = fidelity_of(whole.eval(), [collated(hold_out(samples(), 2)[1])], budget=6)
    assert trainer.measurements()[-1]["eval_kl_by_layer"] == pytest.approx(measured.kl, abs=1e-5)


def test_a_kill_while_a_checkpoint_is_written_costs_that_checkpoint_only(straight, tmp_path):
    with pytest.raises(RuntimeError, match="power failure"):
        train(disturbed(8, crash), settings(), tmp_path, samples())
    for name in (SEAL, "trainer_state.json", "optimizer.pt"):
        (tmp_path / "checkpoint-6" / name).unlink()
    resumed = objective()
    train(resumed, settings(), tmp_path, samples())
    assert same(tensors(resumed), straight[0])


@pytest.mark.parametrize(("changes", "steps"), [({}, 8), ({"steps": 0, "epochs": 0.5}, 3)])
def test_a_finished_training_is_not_trained_further(changes, steps, tmp_path):
    whole, again = objective(), objective()
    train(whole, settings(**changes), tmp_path, samples())
    trainer, finished = train(again, settings(**changes), tmp_path, samples())
    assert finished
    assert trainer.state.global_step == steps
    assert same(tensors(again), tensors(whole))
    assert trainer.metrics
    assert rows(tmp_path / "fidelity.jsonl")[-1]["eval_kl"] == trainer.metrics["eval_kl"]


def test_the_first_measurement_is_before_and_the_last_after_training(straight):
    _, work = straight
    measured = rows(work / "fidelity.jsonl")
    assert [row["step"] for row in measured] == [0, 4, 8]
    for row in measured:
        assert set(row) - {"_sha256"} == {"step"} | {
            f"eval_{name}{suffix}" for name in ("kl", "recall", "tau") for suffix in ("", "_by_layer")
        }
        assert len(row["eval_recall_by_layer"]) == 3
    assert measured[0]["eval_kl"] != measured[-1]["eval_kl"]


def test_measurements_of_a_resumed_training_stand_once_and_in_order(tmp_path):
    """A run that is killed leaves measurements after its last checkpoint, which are made again."""
    with pytest.raises(RuntimeError, match="power failure"):
        train(disturbed(6, crash), settings(measure_every=1), tmp_path, samples())
    assert rows(tmp_path / "fidelity.jsonl")[-1]["step"] == 5
    train(objective(), settings(measure_every=1), tmp_path, samples())
    assert [row["step"] for row in rows(tmp_path / "fidelity.jsonl")] == list(range(9))


def test_ctrl_c_keeps_a_checkpoint_and_goes_on_as_if_nothing_had_happened(straight, tmp_path):
    before = signal.getsignal(signal.SIGINT)
    trainer, finished = train(disturbed(5, press_ctrl_c), settings(), tmp_path, samples())
    assert not finished
    assert trainer.state.global_step == 5
    assert checkpoints(tmp_path) == ["checkpoint-3", "checkpoint-5"]
    assert signal.getsignal(signal.SIGINT) is before
    resumed = objective()
    _, finished = train(resumed, settings(), tmp_path, samples())
    assert finished
    assert same(tensors(resumed), straight[0])


def test_a_second_ctrl_c_ends_at_once(straight, tmp_path):
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        train(disturbed(5, press_ctrl_c_twice), settings(), tmp_path, samples())
    assert checkpoints(tmp_path) == ["checkpoint-3"]
    assert signal.getsignal(signal.SIGINT) is before
    resumed = objective()
    train(resumed, settings(), tmp_path, samples())
    assert same(tensors(resumed), straight[0])


@pytest.mark.parametrize(
    ("changes", "shape", "said"),
    [
        ({"learning_rate": 2e-2}, SHAPE, "train.learning_rate=0.01, now it is 0.02"),
        ({"steps": 9}, SHAPE, "train.steps=8, now it is 9"),
        ({"seed": 1}, SHAPE, "train.seed=0, now it is 1"),
        ({}, LookaheadSettings(tokens=4, rank=2, alpha=16), "lookahead.alpha=8, now it is 16"),
        ({}, LookaheadSettings(tokens=6, rank=2, alpha=8), "lookahead.tokens=4, now it is 6"),
    ],
)
def test_other_settings_are_refused_on_resume(straight, changes, shape, said):
    _, work = straight
    content = (work / "settings.json").read_text()
    with pytest.raises(UserError) as caught:
        train(objective(shape=shape), settings(**changes), work, samples())
    assert said in str(caught.value)
    assert str(work / "settings.json") in str(caught.value)
    assert (work / "settings.json").read_text() == content


def test_other_data_is_refused_on_resume(straight):
    with pytest.raises(UserError, match=r"data.samples=14, now it is 13"):
        train(objective(), settings(), straight[1], samples(13))


FILES = (
    "fidelity.jsonl",
    "lookahead.safetensors",
    "optimizer.pt",
    "rng_state.pth",
    "scheduler.pt",
    "trainer_state.json",
)


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
