"""What packing a kept reading costs: next to nothing, and nothing at all in the target's own dtype."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from keepsight.train.dataset import Batch, SampleDataset, Use, collate
from keepsight.train.importance import ImportanceObjective
from keepsight.train.objective import ReplayedObjective
from keepsight.train.replay import ReplayBuffer, TeacherOutputs, pack, unpack
from keepsight.train.retrieval_head import RetrievalObjective
from keepsight.train.settings import ReplaySettings, RetrievalHeadSettings
from tests.models.retrieval_heads import tiny_retrieval_head
from tests.tiny import tiny_model
from tests.train.runs import objective, samples


def _gradients(module: torch.nn.Module) -> list[torch.Tensor]:
    return [weight.grad.clone() for weight in module.parameters() if weight.grad is not None]


def long_batch() -> Batch:
    """Prompts with far entries."""
    rows = [replace(each, prompt_ids=each.prompt_ids * 3) for each in samples(3)]
    dataset = SampleDataset(rows)
    return Batch(**collate([dataset[Use(place, 0, True)] for place in (0, 2)]))


def with_target_in(dtype: torch.dtype, one: ImportanceObjective) -> None:
    target: Any = one.lookahead.model  # transformers hides the types of `to`
    target.to(dtype)


def fresh_and_replayed(one: ReplayedObjective, batch: Batch, dtype: str) -> list[tuple[float, torch.Tensor]]:
    """Loss, and the gradients in one, of a reading as it is and of one that was packed."""
    found = []
    for buffer in (None, ReplayBuffer(ReplaySettings(dtype=dtype))):
        one.buffer = buffer
        one.zero_grad()
        loss = one.loss(batch)
        loss.backward()
        found.append((loss.item(), torch.cat([each.flatten() for each in _gradients(one)])))
    return found


@pytest.mark.parametrize("far", [0.0, 0.5])
@pytest.mark.parametrize("target", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dtype", ["int8", "bfloat16"])
def test_packing_changes_loss_and_gradients_by_next_to_nothing(dtype: str, target: torch.dtype, far: float) -> None:
    one = objective()
    with_target_in(target, one)
    one.far = far
    (exact, gradient), (packed, of_packed) = fresh_and_replayed(one, long_batch(), dtype)
    assert packed == pytest.approx(exact, rel=0.005)
    assert packed != exact or dtype == "bfloat16"
    assert torch.cosine_similarity(gradient, of_packed, dim=0) > 0.999


def lookahead_with_far() -> ReplayedObjective:
    one = objective()
    with_target_in(torch.bfloat16, one)
    one.far = 0.5
    return one


def retrieval_with_answers() -> ReplayedObjective:
    return RetrievalObjective(
        tiny_retrieval_head(), tiny_model().to(torch.bfloat16), RetrievalHeadSettings(queries=12, answers=0.5)
    )


@pytest.mark.parametrize("make", [lookahead_with_far, retrieval_with_answers])
def test_in_the_targets_dtype_replayed_loss_and_gradients_are_the_fresh_ones(
    make: Callable[[], ReplayedObjective],
) -> None:
    (exact, gradient), (packed, of_packed) = fresh_and_replayed(make(), long_batch(), "bfloat16")
    assert packed == exact
    assert torch.equal(gradient, of_packed)


def test_int8_rounds_by_half_a_step_of_each_head_and_token() -> None:
    keys, cpu = torch.randn(2, 3, 5, 8) * torch.logspace(-3, 3, 5)[:, None], torch.device("cpu")
    outputs = TeacherOutputs([{"keys": keys, "places": torch.arange(4)}], [keys[..., 0]])
    packed = pack(outputs, int8=True)
    assert packed.layers[0]["keys"][0].dtype == torch.int8
    devices: Any = TeacherOutputs([{"keys": cpu, "places": cpu}], [cpu])  # type: ignore[dict-item, list-item]
    back = unpack(packed, devices)
    assert torch.equal(back.layers[0]["places"], torch.arange(4)) and torch.equal(back.importance[0], keys[..., 0])
    step = keys.abs().amax(dim=-1, keepdim=True) / 127
    assert ((back.layers[0]["keys"] - keys).abs() <= 0.501 * step).all()
