"""The soft selection: it keeps the budget, is the shared budget's own at a low temperature, and has its gradients."""

import numpy as np
import pytest
import torch

from keepsight.runtime.allocate import Global, HeadSizes
from keepsight.runtime.importance import select_top
from keepsight.train.eviction import soft_gates
from tests.close import assert_close

SHAPE = (3, 2, 2, 50)  # layers, rows, KV heads, entries


def scores(seed: int = 0) -> torch.Tensor:
    return torch.randn(SHAPE, generator=torch.Generator().manual_seed(seed)) * 2


def gates_of(scores: torch.Tensor, budget: int, floor: float, temperature: float, real=None) -> torch.Tensor:
    """The gates of logarithms of importance, with equal weights of heads."""
    importance = scores.exp() if real is None else scores.exp().masked_fill(~real, -torch.inf)
    return soft_gates(importance, torch.zeros(3, 2), budget, floor, temperature)


@pytest.mark.parametrize("temperature", [0.1, 0.5, 2.0])
@pytest.mark.parametrize("floor", [0.0, 0.2, 1.0])
def test_the_gates_of_a_row_sum_to_the_budget(temperature, floor):
    gates = gates_of(scores(), 10, floor, temperature).exp()
    assert ((gates >= 0) & (gates <= 1)).all()
    assert gates.sum(dim=(0, 2, 3)).tolist() == pytest.approx([60, 60], abs=0.05 + 60 * (floor == 1) * temperature)
    assert ((gates == 1).sum(dim=-1) >= int(10 * floor)).all()


@pytest.mark.parametrize("floor", [0.0, 0.3])
def test_at_a_low_temperature_they_are_what_the_shared_budget_keeps(floor):
    importance = scores().exp()
    real = np.full(SHAPE[:3], SHAPE[3])
    counts = Global(floor)(HeadSizes.of(real, 0), [10, 10], [*importance])
    chosen = torch.stack(select_top([*importance], counts))
    assert torch.equal(gates_of(importance.log(), 10, floor, 1e-3).exp() > 0.5, chosen)


@pytest.mark.parametrize("temperature", [0.5, 50.0])
@pytest.mark.parametrize(("budget", "floor", "padding"), [(10, 0.2, 20), (10, 0.2, 42), (30, 0.9, 40), (60, 1.0, 40)])
def test_a_padded_row_has_the_gates_of_the_row_alone(budget, floor, padding, temperature):
    """Also where it has fewer entries than the budget, or than the floor promises: then it keeps them all."""
    real = (torch.arange(50) >= torch.tensor([0, padding])[None, :, None, None]).expand(SHAPE)
    gates = gates_of(scores(), budget, floor, temperature, real)
    alone = [gates_of(scores()[:, :1], budget, floor, temperature)]
    alone += [gates_of(scores()[:, 1:, :, padding:], budget, floor, temperature)]
    assert not gates[:, 1, :, :padding].exp().any()
    assert_close(gates[:, 0].exp(), alone[0][:, 0].exp())
    assert_close(gates[:, 1, :, padding:].exp(), alone[1][:, 0].exp())
    if 50 - padding <= budget:
        assert (gates[:, 1, :, padding:] == 0).all()


def test_gradients_are_those_of_the_gates_with_the_threshold_that_moves():
    """Against central differences, in which the threshold is found anew."""
    weights = torch.randn(SHAPE, generator=torch.Generator().manual_seed(1), dtype=torch.float64)

    def value(shift: torch.Tensor) -> torch.Tensor:
        return (soft_gates(scores().double().exp(), shift, 10, 0.2, 0.5).exp() * weights).sum()

    shift = torch.zeros(3, 2, dtype=torch.float64, requires_grad=True)
    value(shift).backward()
    assert shift.grad is not None
    for place in np.ndindex(3, 2):
        moved = torch.zeros_like(shift)
        moved[place] = 1e-4
        with torch.no_grad():
            expected = (value(moved) - value(-moved)) / 2e-4
        assert shift.grad[place].item() == pytest.approx(expected.item(), abs=2e-3)
    assert shift.grad.sum().item() == pytest.approx(0, abs=1e-3), "a shift of all scores selects nothing else"


@pytest.mark.parametrize("padding", [0, 37])
def test_of_equal_entries_those_are_guaranteed_that_eviction_keeps(padding):
    """Pooling makes plateaus; padding must not change which of their entries are guaranteed."""
    importance = torch.randint(1, 4, SHAPE, generator=torch.Generator().manual_seed(2)).float()
    counts = Global(1.0)(HeadSizes.of(np.full(SHAPE[:3], SHAPE[3]), 0), [10, 10], [*importance])
    chosen = torch.stack(select_top([*importance], counts))
    padded = torch.nn.functional.pad(importance, (padding, 0), value=-torch.inf)
    gates = soft_gates(padded, torch.zeros(3, 2), 10, 1.0, 0.5)
    assert torch.equal(gates[..., padding:] == 0, chosen)
