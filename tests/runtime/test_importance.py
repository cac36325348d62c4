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
from tests.runtime.dense import best_of


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
    rows = draw(st.integers(1, 4))
    entries = draw(st.integers(1, 30))
    value = st.sampled_from([0.0, 0.25, 0.5, 1.0, 3.0, float("inf"), float("-inf")])
    row = st.lists(value, min_size=entries, max_size=entries)
    importance = draw(st.lists(row, min_size=rows, max_size=rows))
    counts = draw(st.lists(st.integers(0, entries), min_size=rows, max_size=rows))
    return torch.tensor(importance), counts


@given(scores=scores())
def test_selection_is_the_start_of_a_stable_sort(scores):
    importance, counts = scores
    mask_by_counts = top_mask(importance, np.array(counts))
    for row, (row_scores, count) in enumerate(zip(importance.tolist(), counts, strict=True)):
        best = best_of(row_scores, count)
        assert mask_by_counts[row].nonzero()[:, 0].tolist() == sorted(best)
        assert top_mask(importance, count)[row].nonzero()[:, 0].tolist() == sorted(best)
        assert top_indices(importance, count, signed=True)[row].tolist() == best


def look_back(query, stored, observers, softmax, reduction, real=None):
    """Attention and output of observers; `stored` and `observers` are keys and values."""
    stored_keys, stored_values = stored
    entries = LayerEntries(stored_keys, stored_values, real)
    layer = ObservedLayer(entries, None, None, reduction)
    observer_keys, observer_values = observers
    output = layer.attend(query, observer_keys, observer_values, softmax)
    return layer.scores, output


def slow_look_back(query, stored, observers, scaling):
    """Softmax attention in float64, query by query, over the stored entries and the observers up to each query."""
    batch_size, heads, rows, width = query.shape
    kv_heads, length = stored[0].shape[1:3]
    group = heads // kv_heads
    keys = torch.cat([stored[0], observers[0]], dim=2).double()
    values = torch.cat([stored[1], observers[1]], dim=2).double()
    output = torch.zeros(batch_size, rows, heads, width, dtype=torch.float64)
    attention = torch.zeros(batch_size, heads, rows, length, dtype=torch.float64)
    for sample in range(batch_size):
        for head in range(heads):
            for row in range(rows):
                visible = length + row + 1
                head_keys = keys[sample, head // group, :visible]
                head_values = values[sample, head // group, :visible]
                logits = head_keys @ query[sample, head, row].double() * scaling
                weights = logits.softmax(0)
                output[sample, row, head] = weights @ head_values
                attention[sample, head, row] = weights[:length]
    return attention, output


def random_heads(batch_size, rows, width, **options):
    """Queries of four heads, keys and values of two."""
    return [torch.randn(batch_size, heads, rows, width, **options) for heads in (4, 2, 2)]


def reduced_over_queries(attention, reduction):
    """[B, H, q, S] -> [B, H, S]."""
    return attention.amax(dim=2) if reduction == "max" else attention.mean(dim=2)


@pytest.mark.parametrize(
    ("length", "room", "size", "reduction"),
    [(1, 0, 1.0, "mean"), (2, 1, 3000.0, "max"), (11, 4, 1.0, "max"), (14, 0, 3000.0, "mean")],
)
def test_observers_attend_to_entries_and_each_other(size, reduction, length, room):
    """Also where logits are far apart, where a query attends to almost nothing but itself, and where the entries are
    the first of a longer tensor."""
    torch.manual_seed(length)
    query, observer_keys, observer_values = random_heads(2, 5, 8)
    observers = (size * observer_keys, observer_values)
    stored_keys, stored_values = (torch.randn(2, 2, length + room, 8)[:, :, :length] for _ in range(2))
    stored = (stored_keys, stored_values)
    scores, output = look_back(query, stored, observers, Softmax(0.3), reduction)
    slow_attention, slow_output = slow_look_back(query, stored, observers, 0.3)
    expected = reduced_over_queries(slow_attention, reduction)
    rounding = max(1e-4, size * 3e-6)  # of logits, which softmax turns into a factor
    torch.testing.assert_close(scores, expected.float(), atol=1e-6, rtol=rounding)
    torch.testing.assert_close(output, slow_output.float(), atol=max(1e-5, rounding / 10), rtol=rounding)
    assert output.is_contiguous()
    assert output.shape == (2, 5, 4, 8)


def weights_and_outputs(*arguments: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """As `look_back`, with weights that are certainly there."""
    weights, output = look_back(*arguments)
    assert weights is not None
    return weights, output


@pytest.mark.parametrize("reduction", ["mean", "max"])
def test_gradients_of_observers(reduction, length=6):
    """Those of plain softmax attention, all in float32."""
    stored_keys = torch.randn(1, 2, length, 4)
    stored_values = torch.randn(1, 2, length, 4)
    leaves = random_heads(1, 3, 4, requires_grad=True)
    query, key, value = leaves
    stored = (stored_keys, stored_values)
    scores, output = weights_and_outputs(query, stored, (key, value), Softmax(0.5), reduction)
    upstream = [torch.randn(scores.shape), torch.randn(output.shape)]
    gradients = torch.autograd.grad([scores, output], leaves, upstream)

    keys = torch.cat([stored_keys, key], dim=2).repeat_interleave(2, 1)
    values = torch.cat([stored_values, value], dim=2).repeat_interleave(2, 1)
    hidden = torch.ones(3, length + 3, dtype=torch.bool).triu(length + 1)
    weights = (query @ keys.mT * 0.5).masked_fill(hidden, -torch.inf).softmax(-1)
    plain_scores = reduced_over_queries(weights[..., :length], reduction)
    plain_output = (weights @ values).transpose(1, 2)
    expected = torch.autograd.grad([plain_scores, plain_output], leaves, upstream)
    assert_close(gradients, expected)


@pytest.mark.parametrize("reduction", ["mean", "max"])
def test_observers_see_no_padding(reduction):
    """Each row as alone and without its padding, whatever stands there; gradients too."""
    torch.manual_seed(1)
    length = 12
    paddings = [0, 5, 11]
    leaves = random_heads(3, 3, 4, requires_grad=True)
    query, key, value = leaves
    stored = (torch.randn(3, 2, length, 4), torch.randn(3, 2, length, 4))
    real = torch.arange(length) >= torch.tensor(paddings)[:, None, None]
    scores, output = weights_and_outputs(query, stored, (key, value), Softmax(0.5), reduction, real)
    upstream_scores = torch.randn(scores.shape)
    upstream_output = torch.randn(output.shape)
    gradients = torch.autograd.grad([scores, output], leaves, [upstream_scores, upstream_output])
    for row, padding in enumerate(paddings):
        only_row = slice(row, row + 1)
        row_leaves = [leaf.detach()[only_row].requires_grad_() for leaf in leaves]
        query, key, value = row_leaves
        row_stored = [tensor[only_row, :, padding:] for tensor in stored]
        row_scores, row_output = weights_and_outputs(query, row_stored, (key, value), Softmax(0.5), reduction)
        assert_close(scores[row, :, padding:], row_scores[0])
        assert not scores[row, :, :padding].any()
        assert_close(output[row], row_output[0])
        row_upstream = [upstream_scores[only_row, :, padding:], upstream_output[only_row]]
        row_gradients = torch.autograd.grad([row_scores, row_output], row_leaves, row_upstream)
        for gradient, row_gradient in zip(gradients, row_gradients, strict=True):
            assert_close(gradient[row], row_gradient[0])


@pytest.mark.parametrize(("batch", "dtype"), [(1, torch.float32), (2, torch.bfloat16), (1, torch.bfloat16)])
def test_products_with_keys_that_have_room_behind_them(dtype: torch.dtype, batch: int) -> None:
    generator = torch.Generator().manual_seed(0)
    room = torch.randn(batch, 3, 5000, 64, generator=generator).to(dtype)
    queries = torch.randn(batch, 3, 2, 64, generator=generator).to(dtype)
    keys = room[:, :, :4000]
    exact = queries.double() @ keys.double().transpose(-1, -2)
    compute_logits = Softmax(1.0).logits
    for stored_keys in (keys, keys.contiguous()):
        logits = compute_logits(queries, stored_keys)
        assert logits.dtype == torch.float32
        assert logits.is_contiguous()
        assert torch.allclose(logits.double(), exact, rtol=torch.finfo(dtype).eps, atol=1e-3)
        copied_bytes = peak_bytes(partial(compute_logits, queries, stored_keys))
        assert copied_bytes < keys.nbytes / 2, "no copy of the keys"
