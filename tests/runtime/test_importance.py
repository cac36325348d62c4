"""Importance, softmax and selection against written-out definitions."""

from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from keepsight.eval.bench.measure import peak_bytes
from keepsight.runtime.attention import Softmax
from keepsight.runtime.evict import Evict
from keepsight.runtime.importance import (
    Pool,
    reduce_group,
    top_indices,
    top_mask,
)
from keepsight.runtime.layer import KeptLayer, LayerEntries
from keepsight.runtime.methods.positions import Recency
from keepsight.runtime.observe import ObservedLayer
from tests.close import assert_close


def test_group_reductions_and_pooling():
    def pool(importance: torch.Tensor, kind: str) -> torch.Tensor:
        entries = torch.zeros(*importance.shape, 1)
        return Evict(1, Recency(), pool=Pool(kind, 3)).layer_importance(importance, KeptLayer(entries, entries))

    heads = torch.tensor([[[0.0, 4.0, 0.0], [4.0, 0.0, 0.0]]])
    group_first = pool(reduce_group(heads, 1), "max")
    assert group_first.tolist() == [[[2.0, 2.0, 2.0]]]
    assert reduce_group(pool(heads, "max"), 1).tolist() == [[[4.0, 4.0, 2.0]]]
    assert reduce_group(heads, 1, "max").tolist() == [[[4.0, 4.0, 0.0]]]
    assert pool(torch.tensor([[[3.0, 3.0, 3.0]]]), "avg").tolist() == [[[2.0, 3.0, 2.0]]]
    layer = torch.tensor([[[1.0, 0.0], [3.0, 0.0], [0.0, 4.0], [0.0, 8.0]]])
    assert reduce_group(layer, 2).tolist() == [[[2.0, 0.0], [0.0, 6.0]]]
    assert reduce_group(layer, 2, "mean of layer").tolist() == [[[1.0, 3.0], [1.0, 3.0]]]


@st.composite
def scores(draw):
    """[rows, N] with ties, protected entries and padding, and how many to take of each row."""
    rows, entries = draw(st.integers(1, 4)), draw(st.integers(1, 30))
    value = st.sampled_from([0.0, 0.25, 0.5, 1.0, 3.0, float("inf"), float("-inf")])
    values = draw(st.lists(st.lists(value, min_size=entries, max_size=entries), min_size=rows, max_size=rows))
    return torch.tensor(values), draw(st.lists(st.integers(0, entries), min_size=rows, max_size=rows))


@given(scores=scores())
def test_selection_is_the_start_of_a_stable_sort(scores):
    importance, counts = scores
    by_row = top_mask(importance, np.array(counts))
    for row, (values, count) in enumerate(zip(importance.tolist(), counts, strict=True)):
        first = sorted(range(len(values)), key=lambda index: (-values[index], index))[:count]
        expected = sorted(first)
        assert by_row[row].nonzero()[:, 0].tolist() == expected
        assert top_mask(importance, count)[row].nonzero()[:, 0].tolist() == expected
        assert top_indices(importance, count, signed=True)[row].tolist() == first


def look_back(query, stored, own, softmax, reduction, real=None):
    """Attention and output of observers."""
    entries = LayerEntries(stored[0], stored[1], real)
    layer = ObservedLayer(entries, None, None, reduction)
    output = layer.attend(query, own[0], own[1], softmax)
    return layer.scores, output


def slow_look_back(query, stored, own, scaling):
    """Softmax attention in float64, query by query, over the stored entries and the observers up to each query."""
    heads, rows = query.shape[1:3]
    group, length = heads // stored[0].shape[1], stored[0].shape[2]
    keys, values = (torch.cat(pair, dim=2).double() for pair in zip(stored, own, strict=True))
    output = torch.zeros(len(query), rows, heads, query.shape[3], dtype=torch.float64)
    paid = torch.zeros(len(query), heads, rows, length, dtype=torch.float64)
    for batch in range(len(query)):
        for head in range(heads):
            for row in range(rows):
                seen = length + row + 1
                dots = keys[batch, head // group, :seen] @ query[batch, head, row].double() * scaling
                weights = dots.softmax(0)
                output[batch, row, head] = weights @ values[batch, head // group, :seen]
                paid[batch, head, row] = weights[:length]
    return paid, output


@pytest.mark.parametrize(
    ("length", "room", "size", "reduction"),
    [(1, 0, 1.0, "mean"), (2, 1, 3000.0, "max"), (11, 4, 1.0, "max"), (14, 0, 3000.0, "mean")],
)
def test_observers_attend_to_entries_and_each_other(size, reduction, length, room):
    """Also where logits are far apart, where a query attends to almost nothing but itself, and where the entries are
    the first of a longer tensor."""
    torch.manual_seed(length)
    query, *rest = (torch.randn(2, heads, 5, 8) for heads in (4, 2, 2))
    entries = [torch.randn(2, 2, length + room, 8)[:, :, :length] for _ in range(2)]
    stored, own = (entries[0], entries[1]), (size * rest[0], rest[1])
    paid, output = look_back(query, stored, own, Softmax(0.3), reduction)
    expected, slow_output = slow_look_back(query, stored, own, 0.3)
    expected = expected.amax(dim=2) if reduction == "max" else expected.mean(dim=2)
    rounding = max(1e-4, size * 3e-6)  # of logits, which softmax turns into a factor
    torch.testing.assert_close(paid, expected.float(), atol=1e-6, rtol=rounding)
    torch.testing.assert_close(output, slow_output.float(), atol=max(1e-5, rounding / 10), rtol=rounding)
    assert output.is_contiguous() and output.shape == (2, 5, 4, 8)


def weights_and_outputs(*arguments: Any) -> tuple[torch.Tensor, torch.Tensor]:
    weights, output = look_back(*arguments)
    assert weights is not None
    return weights, output


@pytest.mark.parametrize("reduction", ["mean", "max"])
def test_gradients_of_observers(reduction, length=6):
    """Those of plain softmax attention, all in float32."""
    stored = torch.randn(1, 2, length, 4), torch.randn(1, 2, length, 4)

    leaves = [torch.randn(1, heads, 3, 4, requires_grad=True) for heads in (4, 2, 2)]
    query, key, value = leaves
    paid, output = weights_and_outputs(query, stored, (key, value), Softmax(0.5), reduction)
    up = torch.randn(paid.shape), torch.randn(output.shape)
    found = torch.autograd.grad([paid, output], leaves, up)
    keys = torch.cat([stored[0], key], dim=2).repeat_interleave(2, 1)
    values = torch.cat([stored[1], value], dim=2).repeat_interleave(2, 1)
    hidden = torch.ones(3, length + 3, dtype=torch.bool).triu(length + 1)
    weights = (query @ keys.mT * 0.5).masked_fill(hidden, -torch.inf).softmax(-1)
    seen = weights[..., :length].amax(2) if reduction == "max" else weights[..., :length].mean(2)
    expected = torch.autograd.grad([seen, (weights @ values).transpose(1, 2)], leaves, up)
    assert_close(found, expected)


@pytest.mark.parametrize("reduction", ["mean", "max"])
def test_observers_see_no_padding(reduction):
    """Each row as alone and without its padding, whatever stands there; gradients too."""
    torch.manual_seed(1)
    length, pads = 12, [0, 5, 11]
    leaves = [torch.randn(3, heads, 3, 4, requires_grad=True) for heads in (4, 2, 2)]
    stored = torch.randn(3, 2, length, 4), torch.randn(3, 2, length, 4)
    real = torch.arange(length) >= torch.tensor(pads)[:, None, None]
    both = weights_and_outputs(leaves[0], stored, (leaves[1], leaves[2]), Softmax(0.5), reduction, real)
    up = [torch.randn(each.shape) for each in both]
    found = torch.autograd.grad(both, leaves, up)
    for row, pad in enumerate(pads):
        query, key, value = (leaf.detach()[row : row + 1].requires_grad_() for leaf in leaves)
        alone = weights_and_outputs(
            query, [each[row : row + 1, :, pad:] for each in stored], (key, value), Softmax(0.5), reduction
        )
        assert_close(both[0][row, :, pad:], alone[0][0])
        assert not both[0][row, :, :pad].any()
        assert_close(both[1][row], alone[1][0])
        upward = [up[0][row : row + 1, :, pad:], up[1][row : row + 1]]
        assert_close(
            [each[row] for each in found], [each[0] for each in torch.autograd.grad(alone, (query, key, value), upward)]
        )


@pytest.mark.parametrize(("batch", "dtype"), [(1, torch.float32), (2, torch.bfloat16), (1, torch.bfloat16)])
def test_products_with_keys_that_have_room_behind_them(dtype: torch.dtype, batch: int) -> None:
    draw = torch.Generator().manual_seed(0)
    room = torch.randn(batch, 3, 5000, 64, generator=draw).to(dtype)
    rows, keys = torch.randn(batch, 3, 2, 64, generator=draw).to(dtype), room[:, :, :4000]
    exact, logits = rows.double() @ keys.double().transpose(-1, -2), Softmax(1.0).logits
    for each in (keys, keys.contiguous()):
        found = logits(rows, each)
        assert found.dtype == torch.float32 and found.is_contiguous()
        assert torch.allclose(found.double(), exact, rtol=torch.finfo(dtype).eps, atol=1e-3)
        assert peak_bytes(partial(logits, rows, each)) < keys.nbytes / 2, "no copy of the keys"
