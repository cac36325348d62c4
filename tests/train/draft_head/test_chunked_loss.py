"""The loss made chunk by chunk against plain cross entropy and autograd."""

from typing import Any

import pytest
import torch
from torch import Tensor

from keepsight.train import draft_ops as module
from keepsight.train.draft_ops import chunked_loss
from tests.close import assert_close

ROWS = [12, 11, 7]


def inputs(dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(4)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    return {
        "steps": [draw(rows, 8).to(dtype).requires_grad_() for rows in ROWS],
        "weight": draw(40, 8).requires_grad_(),
        "teacher": draw(13, 40).mul(3).softmax(-1).to(dtype),
        "weights": [draw(rows).abs() * (torch.arange(rows) % 4 != 0) for rows in ROWS],
    }


def plain(steps: list[Tensor], weight: Tensor, teacher: Tensor, weights: list[Tensor]) -> Tensor:
    total = torch.zeros((), dtype=torch.float64)
    for step, counts in zip(steps, weights, strict=True):
        for row in range(len(step)):
            scores = (weight.double() @ step[row].double()).log_softmax(-1)
            total = total - counts[row].double() * (teacher[len(teacher) - len(step) + row].double() @ scores)
    return total


@pytest.mark.parametrize("rows", [1024, 5, 1])
def test_loss_and_gradients_equal_plain_cross_entropy(rows, monkeypatch):
    monkeypatch.setattr(module, "_ROWS", rows)
    given = inputs()
    learned = [*given["steps"], given["weight"]]
    found, expected = chunked_loss(**given), plain(**given)
    assert_close(found.double(), expected, torch.float32)
    for ours, theirs in zip(
        torch.autograd.grad(3 * found, learned), torch.autograd.grad(3 * expected, learned), strict=True
    ):
        assert_close(ours, theirs)


def test_half_precision_stays_close_and_keeps_the_dtypes():
    given = inputs(torch.bfloat16)
    learned = [*given["steps"], given["weight"]]
    found, expected = chunked_loss(**given), plain(**given)
    assert found.dtype == torch.float32
    assert found.item() == pytest.approx(expected.item(), rel=2e-2)
    gradients = torch.autograd.grad(found, learned)
    assert [gradient.dtype for gradient in gradients] == [torch.bfloat16] * 3 + [torch.float32]
    for ours, theirs in zip(gradients, torch.autograd.grad(expected, learned), strict=True):
        assert (ours.double() - theirs.double()).norm() < 3e-2 * theirs.double().norm()


def test_rows_of_no_weight_change_nothing():
    given = inputs()
    others = [
        torch.where((counts == 0)[:, None], 7.0, step.detach())
        for step, counts in zip(given["steps"], given["weights"], strict=True)
    ]
    expected = chunked_loss(**given).item()
    given["steps"] = others
    assert chunked_loss(**given).item() == pytest.approx(expected, rel=1e-5)
