"""Attention to packed entries: by torch operators, or by a Triton kernel on a GPU (experimental, off by default)."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from keepsight.experimental import is_on
from keepsight.runtime.attention import Softmax, later
from keepsight.runtime.offload import FetchedEntries
from keepsight.runtime.quantized.packing import PackedEntries
from keepsight.runtime.ragged_kernel import HAS_TRITON, can_compile, merged, with_sinks

if HAS_TRITON:
    import triton
    from triton import language as tl

    from keepsight.runtime.ragged_kernel import online_softmax

PART = 512
"""Entries of a program."""
BLOCK = 64
"""Entries that a program unpacks at a time; it divides `PART`."""
STAGES = 1
"""Blocks that are loaded ahead: one, as what is loaded is unpacked in registers and not kept in shared memory."""


def usable(query: Tensor) -> bool:
    """Whether the kernel is on, and can be compiled for the device of a query."""
    return query.is_cuda and can_compile() and is_on("kernel")


def attend_packed(
    query: Tensor,
    entries: PackedEntries,
    softmax: Softmax,
    fetched: FetchedEntries | None = None,
    scored: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Causal attention of queries [B, H, q, d], the last of T tokens; without the kernel, entries are unpacked at once.

    The `fetched` entries are read in full precision in place of the packed ones. Returns the output [B, q, H, d], and
    the attention of the last query to the first n = `scored` entries, at least the fetched ones and by default the
    packed ones, [B, K, H / K, n] float32.
    """
    if scored is None:
        scored = entries.packed_length
    if usable(query):
        return attend_in_kernel(query, entries, softmax, fetched, scored)

    batch, heads, rows, width = query.shape
    keys = entries.keys()
    values = entries.values()
    if fetched is not None:
        index = fetched.indices[..., None].expand(-1, -1, -1, width)
        # Under autocast keys are float32 and values are not; on the CPU both are float32.
        keys.scatter_(2, index, fetched.keys.to(keys.dtype))
        values.scatter_(2, index, fetched.values.to(values.dtype))

    with torch.autocast(query.device.type, enabled=False):  # it would round the logits
        logits = softmax.logits(query.reshape(batch, keys.shape[1], -1, width).float(), keys.float())
        logits = logits.unflatten(2, (-1, rows))
        if rows > 1:
            logits[..., -rows:].masked_fill_(later(rows, query.device), -torch.inf)
        weights = softmax.normalised(logits)
        output = (weights.flatten(2, 3).to(values.dtype) @ values).view(batch, heads, rows, width)
    return output.transpose(1, 2).contiguous(), weights[..., -1, :scored]


def attend_in_kernel(
    query: Tensor, entries: PackedEntries, softmax: Softmax, fetched: FetchedEntries | None, scored: int
) -> tuple[Tensor, Tensor]:
    """`attend_packed` on a GPU (experimental)."""
    batch, heads, rows, width = query.shape
    kv_heads = entries.recent_keys.shape[1]
    grouped = query.reshape(batch, kv_heads, -1, width).contiguous()
    grouped_rows = grouped.shape[2]
    parts = -(-entries.length // PART)

    outputs = query.new_empty(batch, kv_heads, parts, grouped_rows, width, dtype=torch.float32)
    totals = outputs.new_empty(outputs.shape[:4])
    logits = outputs.new_empty(batch, kv_heads, heads // kv_heads, scored)
    with torch.cuda.device_of(query):
        _compiled()[batch * kv_heads, parts](
            grouped,
            *entries.packed_keys,
            *entries.packed_values,
            entries.recent_keys.contiguous(),
            entries.recent_values.contiguous(),
            *_fetched_arguments(fetched, entries),
            outputs,
            totals,
            logits,
            entries.length,
            entries.packed_length,
            entries.packed_values.scale.shape[2],
            scored,
            kv_heads,
            *entries.packed_keys.scale.stride()[:2],
            *entries.packed_values.scale.stride()[:2],
            softmax.scaling,
            SOFTCAP=softmax.softcap or 0.0,
            BITS=entries.quantizer.bits,
            GROUP=entries.quantizer.group,
            WIDTH=width,
            COLUMNS=max(16, triton.next_power_of_2(width)),
            ROWS=grouped_rows,
            PADDED=max(16, triton.next_power_of_2(grouped_rows)),
            QUERIES=rows,
            PART=PART,
            BLOCK=BLOCK,
            FETCHED=fetched is not None,
            num_stages=STAGES,
        )

    totals = with_sinks(totals, softmax, rows)
    last_totals = totals.unflatten(3, (-1, rows))[..., -1].logsumexp(dim=2)
    return merged(outputs, totals, query), (logits - last_totals[..., None]).exp()


def _fetched_arguments(
    fetched: FetchedEntries | None, entries: PackedEntries
) -> tuple[Tensor, Tensor, Tensor, int, int]:
    """The kernel's arguments `fetched_keys` to `fetched_stride`; tensors that it does not read for no entries.

    Keys and values are [B, K, k, d]. The slots [B, K, n] int32 say where among these k a packed entry is, or -1.
    """
    if fetched is None:
        return entries.recent_keys, entries.recent_values, entries.recent_keys, 0, 0

    indices, keys, values = fetched
    count = indices.shape[2]
    slots = indices.new_full((*indices.shape[:2], entries.packed_length), -1, dtype=torch.int32)
    slots.scatter_(2, indices, torch.arange(count, dtype=torch.int32, device=indices.device).expand_as(indices))

    # The kernel knows one stride: that from an entry to the next, heads and rows behind each other.
    if keys.stride()[1:] != values.stride()[1:] or keys.stride(1) != count * keys.stride(2):
        keys = keys.contiguous()
        values = values.contiguous()
    return keys, values, slots, count, keys.stride(2)


@functools.cache
def _compiled() -> Any:
    # Triton compiles a kernel of its own for integers that 16 divides. These change with each token, so it would
    # compile in the middle of an answer.
    return triton.jit(do_not_specialize=["length", "packed_keys", "packed_values", "scored"])(attend_part)


def attend_part(  # type: ignore[no-untyped-def]
    query,
    key_codes,
    key_scale,
    key_zero,
    value_codes,
    value_scale,
    value_zero,
    recent_keys,
    recent_values,
    fetched_keys,
    fetched_values,
    slots,
    fetched,
    fetched_stride,
    outputs,
    totals,
    logits,
    length,
    packed_keys,
    packed_values,
    scored,
    kv_heads,
    key_row,
    key_head,
    value_row,
    value_head,
    scaling,
    SOFTCAP: tl.constexpr,
    BITS: tl.constexpr,
    GROUP: tl.constexpr,
    WIDTH: tl.constexpr,
    COLUMNS: tl.constexpr,
    ROWS: tl.constexpr,
    PADDED: tl.constexpr,
    QUERIES: tl.constexpr,
    PART: tl.constexpr,
    BLOCK: tl.constexpr,
    FETCHED: tl.constexpr,
):
    """Attention to one part of a KV head's entries: output, logarithm of the denominator, logits of the last query."""
    head = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    group_bytes: tl.constexpr = GROUP * BITS // 8
    rows = tl.arange(0, PADDED)
    columns = tl.arange(0, COLUMNS)
    in_width = columns < WIDTH
    is_query = rows < ROWS
    query_mask = is_query[:, None] & in_width[None, :]
    queries = tl.load(query + (head * ROWS + rows[:, None]) * WIDTH + columns[None, :], mask=query_mask, other=0.0)
    first_key_group = head // kv_heads * key_row + head % kv_heads * key_head
    first_value_group = head // kv_heads * value_row + head % kv_heads * value_head

    best = tl.full([PADDED], float("-inf"), tl.float32)
    total = tl.zeros([PADDED], tl.float32)
    summed = tl.zeros([PADDED, COLUMNS], tl.float32)
    for start in range(part * PART, tl.minimum(part * PART + PART, length), BLOCK):
        tokens = start + tl.arange(0, BLOCK)
        exists = tokens < length

        # Keys [d, BLOCK]: a group is one channel of GROUP tokens.
        packed = tokens < packed_keys
        packed_mask = in_width[:, None] & packed[None, :]
        groups = first_key_group + (tokens // GROUP)[None, :] * WIDTH + columns[:, None]
        bit = tokens % GROUP * BITS
        codes = tl.load(key_codes + groups * group_bytes + (bit // 8)[None, :], mask=packed_mask, other=0).to(tl.int32)
        codes = (codes >> (bit % 8)[None, :]) & (2**BITS - 1)
        scale = tl.load(key_scale + groups, mask=packed_mask, other=0.0).to(tl.float32)
        zero = tl.load(key_zero + groups, mask=packed_mask, other=0.0).to(tl.float32)
        keys = zero + codes.to(tl.float32) * scale
        numbers = (head * (length - packed_keys) + tokens - packed_keys)[None, :] * WIDTH + columns[:, None]
        recent = tl.load(recent_keys + numbers, mask=in_width[:, None] & (exists & ~packed)[None, :], other=0.0)
        keys = tl.where(packed[None, :], keys.to(queries.dtype), recent)

        if FETCHED:
            slot = tl.load(slots + head * packed_keys + tokens, mask=packed, other=-1)
            fetched_rows = (head * fetched + slot) * fetched_stride
            fetched_mask = in_width[:, None] & (slot >= 0)[None, :]
            full_keys = tl.load(fetched_keys + fetched_rows[None, :] + columns[:, None], fetched_mask, other=0.0)
            keys = tl.where(fetched_mask, full_keys, keys)

        scores = tl.dot(queries, keys, input_precision="tf32x3") * scaling
        if SOFTCAP > 0:
            scores = (2 * tl.sigmoid(2 * scores / SOFTCAP) - 1) * SOFTCAP
        visible = exists[None, :] & (tokens[None, :] <= length - QUERIES + (rows % QUERIES)[:, None])
        scores = tl.where(visible, scores, float("-inf"))
        is_last_query = is_query & (rows % QUERIES == QUERIES - 1)
        logit_places = (head * (ROWS // QUERIES) + rows // QUERIES)[:, None] * scored + tokens[None, :]
        tl.store(logits + logit_places, scores, mask=is_last_query[:, None] & (tokens < scored)[None, :])

        weights, fade, best, total = online_softmax(scores, best, total)

        # Values [BLOCK, d]: a group is GROUP channels of one token.
        packed = tokens < packed_values
        packed_mask = packed[:, None] & in_width[None, :]
        groups = first_value_group + tokens[:, None] * (WIDTH // GROUP) + (columns // GROUP)[None, :]
        bit = columns % GROUP * BITS
        codes = tl.load(value_codes + groups * group_bytes + (bit // 8)[None, :], mask=packed_mask, other=0)
        codes = (codes.to(tl.int32) >> (bit % 8)[None, :]) & (2**BITS - 1)
        scale = tl.load(value_scale + groups, mask=packed_mask, other=0.0).to(tl.float32)
        zero = tl.load(value_zero + groups, mask=packed_mask, other=0.0).to(tl.float32)
        values = zero + codes.to(tl.float32) * scale
        numbers = (head * (length - packed_values) + tokens - packed_values)[:, None] * WIDTH + columns[None, :]
        recent = tl.load(recent_values + numbers, mask=(exists & ~packed)[:, None] & in_width[None, :], other=0.0)
        values = tl.where(packed[:, None], values.to(queries.dtype), recent)

        if FETCHED:
            fetched_mask = (slot >= 0)[:, None] & in_width[None, :]
            full_values = tl.load(fetched_values + fetched_rows[:, None] + columns[None, :], fetched_mask, other=0.0)
            values = tl.where(fetched_mask, full_values, values)

        summed = summed * fade[:, None] + tl.dot(weights.to(values.dtype), values, input_precision="tf32x3")

    out_rows = (head * tl.num_programs(1) + part) * ROWS + rows
    sees_entries = total > 0
    output = summed / tl.where(sees_entries, total, 1.0)[:, None]
    tl.store(outputs + out_rows[:, None] * WIDTH + columns[None, :], output, mask=query_mask)
    tl.store(totals + out_rows, tl.where(sees_entries, best + tl.log(total), float("-inf")), mask=is_query)
