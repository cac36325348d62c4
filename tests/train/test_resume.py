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
    collate_all,
    crash,
    disturbed,
    measure_fidelity,
    module_tensors,
    new_objective,
    press_ctrl_c,
    press_ctrl_c_twice,
    rows,
    same,
    samples,
    settings,
    train,
)


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Tensor], Path]:
    """Tensors and folder of an uninterrupted training."""
    work = tmp_path_factory.mktemp("uninterrupted")
    objective = new_objective()
    _, finished = train(objective, settings(), work, samples())
    assert finished
    return module_tensors(objective), work


def logged_losses(work: Path) -> list[float]:
    log = read_json(work / "checkpoint-8" / "trainer_state.json")["log_history"]
    return [row["loss"] for row in log if "loss" in row]


@pytest.mark.parametrize(
    ("at", "saved"), [(2, []), (5, ["checkpoint-3"]), (8, ["checkpoint-3", "checkpoint-6"])], ids=["2", "5", "8"]
)
def test_a_resumed_training_equals_an_uninterrupted_one(uninterrupted, at, saved, tmp_path):
    """Before the first checkpoint, in the first epoch after one, and in the second epoch."""
    expected_tensors, uninterrupted_work = uninterrupted
    with pytest.raises(RuntimeError, match="power failure"):
        train(disturbed(at, crash), settings(), tmp_path, samples())
    assert checkpoints(tmp_path) == saved
    resumed = new_objective()
    _, finished = train(resumed, settings(), tmp_path, samples())
    assert finished
    assert same(module_tensors(resumed), expected_tensors)
    assert whole_lines(tmp_path / "fidelity.jsonl") == whole_lines(uninterrupted_work / "fidelity.jsonl")
    assert logged_losses(tmp_path) == logged_losses(uninterrupted_work)
    assert len(logged_losses(tmp_path)) == 3


@pytest.mark.parametrize(
    ("changes", "at"), [({"group_by_length": True}, 8), ({"batch_size": 1, "samples_per_step": 2}, 10)]
)
def test_other_ways_of_batching_resume_alike(changes, at, tmp_path):
    uninterrupted = new_objective()
    train(uninterrupted, settings(**changes), tmp_path / "uninterrupted", samples())
    with pytest.raises(RuntimeError, match="power failure"):
        train(disturbed(at, crash), settings(**changes), tmp_path / "killed", samples())
    resumed = new_objective()
    train(resumed, settings(**changes), tmp_path / "killed", samples())
    assert same(module_tensors(resumed), module_tensors(uninterrupted))


def test_dropout_resumes_alike_and_is_off_while_measuring(tmp_path):
    shape = LookaheadSettings(tokens=4, rank=2, alpha=8, dropout=0.3)
    uninterrupted = new_objective(shape=shape)
    trainer, _ = train(uninterrupted, settings(), tmp_path / "uninterrupted", samples())
    with pytest.raises(RuntimeError, match="power failure"):
        train(disturbed(5, crash, shape=shape), settings(), tmp_path / "killed", samples())
    resumed = new_objective(shape=shape)
    train(resumed, settings(), tmp_path / "killed", samples())
    assert same(module_tensors(resumed), module_tensors(uninterrupted))
    _, held_out = hold_out(samples(), 2)
    fidelity = measure_fidelity(uninterrupted.eval(), [collate_all(held_out)], budget=6)
    assert trainer.measurements()[-1]["eval_kl_by_layer"] == pytest.approx(fidelity.kl, abs=1e-5)


def test_measurements_of_a_resumed_training_stand_once_and_in_order(tmp_path):
    """A run that is killed leaves measurements after its last checkpoint, which are made again."""
    with pytest.raises(RuntimeError, match="power failure"):
        train(disturbed(6, crash), settings(measure_every=1), tmp_path, samples())
    assert rows(tmp_path / "fidelity.jsonl")[-1]["step"] == 5
    train(new_objective(), settings(measure_every=1), tmp_path, samples())
    assert [row["step"] for row in rows(tmp_path / "fidelity.jsonl")] == list(range(9))


def test_a_measurement_names_its_samples(tmp_path):
    """Which are held out depends on the prompts of earlier stages."""

    def held_out_digest(work: Path, trained: frozenset[bytes]) -> str:
        run = TrainingRun(work, samples(), trained=trained)
        ModuleTrainer(new_objective(), settings(held_out=2, steps=1), run).fit()
        _, held_out = hold_out(samples(), 2, trained=trained)
        (digest,) = {row["held_out"] for row in rows(work / "fidelity.jsonl")}
        assert digest == samples_digest(held_out.samples)
        return digest

    _, first_held_out = hold_out(samples(), 2)
    first_digest = held_out_digest(tmp_path / "first", frozenset())
    second_digest = held_out_digest(tmp_path / "second", prompt_digests(first_held_out.samples))
    assert first_digest != second_digest


def test_how_often_a_training_is_measured_and_saved_may_change(uninterrupted, tmp_path):
    with pytest.raises(RuntimeError, match="power failure"):
        train(disturbed(5, crash), settings(), tmp_path, samples())
    saved = read_json(tmp_path / "settings.json")
    assert not any("measure_every" in name for name in saved["settings"])
    resumed = new_objective()
    train(resumed, settings(measure_every=5, save_every=1), tmp_path, samples())
    assert same(module_tensors(resumed), uninterrupted[0])
    assert "checkpoint-7" in checkpoints(tmp_path)


def test_ctrl_c_keeps_a_checkpoint_and_goes_on_as_if_nothing_had_happened(uninterrupted, tmp_path):
    before = signal.getsignal(signal.SIGINT)
    trainer, finished = train(disturbed(5, press_ctrl_c), settings(), tmp_path, samples())
    assert not finished
    assert trainer.state.global_step == 5
    assert checkpoints(tmp_path) == ["checkpoint-3", "checkpoint-5"]
    assert signal.getsignal(signal.SIGINT) is before
    resumed = new_objective()
    _, finished = train(resumed, settings(), tmp_path, samples())
    assert finished
    assert same(module_tensors(resumed), uninterrupted[0])


def test_minutes_end_with_a_checkpoint_and_the_next_ones_go_on(uninterrupted, tmp_path, monkeypatch, capsys):
    """By a clock that is a second later whenever it is looked at: once before the first step, once after each."""
    clock = itertools.count()
    monkeypatch.setattr(checkpoints_module, "time", SimpleNamespace(monotonic=lambda: float(next(clock))))
    tensors_of_runs = []
    for minutes, last_step in ((3 / 60, 3), (2 / 60, 5), (0, 8)):
        objective = new_objective()
        trainer, finished = train(objective, settings(minutes=minutes, save_every=100), tmp_path, samples())
        assert finished
        assert trainer.state.global_step == last_step
        assert checkpoints(tmp_path)[-1] == f"checkpoint-{last_step}"
        tensors_of_runs.append(module_tensors(objective))
    first, second, last = tensors_of_runs
    assert same(last, uninterrupted[0])
    assert not same(first, second)
    printed = capsys.readouterr().out
    assert "stopped at step 3 of 8" in printed
    assert printed.count("stopped at") == 2


def test_a_second_ctrl_c_ends_at_once(uninterrupted, tmp_path):
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        train(disturbed(5, press_ctrl_c_twice), settings(), tmp_path, samples())
    assert checkpoints(tmp_path) == ["checkpoint-3"]
    assert signal.getsignal(signal.SIGINT) is before
    resumed = new_objective()
    train(resumed, settings(), tmp_path, samples())
    assert same(module_tensors(resumed), uninterrupted[0])


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A training that was killed in step 8, after checkpoints 3 and 6."""
    work = tmp_path_factory.mktemp("killed")
    with pytest.raises(RuntimeError, match="power failure"):
        train(disturbed(8, crash), settings(), work, samples())
    assert checkpoints(work) == ["checkpoint-3", "checkpoint-6"]
    assert set(read_json(work / "checkpoint-6" / SEAL)) == {
        "fidelity.jsonl",
        "lookahead.safetensors",
        "optimizer.pt",
        "rng_state.pth",
        "scheduler.pt",
        "trainer_state.json",
    }
    return work


@pytest.fixture
def work(killed: Path, tmp_path: Path) -> Path:
    """A copy of `killed` that a test may spoil."""
    return Path(shutil.copytree(killed, tmp_path / "work"))


def cannot_go_on(work: Path, field: str, code: Code, **changes: object) -> str:
    with refused(field, code) as error:
        train(new_objective(), settings(**changes), work, samples())
    return str(error.value)


@pytest.mark.parametrize("name", ["optimizer.pt", "lookahead.safetensors"])
def test_one_changed_bit_is_noticed(work, name):
    path = work / "checkpoint-6" / name
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    assert f"checkpoint-6/{name}" in cannot_go_on(work, "checkpoint", "file")


def seal_anew(path: Path) -> None:
    """Write a file's digest to its checkpoint's seal, as someone who exchanges files does."""
    seal = path.with_name(SEAL)
    write_json(seal, read_json(seal) | {path.name: file_digest(path)})


@pytest.mark.parametrize("changed", [{"other": torch.ones(1)}, {"tokens": torch.ones(8, 32)}])
def test_weights_of_another_shape_are_named(work, changed):
    path = work / "checkpoint-6" / "lookahead.safetensors"
    save_file(load_file(path) | changed, path)
    seal_anew(path)
    (name,) = changed
    assert str(path) in cannot_go_on(work, name, "file")


def test_other_folders_are_no_checkpoints(uninterrupted, work):
    for name in ("checkpoint-x", "checkpoint-", "checkpoint-9-old", "checkpoint-99"):
        (work / name).mkdir()
    (work / "checkpoint-x" / "trainer_state.json").write_text("{}")
    assert last_checkpoint(work) == work / "checkpoint-6"
    resumed = new_objective()
    train(resumed, settings(), work, samples())
    assert same(module_tensors(resumed), uninterrupted[0])
    assert (work / "checkpoint-x" / "trainer_state.json").exists()


def test_all_settings_that_differ_are_listed(work):
    message = cannot_go_on(work, "train.learning_rate", "conflict", learning_rate=2e-2, seed=1)
    assert "train.seed=0, now it is 1" in message
    with refused("model", "conflict"):
        train(new_objective(), settings(), work, samples(13))


def test_another_target_dtype_or_start_is_refused(tmp_path):
    def trainer_for(identity: Identity, **changes: object) -> ModuleTrainer:
        start = {"model.dtype": "float32", "command.init": None} | changes
        return ModuleTrainer(new_objective(), settings(steps=3), TrainingRun(tmp_path, samples(), identity, start))

    trainer_for(Identity("a")).fit()
    for name, value in {"model.dtype": "bfloat16", "command.init": "sha256:1"}.items():
        with refused(name, "conflict"):
            trainer_for(Identity("a"), **{name: value}).fit()
    with refused("model", "conflict"):
        trainer_for(Identity("b")).fit()


def test_a_finished_training_is_not_trained_further_and_writes_nothing_elsewhere(tmp_path, monkeypatch):
    current_folder = tmp_path / "current"
    current_folder.mkdir()
    monkeypatch.chdir(current_folder)
    work = tmp_path / "work"
    values = settings(report_to=["tensorboard"], steps=0, epochs=0.5)
    first, _ = train(new_objective(), values, work, samples())
    logs = sorted(work.rglob("events.*"))
    second, finished = train(new_objective(), values, work, samples())
    assert finished
    assert second.state.global_step == first.state.global_step == 3
    assert same(module_tensors(second.objective), module_tensors(first.objective))
    assert second.metrics == first.metrics != {}
    assert sorted(work.rglob("events.*")) == logs
    assert list(current_folder.iterdir()) == []


@pytest.mark.parametrize(("count", "steps"), [(1, [8]), (3, [3, 6, 8])])
def test_as_many_checkpoints_as_asked_for_are_kept(count, steps, tmp_path):
    train(new_objective(), settings(checkpoints=count), tmp_path, samples())
    assert checkpoints(tmp_path) == [f"checkpoint-{step}" for step in steps]


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
def test_a_full_disk_ends_a_training_in_one_line_and_costs_one_checkpoint(uninterrupted, size, tmp_path):
    """While the weights or the optimiser's state are written."""
    full_disk = ExitStack()

    def fill_the_disk(_: object) -> None:
        full_disk.enter_context(files_no_larger_than(size))

    with full_disk, pytest.raises(UserError) as caught:
        train(disturbed(6, fill_the_disk), settings(), tmp_path, samples())
    message = str(caught.value)
    assert "checkpoint-6: the checkpoint cannot be written (" in message
    assert "\n" not in message
    assert checkpoints(tmp_path) == ["checkpoint-3"]
    resumed = new_objective()
    train(resumed, settings(), tmp_path, samples())
    assert same(module_tensors(resumed), uninterrupted[0])


def test_checkpoints_of_other_programs_stay(tmp_path):
    checkpoint = tmp_path / "checkpoint-500"
    checkpoint.mkdir()
    with refused("out", "conflict"):
        train(new_objective(), settings(), tmp_path, samples())
    assert checkpoint.exists()


class Planted:
    """Runs when it is unpickled."""

    def __reduce__(self) -> Any:
        return os.mkdir, ("planted",)


@pytest.mark.parametrize("name", ["optimizer.pt", "scheduler.pt", "rng_state.pth"])
def test_no_file_of_a_checkpoint_runs_code(work, name, monkeypatch):
    monkeypatch.chdir(work)
    path = work / "checkpoint-6" / name
    torch.save(Planted(), path)
    seal_anew(path)
    cannot_go_on(work, "checkpoint", "file")
    assert not (work / "planted").exists()
