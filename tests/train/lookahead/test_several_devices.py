"""Training on a target whose layers lie on several (pretended) devices: what comes of it is what one device gives."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from keepsight.models.lookahead import Lookahead
from keepsight.train import fidelity, importance
from keepsight.train.dataset import Batch, hold_out
from keepsight.train.importance import ImportanceObjective
from keepsight.train.trainer import ModuleTrainer
from tests.close import assert_close
from tests.devices import FIRST, HOST, SECOND, in_halves, several_devices
from tests.families import fresh_model
from tests.tiny import tiny_model
from tests.train.runs import SHAPE, Disturbed, collated, crash, same, samples, settings, side_by_side, tensors, train

LONG = [replace(each, prompt_ids=each.prompt_ids * 2) for each in samples()]
"""With far entries."""


def learning(model: Any, checkpoints: bool = False, cuts: int = 1) -> ImportanceObjective:
    torch.manual_seed(0)
    return ImportanceObjective(Lookahead(model, SHAPE), far=0.3, checkpoints=checkpoints, cuts=cuts)


def padded(device: torch.device = HOST) -> Batch:
    batch: dict[str, Any] = collated(hold_out(LONG[:6], 2)[0])
    batch |= {name: each.to(device) for name, each in batch.items() if isinstance(each, torch.Tensor)}
    return Batch(**batch)


def logged(trainer: ModuleTrainer) -> list[dict[str, Any]]:
    clocks = ("train_runtime", "train_samples_per_second", "train_steps_per_second")
    return [{key: row[key] for key in row if key not in clocks} for row in trainer.trained().log]


@pytest.mark.parametrize(
    ("changes", "checkpoints"),
    [({}, False), ({"replays": 2}, False), ({}, True), ({"cuts": 3}, False)],
    ids=["plain", "replayed", "twice", "cuts"],
)
def test_losses_measurements_and_weights(tmp_path: Path, changes: dict[str, Any], checkpoints: bool) -> None:
    cuts = settings(**changes).cuts
    whole = learning(tiny_model(), checkpoints, cuts)
    expected, _ = train(whole, settings(**changes), tmp_path / "whole", LONG)
    with several_devices():
        halves = learning(in_halves(tiny_model()), checkpoints, cuts)
        trained, finished = train(halves, settings(**changes), tmp_path / "halves", LONG)
        assert finished
        assert {each.device for each in halves.parameters() if each.requires_grad} == {FIRST, SECOND}
    assert logged(trained) == logged(expected)
    assert same(tensors(halves), tensors(whole))


def test_a_training_is_resumed(tmp_path: Path) -> None:
    whole = learning(tiny_model())
    train(whole, settings(), tmp_path / "whole", LONG)
    with several_devices():
        with pytest.raises(RuntimeError, match="power failure"):
            failing = Disturbed(6, crash, learning(in_halves(tiny_model())).lookahead, 0.3)
            train(failing, settings(), tmp_path / "halves", LONG)
        halves = learning(in_halves(tiny_model()))
        train(halves, settings(), tmp_path / "halves", LONG)
    assert same(tensors(halves), tensors(whole))


@pytest.mark.parametrize("family", ["Llama 3", "Gemma 2", "GPT-OSS"])
def test_gradients_of_cells_side_by_side(family: str) -> None:
    def gradients(model: Any, batch: Batch) -> list[torch.Tensor]:
        cells = side_by_side([learning(model), learning(model)])
        cells.loss(batch).backward()
        return [each.grad.cpu() for each in cells.parameters() if each.grad is not None]

    expected = gradients(fresh_model(family), padded())
    with several_devices():
        found = gradients(in_halves(fresh_model(family)), padded(FIRST))
    assert len(found) == len(expected) > 2
    for pair in zip(found, expected, strict=True):
        assert_close(*pair)


def test_what_stays_on_another_device_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the tests above could not fail."""
    for module in (importance, fidelity):
        monkeypatch.setattr(module, "on_each", lambda tensor: lambda device: tensor)
    with several_devices(), pytest.raises(RuntimeError, match="tensors on cpu:0, cpu:1"):
        learning(in_halves(tiny_model())).loss(padded(FIRST))
