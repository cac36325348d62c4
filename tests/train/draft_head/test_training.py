"""Training draft heads on a tiny target: they learn, and a stopped training ends as if nothing had happened."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from keepsight.errors import UserError
from keepsight.train.dataset import hold_out
from keepsight.train.draft_head import DraftHeadObjective, measure_draft_head
from keepsight.train.trainer import ModuleTrainer, TrainingRun
from tests.tiny import FAMILIES
from tests.train.draft_head.head_runs import head_objective, head_settings, train_draft_head
from tests.train.runs import checkpoints, collated, crash, press_ctrl_c, rows, same, samples


def tensors(objective: DraftHeadObjective) -> dict[str, Tensor]:
    return {name: value.detach().clone() for name, value in objective.head.state_dict().items()}


def happens(objective: DraftHeadObjective, at: int, action) -> DraftHeadObjective:
    """The objective, to which something happens at the n-th training batch."""
    calls = iter(range(1, 1000))
    objective.register_forward_pre_hook(lambda *_: action(objective) if next(calls) == at else None)
    return objective


def spoil(objective: DraftHeadObjective) -> None:
    with torch.no_grad():
        objective.head.norm.weight.fill_(torch.nan)


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Tensor], Path]:
    work = tmp_path_factory.mktemp("straight")
    objective = head_objective()
    _, finished = train_draft_head(objective, work, samples())
    assert finished
    return tensors(objective), work


@pytest.mark.parametrize("family", FAMILIES)
def test_it_learns_a_few_samples(family, tmp_path):
    few = samples(6)
    objective = head_objective(family, head_settings(steps=60, batch_size=4, measure_every=60, clip=1.0))
    before = tensors(objective)
    batch = collated(hold_out(few, 2)[0])
    start = measure_draft_head(objective, [batch])
    trainer, _ = train_draft_head(objective, tmp_path, few)
    end = measure_draft_head(objective, [batch])
    assert sum(end["eval_kl_by_step"]) < 0.4 * sum(start["eval_kl_by_step"])
    assert sum(end["eval_agreement_by_step"]) > sum(start["eval_agreement_by_step"]) + 0.5
    logged = [row["loss"] for row in trainer.state.log_history if "loss" in row]
    assert logged[-1] < logged[0] - 0.8  # of which the target's own entropy is the larger part
    unmoved = [name for name, value in tensors(objective).items() if torch.equal(value, before[name])]
    assert sorted(unmoved) == ["d2t", "t2d"]


@pytest.mark.parametrize("at", [2, 5])
def test_a_resumed_training_equals_an_uninterrupted_one(straight, at, tmp_path):
    with pytest.raises(RuntimeError, match="power failure"):
        train_draft_head(happens(head_objective(), at, crash), tmp_path, samples())
    resumed = head_objective()
    _, finished = train_draft_head(resumed, tmp_path, samples())
    assert finished
    assert same(tensors(resumed), straight[0])
    assert rows(tmp_path / "fidelity.jsonl")[-1] == rows(straight[1] / "fidelity.jsonl")[-1]


def test_ctrl_c_keeps_a_checkpoint_of_the_head_alone(straight, tmp_path):
    interrupted = happens(head_objective(), 4, press_ctrl_c)
    _, finished = train_draft_head(interrupted, tmp_path, samples())
    assert not finished
    assert checkpoints(tmp_path) == ["checkpoint-3", "checkpoint-4"]
    state = load_file(tmp_path / "checkpoint-4" / "draft_head.safetensors")
    assert same(state, tensors(interrupted))
    resumed = head_objective()
    train_draft_head(resumed, tmp_path, samples())
    assert same(tensors(resumed), straight[0])


def test_measurements_hold_what_each_place_of_a_draft_is_worth(straight):
    measured = rows(straight[1] / "fidelity.jsonl")
    assert [row["step"] for row in measured] == [0, 4, 8]
    for row in measured:
        for name in ("kl_by_step", "agreement_by_step", "acceptance_by_position"):
            assert len(row[f"eval_{name}"]) == 4
        assert row["eval_kl"] == pytest.approx(sum(row["eval_kl_by_step"]) / 4)


def test_a_loss_that_is_no_number_is_refused(tmp_path):
    with pytest.raises(UserError) as caught:
        train_draft_head(happens(head_objective(), 5, spoil), tmp_path, samples())
    message = str(caught.value)
    assert "\n" not in message
    assert "the loss is nan at step 5 on samples [" in message
    assert f"the last good checkpoint: {tmp_path / 'checkpoint-3'}; lower draft_head.train.learning_rate" in message


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"unroll": 3}, "draft_head.unroll=4, now it is 3"),
        ({"learning_rate": 2e-2}, "draft_head.train.learning_rate=0.01, now it is 0.02"),
    ],
)
def test_other_settings_are_refused_on_resume(straight, changes, said):
    with pytest.raises(UserError) as caught:
        train_draft_head(head_objective(settings=head_settings(**changes)), straight[1], samples())
    assert said in str(caught.value)


def test_too_few_samples_are_refused(tmp_path):
    with pytest.raises(UserError, match=r"draft_head.train.held_out=14 needs more than the 14 samples"):
        ModuleTrainer(head_objective(), head_settings(held_out=14).train, TrainingRun(tmp_path, samples()))


def test_mixed_precision_trains_and_measures(tmp_path):
    objective = head_objective(settings=head_settings(steps=2, precision="bf16"))
    trainer, finished = train_draft_head(objective, tmp_path, samples())
    assert finished
    assert trainer.metrics["eval_kl"] > 0
    assert {value.dtype for value in objective.head.parameters()} == {torch.float32}


def test_a_head_is_not_divided(tmp_path, monkeypatch):
    monkeypatch.setattr("keepsight.train.trainer.model_is_divided", lambda accelerator, objective: True)
    with pytest.raises(UserError, match=r"ZeRO-3 .*zero2.yaml, or where no GPU holds it model.device_map=auto"):
        ModuleTrainer(head_objective(), head_settings().train, TrainingRun(tmp_path, samples()))
