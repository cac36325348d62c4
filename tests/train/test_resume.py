"""A training that is stopped, killed or started again ends as if nothing had happened."""

import signal
from pathlib import Path

import pytest
from safetensors.torch import load_file
from torch import Tensor

from keepsight.errors import UserError
from keepsight.models.lookahead_settings import LookaheadSettings
from keepsight.train.checkpoints import SEAL
from keepsight.train.dataset import hold_out
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
