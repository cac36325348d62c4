"""The loss made chunk by chunk against plain cross entropy and autograd."""

import pytest
import torch
from torch import Tensor

from keepsight.train import chunked_loss as module
from keepsight.train.chunked_loss import chunked_loss


def inputs(dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(4)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    return {
        "hidden": draw(23, 8).to(dtype).requires_grad_(),
        "weight": draw(40, 8).requires_grad_(),
        "teacher": draw(9, 40).mul(3).softmax(-1).to(dtype),
        "rows": torch.randint(0, 9, (23,), generator=generator),
        "weights": draw(23).abs() * (torch.arange(23) % 4 != 0),
    }


def plain(hidden: Tensor, weight: Tensor, teacher: Tensor, rows: Tensor, weights: Tensor) -> Tensor:
    scores = (hidden.double() @ weight.double().T).log_softmax(-1)
    return -(teacher.double()[rows] * scores).sum(-1) @ weights.double()


@pytest.mark.parametrize(("rows", "cached"), [(1024, 1 << 21), (10, 1 << 21), (10, 120), (1, 1)])
def test_loss_and_gradients_equal_plain_cross_entropy(rows, cached, monkeypatch):
    monkeypatch.setattr(module, "_ROWS", rows)
    monkeypatch.setattr(module, "_CACHED", cached)
    given = inputs()
    learned = [given["hidden"], given["weight"]]
    found, expected = chunked_loss(**given), plain(**given)
    torch.testing.assert_close(found.double(), expected, rtol=1e-6, atol=1e-5)
    for ours, theirs in zip(
        torch.autograd.grad(3 * found, learned), torch.autograd.grad(3 * expected, learned), strict=True
    ):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


def test_half_precision_stays_close_and_keeps_the_dtypes():
    given = inputs(torch.bfloat16)
    learned = [given["hidden"], given["weight"]]
    found, expected = chunked_loss(**given), plain(**given)
    assert found.dtype == torch.float32
    assert found.item() == pytest.approx(expected.item(), rel=2e-2)
    gradients = torch.autograd.grad(found, learned)
    assert [gradient.dtype for gradient in gradients] == [torch.bfloat16, torch.float32]
    for ours, theirs in zip(gradients, torch.autograd.grad(expected, learned), strict=True):
        assert (ours.double() - theirs.double()).norm() < 3e-2 * theirs.double().norm()


def test_rows_of_no_weight_change_nothing():
    given = inputs()
    unweighted = given["weights"] == 0
    other = given | {"hidden": torch.where(unweighted[:, None], 7.0, given["hidden"].detach())}
    assert chunked_loss(**given).item() == pytest.approx(chunked_loss(**other).item(), rel=1e-6)
