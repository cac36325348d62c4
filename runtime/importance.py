"""How important each prompt entry is to the queries that observe it.

Shapes: B batch, H query heads, K KV heads (query head h reads KV head h // (H / K)), q queries, S keys, N prompt
entries, d head dimension. The order is that of LookaheadKV's implementation base (KVCache-Factory with KV-head
granularity): softmax over all keys, slice the prompt's, reduce over queries, reduce over the group, pool.
"""

import torch
from torch import Tensor
from torch.nn import functional

_ROWS_AT_ONCE = 128  # bounds the memory of one block of attention weights to B x H x 128 x S float32


def observed_attention(
    query: Tensor,
    key: Tensor,
    scaling: float,
    prompt_length: int,
    *,
    key_mask: Tensor | None = None,
    query_mask: Tensor | None = None,
) -> Tensor:
    """Mean attention that observing queries pay to each prompt entry (LookaheadKV, section 2).

    Args:
        query: [B, H, q, d], the queries of the last q of the S positions; causal among themselves.
        key: [B, K, S, d].
        scaling: Factor of the dot products.
        prompt_length: N; columns from N on take part in the softmax and are dropped after it.
        key_mask: [B, S] bool, False for padding. Where absent, every key is real.
        query_mask: [B, q] bool, False for padding rows, which are left out of the mean.

    Returns:
        [B, H, N] float32, differentiable. A row sums to at most 1.
    """
    batch, _, rows, _ = query.shape
    total: Tensor | float = 0.0
    for start in range(0, rows, _ROWS_AT_ONCE):
        block = slice(start, min(start + _ROWS_AT_ONCE, rows))
        weights = _attention(query[:, :, block], key, scaling, rows - start, key_mask)[..., :prompt_length]
        if query_mask is not None:
            weights = weights * query_mask[:, None, block, None]
        total = total + weights.sum(dim=2)
    counted = query_mask.sum(dim=1) if query_mask is not None else query.new_full((batch,), rows, dtype=torch.long)
    return torch.as_tensor(total) / counted.clamp(min=1)[:, None, None]


def _attention(query: Tensor, key: Tensor, scaling: float, rows_left: int, key_mask: Tensor | None) -> Tensor:
    """Softmax in float32 of q queries, the first of which is `rows_left` from the end of the keys: [B, H, q, S]."""
    batch, heads, rows, width = query.shape
    kv_heads, keys = key.shape[1], key.shape[2]
    grouped = query.reshape(batch, kv_heads, (heads // kv_heads) * rows, width)
    logits = (grouped @ key.transpose(-1, -2)).view(batch, heads, rows, keys).float() * scaling
    last_visible = keys - rows_left + torch.arange(rows, device=query.device)
    visible = torch.arange(keys, device=query.device) <= last_visible[:, None]
    if key_mask is not None:
        visible = visible & key_mask[:, None, None]
    return logits.masked_fill(~visible, torch.finfo(torch.float32).min).softmax(dim=-1)


def reduce_group(importance: Tensor, kv_heads: int, reduction: str = "mean") -> Tensor:
    """[B, H, N] over query heads -> [B, K, N] over KV heads, by `mean` or `max` within each group."""
    grouped = importance.unflatten(1, (kv_heads, -1))
    return grouped.amax(dim=2) if reduction == "max" else grouped.mean(dim=2)


def pool(importance: Tensor, kernel: int, kind: str = "max") -> Tensor:
    """Pool [B, K, N] over neighbours with stride 1, so that an entry is kept together with what surrounds it.

    `max` pads with -inf; `avg` pads with zeros and always divides by `kernel` (SnapKV's two poolings).
    """
    if kernel == 1:
        return importance
    if kind == "max":
        return functional.max_pool1d(importance, kernel, stride=1, padding=kernel // 2)
    return functional.avg_pool1d(importance, kernel, stride=1, padding=kernel // 2)


def top_entries(importance: Tensor, budget: int) -> Tensor:
    """Indices of the `budget` largest values along the last axis, in ascending order; ties go to the lowest index.

    Args:
        importance: [..., N] float, without NaN.
        budget: At most N.

    Returns:
        [..., budget] int64. `torch.topk` alone leaves open which of several equal values it takes.
    """
    threshold = importance.topk(budget, dim=-1).values[..., -1:]
    above = importance > threshold
    tied = importance == threshold
    wanted = budget - above.sum(dim=-1, keepdim=True)
    kept = above | (tied & (tied.cumsum(dim=-1) <= wanted))
    return kept.nonzero()[:, -1].view(*importance.shape[:-1], budget)
