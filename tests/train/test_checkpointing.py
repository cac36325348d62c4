"""Gradient checkpointing of the second pass: the same gradients, and less that is kept for them."""

from collections.abc import Callable, Iterable
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from keepsight.models.decoder import decoder_of
from keepsight.models.lookahead_settings import LookaheadSettings
from keepsight.runtime import observe
from keepsight.train.ablation import SideBySide
from keepsight.train.dataset import Batch
from keepsight.train.importance import ImportanceObjective
from keepsight.train.plan import plan_step
from tests.close import assert_close
from tests.families import FAMILIES, fresh_model
from tests.models.modules import random_on
from tests.tiny import prompt_ids
from tests.train.runs import objective as new_objective
from tests.train.runs import same, samples, settings, side_by_side, tensors, tensors_of, train

SHAPE = LookaheadSettings(tokens=4, rank=2, alpha=8)


def objective(family: str, checkpoints: bool, shape: LookaheadSettings = SHAPE, **changes: Any) -> ImportanceObjective:
    return ImportanceObjective(random_on(fresh_model(family, **changes), shape), far=0.5, checkpoints=checkpoints)


def padded() -> Batch:
    """Long enough that some entries are far."""
    ids, mask = prompt_ids(60, 47)
    return Batch(ids, prompt_ids(5, 5, seed=1)[0], mask.bool())


def learned(each: ImportanceObjective | SideBySide, autocast: bool = False) -> tuple[Tensor, dict[str, Tensor]]:
    """A batch's loss, and the gradients by name."""
    torch.manual_seed(1)  # for dropout
    with torch.autocast("cpu", torch.bfloat16) if autocast else nullcontext():
        loss = each.loss(padded())
    loss.backward()
    return loss.detach(), {name: value.grad for name, value in each.named_parameters() if value.grad is not None}


@pytest.mark.parametrize("family", sorted({*FAMILIES} - {"Mistral with a window"}))
def test_the_gradients_are_the_same_in_every_family(family: str) -> None:
    plain, recomputed = (learned(objective(family, checkpoints)) for checkpoints in (False, True))
    assert torch.equal(recomputed[0], plain[0])
    assert len(plain[1]) > 1
    assert_close(recomputed[1], plain[1])


@pytest.mark.parametrize(
    ("shape", "autocast"),
    [({"dropout": 0.3}, False), ({}, True), ({"tokens": 140}, False), ({"targets": ["none"]}, False)],
    ids=["dropout", "autocast", "many tokens", "no LoRA"],
)
def test_also_with(shape: dict[str, Any], autocast: bool) -> None:
    given = replace(SHAPE, **shape)
    plain, recomputed = (learned(objective("Llama 3", each, given), autocast) for each in (False, True))
    assert torch.equal(recomputed[0], plain[0])
    assert_close(recomputed[1], plain[1])


def test_modules_side_by_side_learn_the_same() -> None:
    model = fresh_model("Llama 3")
    sides = [
        side_by_side([ImportanceObjective(random_on(model, SHAPE, seed), 0.5, checkpoints) for seed in (7, 8)])
        for checkpoints in (False, True)
    ]
    (loss, plain), (again, recomputed) = map(learned, sides)
    assert torch.equal(again, loss)
    assert_close(recomputed, plain)


def kept_bytes(run: Callable[[], object], known: Iterable[Tensor]) -> int:
    """Bytes of what autograd keeps of a computation, but for what was there before; each storage once."""
    storages: dict[int, int] = {}
    before = {tensor.untyped_storage().data_ptr() for tensor in known}

    def note(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in before:
            storages[storage.data_ptr()] = storage.nbytes()
        return tensor

    with saved_tensors_hooks(note, lambda tensor: tensor):
        output = run()
    del output
    return sum(storages.values())


def test_no_layers_attention_is_kept() -> None:
    """Without it 4 heads x 4 tokens x 65 entries of 4 bytes stay for each of 4 layers, and much else."""
    batch = padded()
    bytes_of = {}
    for checkpoints in (False, True):
        each = objective("Llama 3", checkpoints)
        reading = each.run_teacher(batch)
        known = [*each.parameters(), *tensors_of(reading)]
        bytes_of[checkpoints] = kept_bytes(partial(each.compared, reading, batch), known)
    assert bytes_of[True] < 0.2 * bytes_of[False], bytes_of


@pytest.mark.parametrize(
    ("family", "checkpoints"),
    [*((each, False) for each in sorted({*FAMILIES} - {"Mistral with a window"})), ("Llama 3", True)],
)
def test_large_attention_weights_alone_may_be_computed_again(
    family: str, checkpoints: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = learned(objective(family, checkpoints))
    monkeypatch.setattr(observe, "RECOMPUTED", 1)
    again = learned(objective(family, checkpoints))
    assert torch.equal(again[0], plain[0])
    assert_close(again[1], plain[1])


def test_large_attention_weights_are_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """4 heads x 4 tokens x 60 entries of 4 bytes, for each of 4 layers; of a layer's importance a quarter stays."""
    batch = padded()
    weights = 4 * 4 * batch.prompt_ids.shape[1] * 4 * len(batch.prompt_ids)
    kept = []
    for least in (weights + 1, weights):
        monkeypatch.setattr(observe, "RECOMPUTED", least)
        each = objective("Llama 3", checkpoints=False)
        reading = each.run_teacher(batch)
        kept.append(kept_bytes(partial(each.compared, reading, batch), [*each.parameters(), *tensors_of(reading)]))
    layers = len(decoder_of(each.lookahead.model).layers)
    assert kept[0] - kept[1] >= layers * weights, kept


def test_the_peak_of_a_long_prompt_falls() -> None:
    """By the plan, which counts every tensor of the step: most of all layers' attention in the second pass goes."""
    config = fresh_model("Llama 3", max_position_embeddings=4096, num_hidden_layers=6).config
    shape = LookaheadSettings(tokens=32, rank=2)
    plain, recomputed = (
        plan_step(config, torch.float32, shape, 0.5, 2000, 50, checkpoints=checkpoints) for checkpoints in (False, True)
    )
    above = [plan.second - plan.outputs for plan in (plain, recomputed)]
    assert above[1] < 0.6 * above[0], above
    assert recomputed.outputs == plain.outputs


@pytest.mark.parametrize("fails", [False, True])
def test_the_model_is_as_it_was(fails: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    each = objective("Llama 3", checkpoints=True)
    layers = decoder_of(each.lookahead.model).layers
    own = layers[1].forward  # such as accelerate gives a layer that lies elsewhere
    layers[1].forward = own
    before = [dict(vars(layer)) for layer in layers]
    if fails:
        monkeypatch.setattr(layers[2].mlp, "forward", lambda _: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            each.importances(padded())
    else:
        each.loss(padded()).backward()
    assert [dict(vars(layer)) for layer in layers] == before


def test_a_training_ends_as_one_without_and_may_change_to_it_when_resumed(tmp_path: Path) -> None:
    ended = []
    for checkpoints in (False, True):
        each = new_objective()
        each.checkpoints = checkpoints
        train(each, settings(steps=4, gradient_checkpointing=checkpoints), tmp_path / str(checkpoints), samples())
        ended.append(tensors(each))
    assert same(*ended)
    train(new_objective(), settings(steps=4, gradient_checkpointing=True), tmp_path / "False", samples())
