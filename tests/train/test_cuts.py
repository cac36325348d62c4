"""Several cuts of the same teacher outputs against as many samples, each with its own."""

from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor

from keepsight.data_gen.store import TrainingSample
from keepsight.models.lookahead_settings import LookaheadSettings
from keepsight.runtime import observe
from keepsight.train.dataset import Batch
from keepsight.train.importance import Cuts, ImportanceObjective, cut_positions
from keepsight.train.replay import ReplayBuffer
from keepsight.train.settings import ReplaySettings
from keepsight.train.trainer import ModuleTrainer, TrainingRun
from tests.close import assert_close
from tests.families import fresh_model
from tests.models.modules import random_on
from tests.refused import refused
from tests.train.runs import (
    at_batch,
    batch_of,
    crash,
    measure_fidelity,
    module_tensors,
    new_objective,
    same,
    samples,
    samples_of_lengths,
    settings,
)

SHAPE = LookaheadSettings(tokens=5, rank=2, alpha=8)
LENGTHS = {"one": [(50, 9)], "padded": [(50, 3), (44, 14), (61, 8)], "short": [(50, 2)]}
LossAndGradients = tuple[Tensor, dict[str, Tensor]]


def objective(family: str = "Llama 3", cuts: int = 1, **options: Any) -> ImportanceObjective:
    lookahead = random_on(fresh_model(family), options.pop("shape", SHAPE))
    return ImportanceObjective(lookahead, far=0.4, cuts=cuts, **options)


def samples_at_cuts(sample: TrainingSample, cuts: int) -> list[TrainingSample]:
    """The samples that a sample is at each of its cuts."""
    return [
        replace(sample, prompt_ids=sample.prompt_ids + sample.answer_ids[:cut], answer_ids=sample.answer_ids[cut:])
        for cut in cut_positions(len(sample.answer_ids), cuts)
    ]


def loss_and_gradients(
    objective: ImportanceObjective, samples: list[TrainingSample], **changes: Any
) -> LossAndGradients:
    objective.zero_grad()
    loss = objective.loss(Batch(**batch_of(samples) | changes))
    loss.backward()
    gradients = {name: weight.grad for name, weight in objective.named_parameters() if weight.grad is not None}
    return loss.detach(), gradients


def mean(results: list[LossAndGradients]) -> LossAndGradients:
    losses = [loss for loss, _ in results]
    mean_gradients = {}
    for name in results[0][1]:
        mean_gradients[name] = torch.stack([gradients[name] for _, gradients in results]).mean(dim=0)
    return torch.stack(losses).mean(), mean_gradients


def loss_and_gradients_apart(
    objective: ImportanceObjective, samples: list[TrainingSample], cuts: int
) -> LossAndGradients:
    """What is learned of the samples at their cuts, each read alone."""
    results = []
    for sample in samples:
        results_at_cuts = [loss_and_gradients(objective, [part]) for part in samples_at_cuts(sample, cuts)]
        results.append(mean(results_at_cuts))
    return mean(results)


@pytest.mark.parametrize(
    ("length", "cuts", "expected"),
    [(12, 1, [0]), (12, 4, [0, 3, 6, 9]), (10, 4, [0, 2, 5, 7]), (4, 4, [0, 1, 2, 3]), (2, 4, [0, 1]), (1, 3, [0])],
)
def test_cuts_are_spread_over_the_answer(length: int, cuts: int, expected: list[int]) -> None:
    assert cut_positions(length, cuts) == expected


@pytest.mark.parametrize(
    ("family", "lengths", "checkpoints"),
    [
        ("DeepSeek-V3", "padded", False),
        ("Phi-3, Phi-4", "padded", False),
        ("Qwen3-MoE", "padded", False),
        ("Llama 3", "one", False),
        ("Llama 3", "padded", True),
        ("Llama 3", "short", True),
    ],
)
def test_cuts_equal_separate_samples(
    family: str, lengths: str, checkpoints: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    samples = samples_of_lengths(*LENGTHS[lengths])
    expected_loss, expected_gradients = loss_and_gradients_apart(objective(family), samples, 4)
    monkeypatch.setattr(observe, "RECOMPUTED", 1 if checkpoints else 2**40)
    loss, gradients = loss_and_gradients(objective(family, 4, checkpoints=checkpoints), samples)
    loss_without_cuts, _ = loss_and_gradients(objective(family), samples)
    assert abs(expected_loss - loss_without_cuts) > 1e-3
    assert_close(loss, expected_loss)
    assert len(gradients) > 1
    assert_close(gradients, expected_gradients)


@pytest.mark.parametrize(("dtype", "tolerance"), [("int8", 0.01), ("bfloat16", 0.005)])
def test_cuts_of_kept_outputs(dtype: str, tolerance: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """All uses learn the same, as near to fresh teacher outputs as rounded entries allow."""
    replaying = objective(cuts=4)
    samples = samples_of_lengths(*LENGTHS["padded"])
    expected_loss, expected_gradients = loss_and_gradients_apart(objective(), samples, 4)
    replaying.buffer = ReplayBuffer(ReplaySettings(dtype=dtype))
    run_teacher = Mock(wraps=replaying.run_teacher)
    monkeypatch.setattr(replaying, "run_teacher", run_teacher)
    loss, gradients = loss_and_gradients(replaying, samples, turn=0, last=False)
    for turn in (1, 2):
        replayed_loss, replayed_gradients = loss_and_gradients(replaying, samples, turn=turn, last=turn == 2)
        assert torch.equal(replayed_loss, loss)
        assert same(replayed_gradients, gradients)
    assert run_teacher.call_count == 1
    assert abs(loss / expected_loss - 1) < tolerance
    for name, expected in expected_gradients.items():
        assert torch.cosine_similarity(gradients[name].flatten(), expected.flatten(), dim=0) > 0.995, name


def test_what_is_measured_is_the_prompt_itself() -> None:
    batch = batch_of(samples_of_lengths(*LENGTHS["padded"]))
    with_one_cut = measure_fidelity(objective(cuts=1), [batch], budget=6)
    with_four_cuts = measure_fidelity(objective(cuts=4), [batch], budget=6)
    assert with_one_cut == with_four_cuts


def test_kept_outputs_hold_no_more_than_their_samples_tokens() -> None:
    """By which their memory is bounded: not the longest prompt beside the longest answer."""
    batch = Batch(**batch_of(samples_of_lengths((60, 4), (20, 40))))
    assert Cuts.of_batch(batch, 4).length == max(60 + 3, 20 + 30)
    with_cuts = objective(cuts=4)
    kept_per_sample = with_cuts.kept_tokens(batch) / 2
    assert kept_per_sample == 63
    assert with_cuts.run_teacher(batch).layers[0]["keys"].shape[2] == kept_per_sample


@pytest.mark.parametrize("family", ["Gemma 2", "Llama 4 (text)", "Qwen3-Next"])
def test_layers_that_forget_are_refused(family: str) -> None:
    with refused("train.cuts", "model"):
        objective(family, 2)
    objective(family, 1)


def train_with_cuts(work: Path, crash_at: int = 0) -> ModuleTrainer:
    """A training on replayed teacher outputs, which crashes at its n-th batch if one is given."""
    lookahead = new_objective().lookahead
    disturbed = at_batch(ImportanceObjective(lookahead, far=0.5, checkpoints=False, cuts=3), crash_at, crash)
    run = TrainingRun(work, samples(), replay=ReplaySettings(memory="90KB"))
    trainer = ModuleTrainer(disturbed, settings(replays=3, steps=14, cuts=3), run)
    trainer.fit()
    return trainer


def test_too_few_samples_for_a_batch_that_is_used_again_are_refused(tmp_path: Path) -> None:
    run = TrainingRun(tmp_path, samples(), replay=ReplaySettings(memory="90KB"))
    with refused("train.batch_size", "range"):
        ModuleTrainer(objective(), settings(replays=3, steps=14, batch_size=32, samples_per_step=32), run)


def test_a_run_that_was_killed_goes_on_bit_for_bit(tmp_path: Path) -> None:
    """From a checkpoint at step 6, in the middle of the uses of several teacher outputs."""
    uninterrupted = train_with_cuts(tmp_path / "uninterrupted")
    with pytest.raises(RuntimeError, match="power failure"):
        train_with_cuts(tmp_path / "killed", crash_at=9)
    resumed = train_with_cuts(tmp_path / "killed")
    assert same(module_tensors(uninterrupted.objective), module_tensors(resumed.objective))
    assert not same(module_tensors(uninterrupted.objective), module_tensors(new_objective()))
