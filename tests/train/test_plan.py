"""The plan of a training step, against what torch's allocator gives when the step is run."""

import gc
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
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
from keepsight.train.plan import plan_step, stored_bytes
from keepsight.train.settings import FinetuneSettings
from tests.families import fresh_model
from tests.train.runs import tensors_of

FLOAT = torch.float32
HALF = torch.bfloat16
SETTINGS = LookaheadSettings(tokens=16, rank=4)
SHAPE = {"hidden_size": 64, "intermediate_size": 192, "head_dim": 16, "max_position_embeddings": 4096}


def importance_objective(model: Any, checkpoints: bool = False, cuts: int = 1) -> ImportanceObjective:
    return ImportanceObjective(Lookahead(model, SETTINGS), 0.5, checkpoints, cuts)


def eviction_objective(model: Any, checkpoints: bool, floor: float | None) -> EvictionObjective:
    lookahead = Lookahead(model, SETTINGS)
    fields = selection_fields(replace(SETTINGS.selecting("shared"), floor=floor))
    allocate = fields.pop("allocate")
    method = Evict(1, TokensInTraining(lookahead), **fields)
    settings = FinetuneSettings(budgets=[64], gradient_checkpointing=checkpoints)
    return EvictionObjective(model, method, allocate, settings, lookahead)


MakeObjective = Callable[[Any], ImportanceObjective | EvictionObjective]


@dataclass
class MeasuredBytes:
    """Most bytes that torch's CPU allocator has given out at a time.

    Attributes:
        before: Weights, gradients and Adam's moments.
        first: Of the first pass, above `before`.
        second: Of the second pass, above `before`, the teacher outputs included.
    """

    before: int
    first: int
    second: int


def measure_step(
    family: str, dtype: torch.dtype, tokens: int, answer: int, make_objective: MakeObjective
) -> MeasuredBytes:
    model = fresh_model(family, **SHAPE).to(dtype).requires_grad_(False)
    objective = make_objective(model)
    trained = [weight for weight in objective.parameters() if weight.requires_grad]
    optimizer = torch.optim.Adam(trained)
    ids = torch.randint(3, 100, (1, tokens + answer), generator=torch.Generator().manual_seed(0))
    batch = Batch(ids[:, :tokens], ids[:, tokens:])
    for weight in trained:
        weight.grad = torch.zeros_like(weight)
    optimizer.step()
    model_bytes = sum(weight.nbytes for weight in model.parameters())
    trained_bytes = sum(weight.nbytes for weight in trained)

    outputs = objective.run_teacher(batch)
    objective.loss_of(outputs, batch).backward()  # what is cached once is there
    gc.collect()
    output_bytes = sum(tensor.untyped_storage().nbytes() for tensor in tensors_of(outputs))
    second_pass = most_bytes(lambda: objective.loss_of(outputs, batch).backward())
    first_pass = most_bytes(lambda: objective.run_teacher(batch))
    return MeasuredBytes(before=model_bytes + 4 * trained_bytes, first=first_pass, second=output_bytes + second_pass)


def most_bytes(run: Callable[[], object]) -> int:
    """The most that is given out at a time while a function runs."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        run()
    assert profiled.profiler is not None
    assert profiled.profiler.kineto_results is not None
    events: list[Any] = profiled.profiler.kineto_results.events()
    current = 0
    most = 0
    for event in events:
        if event.name() == "[memory]":
            current += event.nbytes()
            most = max(most, current)
    return most


@pytest.mark.parametrize(
    ("family", "dtype", "tokens", "answer", "make_objective"),
    [
        ("Llama 3", FLOAT, 300, 40, importance_objective),
        ("Llama 3", FLOAT, 1500, 100, partial(importance_objective, checkpoints=True, cuts=3)),
        ("Gemma 3 (text)", FLOAT, 1500, 100, importance_objective),
        ("GPT-OSS", HALF, 1500, 20, partial(importance_objective, checkpoints=True)),
        ("Qwen3-MoE", HALF, 1500, 100, importance_objective),
        ("Gemma 4 E2B, E4B", FLOAT, 300, 40, importance_objective),
        ("Falcon-H1", FLOAT, 300, 40, importance_objective),
        ("Llama 3", FLOAT, 1500, 60, partial(eviction_objective, checkpoints=False, floor=0.2)),
        ("Qwen3", FLOAT, 1500, 60, partial(eviction_objective, checkpoints=True, floor=None)),
    ],
)
def test_the_plan_is_within_10_percent_of_what_is_measured(
    family: str, dtype: torch.dtype, tokens: int, answer: int, make_objective: MakeObjective
) -> None:
    plan = plan_step(fresh_model(family, **SHAPE).config, dtype, make_objective, tokens, answer)
    measured = measure_step(family, dtype, tokens, answer, make_objective)
    assert plan.weights + plan.module == pytest.approx(measured.before, rel=0.01)
    assert plan.first == pytest.approx(measured.first, rel=0.1)
    assert plan.second == pytest.approx(measured.second, rel=0.1), "which is the peak of large targets"
    measured_peak = measured.before + max(measured.first, measured.second)
    assert plan.peak == pytest.approx(measured_peak, rel=0.1)


def test_what_is_stored_of_a_quantised_or_sharded_target() -> None:
    model = fresh_model("Llama 3", **SHAPE)
    decoder = model.model
    linear = sum(module.weight.numel() for module in decoder.layers.modules() if hasattr(module, "in_features"))
    all_bytes = sum(weight.nbytes for weight in model.parameters())
    assert stored_bytes(model, None) == all_bytes
    assert stored_bytes(model, "int8") == all_bytes - 3 * linear
    assert all_bytes - 3.5 * linear < stored_bytes(model, "nf4") < all_bytes - 3.45 * linear

    layer_bytes = sum(weight.nbytes for weight in decoder.layers[0].parameters())
    plan = plan_step(model.config, torch.float32, importance_objective, 300, 40, shards=4)
    assert plan.weights == math.ceil(all_bytes / 4) + 2 * layer_bytes

    bytes_of_layers = sum(weight.nbytes for weight in decoder.layers.parameters())
    other_bytes = all_bytes - bytes_of_layers
    plan = plan_step(model.config, torch.float32, importance_objective, 300, 40, shards=4, layers_alone=True)
    assert plan.weights == other_bytes + math.ceil(bytes_of_layers / 4) + 2 * layer_bytes
