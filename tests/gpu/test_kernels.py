"""Each kernel that runs on CUDA alone against what the CPU computes of the same numbers, widened to float64."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention.flex_attention import flex_attention

from keepsight.runtime import ragged_kernel
from keepsight.runtime.attention import Softmax
from keepsight.runtime.drafting.speckv import attend_by_blocks, attend_by_flex
from keepsight.runtime.importance import observed_attention, top_indices, top_mask
from keepsight.runtime.layer import RaggedLayer
from keepsight.runtime.offload import FetchedEntries
from keepsight.runtime.quantized import kernel
from keepsight.runtime.quantized.kernel import attend_packed
from keepsight.runtime.quantized.packing import PackedEntries, Quantizer
from keepsight.train.draft_ops import merged_attention
from tests.close import assert_close
from tests.gpu.device import FLOATS, GPU, ON_CUDA, SINGLE, there

pytestmark = GPU
KV_HEADS, GROUP, RESIDUAL = 2, 4, 64


def drawn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    """The same numbers on every device, [..., d], behind an offset and with rows apart, as in a cache with room."""
    generator = torch.Generator().manual_seed(seed)
    *before, width = shape
    return torch.randn(*before, width + 8, generator=generator)[..., 8:].to(dtype)


def packed_entries(length: int, bits: int, width: int, dtype: torch.dtype) -> PackedEntries:
    """Of a prompt and five tokens after it, which have moved the packed ones into a room with spare space."""
    keys, values = (there(drawn(2, KV_HEADS, length, width, seed=seed, dtype=dtype)) for seed in (1, 2))
    entries = PackedEntries.pack(Quantizer(bits, 32), RESIDUAL, keys[:, :, :-5], values[:, :, :-5])
    for token in range(length - 5, length):
        entries = entries.with_recent(keys[:, :, token : token + 1], values[:, :, token : token + 1]).packed()
    return entries


def fetched_entries(entries: PackedEntries, count: int) -> FetchedEntries:
    """Entries beside each other, as they come from the CPU: keys and values of one row."""
    generator, width = torch.Generator().manual_seed(3), entries.recent_keys.shape[3]
    places = [torch.randperm(entries.packed_length, generator=generator)[:count] for _ in range(2 * KV_HEADS)]
    rows = there(drawn(2, KV_HEADS, count, 2 * width, seed=4, dtype=entries.recent_keys.dtype).contiguous())
    return FetchedEntries(there(torch.stack(places).view(2, KV_HEADS, count)), *rows.chunk(2, dim=3))


@pytest.mark.skipif(not ragged_kernel.HAS_TRITON, reason="Triton has no wheels for this platform, or is not installed")
@pytest.mark.parametrize("dtype", SINGLE)
@pytest.mark.parametrize(("bits", "width"), [(1, 64), (2, 64), (4, 64), (2, 96), (2, 128)])
@pytest.mark.parametrize(("length", "rows", "count"), [(70, 1, 0), (577, 2, 9), (1500, 1, 64)])
def test_packed_entries_are_read_as_unpacked_ones(
    dtype: torch.dtype, bits: int, width: int, length: int, rows: int, count: int
) -> None:
    if not ON_CUDA and length > 100 and (bits, width) != (2, 64):
        pytest.skip(
            "without CUDA Triton's interpreter runs the kernel, which takes minutes at this length; the short one runs"
        )
    entries = packed_entries(length, bits, width, dtype)
    query = there(drawn(2, KV_HEADS * GROUP, rows, width, seed=5, dtype=dtype))
    softmax, scored = Softmax(width**-0.5, 20.0, there(torch.arange(8.0))), entries.packed_length
    fetched = fetched_entries(entries, count) if count else None
    found = kernel.attend_in_kernel(query, entries, softmax, fetched, scored)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernel, "usable", lambda query: False)
        expected = attend_packed(query, entries, softmax, fetched, scored)
    for one, other in zip(found, expected, strict=True):
        assert (one.shape, one.dtype) == (other.shape, other.dtype) and one.isfinite().all()
        assert_close(one, other, dtype)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize(("length", "count", "band"), [(50, 8, 64), (449, 100, 64), (2000, 37, 256)])
def test_the_sparse_prefill_by_flex_is_that_by_blocks(dtype: torch.dtype, length: int, count: int, band: int) -> None:
    query = drawn(2, KV_HEADS * GROUP, length, 64, dtype=dtype)
    key, value = (drawn(2, KV_HEADS, length, 64, seed=seed, dtype=dtype) for seed in (1, 2))
    generator = torch.Generator().manual_seed(3)
    places = torch.stack([torch.randperm(length, generator=generator)[:count] for _ in range(2 * KV_HEADS)])
    columns = places.sort(dim=-1).values.view(2, KV_HEADS, count)
    expected = attend_by_blocks(query.double(), key.double(), value.double(), columns, band, Softmax(0.125))
    one, other, third, places = there([query, key, value, columns])
    flex: Any = torch.compile(flex_attention) if ON_CUDA else flex_attention
    by_one_call = attend_by_flex(one, other, third, places, band, 0.125, flex)
    for found in (by_one_call, attend_by_blocks(one, other, third, places, band, Softmax(0.125))):
        assert_close(found.cpu().double(), expected, dtype)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize(("steps", "rows"), [(1, 37), (3, 150)])
def test_the_attention_of_unrolled_drafts_and_its_gradients(dtype: torch.dtype, steps: int, rows: int) -> None:
    shapes = [(2, 8, rows, 64)] + [(2, 2, rows, 64)] * 2 * steps
    given = [drawn(*shape, seed=seed, dtype=dtype).contiguous() for seed, shape in enumerate(shapes)]
    weight = drawn(2, 8, rows, 64, seed=99).double()
    ours = [there(each).requires_grad_() for each in given]
    exact = [each.double().requires_grad_() for each in given]
    found = merged_attention(ours[0], ours[1 : steps + 1], ours[steps + 1 :])
    expected = dense(exact[0], exact[1 : steps + 1], exact[steps + 1 :])
    assert_close(found.cpu().double(), expected, dtype)
    of_ours = torch.autograd.grad((found.double() * there(weight)).sum(), ours)
    for one, other in zip(of_ours, torch.autograd.grad((expected * weight).sum(), exact), strict=True):
        assert_close(one.cpu().double(), other, dtype)


def dense(query: Tensor, keys: list[Tensor], values: list[Tensor]) -> Tensor:
    """One softmax: causal over the first keys, and over the same row's key alone of all others."""
    rows, group = query.shape[2], query.shape[1] // keys[0].shape[1]
    own = torch.eye(rows, dtype=torch.bool)
    allowed = torch.cat([torch.ones_like(own).tril(), *[own] * (len(keys) - 1)], dim=1)
    key, value = (torch.cat(each, dim=2).repeat_interleave(group, dim=1) for each in (keys, values))
    return functional.scaled_dot_product_attention(query, key, value, attn_mask=allowed)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize(("rows", "keys"), [(32, 64), (300, 1027)])
def test_observed_attention(dtype: torch.dtype, rows: int, keys: int) -> None:
    query, key = drawn(2, 8, rows, 64, dtype=dtype), drawn(2, 2, keys, 64, seed=1, dtype=dtype)
    for reduction in ("mean", "max", "sum"):
        expected = observed_attention(query.double(), key.double(), Softmax(0.125), keys - 3, reduction=reduction)
        found = observed_attention(there(query), there(key), Softmax(0.125), keys - 3, reduction=reduction)
        assert found.dtype == torch.float32
        assert_close(found.cpu().double(), expected.double(), dtype)


@pytest.mark.parametrize("count", [1, 700, 4096])
def test_selections_are_the_same_index_for_index_ties_included(count: int) -> None:
    tied = torch.randint(0, 50, (2, 3, 4096), generator=torch.Generator().manual_seed(0)).float() / 7
    assert torch.equal(top_mask(there(tied), count).cpu(), top_mask(tied, count))
    assert torch.equal(top_indices(there(tied), count).cpu(), top_indices(tied, count))
    assert torch.equal(
        top_indices(there(tied - 3), count, signed=True).cpu(), top_indices(tied - 3, count, signed=True)
    )


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("rows", [1, 5])
@pytest.mark.parametrize("in_kernel", [True, False])
def test_heads_of_different_lengths_attend_as_each_does_alone(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, rows: int, in_kernel: bool
) -> None:
    if not in_kernel:
        monkeypatch.setattr(ragged_kernel, "can_compile", lambda: False)
    counts = np.array([[5, 930], [64, 1]])
    keys, values = (drawn(counts.sum(), 64, seed=seed, dtype=dtype) for seed in (1, 2))
    new, query = drawn(2, 2, rows, 64, seed=3, dtype=dtype), drawn(2, 8, rows, 64, seed=4, dtype=dtype)
    layer = RaggedLayer(there(keys), there(values), counts, 1000)
    key, value = layer.update(there(new), there(new))
    found = layer.attend(there(query), key, value, Softmax(1 / math.sqrt(64))).cpu()
    start = 0
    for row in range(2):
        for head in range(2):
            mine = slice(start, start := start + counts[row, head])
            key, value = (torch.cat([each[mine], new[row, head]]).double() for each in (keys, values))
            hidden = torch.ones(rows, len(key), dtype=torch.bool).triu(len(key) - rows + 1)
            for each in range(4 * head, 4 * head + 4):
                weights = (query[row, each].double() @ key.T / 8).masked_fill(hidden, -torch.inf).softmax(-1)
                assert_close(found[row, :, each].double(), weights @ value, dtype)
