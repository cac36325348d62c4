"""Attention of many bfloat16 queries by matrix products, on CPUs where torch's attention kernel multiplies slowly.

The kernel of `scaled_dot_product_attention` multiplies bfloat16 blocks with MKL, which does not use AVX512_bf16 on
processors of AMD. oneDNN does, and behind `torch.bmm` it is four times as fast there. But it returns dot products in
bfloat16, which has 8 significant bits: a logit of 30 would be off by up to 0.06, its weight by 6 %. So a reference
close to the largest logit of each query is subtracted within the product, as one more channel of queries and keys. What
is rounded is then the distance from the reference, small for the entries that have weight. Softmax does not change when
all logits of a query are shifted.
"""

import functools
from typing import Any

import torch
from torch import Tensor

LEAST_QUERIES = 32
"""Fewer queries are left to the kernel: it is as fast for them."""
_SAMPLED = 16
"""The reference of a query is the largest logit of every so many keys, and of its own key."""
_BLOCK_BYTES = 2**23
"""Logits of so many queries are made at once that they stay in the processor's caches."""
_MULTIPLE = 16
"""What divides the queries of a block, and the fewest of them."""


@functools.cache
def _is_faster_here() -> bool:
    """Whether this CPU multiplies bfloat16 faster by oneDNN than by MKL: it has AVX512_bf16, and no AMX."""
    capabilities: dict[str, Any] = getattr(torch.cpu, "get_capabilities", dict)()  # not in torch 2.7
    return bool(capabilities.get("avx512_bf16")) and not capabilities.get("amx_bf16")


def is_faster(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Whether `attend_by_products` is faster than torch's kernel for queries [B, H, q, d] that need no gradients."""
    if not query.is_cpu or query.shape[2] < LEAST_QUERIES or torch.is_grad_enabled():
        return False
    if not (query.dtype == key.dtype == value.dtype == torch.bfloat16):
        return False
    mkldnn: Any = torch.backends.mkldnn
    return bool(mkldnn.enabled) and bool(mkldnn.is_available()) and _is_faster_here()


def attend_by_products(query: Tensor, key: Tensor, value: Tensor, scaling: float, mask: Tensor | None = None) -> Tensor:
    """Attention of the last q of S positions.

    Args:
        query: [B, H, q, d], bfloat16.
        key: [B, K, S, d].
        value: [B, K, S, v].
        scaling: Factor of the dot products.
        mask: [B or 1, 1, q, S] bool, True where a query may look; None where it looks at all positions up to its own.

    Returns:
        [B, q, H, v], contiguous. A query that may look nowhere gets the mean of all values.
    """
    batch, heads, queries, width = query.shape
    kv_heads, entries = key.shape[1:3]
    group = heads // kv_heads
    rows = _BLOCK_BYTES // (batch * heads * entries * query.element_size())
    rows = min(max(rows - rows % _MULTIPLE, _MULTIPLE), queries)

    scaled = query.unflatten(1, (kv_heads, group)) * scaling
    diagonal_logits = (scaled * key[:, :, None, entries - queries :]).sum(dim=-1, keepdim=True)
    channels = 2 - width % 2  # an even number of all channels is multiplied faster
    ones = key.new_zeros(channels)
    ones[0] = 1.0
    keys = torch.cat([key, ones.expand(*key.shape[:3], -1)], dim=-1).flatten(0, 1)
    values = value.flatten(0, 1)
    unseen = None if mask is None else ~mask[:, :, None]
    output = value.new_empty(batch, queries, heads, value.shape[3])
    buffer = query.new_empty(batch * heads * rows * entries)
    lowest = torch.finfo(query.dtype).min
    for start in range(0, queries, rows):
        end = min(start + rows, queries)
        count = end - start
        before = entries - queries + start
        seen = entries if mask is not None else before + count
        block = scaled[:, :, :, start:end]

        sampled_keys = keys[:, : seen if mask is not None else before + 1 : _SAMPLED, :width]
        sampled_logits = torch.bmm(_by_kv_head(block), sampled_keys.mT).view(*block.shape[:-1], -1)
        if unseen is not None:
            sampled_logits.masked_fill_(unseen[..., start:end, ::_SAMPLED], lowest)
        reference = torch.maximum(sampled_logits.amax(dim=-1, keepdim=True), diagonal_logits[:, :, :, start:end])
        shift = torch.cat([-reference, reference.new_zeros(*reference.shape[:-1], channels - 1)], dim=-1)

        shifted = _by_kv_head(torch.cat([block, shift], dim=-1))
        logits = buffer[: batch * heads * count * seen].view(batch * kv_heads, group * count, seen)
        torch.bmm(shifted, keys[:, :seen].mT, out=logits)
        by_query = logits.view(batch, kv_heads, group, count, seen)
        if unseen is not None:
            by_query.masked_fill_(unseen[..., start:end, :], lowest)
        else:
            later = torch.ones(count, count, dtype=torch.bool).triu_(1)
            by_query[..., before:].masked_fill_(later, lowest)
        weights = torch.softmax(logits, dim=-1, out=logits)  # in place: new memory of this size is slow
        attended = torch.bmm(weights, values[:, :seen]).view(batch, heads, count, -1)
        output[:, start:end] = attended.transpose(1, 2)
    return output


def _by_kv_head(queries: Tensor) -> Tensor:
    """Queries [B, K, G, q, d] -> [B x K, G x q, d]."""
    return queries.flatten(0, 1).flatten(1, 2)
