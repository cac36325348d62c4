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
KV_HEADS = 2
GROUP = 4
RESIDUAL = 64


def drawn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    """The same numbers on every device, [..., d], behind an offset and with rows apart, as in a cache with room."""
    generator = torch.Generator().manual_seed(seed)
    *before, width = shape
    return torch.randn(*before, width + 8, generator=generator)[..., 8:].to(dtype)


def packed_entries(length: int, bits: int, width: int, dtype: torch.dtype) -> PackedEntries:
    """Of a prompt and five tokens after it, which have moved the packed ones into a room with spare space."""
    keys = there(drawn(2, KV_HEADS, length, width, seed=1, dtype=dtype))
    values = there(drawn(2, KV_HEADS, length, width, seed=2, dtype=dtype))
    entries = PackedEntries.pack(Quantizer(bits, 32), RESIDUAL, keys[:, :, :-5], values[:, :, :-5])
    for position in range(length - 5, length):
        key = keys[:, :, position : position + 1]
        value = values[:, :, position : position + 1]
        entries = entries.with_recent(key, value).packed()
    return entries


def random_positions(length: int, count: int) -> Tensor:
    """[2, KV heads, count] of different positions below a length."""
    generator = torch.Generator().manual_seed(3)
    rows = [torch.randperm(length, generator=generator)[:count] for _ in range(2 * KV_HEADS)]
    return torch.stack(rows).view(2, KV_HEADS, count)


def fetched_entries(entries: PackedEntries, count: int) -> FetchedEntries:
    """Entries beside each other, as they come from the CPU: keys and values of one row."""
    width = entries.recent_keys.shape[3]
    positions = random_positions(entries.packed_length, count)
    rows = there(drawn(2, KV_HEADS, count, 2 * width, seed=4, dtype=entries.recent_keys.dtype).contiguous())
    keys, values = rows.chunk(2, dim=3)
    return FetchedEntries(there(positions), keys, values)


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
    softmax = Softmax(width**-0.5, 20.0, there(torch.arange(8.0)))
    scored = entries.packed_length
    fetched = fetched_entries(entries, count) if count else None
    results = kernel.attend_in_kernel(query, entries, softmax, fetched, scored)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernel, "usable", lambda query: False)
        expected_results = attend_packed(query, entries, softmax, fetched, scored)
    for result, expected in zip(results, expected_results, strict=True):
        assert result.shape == expected.shape
        assert result.dtype == expected.dtype
        assert result.isfinite().all()
        assert_close(result, expected, dtype)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize(("length", "count", "band"), [(50, 8, 64), (449, 100, 64), (2000, 37, 256)])
def test_the_sparse_prefill_by_flex_is_that_by_blocks(dtype: torch.dtype, length: int, count: int, band: int) -> None:
    query = drawn(2, KV_HEADS * GROUP, length, 64, dtype=dtype)
    key = drawn(2, KV_HEADS, length, 64, seed=1, dtype=dtype)
    value = drawn(2, KV_HEADS, length, 64, seed=2, dtype=dtype)
    columns = random_positions(length, count).sort(dim=-1).values
    expected = attend_by_blocks(query.double(), key.double(), value.double(), columns, band, Softmax(0.125))

    query, key, value, columns = there([query, key, value, columns])
    flex: Any = torch.compile(flex_attention) if ON_CUDA else flex_attention
    by_flex = attend_by_flex(query, key, value, columns, band, 0.125, flex)
    by_blocks = attend_by_blocks(query, key, value, columns, band, Softmax(0.125))
    assert_close(by_flex.cpu().double(), expected, dtype)
    assert_close(by_blocks.cpu().double(), expected, dtype)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize(("steps", "rows"), [(1, 37), (3, 150)])
def test_the_attention_of_unrolled_drafts_and_its_gradients(dtype: torch.dtype, steps: int, rows: int) -> None:
    query_shape = (2, 8, rows, 64)
    key_shape = (2, 2, rows, 64)
    shapes = [query_shape] + [key_shape] * 2 * steps
    cpu_inputs = [drawn(*shape, seed=seed, dtype=dtype).contiguous() for seed, shape in enumerate(shapes)]
    weight = drawn(2, 8, rows, 64, seed=99).double()

    inputs = [there(tensor).requires_grad_() for tensor in cpu_inputs]
    exact_inputs = [tensor.double().requires_grad_() for tensor in cpu_inputs]
    query, *keys_and_values = inputs
    exact_query, *exact_keys_and_values = exact_inputs
    output = merged_attention(query, keys_and_values[:steps], keys_and_values[steps:])
    expected_output = dense(exact_query, exact_keys_and_values[:steps], exact_keys_and_values[steps:])
    assert_close(output.cpu().double(), expected_output, dtype)

    gradients = torch.autograd.grad((output.double() * there(weight)).sum(), inputs)
    expected_gradients = torch.autograd.grad((expected_output * weight).sum(), exact_inputs)
    for gradient, expected in zip(gradients, expected_gradients, strict=True):
        assert_close(gradient.cpu().double(), expected, dtype)


def dense(query: Tensor, keys: list[Tensor], values: list[Tensor]) -> Tensor:
    """One softmax: causal over the first keys, and over the same row's key alone of all others."""
    rows = query.shape[2]
    group = query.shape[1] // keys[0].shape[1]
    same_row = torch.eye(rows, dtype=torch.bool)
    causal = torch.ones_like(same_row).tril()
    mask = torch.cat([causal, *[same_row] * (len(keys) - 1)], dim=1)
    key = torch.cat(keys, dim=2).repeat_interleave(group, dim=1)
    value = torch.cat(values, dim=2).repeat_interleave(group, dim=1)
    return functional.scaled_dot_product_attention(query, key, value, attn_mask=mask)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize(("rows", "keys"), [(32, 64), (300, 1027)])
def test_observed_attention(dtype: torch.dtype, rows: int, keys: int) -> None:
    query = drawn(2, 8, rows, 64, dtype=dtype)
    key = drawn(2, 2, keys, 64, seed=1, dtype=dtype)
    for reduction in ("mean", "max", "sum"):
        expected = observed_attention(query.double(), key.double(), Softmax(0.125), keys - 3, reduction=reduction)
        observed = observed_attention(there(query), there(key), Softmax(0.125), keys - 3, reduction=reduction)
        assert observed.dtype == torch.float32
        assert_close(observed.cpu().double(), expected.double(), dtype)


@pytest.mark.parametrize("count", [1, 700, 4096])
def test_selections_are_the_same_index_for_index_ties_included(count: int) -> None:
    tied = torch.randint(0, 50, (2, 3, 4096), generator=torch.Generator().manual_seed(0)).float() / 7
    assert torch.equal(top_mask(there(tied), count).cpu(), top_mask(tied, count))
    assert torch.equal(top_indices(there(tied), count).cpu(), top_indices(tied, count))
    signed = tied - 3
    indices = top_indices(there(signed), count, signed=True).cpu()
    assert torch.equal(indices, top_indices(signed, count, signed=True))


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("rows", [1, 5])
@pytest.mark.parametrize("in_kernel", [True, False])
def test_heads_of_different_lengths_attend_as_each_does_alone(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, rows: int, in_kernel: bool
) -> None:
    if not in_kernel:
        monkeypatch.setattr(ragged_kernel, "can_compile", lambda: False)
    counts = np.array([[5, 930], [64, 1]])
    keys = drawn(counts.sum(), 64, seed=1, dtype=dtype)
    values = drawn(counts.sum(), 64, seed=2, dtype=dtype)
    new = drawn(2, 2, rows, 64, seed=3, dtype=dtype)  # both the new keys and the new values
    query = drawn(2, 8, rows, 64, seed=4, dtype=dtype)
    layer = RaggedLayer(there(keys), there(values), counts, 1000)
    key, value = layer.update(there(new), there(new))
    outputs = layer.attend(there(query), key, value, Softmax(1 / math.sqrt(64))).cpu()
    start = 0
    for row in range(2):
        for kv_head in range(2):
            stop = start + counts[row, kv_head]
            head_keys = torch.cat([keys[start:stop], new[row, kv_head]]).double()
            head_values = torch.cat([values[start:stop], new[row, kv_head]]).double()
            start = stop
            hidden = torch.ones(rows, len(head_keys), dtype=torch.bool).triu(len(head_keys) - rows + 1)
            for query_head in range(4 * kv_head, 4 * kv_head + 4):
                logits = query[row, query_head].double() @ head_keys.T / 8
                weights = logits.masked_fill(hidden, -torch.inf).softmax(-1)
                assert_close(outputs[row, :, query_head].double(), weights @ head_values, dtype)
