"""Importance: attention scores of observing queries to each entry, reduced, pooled and ranked.

Shapes: B batch, H query heads, K KV heads (query head h reads KV head h // (H / K)), q queries, S keys, N observed
entries, d head dimension. The order is that of LookaheadKV's implementation base (KVCache-Factory with KV-head
granularity): softmax over all keys, slice the observed ones, reduce over queries, reduce over the group, pool.
"""

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention.flex_attention import BlockMask

from keepsight.errors import UserError, as_options
from keepsight.runtime.attention import Softmax, later
from keepsight.runtime.layer import Counts, KeptLayer

ROWS_AT_ONCE = 128
"""Bounds the memory of one block of attention weights to B x H x 128 x S float32."""
STACKED = 2**20
"""Bounds the memory of layers that one operator works on."""
_OVER_QUERIES = ("mean", "max", "sum")
OverHeads = Annotated[str, Literal["mean", "max", "mean of layer"]]


@as_options
@dataclass(frozen=True)
class Reduce:
    """How the attention of many queries becomes one importance per KV head: reduced over queries, then over heads.

    `mean` over queries ranks as a sum does. `heads` reduces over the query heads of a KV head; `mean of layer` over all
    of the layer's query heads, so that its KV heads keep the same entries.
    """

    queries: Annotated[str, Literal["mean", "max"]] = "mean"
    heads: OverHeads = "mean"


@as_options
@dataclass(frozen=True)
class Pool:
    """Pooling over neighbouring entries with stride 1, so that an entry is kept with its neighbours.

    Attributes:
        kind: `max` pads with -inf; `avg` pads with zeros and always divides by `kernel` (SnapKV's two poolings).
        kernel: Odd number of entries; 1 turns pooling off.
    """

    kind: Annotated[str, Literal["max", "avg"]] = "max"
    kernel: int = 7

    def __post_init__(self) -> None:
        if type(self.kernel) is not int or not 1 <= self.kernel < 4096 or self.kernel % 2 == 0:
            expected = "odd and at least 1, or entries and scores shift, and below 4096"
            raise UserError(f"pool: kernel {self.kernel!r} must be {expected}")


NO_POOL = Pool(kernel=1)


def observed_attention(
    query: Tensor,
    key: Tensor,
    softmax: Softmax,
    length: int,
    *,
    key_mask: Tensor | None = None,
    query_mask: Tensor | None = None,
    ahead: Tensor | None = None,
    reduction: str = "mean",
) -> Tensor:
    """Attention of observing queries to each of the first entries, reduced over the queries.

    Args:
        query: [B, H, q, d], the queries of the last q of the S positions; causal among themselves but for `ahead`.
        key: [B, K, S, d].
        softmax: The layer's; the weights of its sinks go to no entry.
        length: N; later columns take part in the softmax and are dropped after it.
        key_mask: [B, S], or [B, 1 or K, S], bool, False for padding. Where absent, every key is real.
        query_mask: [B, q] bool, False for padding rows, which do not count; or float, a weight per query. [B, C, q]
            for C reductions, each over queries of its own.
        ahead: [B, q] int64, how many positions after its own each query sees, see `seen_ahead`; None where none does.
        reduction: Reduction over the queries: `mean` (LookaheadKV, section 2), `max` (SpecKV) or `sum` (H2O).

    Returns:
        [B, H, N] float32, or [B, C, H, N], differentiable. Queries are taken in blocks, so that no N x N tensor is
        made.
    """
    assert reduction in _OVER_QUERIES
    batch, _, rows, _ = query.shape
    # The masks are one for all layers, which may lie on several devices.
    key_mask = None if key_mask is None else key_mask.to(query.device)
    query_mask = None if query_mask is None else query_mask.to(query.device)
    last = None if ahead is None else torch.arange(rows, device=query.device) + ahead.to(query.device)  # each sees
    reduce_rows = functools.partial(torch.amax if reduction == "max" else torch.sum, dim=2)
    join, total = torch.maximum if reduction == "max" else torch.add, None
    for start in range(0, rows, ROWS_AT_ONCE):
        chosen = slice(start, min(start + ROWS_AT_ONCE, rows))
        # Without `ahead`, no query of the block sees what comes after the block.
        visible = key.shape[2] - (rows - chosen.stop if last is None else 0)
        hidden = None if last is None else torch.arange(rows, device=last.device) > last[:, chosen, None]
        seen_mask = None if key_mask is None else key_mask[..., :visible]
        weights = attention_weights(query[:, :, chosen], key[:, :, :visible], softmax, seen_mask, hidden)[..., :length]
        if query_mask is None:
            reduced = reduce_rows(weights)
        elif query_mask.dim() == 2:
            reduced = reduce_rows(weights * query_mask[:, None, chosen, None])
        else:
            each_set = query_mask[..., chosen].unbind(dim=1)
            reduced = torch.stack([reduce_rows(weights * each[:, None, :, None]) for each in each_set], dim=1)
        reduced = functional.pad(reduced, (0, length - reduced.shape[-1]))
        total = reduced if total is None else join(total, reduced)
    assert total is not None
    if reduction != "mean":
        return total
    counted = query_mask.sum(dim=-1) if query_mask is not None else query.new_full((batch,), rows, dtype=torch.long)
    return total / counted.clamp(min=1)[..., None, None]


def combine(of_window: Tensor, of_draft: Tensor, rows: int, real: Tensor, reduction: str) -> Tensor:
    """Combine the attention of a prompt's last queries and of a draft in a layer, [B, H, C] float32 each.

    Both are reduced by `reduction` (`mean` or `max`): over `rows` queries of the window, and over a draft of which
    `real` [B, T] bool is False for padding.
    """
    if reduction == "max":
        return torch.maximum(of_window, of_draft)
    drafted = real.sum(dim=1)[:, None, None].to(of_draft.device)
    return (of_window * rows + of_draft * drafted) / (rows + drafted)


def attention_weights(
    query: Tensor, key: Tensor, softmax: Softmax, key_mask: Tensor | None = None, hidden: Tensor | None = None
) -> Tensor:
    """Attention weights in float32; arguments as for `observed_attention`.

    The queries are those of the last q keys, unless `hidden` [B, q, m] bool says which of the last m keys each of them
    does not see.

    Returns:
        [B, H, q, S] float32, causal unless `hidden` is set.
    """
    batch, heads, rows, width = query.shape
    kv_heads, keys = key.shape[1], key.shape[2]
    grouped = query.reshape(batch, kv_heads, (heads // kv_heads) * rows, width)
    # In place, and masked only where something can be hidden: passes over the logits dominate the time.
    logits = softmax.logits(grouped, key).view(batch, kv_heads, -1, rows, keys)
    least = torch.finfo(torch.float32).min
    hidden = later(rows, query.device) if hidden is None else hidden[:, None, None]
    logits[..., keys - hidden.shape[-1] :].masked_fill_(hidden, least)
    if key_mask is not None:
        by_head = key_mask if key_mask.dim() == 3 else key_mask[:, None]
        logits.masked_fill_(~by_head[:, :, None, None], least)
    return softmax.normalised(logits).flatten(1, 2)


def recorded_queries(layer: KeptLayer, wanted: int) -> Any:
    """The recording of the last `wanted` tokens, or of as many as are left: see `Recorded`.

    Raises:
        UserError: no query was recorded, or all of their entries may have been evicted.
    """
    recorded = layer.recorded
    if recorded is None or recorded.queries is None or not recorded.queries.shape[2]:
        raise UserError(
            f"no query is left of the {wanted} that should observe: prefill with needs=method.needs(), and where an "
            "evicted cache is evicted again, let the method keep its window"
        )
    return recorded.last(wanted)


def seen_ahead(mask: Any, rows: int) -> Tensor | None:
    """How many later tokens each token sees: in Gemma 3 the tokens of an image see the whole image.

    `mask` is the attention mask of one pass: [B, 1, q, S], bool (True where a query may look) or added to the logits,
    or flex attention's; any other (None, the padding mask of flash attention) is causal. Returns [B, rows] int64, for
    the last `rows` tokens of the pass; None where no token sees a later one.
    """
    if rows < 2 or mask is None or len(mask.shape) != 4:
        return None
    if isinstance(mask, BlockMask):
        batch, _, queries, keys = mask.shape
        query, key = (torch.arange(count - rows, count, device=mask.kv_indices.device) for count in (queries, keys))
        every = torch.arange(batch, device=query.device)[:, None, None]
        seen = mask.mask_mod(every, query.new_zeros(()), query[:, None], key).expand(batch, rows, rows)
    else:
        seen = mask[:, 0, -rows:, -rows:]
    ahead: Tensor = (seen if seen.dtype == torch.bool else seen == 0).triu(1).sum(dim=-1)
    return ahead if bool(ahead.any()) else None


def reduce_group(importance: Tensor, kv_heads: int, reduction: str = "mean") -> Tensor:
    """[B, H, N] over query heads -> [B, K, N] over KV heads; `reduction` as `Reduce.heads`."""
    if reduction == "mean of layer":
        return importance.mean(dim=1, keepdim=True).expand(-1, kv_heads, -1)
    if importance.shape[1] == kv_heads:
        return importance
    grouped = importance.unflatten(1, (kv_heads, -1))
    return grouped.amax(dim=2) if reduction == "max" else grouped.mean(dim=2)


def stacked(layers: Sequence[Tensor]) -> Iterator[tuple[slice, Tensor]]:
    """Stack neighbouring layers of one shape and device to [l, ...], so that one operator serves all of them.

    Yields:
        The places of the layers, and the stack, not to be written to: of `STACKED` numbers at most, or a single layer.
    """
    start = 0
    while start < len(layers):
        first, stop = layers[start], start + 1
        most = start + max(STACKED // max(first.numel(), 1), 1)
        alike = first.shape, first.device
        while stop < min(most, len(layers)) and (layers[stop].shape, layers[stop].device) == alike:
            stop += 1
        # One layer, as after a long prompt, is not copied.
        yield slice(start, stop), first[None] if stop == start + 1 else torch.stack([*layers[start:stop]])
        start = stop


def top_mask(importance: Tensor, count: int | Counts) -> Tensor:
    """Mask [..., N] bool of the `count` most important entries along the last axis; ties go to the lowest index.

    `count` is at most N: one for all rows, or [...], one per row. Importance holds no NaN; `torch.topk` alone leaves
    ties undefined.
    """
    counts = np.asarray(count)
    most = int(counts.max())
    if most == 0:
        return torch.zeros_like(importance, dtype=torch.bool)
    best = importance.topk(most, dim=-1).values
    if counts.min() == most:
        wanted, threshold = most, best[..., -1:]
    else:
        ends = torch.from_numpy(np.stack([counts.clip(min=1) - 1, counts])[..., None])
        last, wanted = ends.to(importance.device, non_blocking=True)
        threshold = best.gather(-1, last)
    above = importance > threshold
    tied = importance == threshold
    return above | (tied & (tied.cumsum(dim=-1, dtype=torch.int32) <= wanted - above.sum(dim=-1, keepdim=True)))


def top_indices(importance: Tensor, count: int, *, signed: bool = False) -> Tensor:
    """Indices [..., count] int64 of the most important entries, in descending order; ties go to the lowest index.

    They are the entries of `top_mask`, of importance [..., N] float32 without NaN, found without waiting for the
    device, in few operators. If not `signed`, negative numbers come last, in any order.
    """
    bits = importance.view(torch.int32)  # the order of positive floats is that of their bits
    if signed:
        bits = (importance + 0.0).view(torch.int32)  # -0.0 becomes 0.0
        bits = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    places = _descending(bits.shape[-1], bits.device).expand_as(bits)
    order = torch.stack([places, bits], dim=-1).view(torch.int64)[..., 0]  # the low half breaks ties
    return order.topk(count, dim=-1).indices


@functools.lru_cache(maxsize=8)
@torch.inference_mode(False)  # a cached tensor may be used in any mode
def _descending(count: int, device: torch.device) -> Tensor:
    return torch.arange(count - 1, -1, -1, dtype=torch.int32, device=device)


def select_top(importance: Sequence[Tensor], counts: Counts) -> list[Tensor]:
    """For each layer, the mask [B, K, C] bool of the `counts` [L, B, K] top entries; ties go to the first index."""
    chosen: list[Tensor] = []
    for places, layers in stacked(importance):
        chosen += top_mask(layers, counts[places]).unbind()
    return chosen


def value_norms(values: Tensor, kv_heads: int) -> Tensor:
    """L2 norms [B, K, C] float32 of values [B, K, C, d]; of values [B, H, C, d] the mean over a KV head's group."""
    precise = torch.promote_types(values.dtype, torch.float32)
    return reduce_group(torch.linalg.vector_norm(values, dim=-1, dtype=precise).float(), kv_heads)
