"""Attention of ragged heads in one Triton kernel on a GPU.

Each KV head is a sequence of its own, at an offset in flattened entries: nothing is padded, and one launch serves all
heads of a layer, where otherwise each head is attended to by itself.
"""

from __future__ import annotations

import functools
import os
import shutil
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from keepsight.runtime.attention import Softmax

HAS_TRITON = find_spec("triton") is not None
if HAS_TRITON:
    import triton
    from triton import language as tl

    @triton.jit
    def online_softmax(scores, best, total):  # type: ignore[no-untyped-def]
        """Weights of more scores, the factor for earlier sums, and the new highest score and denominator."""
        highest = tl.maximum(best, tl.max(scores, 1))
        least = tl.where(highest == float("-inf"), 0.0, highest)  # where a query sees no entry yet
        weights = tl.exp(scores - least[:, None])
        fade = tl.exp(best - least)
        return weights, fade, highest, total * fade + tl.sum(weights, 1)


PART = 256
"""Entries of a program."""
BLOCK = 64
"""Entries that a program reads at a time; it divides `PART`."""
MOST_ROWS = 32
"""Most grouped queries of a program."""
STAGES = 1
"""Blocks that are loaded ahead: with two, a program in float32 would need more shared memory than some GPUs have."""


@functools.cache
def can_compile() -> bool:
    """Whether Triton is installed, for NVIDIA's GPUs, and finds the C compiler that it needs."""
    compiler = os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")
    return HAS_TRITON and torch.version.hip is None and compiler is not None


def usable(query: Tensor, values: Tensor) -> bool:
    """Whether the kernel takes queries, or keys, [..., d] and values [..., d]; it computes no gradients."""
    return query.is_cuda and query.shape[-1] == values.shape[-1] and can_compile()


def attend_ragged(
    query: Tensor, keys: Tensor, values: Tensor, starts: Tensor, ends: Tensor, longest: int, softmax: Softmax
) -> Tensor:
    """Causal attention [B, q, H, d], contiguous, of queries [B, H, q, d], the last q tokens of each KV head's entries.

    Keys and values [total, d] are those of all rows and KV heads. `starts` and `ends` [B x K] int64 are the place of
    each head's first entry and one past its last, the entry of the last query; `longest` is at least the largest number
    of entries of a head.
    """
    batch, _, rows, width = query.shape
    kv_heads = len(starts) // batch
    grouped = query.reshape(len(starts), -1, width).contiguous()
    of_head = grouped.shape[1]
    parts = -(-longest // PART)
    padded = min(MOST_ROWS, max(16, triton.next_power_of_2(of_head)))
    outputs = query.new_empty(batch, kv_heads, parts, of_head, width, dtype=torch.float32)
    totals = outputs.new_empty(outputs.shape[:4])
    with torch.cuda.device_of(query):
        _compiled()[len(starts), parts, triton.cdiv(of_head, padded)](
            grouped,
            keys,
            values,
            starts,
            ends,
            outputs,
            totals,
            of_head,
            rows,
            keys.stride(0),
            values.stride(0),
            softmax.scaling,
            SOFTCAP=softmax.softcap or 0.0,
            WIDTH=width,
            COLUMNS=max(16, triton.next_power_of_2(width)),
            PADDED=padded,
            PART=PART,
            BLOCK=BLOCK,
            num_stages=STAGES,
        )
    return merged(outputs, with_sinks(totals, softmax, rows), query)


def merged(outputs: Tensor, totals: Tensor, query: Tensor) -> Tensor:
    """Merge the attention of queries [B, H, q, d] to the parts of each KV head's entries.

    `outputs` [B, K, parts, r, d] float32 are those of r grouped queries, `totals` from `with_sinks` [B, K, parts, r],
    or parts + 1 with sinks. Returns the output [B, q, H, d], contiguous.
    """
    shares = totals.softmax(dim=2)[:, :, : outputs.shape[2]]
    output = (shares[..., None] * outputs).sum(dim=2).to(query.dtype)
    return output.view(query.shape).transpose(1, 2).contiguous()


def with_sinks(totals: Tensor, softmax: Softmax, rows: int) -> Tensor:
    """Logarithms of the parts' denominators [B, K, parts, r] and, as one more part, the softmax's sinks, if any.

    The r grouped queries are `rows` tokens of each query head.
    """
    sinks = softmax.sinks_of(totals.shape[1], rows)
    if sinks is None:
        return totals
    return torch.cat([totals, sinks[:, None, :, 0].expand(len(totals), -1, 1, -1)], dim=2)


@functools.cache
def _compiled() -> Any:
    return triton.jit(attend_part)


def attend_part(  # type: ignore[no-untyped-def]
    query,
    keys,
    values,
    starts,
    ends,
    outputs,
    totals,
    of_head,
    queries,
    key_stride,
    value_stride,
    scaling,
    SOFTCAP: tl.constexpr,
    WIDTH: tl.constexpr,
    COLUMNS: tl.constexpr,
    PADDED: tl.constexpr,
    PART: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Attention to one part of a KV head's entries: the output, and the logarithm of the softmax's denominator."""
    head = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    rows = tl.program_id(2) * PADDED + tl.arange(0, PADDED)
    columns = tl.arange(0, COLUMNS)
    inside = columns < WIDTH
    of_rows = (rows < of_head)[:, None] & inside[None, :]
    queried = tl.load(query + (head * of_head + rows[:, None]) * WIDTH + columns[None, :], mask=of_rows, other=0.0)
    first = tl.load(starts + head)
    length = (tl.load(ends + head) - first).to(tl.int32)

    best = tl.full([PADDED], float("-inf"), tl.float32)
    total = tl.zeros([PADDED], tl.float32)
    summed = tl.zeros([PADDED, COLUMNS], tl.float32)
    for start in range(part * PART, tl.minimum(part * PART + PART, length), BLOCK):
        tokens = start + tl.arange(0, BLOCK)
        exists = tokens < length
        loaded = inside[:, None] & exists[None, :]
        block = tl.load(keys + (first + tokens)[None, :] * key_stride + columns[:, None], mask=loaded, other=0.0)
        scores = tl.dot(queried, block, input_precision="tf32x3") * scaling
        if SOFTCAP > 0:
            scores = (2 * tl.sigmoid(2 * scores / SOFTCAP) - 1) * SOFTCAP
        visible = exists[None, :] & (tokens[None, :] <= length - queries + (rows % queries)[:, None])
        scores = tl.where(visible, scores, float("-inf"))

        weights, fade, best, total = online_softmax(scores, best, total)
        loaded = exists[:, None] & inside[None, :]
        block = tl.load(values + (first + tokens)[:, None] * value_stride + columns[None, :], mask=loaded, other=0.0)
        summed = summed * fade[:, None] + tl.dot(weights.to(block.dtype), block, input_precision="tf32x3")

    offsets = (head * tl.num_programs(1) + part) * of_head + rows
    has_entries = total > 0
    output = summed / tl.where(has_entries, total, 1.0)[:, None]
    tl.store(outputs + offsets[:, None] * WIDTH + columns[None, :], output, mask=of_rows)
    tl.store(totals + offsets, tl.where(has_entries, best + tl.log(total), float("-inf")), mask=rows < of_head)
