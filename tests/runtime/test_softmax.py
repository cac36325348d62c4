"""Attention weights: written over the logits where nobody needs these, and the same as where they are kept."""

from functools import partial

import pytest
import torch

from keepsight.eval.bench.measure import peak_bytes
from keepsight.runtime.attention import Softmax, products

SHAPES = [(1, 3, 3, 32, 97), (2, 1, 4, 1, 4128), (1, 2, 1, 5, 1), (1, 8, 4, 32, 1033)]


@pytest.mark.parametrize("shape", SHAPES)
def test_weights_over_the_logits_are_those_beside_them(shape: tuple[int, ...]) -> None:
    logits = torch.randn(shape, generator=torch.Generator().manual_seed(0)) * 9
    logits[..., :: max(2, shape[-1] // 3)][..., 1:] = -torch.inf
    expected = logits.clone().softmax(dim=-1)
    with torch.no_grad():
        weights = Softmax(1.0).normalised(logits)
    assert torch.equal(weights, expected) and weights.data_ptr() == logits.data_ptr()


def test_logits_that_gradients_need_stay() -> None:
    logits = torch.randn(1, 2, 2, 3, 7, requires_grad=True)
    before = logits.detach().clone()
    weights = Softmax(1.0).normalised(logits)
    weights.square().sum().backward()
    assert torch.equal(logits.detach(), before) and logits.grad is not None and bool(logits.grad.any())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("batch", [1, 2])
def test_products_with_keys_that_have_room_behind_them(dtype: torch.dtype, batch: int) -> None:
    draw = torch.Generator().manual_seed(0)
    room = torch.randn(batch, 3, 5000, 64, generator=draw).to(dtype)
    rows, keys = torch.randn(batch, 3, 2, 64, generator=draw).to(dtype), room[:, :, :4000]
    exact = rows.double() @ keys.double().transpose(-1, -2)
    for given in (keys, keys.contiguous()):
        found = products(rows, given)
        assert found.dtype == dtype and found.is_contiguous()
        assert torch.allclose(found.double(), exact, rtol=torch.finfo(dtype).eps, atol=1e-3)
        assert peak_bytes(partial(products, rows, given)) < keys.nbytes / 2, "no copy of the keys"
