"""The plan of a training step, against what torch's allocator gives when the step is run."""

import gc
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from keepsight.models.lookahead import Lookahead
from keepsight.models.lookahead_settings import LookaheadSettings
from keepsight.runtime.evict import Evict
from keepsight.runtime.methods.lookaheadkv import selection_fields
from keepsight.train.dataset import Batch
from keepsight.train.eviction import EvictionObjective, TokensInTraining
from keepsight.train.importance import ImportanceObjective
from keepsight.train.plan import StepPlan, plan_step, stored_bytes
from keepsight.train.settings import FinetuneSettings
from tests.families import fresh_model
from tests.train.runs import tensors_of

FLOAT, HALF = torch.float32, torch.bfloat16
SETTINGS = LookaheadSettings(tokens=16, rank=4)
SHAPE = {"hidden_size": 64, "intermediate_size": 192, "head_dim": 16, "max_position_embeddings": 4096}


def importance(model: Any, checkpoints: bool = False, cuts: int = 1) -> ImportanceObjective:
    return ImportanceObjective(Lookahead(model, SETTINGS), 0.5, checkpoints, cuts)


def eviction(model: Any, checkpoints: bool, floor: float | None) -> EvictionObjective:
    lookahead = Lookahead(model, SETTINGS)
    parts = selection_fields(replace(SETTINGS.selecting("shared"), floor=floor))
    allocate = parts.pop("allocate")
    method, settings = Evict(1, TokensInTraining(lookahead), **parts), FinetuneSettings(budgets=[64])
    return EvictionObjective(model, method, allocate, replace(settings, gradient_checkpointing=checkpoints), lookahead)


Make = Callable[[Any], ImportanceObjective | EvictionObjective]


def planned(family: str, dtype: torch.dtype, tokens: int, answer: int, make: Make) -> StepPlan:
    return plan_step(fresh_model(family, **SHAPE).config, dtype, make, tokens, answer)


def measured(family: str, dtype: torch.dtype, tokens: int, answer: int, make: Make) -> tuple[int, int, int]:
    """Most bytes that torch's CPU allocator has given out at a time.

    Returns:
        Those of weights, gradients and Adam's moments, and above them those of the first pass and of the second, in
        which the teacher outputs are.
    """
    model = fresh_model(family, **SHAPE).to(dtype).requires_grad_(False)
    objective = make(model)
    trained = [weight for weight in objective.parameters() if weight.requires_grad]
    optimizer = torch.optim.Adam(trained)
    ids = torch.randint(3, 100, (1, tokens + answer), generator=torch.Generator().manual_seed(0))
    batch = Batch(ids[:, :tokens], ids[:, tokens:])
    for weight in trained:
        weight.grad = torch.zeros_like(weight)
    optimizer.step()
    before = sum(weight.nbytes for weight in model.parameters()) + 4 * sum(weight.nbytes for weight in trained)
    outputs = objective.run_teacher(batch)
    objective.loss_of(outputs, batch).backward()  # what is cached once is there
    gc.collect()
    held = sum(tensor.untyped_storage().nbytes() for tensor in tensors_of(outputs))
    second = held + most_bytes(lambda: objective.loss_of(outputs, batch).backward())
    return before, most_bytes(lambda: objective.run_teacher(batch)), second


def most_bytes(run: Callable[[], object]) -> int:
    """The most that is given out at a time while a function runs."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        run()
    assert profiled.profiler is not None and profiled.profiler.kineto_results is not None
    now = most = 0
    events: list[Any] = profiled.profiler.kineto_results.events()
    for event in events:
        if event.name() == "[memory]":
            now += event.nbytes()
            most = max(most, now)
    return most


@pytest.mark.parametrize(
    "given",
    [
        ("Llama 3", FLOAT, 300, 40, importance),
        ("Llama 3", FLOAT, 1500, 100, partial(importance, checkpoints=True, cuts=3)),
        ("Gemma 3 (text)", FLOAT, 1500, 100, importance),
        ("GPT-OSS", HALF, 1500, 20, partial(importance, checkpoints=True)),
        ("Qwen3-MoE", HALF, 1500, 100, importance),
        ("Gemma 4 E2B, E4B", FLOAT, 300, 40, importance),
        ("Falcon-H1", FLOAT, 300, 40, importance),
        ("Llama 3", FLOAT, 1500, 60, partial(eviction, checkpoints=False, floor=0.2)),
        ("Qwen3", FLOAT, 1500, 60, partial(eviction, checkpoints=True, floor=None)),
    ],
)
def test_the_plan_is_within_10_percent_of_what_is_measured(given: Any) -> None:
    """Family, dtype, tokens of prompt and answer, and what is trained."""
    plan, (before, first, second) = planned(*given), measured(*given)
    assert plan.weights + plan.module == pytest.approx(before, rel=0.01)
    assert plan.first == pytest.approx(first, rel=0.1)
    assert plan.second == pytest.approx(second, rel=0.1), "which is the peak of large targets"
    assert plan.peak == pytest.approx(before + max(first, second), rel=0.1)


def test_what_is_stored_of_a_quantised_or_sharded_target() -> None:
    model = fresh_model("Llama 3", **SHAPE)
    linear = sum(module.weight.numel() for module in model.model.layers.modules() if hasattr(module, "in_features"))
    whole = sum(weight.nbytes for weight in model.parameters())
    assert stored_bytes(model, None) == whole
    assert stored_bytes(model, "int8") == whole - 3 * linear
    assert whole - 3.5 * linear < stored_bytes(model, "nf4") < whole - 3.45 * linear
    plan = plan_step(model.config, torch.float32, importance, 300, 40, shards=4)
    layer = sum(weight.nbytes for weight in model.model.layers[0].parameters())
    assert plan.weights == -(-whole // 4) + 2 * layer
    by_layer = plan_step(model.config, torch.float32, importance, 300, 40, shards=4, layers_alone=True)
    layers = sum(weight.nbytes for weight in model.model.layers.parameters())
    assert by_layer.weights == whole - layers + -(-layers // 4) + 2 * layer
