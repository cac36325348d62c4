"""A training that is stopped, killed or started again ends as if nothing had happened; damaged checkpoints."""

import itertools
import os
import resource
import shutil
import signal
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from keepsight.errors import Code, UserError
from keepsight.files import file_digest, one_writer, read_json, whole_lines, write_json
from keepsight.models.identity import Identity
from keepsight.models.lookahead_settings import LookaheadSettings
from keepsight.train import checkpoints as checkpoints_module
from keepsight.train.checkpoints import SEAL, last_checkpoint
from keepsight.train.dataset import hold_out, prompt_digests, samples_digest
from keepsight.train.trainer import ModuleTrainer, TrainingRun
from tests.refused import refused
from tests.train.runs import (
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
    assert whole_lines(tmp_path / "fidelity.jsonl") == whole_lines(straight[1] / "fidelity.jsonl")
    logs = [read_json(work / "checkpoint-8" / "trainer_state.json")["log_history"] for work in (tmp_path, straight[1])]
    losses = [[row["loss"] for row in log if "loss" in row] for log in logs]
    assert losses[0] == losses[1] and len(losses[0]) == 3


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


def test_measurements_of_a_resumed_training_stand_once_and_in_order(tmp_path):
    """A run that is killed leaves measurements after its last checkpoint, which are made again."""
    with pytest.raises(RuntimeError, match="power failure"):
        train(disturbed(6, crash), settings(measure_every=1), tmp_path, samples())
    assert rows(tmp_path / "fidelity.jsonl")[-1]["step"] == 5
    train(objective(), settings(measure_every=1), tmp_path, samples())
    assert [row["step"] for row in rows(tmp_path / "fidelity.jsonl")] == list(range(9))


def test_a_measurement_names_its_samples(tmp_path):
    """Which are held out depends on the prompts of earlier stages."""
    for name, trained in ("first", frozenset()), ("second", prompt_digests(hold_out(samples(), 2)[1].samples)):
        run = TrainingRun(tmp_path / name, samples(), trained=trained)
        ModuleTrainer(objective(), settings(held_out=2, steps=1), run).fit()
        expected = samples_digest(hold_out(samples(), 2, trained=trained)[1].samples)
        assert {row["held_out"] for row in rows(tmp_path / name / "fidelity.jsonl")} == {expected}
    first, second = (rows(tmp_path / name / "fidelity.jsonl")[0] for name in ("first", "second"))
    assert first["held_out"] != second["held_out"]


def test_how_often_a_training_is_measured_and_saved_may_change(straight, tmp_path):
    with pytest.raises(RuntimeError, match="power failure"):
        train(disturbed(5, crash), settings(), tmp_path, samples())
    begun = read_json(tmp_path / "settings.json")
    assert not any("measure_every" in name for name in begun["settings"])
    resumed = objective()
    train(resumed, settings(measure_every=5, save_every=1), tmp_path, samples())
    assert same(tensors(resumed), straight[0])
    assert "checkpoint-7" in checkpoints(tmp_path)


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


def test_minutes_end_with_a_checkpoint_and_the_next_ones_go_on(straight, tmp_path, monkeypatch, capsys):
    """By a clock that is a second later whenever it is looked at: once before the first step, once after each."""
    clock = itertools.count()
    monkeypatch.setattr(checkpoints_module, "time", SimpleNamespace(monotonic=lambda: float(next(clock))))
    trained = []
    for minutes, steps in ((3 / 60, 3), (2 / 60, 5), (0, 8)):
        last = objective()
        trainer, finished = train(last, settings(minutes=minutes, save_every=100), tmp_path, samples())
        assert finished and trainer.state.global_step == steps
        trained.append(tensors(last))
        assert checkpoints(tmp_path)[-1] == f"checkpoint-{steps}"
    assert same(trained[-1], straight[0]) and not same(trained[0], trained[1])
    printed = capsys.readouterr().out
    assert "stopped at step 3 of 8" in printed and printed.count("stopped at") == 2


def test_a_second_ctrl_c_ends_at_once(straight, tmp_path):
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        train(disturbed(5, press_ctrl_c_twice), settings(), tmp_path, samples())
    assert checkpoints(tmp_path) == ["checkpoint-3"]
    assert signal.getsignal(signal.SIGINT) is before
    resumed = objective()
    train(resumed, settings(), tmp_path, samples())
    assert same(tensors(resumed), straight[0])


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A training that was killed in step 8, after checkpoints 3 and 6."""
    work = tmp_path_factory.mktemp("killed")
    with pytest.raises(RuntimeError, match="power failure"):
        train(disturbed(8, crash), settings(), work, samples())
    assert checkpoints(work) == ["checkpoint-3", "checkpoint-6"]
    states = {"optimizer.pt", "rng_state.pth", "scheduler.pt", "trainer_state.json"}
    assert {*read_json(work / "checkpoint-6" / SEAL)} == {"fidelity.jsonl", "lookahead.safetensors", *states}
    return work


@pytest.fixture
def work(killed: Path, tmp_path: Path) -> Path:
    """A copy of `killed` that a test may spoil."""
    return Path(shutil.copytree(killed, tmp_path / "work"))


def cannot_go_on(work: Path, field: str, code: Code, **changes: object) -> str:
    with refused(field, code) as error:
        train(objective(), settings(**changes), work, samples())
    return str(error.value)


@pytest.mark.parametrize("name", ["optimizer.pt", "lookahead.safetensors"])
def test_one_changed_bit_is_noticed(work, name):
    content = bytearray((work / "checkpoint-6" / name).read_bytes())
    content[len(content) // 2] ^= 1
    (work / "checkpoint-6" / name).write_bytes(content)
    assert f"checkpoint-6/{name}" in cannot_go_on(work, "checkpoint", "file")


@pytest.mark.parametrize("changed", [{"other": torch.ones(1)}, {"tokens": torch.ones(8, 32)}])
def test_weights_of_another_shape_are_named(work, changed):
    """Sealed anew, as someone who exchanges files does."""
    path = work / "checkpoint-6" / "lookahead.safetensors"
    save_file(load_file(path) | changed, path)
    seal = path.with_name(SEAL)
    write_json(seal, read_json(seal) | {path.name: file_digest(path)})
    (name,) = changed
    assert str(path) in cannot_go_on(work, name, "file")


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
    message = cannot_go_on(work, "train.learning_rate", "conflict", learning_rate=2e-2, seed=1)
    assert "train.seed=0, now it is 1" in message
    with refused("model", "conflict"):
        train(objective(), settings(), work, samples(13))


def test_another_target_dtype_or_start_is_refused(tmp_path):
    def begun(identity: Identity, **changes: object) -> ModuleTrainer:
        start = {"model.dtype": "float32", "command.init": None} | changes
        return ModuleTrainer(objective(), settings(steps=3), TrainingRun(tmp_path, samples(), identity, start))

    begun(Identity("a")).fit()
    for name, other in {"model.dtype": "bfloat16", "command.init": "sha256:1"}.items():
        with refused(name, "conflict"):
            begun(Identity("a"), **{name: other}).fit()
    with refused("model", "conflict"):
        begun(Identity("b")).fit()


def test_a_finished_training_is_not_trained_further_and_writes_nothing_elsewhere(tmp_path, monkeypatch):
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    changes = {"report_to": ["tensorboard"], "steps": 0, "epochs": 0.5}
    first, _ = train(objective(), settings(**changes), tmp_path / "work", samples())
    logs = sorted((tmp_path / "work").rglob("events.*"))
    again, finished = train(objective(), settings(**changes), tmp_path / "work", samples())
    assert finished and again.state.global_step == first.state.global_step == 3
    assert same(tensors(again.objective), tensors(first.objective))
    assert again.metrics == first.metrics != {}
    assert sorted((tmp_path / "work").rglob("events.*")) == logs
    assert list((tmp_path / "here").iterdir()) == []


@pytest.mark.parametrize(("kept", "left"), [(1, [8]), (3, [3, 6, 8])])
def test_as_many_checkpoints_as_asked_for_are_kept(kept, left, tmp_path):
    train(objective(), settings(checkpoints=kept), tmp_path, samples())
    assert checkpoints(tmp_path) == [f"checkpoint-{step}" for step in left]


def test_another_process_is_kept_out(work):
    with one_writer(work):
        cannot_go_on(work, "out", "conflict")


@contextmanager
def files_no_larger_than(size: int) -> Iterator[None]:
    """Within the block this process writes no larger file, which fails as on a full disk."""
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, limit[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)


@pytest.mark.parametrize("size", [2_000, 20_000])
def test_a_full_disk_ends_a_training_in_one_line_and_costs_one_checkpoint(straight, size, tmp_path):
    """While the weights or the optimiser's state are written."""
    full = ExitStack()
    with full, pytest.raises(UserError) as caught:
        train(disturbed(6, lambda _: full.enter_context(files_no_larger_than(size))), settings(), tmp_path, samples())
    assert "checkpoint-6: the checkpoint cannot be written (" in str(caught.value) and "\n" not in str(caught.value)
    assert checkpoints(tmp_path) == ["checkpoint-3"]
    resumed = objective()
    train(resumed, settings(), tmp_path, samples())
    assert same(tensors(resumed), straight[0])


def test_checkpoints_of_other_programs_stay(tmp_path):
    (other := tmp_path / "checkpoint-500").mkdir()
    with refused("out", "conflict"):
        train(objective(), settings(), tmp_path, samples())
    assert other.exists()


class Planted:
    """Runs when it is unpickled."""

    def __reduce__(self) -> Any:
        return os.mkdir, ("planted",)


@pytest.mark.parametrize("name", ["optimizer.pt", "scheduler.pt", "rng_state.pth"])
def test_no_file_of_a_checkpoint_runs_code(work, name, monkeypatch):
    """Sealed anew, as someone who exchanges files does."""
    monkeypatch.chdir(work)
    torch.save(Planted(), work / "checkpoint-6" / name)
    seal = work / "checkpoint-6" / SEAL
    write_json(seal, read_json(seal) | {name: file_digest(seal.with_name(name))})
    cannot_go_on(work, "checkpoint", "file")
    assert not (work / "planted").exists()
