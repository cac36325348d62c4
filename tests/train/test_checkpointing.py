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
from keepsight.runtime.evict import Evict
from keepsight.runtime.methods.lookaheadkv import selection_fields
from keepsight.train.dataset import Batch
from keepsight.train.eviction import EvictionObjective, TokensInTraining
from keepsight.train.importance import ImportanceObjective
from keepsight.train.settings import FinetuneSettings
from tests.close import assert_close
from tests.families import fresh_model
from tests.models.modules import random_on
from tests.tiny import prompt_ids
from tests.train.runs import GRID, same, samples, settings, tensors, tensors_of, train
from tests.train.runs import objective as new_objective

SHAPE = LookaheadSettings(tokens=4, rank=2, alpha=8)


def objective(family: str, checkpoints: bool, shape: LookaheadSettings = SHAPE, **changes: Any) -> ImportanceObjective:
    return ImportanceObjective(random_on(fresh_model(family, **changes), shape), far=0.5, checkpoints=checkpoints)


def padded() -> Batch:
    """Long enough that some entries are far."""
    ids, mask = prompt_ids(60, 47)
    return Batch(ids, prompt_ids(5, 5, seed=1)[0], mask.bool())


def learned(each: ImportanceObjective, autocast: bool = False) -> tuple[Tensor, dict[str, Tensor]]:
    """A batch's loss, and the gradients by name."""
    torch.manual_seed(1)  # for dropout
    with torch.autocast("cpu", torch.bfloat16) if autocast else nullcontext():
        loss = each.loss(padded())
    loss.backward()
    return loss.detach(), {name: value.grad for name, value in each.named_parameters() if value.grad is not None}


@pytest.mark.parametrize("family", [*GRID, "Inkling"])
def test_the_gradients_are_the_same_in_every_family(family: str) -> None:
    plain, recomputed = (learned(objective(family, checkpoints)) for checkpoints in (False, True))
    assert torch.equal(recomputed[0], plain[0])
    assert len(plain[1]) > 1
    assert_close(recomputed[1], plain[1])


@pytest.mark.parametrize(
    ("shape", "autocast"),
    [({"dropout": 0.3, "tokens": 140}, False), ({"targets": ["none"]}, True)],
    ids=["dropout, many tokens", "autocast, no LoRA"],
)
def test_also_with(shape: dict[str, Any], autocast: bool) -> None:
    given = replace(SHAPE, **shape)
    plain, recomputed = (learned(objective("Llama 3", each, given), autocast) for each in (False, True))
    assert torch.equal(recomputed[0], plain[0])
    assert_close(recomputed[1], plain[1])


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
        outputs = each.run_teacher(batch)
        known = [*each.parameters(), *tensors_of(outputs)]
        bytes_of[checkpoints] = kept_bytes(partial(each.importances_from, outputs, batch), known)
    assert bytes_of[True] < 0.2 * bytes_of[False], bytes_of


@pytest.mark.parametrize(
    ("family", "group", "floor"),
    [("Llama 3", "max", 0.25), ("Gemma 3 (text)", "mean", 0.25), ("GPT-OSS", "mean", None)],
)
def test_the_eviction_stage_recomputes_soft_tokens_and_answers(family: str, group: str, floor: float | None) -> None:
    """Loss and gradients are the same, of weights of heads too, and a fraction is kept for them."""
    kept, losses, gradients = [], [], []
    for checkpoints in (False, True):
        lookahead = random_on(fresh_model(family), replace(SHAPE, group=group))
        parts = selection_fields(replace(SHAPE.selecting("shared"), group=group, floor=floor))
        allocate = parts.pop("allocate")
        given = FinetuneSettings(budgets=[12], gradient_checkpointing=checkpoints)
        method = Evict(1, TokensInTraining(lookahead), **parts)
        each = EvictionObjective(lookahead.model, method, allocate, given, lookahead)
        batch = padded()
        outputs = each.run_teacher(batch)
        kept.append(kept_bytes(partial(each.loss_of, outputs, batch), [*each.parameters(), *tensors_of(outputs)]))
        loss = each.loss_of(outputs, batch)
        loss.backward()
        losses.append(loss.detach())
        gradients.append({name: value.grad for name, value in each.named_parameters() if value.grad is not None})
    assert torch.equal(*losses) and losses[0] > 0
    assert len(gradients[0]) > 2
    assert_close(gradients[1], gradients[0])
    assert kept[1] < 0.6 * kept[0], kept


@pytest.mark.parametrize(("family", "checkpoints"), [("GPT-OSS", False), ("DeepSeek-V3", False), ("Llama 3", True)])
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
        outputs = each.run_teacher(batch)
        kept.append(
            kept_bytes(partial(each.importances_from, outputs, batch), [*each.parameters(), *tensors_of(outputs)])
        )
    layers = len(decoder_of(each.lookahead.model).layers)
    assert kept[0] - kept[1] >= layers * weights, kept


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
