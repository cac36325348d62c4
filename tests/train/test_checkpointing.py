"""Gradient checkpointing of the second pass: the same gradients, and less that is kept for them."""

from collections.abc import Callable, Iterable
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
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
from tests.train.runs import GRID, module_tensors, new_objective, same, samples, settings, tensors_of, train

SHAPE = LookaheadSettings(tokens=4, rank=2, alpha=8)


def objective(family: str, checkpoints: bool, shape: LookaheadSettings = SHAPE, **changes: Any) -> ImportanceObjective:
    return ImportanceObjective(random_on(fresh_model(family, **changes), shape), far=0.5, checkpoints=checkpoints)


def padded_batch() -> Batch:
    """Long enough that some entries are far."""
    ids, mask = prompt_ids(60, 47)
    answer = prompt_ids(5, 5, seed=1)[0]
    return Batch(ids, answer, mask.bool())


def loss_and_gradients(objective: ImportanceObjective, autocast: bool = False) -> tuple[Tensor, dict[str, Tensor]]:
    """A batch's loss, and the gradients by name."""
    torch.manual_seed(1)  # for dropout
    with torch.autocast("cpu", torch.bfloat16) if autocast else nullcontext():
        loss = objective.loss(padded_batch())
    loss.backward()
    return loss.detach(), gradients_of(objective)


def gradients_of(objective: nn.Module) -> dict[str, Tensor]:
    return {name: weight.grad for name, weight in objective.named_parameters() if weight.grad is not None}


@pytest.mark.parametrize("family", [*GRID, "Inkling"])
def test_the_gradients_are_the_same_in_every_family(family: str) -> None:
    loss, gradients = loss_and_gradients(objective(family, checkpoints=False))
    recomputed_loss, recomputed_gradients = loss_and_gradients(objective(family, checkpoints=True))
    assert torch.equal(recomputed_loss, loss)
    assert len(gradients) > 1
    assert_close(recomputed_gradients, gradients)


@pytest.mark.parametrize(
    ("changes", "autocast"),
    [({"dropout": 0.3, "tokens": 140}, False), ({"targets": ["none"]}, True)],
    ids=["dropout, many tokens", "autocast, no LoRA"],
)
def test_also_with(changes: dict[str, Any], autocast: bool) -> None:
    shape = replace(SHAPE, **changes)
    loss, gradients = loss_and_gradients(objective("Llama 3", False, shape), autocast)
    recomputed_loss, recomputed_gradients = loss_and_gradients(objective("Llama 3", True, shape), autocast)
    assert torch.equal(recomputed_loss, loss)
    assert_close(recomputed_gradients, gradients)


def saved_bytes(run: Callable[[], object], existing: Iterable[Tensor]) -> int:
    """Bytes of what autograd saves of a computation, but for what existed before; each storage once."""
    storages: dict[int, int] = {}
    existing_storages = {tensor.untyped_storage().data_ptr() for tensor in existing}

    def note(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in existing_storages:
            storages[storage.data_ptr()] = storage.nbytes()
        return tensor

    with saved_tensors_hooks(note, lambda tensor: tensor):
        output = run()
    del output
    return sum(storages.values())


def bytes_saved_for_importance(objective: ImportanceObjective, batch: Batch) -> int:
    """Bytes that autograd saves of the second pass."""
    outputs = objective.run_teacher(batch)
    existing = [*objective.parameters(), *tensors_of(outputs)]
    return saved_bytes(partial(objective.importances_from, outputs, batch), existing)


def test_no_layers_attention_is_kept() -> None:
    """Without it 4 heads x 4 tokens x 65 entries of 4 bytes stay for each of 4 layers, and much else."""
    batch = padded_batch()
    plain_bytes = bytes_saved_for_importance(objective("Llama 3", checkpoints=False), batch)
    checkpointed_bytes = bytes_saved_for_importance(objective("Llama 3", checkpoints=True), batch)
    assert checkpointed_bytes < 0.2 * plain_bytes


def eviction_objective(family: str, group: str, floor: float | None, checkpoints: bool) -> EvictionObjective:
    lookahead = random_on(fresh_model(family), replace(SHAPE, group=group))
    fields = selection_fields(replace(SHAPE.selecting("shared"), group=group, floor=floor))
    allocate = fields.pop("allocate")
    finetune = FinetuneSettings(budgets=[12], gradient_checkpointing=checkpoints)
    method = Evict(1, TokensInTraining(lookahead), **fields)
    return EvictionObjective(lookahead.model, method, allocate, finetune, lookahead)


@pytest.mark.parametrize(
    ("family", "group", "floor"),
    [("Llama 3", "max", 0.25), ("Gemma 3 (text)", "mean", 0.25), ("GPT-OSS", "mean", None)],
)
def test_the_eviction_stage_recomputes_soft_tokens_and_answers(family: str, group: str, floor: float | None) -> None:
    """Loss and gradients are the same, of weights of heads too, and a fraction is kept for them."""
    saved = {}
    losses = {}
    gradients = {}
    for checkpoints in (False, True):
        eviction = eviction_objective(family, group, floor, checkpoints)
        batch = padded_batch()
        outputs = eviction.run_teacher(batch)
        existing = [*eviction.parameters(), *tensors_of(outputs)]
        saved[checkpoints] = saved_bytes(partial(eviction.loss_of, outputs, batch), existing)
        loss = eviction.loss_of(outputs, batch)
        loss.backward()
        losses[checkpoints] = loss.detach()
        gradients[checkpoints] = gradients_of(eviction)
    assert torch.equal(losses[True], losses[False])
    assert losses[False] > 0
    assert len(gradients[False]) > 2
    assert_close(gradients[True], gradients[False])
    assert saved[True] < 0.6 * saved[False], saved


@pytest.mark.parametrize(("family", "checkpoints"), [("GPT-OSS", False), ("DeepSeek-V3", False), ("Llama 3", True)])
def test_large_attention_weights_alone_may_be_computed_again(
    family: str, checkpoints: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    loss, gradients = loss_and_gradients(objective(family, checkpoints))
    monkeypatch.setattr(observe, "RECOMPUTED", 1)
    recomputed_loss, recomputed_gradients = loss_and_gradients(objective(family, checkpoints))
    assert torch.equal(recomputed_loss, loss)
    assert_close(recomputed_gradients, gradients)


def test_large_attention_weights_are_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """4 heads x 4 tokens x 60 entries of 4 bytes, for each of 4 layers; of a layer's importance a quarter stays."""
    batch = padded_batch()
    rows, length = batch.prompt_ids.shape
    layer_bytes = 4 * 4 * length * 4 * rows
    monkeypatch.setattr(observe, "RECOMPUTED", layer_bytes + 1)
    plain = objective("Llama 3", checkpoints=False)
    plain_bytes = bytes_saved_for_importance(plain, batch)
    monkeypatch.setattr(observe, "RECOMPUTED", layer_bytes)
    recomputed_bytes = bytes_saved_for_importance(objective("Llama 3", checkpoints=False), batch)
    layers = len(decoder_of(plain.lookahead.model).layers)
    assert plain_bytes - recomputed_bytes >= layers * layer_bytes


@pytest.mark.parametrize("fails", [False, True])
def test_the_model_is_as_it_was(fails: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpointed = objective("Llama 3", checkpoints=True)
    layers = decoder_of(checkpointed.lookahead.model).layers
    layers[1].forward = layers[1].forward  # an attribute, such as accelerate gives a layer that lies elsewhere
    before = [dict(vars(layer)) for layer in layers]
    if fails:
        monkeypatch.setattr(layers[2].mlp, "forward", lambda _: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            checkpointed.importances(padded_batch())
    else:
        checkpointed.loss(padded_batch()).backward()
    assert [dict(vars(layer)) for layer in layers] == before


def test_a_training_ends_as_one_without_and_may_change_to_it_when_resumed(tmp_path: Path) -> None:
    tensors = {}
    for checkpoints in (False, True):
        trained = new_objective()
        trained.checkpoints = checkpoints
        values = settings(steps=4, gradient_checkpointing=checkpoints)
        train(trained, values, tmp_path / str(checkpoints), samples())
        tensors[checkpoints] = module_tensors(trained)
    assert same(tensors[True], tensors[False])
    train(new_objective(), settings(steps=4, gradient_checkpointing=True), tmp_path / "False", samples())
