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
STACKED_NUMBERS = 2**20
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
            raise UserError(f"pool: kernel {self.kernel!r} must be {expected}", field="kernel", code="range")


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
    batch, _, queries, _ = query.shape
    device = query.device
    # The masks are one for all layers, which may lie on several devices.
    key_mask = None if key_mask is None else key_mask.to(device)
    query_mask = None if query_mask is None else query_mask.to(device)
    last_seen = None if ahead is None else torch.arange(queries, device=device) + ahead.to(device)

    total: Tensor | None = None
    for start in range(0, queries, ROWS_AT_ONCE):
        stop = min(start + ROWS_AT_ONCE, queries)
        if last_seen is None:
            visible = key.shape[2] - (queries - stop)  # no query of the block sees what comes after the block
            unseen = None
        else:
            visible = key.shape[2]
            unseen = torch.arange(queries, device=device) > last_seen[:, start:stop, None]
        block_key_mask = None if key_mask is None else key_mask[..., :visible]
        block_query_mask = None if query_mask is None else query_mask[..., start:stop]

        weights = attention_weights(query[:, :, start:stop], key[:, :, :visible], softmax, block_key_mask, unseen)
        block_total = _over_queries(weights[..., :length], block_query_mask, reduction)
        block_total = functional.pad(block_total, (0, length - block_total.shape[-1]))
        if total is None:
            total = block_total
        elif reduction == "max":
            total = torch.maximum(total, block_total)
        else:
            total = total + block_total
    assert total is not None

    if reduction != "mean":
        return total
    counted = query.new_full((batch,), queries, dtype=torch.long)
    if query_mask is not None:
        counted = query_mask.sum(dim=-1)
    return total / counted.clamp(min=1)[..., None, None]


def _over_queries(weights: Tensor, query_mask: Tensor | None, reduction: str) -> Tensor:
    """The maximum or, for other reductions, the sum of weights [B, H, q, N] over the queries.

    [B, H, N]; [B, C, H, N] for a mask [B, C, q].
    """
    reduce_rows = torch.amax if reduction == "max" else torch.sum
    if query_mask is None:
        return reduce_rows(weights, dim=2)
    if query_mask.dim() == 2:
        return reduce_rows(weights * query_mask[:, None, :, None], dim=2)

    by_query_set = []
    for set_mask in query_mask.unbind(dim=1):
        by_query_set.append(reduce_rows(weights * set_mask[:, None, :, None], dim=2))
    return torch.stack(by_query_set, dim=1)


def combine(
    window_attention: Tensor, draft_attention: Tensor, window: int, draft_mask: Tensor, reduction: str
) -> Tensor:
    """Combine the attention of a prompt's last queries and of a draft in a layer, [B, H, C] float32 each.

    Both are reduced by `reduction` (`mean` or `max`): over the `window` last queries, and over a draft of which
    `draft_mask` [B, T] bool is False for padding.
    """
    if reduction == "max":
        return torch.maximum(window_attention, draft_attention)
    draft_queries = draft_mask.sum(dim=1)[:, None, None].to(draft_attention.device)
    total = window_attention * window + draft_attention * draft_queries
    return total / (window + draft_queries)


def attention_weights(
    query: Tensor, key: Tensor, softmax: Softmax, key_mask: Tensor | None = None, unseen: Tensor | None = None
) -> Tensor:
    """Attention weights in float32; arguments as for `observed_attention`.

    Without `unseen` the queries are those of the last q keys, and causal. It is [B, q, m] bool, True for those of the
    last m keys that a query does not see.

    Returns:
        [B, H, q, S] float32.
    """
    batch, heads, queries, width = query.shape
    kv_heads, keys = key.shape[1:3]
    grouped = query.reshape(batch, kv_heads, (heads // kv_heads) * queries, width)
    # In place, and masked only where something can be unseen: passes over the logits dominate the time.
    logits = softmax.logits(grouped, key).view(batch, kv_heads, -1, queries, keys)
    least = torch.finfo(torch.float32).min
    unseen = later(queries, query.device) if unseen is None else unseen[:, None, None]
    logits[..., keys - unseen.shape[-1] :].masked_fill_(unseen, least)
    if key_mask is not None:
        by_head = key_mask if key_mask.dim() == 3 else key_mask[:, None]
        logits.masked_fill_(~by_head[:, :, None, None], least)
    return softmax.normalised(logits, grouped).flatten(1, 2)


def recorded_queries(layer: KeptLayer, window: int) -> Any:
    """The recording of the last `window` tokens, or of as many as are left: see `Recorded`.

    Raises:
        UserError: no query was recorded, or all of their entries may have been evicted.
    """
    recorded = layer.recorded
    if recorded is None or recorded.queries is None or not recorded.queries.shape[2]:
        raise UserError(
            f"no query is left of the {window} that should observe: prefill with needs=method.needs(), and where an "
            "evicted cache is evicted again, let the method keep its window",
            field="window",
            code="state",
        )
    return recorded.last(window)


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
        device = mask.kv_indices.device
        query_indices = torch.arange(queries - rows, queries, device=device)[:, None]
        key_indices = torch.arange(keys - rows, keys, device=device)
        batch_indices = torch.arange(batch, device=device)[:, None, None]
        head_index = query_indices.new_zeros(())
        visible = mask.mask_mod(batch_indices, head_index, query_indices, key_indices).expand(batch, rows, rows)
    else:
        visible = mask[:, 0, -rows:, -rows:]
        if visible.dtype != torch.bool:
            visible = visible == 0
    ahead: Tensor = visible.triu(1).sum(dim=-1)
    return ahead if bool(ahead.any()) else None


def reduce_group(importance: Tensor, kv_heads: int, reduction: str = "mean") -> Tensor:
    """[B, H, N] over query heads -> [B, K, N] over KV heads; `reduction` as `Reduce.heads`."""
    if reduction == "mean of layer":
        return importance.mean(dim=1, keepdim=True).expand(-1, kv_heads, -1)
    if importance.shape[1] == kv_heads:
        return importance
    grouped = importance.unflatten(1, (kv_heads, -1))
    return grouped.amax(dim=2) if reduction == "max" else grouped.mean(dim=2)


def stack_layers(layers: Sequence[Tensor]) -> Iterator[tuple[slice, Tensor]]:
    """Stack neighbouring layers of one shape and device to [l, ...], so that one operator serves all of them.

    Yields:
        The indices of the layers, and the stack, not to be written to: of `STACKED_NUMBERS` numbers at most, or a
        single layer.
    """
    start = 0
    while start < len(layers):
        layer = layers[start]
        limit = min(start + max(STACKED_NUMBERS // max(layer.numel(), 1), 1), len(layers))
        stop = start + 1
        while stop < limit and layers[stop].shape == layer.shape and layers[stop].device == layer.device:
            stop += 1

        is_alone = stop == start + 1  # as after a long prompt; not copied
        stack = layer[None] if is_alone else torch.stack([*layers[start:stop]])
        yield slice(start, stop), stack
        start = stop


def top_mask(importance: Tensor, count: int | Counts) -> Tensor:
    """Mask [..., N] bool of the `count` most important entries along the last axis; ties go to the lowest index.

    `count` is at most N: one for all rows, or [...], one per row. Importance holds no NaN; `torch.topk` alone leaves
    ties undefined.
    """
    counts = np.asarray(count)
    largest = int(counts.max())
    if largest == 0:
        return torch.zeros_like(importance, dtype=torch.bool)

    best = importance.topk(largest, dim=-1).values
    row_counts: int | Tensor
    if counts.min() == largest:
        row_counts = largest
        threshold = best[..., -1:]
    else:
        # Both go to the device in one copy.
        ends_and_counts = torch.from_numpy(np.stack([counts.clip(min=1) - 1, counts])[..., None])
        ends, row_counts = ends_and_counts.to(importance.device, non_blocking=True)
        threshold = best.gather(-1, ends)

    above = importance > threshold
    tied = importance == threshold
    tied_to_keep = row_counts - above.sum(dim=-1, keepdim=True)
    return above | (tied & (tied.cumsum(dim=-1, dtype=torch.int32) <= tied_to_keep))


def in_chunks(scores: Tensor, chunk: int) -> Tensor:
    """Scores [n] by chunks of `chunk` neighbours, [c, chunk]; the last one is padded with -inf."""
    return functional.pad(scores, (0, -len(scores) % chunk), value=-torch.inf).view(-1, chunk)


def best_in_chunks(scores: Tensor, chunk: int, counts: Tensor) -> Tensor:
    """[n] bool: of scores [n] the `counts` [c] best of each chunk of `chunk` neighbours; ties go to the first ones."""
    ranks = in_chunks(scores, chunk).argsort(dim=1, descending=True, stable=True).argsort(dim=1)
    return (ranks < counts[:, None]).flatten()[: len(scores)]


def top_indices(importance: Tensor, count: int, *, signed: bool = False) -> Tensor:
    """Indices [..., count] int64 of the most important entries, in descending order; ties go to the lowest index.

    They are the entries of `top_mask`, of importance [..., N] float32 without NaN, found without waiting for the
    device, in few operators. If not `signed`, negative numbers come last, in any order.
    """
    bits = importance.view(torch.int32)  # the order of positive floats is that of their bits
    if signed:
        bits = (importance + 0.0).view(torch.int32)  # -0.0 becomes 0.0
        bits = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    tie_breakers = _descending(bits.shape[-1], bits.device).expand_as(bits)
    order = torch.stack([tie_breakers, bits], dim=-1).view(torch.int64)[..., 0]  # the low half breaks ties
    return order.topk(count, dim=-1).indices


@functools.lru_cache(maxsize=8)
@torch.inference_mode(False)  # a cached tensor may be used in any mode
def _descending(count: int, device: torch.device) -> Tensor:
    return torch.arange(count - 1, -1, -1, dtype=torch.int32, device=device)


def select_top(importance: Sequence[Tensor], counts: Counts) -> list[Tensor]:
    """For each layer, the mask [B, K, C] bool of the `counts` [L, B, K] top entries; ties go to the first index."""
    masks: list[Tensor] = []
    for indices, layers in stack_layers(importance):
        masks += top_mask(layers, counts[indices]).unbind()
    return masks


def value_norms(values: Tensor, kv_heads: int) -> Tensor:
    """L2 norms [B, K, C] float32 of values [B, K, C, d]; of values [B, H, C, d] the mean over a KV head's group."""
    precise = torch.promote_types(values.dtype, torch.float32)
    return reduce_group(torch.linalg.vector_norm(values, dim=-1, dtype=precise).float(), kv_heads)
