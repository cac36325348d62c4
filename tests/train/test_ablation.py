"""Modules side by side: each learns what it would learn alone, on teacher outputs that are made once for all."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from keepsight.models.lookahead import Lookahead
from keepsight.train.ablation import AblationTrainer, Cell
from keepsight.train.dataset import SampleDataset
from keepsight.train.importance import ImportanceObjective
from keepsight.train.settings import LookaheadTrainSettings
from keepsight.train.trainer import ModuleTrainer, TrainingRun
from tests.tiny import tiny_model
from tests.train.runs import SHAPE, at_batch, collated, crash, same, samples, settings, side_by_side, tensors

CHANGES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "small": ({}, {}),
    "tokens alone": ({"tokens": 7, "rank": 0}, {"far": 0.5}),
    "fast": ({}, {"learning_rate": 5e-2, "clip": 0.01}),
}


def objective_of(name: str, model: nn.Module, learning: LookaheadTrainSettings) -> ImportanceObjective:
    torch.manual_seed(0)
    return ImportanceObjective(Lookahead(model, replace(SHAPE, **CHANGES[name][0])), learning.far)  # type: ignore[arg-type]


def learning_of(name: str, **changes: Any) -> LookaheadTrainSettings:
    return settings(**{"far": 0.0, "clip": 0.1, "steps": 4, "measure_every": 2} | changes | CHANGES[name][1])


def ablation(work: Path, **changes: Any) -> AblationTrainer:
    model = tiny_model()
    given = {name: learning_of(name, **changes) for name in CHANGES}
    cells = [Cell(name, objective_of(name, model, each), each) for name, each in given.items()]
    return AblationTrainer(cells, TrainingRun(work, samples()))


def alone(name: str, work: Path, **changes: Any) -> ModuleTrainer:
    given = learning_of(name, **changes)
    return ModuleTrainer(objective_of(name, tiny_model(), given), given, TrainingRun(work, samples()))


@pytest.mark.parametrize("changes", [{"replays": 3, "batch_size": 1, "samples_per_step": 2}, {"precision": "bf16"}])
def test_each_cell_learns_bit_for_bit_what_it_learns_alone(changes: dict[str, Any], tmp_path: Path) -> None:
    together = ablation(tmp_path / "together", **changes)
    assert together.fit()
    for cell, trained in zip(together.objective.cells, together.trained_cells(), strict=True):
        single = alone(cell.name, tmp_path / cell.name, **changes)
        assert single.fit()
        assert same(tensors(cell.objective), tensors(single.objective)), cell.name
        assert trained.settings == learning_of(cell.name, **changes)
        expected = single.trained()
        assert trained.metrics == expected.metrics
        assert trained.losses == pytest.approx(expected.losses, abs=1e-4)  # the Trainer rounds its own
        assert (trained.steps, trained.samples, trained.samples_per_step) == (4, 14, 2)
        assert [row for row in trained.log if "eval_kl" in row] == [row for row in expected.log if "eval_kl" in row]


def test_a_killed_ablation_goes_on_bit_for_bit(tmp_path: Path) -> None:
    whole = ablation(tmp_path / "whole", replays=2)
    assert whole.fit()
    killed = ablation(tmp_path / "killed", replays=2)
    at_batch(killed.objective, 4, crash)
    with pytest.raises(RuntimeError, match="power failure"):
        killed.fit()
    resumed = ablation(tmp_path / "killed", replays=2)
    assert resumed.fit()
    assert resumed.trained_cells() == whole.trained_cells()
    for first, second in zip(whole.objective.cells, resumed.objective.cells, strict=True):
        assert same(tensors(first.objective), tensors(second.objective)), first.name


def test_what_a_cell_computed_is_freed_before_the_next_begins() -> None:
    """Behind the loss are its gradients alone, however many cells there are."""
    model = tiny_model()
    objective = side_by_side([objective_of("small", model, learning_of("small")) for _ in range(3)])
    behind, waiting = set[str](), [objective(**collated(SampleDataset(samples(2))))["loss"].grad_fn]
    while waiting:
        node = waiting.pop()
        behind.add(type(node).__name__)
        waiting += [each for each, _ in node.next_functions if each is not None]
    assert behind == {"SumBackward0", "StackBackward0", "_KnownGradientsBackward", "AccumulateGrad"}
