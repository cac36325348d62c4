"""Observers score a state's entries. Many run a second, short pass whose queries attend to the cache.

Tokens after a prompt cannot change the prompt's keys and values (causality), so any number of observers can run after
one prefill, and none of them changes the cache.

Several rows of observers may share the entries of one row, each under a mask of its own. They then attend
side by side, as further queries of that row: [R, H, q, d] is taken as [B, H, (R / B) x q, d], and no entry is repeated.
"""

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel
from transformers.cache_utils import Cache, DynamicLayer, LinearAttentionLayer
from typing_extensions import override

from keepsight.errors import Positive, UserError
from keepsight.models.decoder import decoder_of
from keepsight.runtime import registry
from keepsight.runtime.attention import OwnAttention, Softmax, later, run
from keepsight.runtime.importance import (
    ROWS_AT_ONCE,
    Reduce,
    combine,
    observed_attention,
    recorded_queries,
    reduce_group,
)
from keepsight.runtime.layer import KeptLayer, LayerEntries
from keepsight.runtime.state import Needs, State, full_layers, with_full_layers, with_observers
from keepsight.runtime.tail import Tail

RECOMPUTED = 2**24
"""Bytes of a layer's attention weights above which they are recomputed in the backward pass."""


class Observer(ABC):
    """Scorer of a state's entries. Observers hold no state and change none.

    Where an attribute `budget`, `sinks` or `window` is None, the observer takes that of its method.

    Attributes:
        signed: Whether scores can be negative, and so cannot be multiplied by weights; None where that is not known.
    """

    signed: bool | None = None

    @property
    def joins_prefill(self) -> bool:
        """Whether the observers are known before a prompt is read, and can be read with it; see `tail`."""
        return False

    @abstractmethod
    def __call__(self, model: PreTrainedModel, state: State, reduce: Reduce) -> list[Tensor]:
        """Score each entry.

        Args:
            model: The base model.
            state: A prompt that it has read, before or after eviction.
            reduce: Reduction over the observing queries and over the query heads of a KV head; unused by scorers
                without queries.

        Returns:
            For each layer, [B, K, C] float32 by KV head: higher is more important. Scores by query head, [B, H, C], are
            reduced by the caller, but then those of all layers take memory at once.
        """

    def needs(self) -> Needs:
        """What the prefill has to record for this observer: the queries of its window, where it has one."""
        return Needs(window=getattr(self, "window", 0) or 0)

    def positions(self) -> int:
        """Maximum number of positions after the prompt that the observing tokens take."""
        return 0

    def tail(self, model: PreTrainedModel, tokens: Tensor, mask: Tensor | None, reduce: Reduce) -> Tail | None:
        """The observers, to be read in one pass with a prompt; None where they are not known before it is read.

        `tokens` [B, N] int64 are the prompts, `mask` [B, N] is 0 for their padding, and `reduce` is as in a call. What
        the tail scores is what a call returns.
        """
        return None

    @property
    def adapter_digest(self) -> str | None:
        """Digest of the lookahead adapter that it observes with; None without one."""
        return None


class LayerObserver(Observer):
    """Scorer that needs no more than a layer's own entries and what was recorded when these were read.

    Entries can be evicted from a layer as soon as it is read.
    """

    @abstractmethod
    def score(self, layer: KeptLayer, reduction: str) -> Tensor:
        """Score each entry of a layer: [B, H, C] or [B, K, C] float32, reduced over the queries by `mean` or `max`."""

    @override
    def __call__(self, model: PreTrainedModel, state: State, reduce: Reduce) -> list[Tensor]:
        return [reduce_group(self.score(layer, reduce.queries), layer.kv_heads, reduce.heads) for layer in state.layers]


@registry.observer("prompt_window")
@dataclass(frozen=True)
class PromptWindow(LayerObserver):
    """The last tokens observe (SnapKV, arXiv 2404.14469, section 4), by queries recorded when they were read.

    Attributes:
        window: Number of observing tokens, at most as many as were recorded; None for the method's window.
    """

    window: Positive | None = None
    signed = False

    @override
    def score(self, layer: KeptLayer, reduction: str) -> Tensor:
        assert self.window is not None
        recorded, (keys, _, real) = recorded_queries(layer, self.window), layer.attended()
        return observed_attention(
            recorded.queries,
            keys,
            recorded.softmax,
            keys.shape[2],
            key_mask=real,
            query_mask=recorded.query_mask,
            ahead=recorded.ahead,
            reduction=reduction,
        )


OfLayer = Callable[[int, Tensor], Tensor]
"""Reduces the attention [B, H, N] of a layer, which has this index among the layers with full attention."""


def all_heads(place: int, attention: Tensor) -> Tensor:
    """An `OfLayer`: the attention as it is."""
    return attention


def look_back(
    model: PreTrainedModel,
    state: State,
    embeddings: Tensor,
    *,
    reduce: Reduce,
    observer_mask: Tensor | None = None,
    combined: OfLayer = all_heads,
    stops: bool = True,
    start: int = 0,
) -> list[Tensor]:
    """Let observers look back from the position of a state's next token, or `start` tokens after it; see `observe`.

    Each layer's attention is reduced to KV heads when it is computed, after `combined`, which adds that of other
    observers: [B, K, N] float32 for each layer. A `UserError` if `start` is before the prompt, or is not 0 though
    entries were evicted before or a layer is bounded.
    """
    rope_lengths = state.rope_lengths + start + embeddings.shape[1]
    state = with_observers(model, state, start + embeddings.shape[1])
    return _look_back(
        model,
        state,
        embeddings,
        rope_lengths,
        reduce=reduce,
        observer_mask=observer_mask,
        combined=combined,
        stops=stops,
        start=start,
    )


def _look_back(
    model: PreTrainedModel,
    state: State,
    embeddings: Tensor,
    rope_lengths: Tensor,
    *,
    reduce: Reduce,
    observer_mask: Tensor | None = None,
    combined: OfLayer = all_heads,
    stops: bool = True,
    start: int = 0,
) -> list[Tensor]:
    """`look_back`, where a text of `rope_lengths` [B] tokens has the RoPE of the state's keys."""
    kv_heads, hidden = [layer.kv_heads for layer in state.layers], max(-start, 0)
    seen = _before(state, start) if start else state

    def keep(place: int, observed: Tensor) -> Tensor:
        attention = functional.pad(observed, (0, hidden))
        return reduce_group(combined(place, attention), kv_heads[place], reduce.heads)

    return observe(
        model,
        seen.cache,
        seen.tokens_mask,
        embeddings,
        first=seen.lengths + seen.rope_offset + max(start, 0),
        observer_mask=observer_mask,
        reduction=reduce.queries,
        keep=keep,
        stops=stops,
        rope_lengths=rope_lengths,
    )


def _before(state: State, start: int) -> State:
    """A copy of a state as it was `-start` tokens ago, or as it is where `start` is not below 0."""
    width = state.tokens.shape[1]
    if len(state.layers) < len(state.cache.layers) or any(layer.keys.shape[2] != width for layer in state.layers):
        raise UserError(
            f"draft tokens: start {start} needs full attention in all layers and a prompt from which nothing was "
            "evicted yet; leave it at 0"
        )
    if -start >= int(state.lengths.min()):
        raise UserError(f"draft tokens: start {start} is before a prompt of {int(state.lengths.min())} tokens")
    return state.copy().crop(max(-start, 0), state.logits)


def look_back_with_window(
    model: PreTrainedModel,
    state: State,
    embeddings: Tensor,
    window: int,
    *,
    reduce: Reduce,
    observer_mask: Tensor | None = None,
    start: int = 0,
) -> list[Tensor]:
    """`look_back`, where the last `window` tokens that the state has read observe too; 0 for none."""
    rope_lengths = state.rope_lengths + start + embeddings.shape[1]
    state = with_observers(model, state, start + embeddings.shape[1])
    look = functools.partial(
        _look_back, model, state, embeddings, rope_lengths, reduce=reduce, observer_mask=observer_mask, start=start
    )
    if not window:
        return look()
    layers = state.layers
    rows = min((recorded_queries(each, window).queries.shape[2] for each in layers), default=0)
    real = observer_mask if observer_mask is not None else embeddings.new_ones(embeddings.shape[:2], dtype=torch.bool)

    def with_window(place: int, observed: Tensor) -> Tensor:
        of_window = PromptWindow(rows).score(layers[place], reduce.queries)
        return combine(of_window, observed, rows, real, reduce.queries)

    return look(combined=with_window)


def observe(
    model: PreTrainedModel,
    cache: Cache,
    mask: Tensor | None,
    embeddings: Tensor,
    *,
    first: Tensor | None = None,
    observer_mask: Tensor | None = None,
    reduction: str = "mean",
    keep: OfLayer = all_heads,
    stops: bool = False,
    rope_lengths: Tensor | None = None,
) -> list[Tensor]:
    """Let observers look back at a cache.

    Args:
        model: The model that filled the cache, with the observers' adapter, if any, switched on.
        cache: Cache of N entries per head, from M >= N tokens; it is not changed.
        mask: [R, M] bool, False for left padding among the tokens; None when no row is padded. Where all layers have
            full attention, R may be a multiple of the cache's B rows: R / B neighbouring rows of observers then share
            one, and a row's mask may hide any entries.
        embeddings: [R, n, hidden], the observers' input embeddings.
        first: [R] int64, the first observer's position; the number of real tokens by default.
        observer_mask: [R, n] bool, False for padding on the right of the observers.
        reduction: Reduction over the observers: `mean` or `max`.
        keep: Reduces a layer's attention as soon as it is computed.
        stops: Whether the pass may end in the middle of the model, once the last layer's entries are scored: forward
            hooks around its modules are then not called.
        rope_lengths: [R] int64, the length of the text whose RoPE the cache's keys have, where it depends on one.

    Returns:
        For each layer with full attention, `keep` of the observers' attention [R, H, N] float32. Gradients flow
        to `embeddings` and to the model's trainable parameters; without gradients the result may be inference tensors.
    """
    if first is None:
        seen = torch.full((len(embeddings),), cache.get_seq_length(), device=embeddings.device)
        first = seen if mask is None else mask.sum(dim=1)
    stored = full_layers(cache)
    kinds = [ObservedLayer] * len(stored)
    if stops:
        kinds[-1:] = [LastObservedLayer] * len(kinds[-1:])
    observed = [
        kind(layer, mask, observer_mask, reduction, functools.partial(keep, place))
        for place, (kind, layer) in enumerate(zip(kinds, stored, strict=True))
    ]
    with torch.inference_mode(not torch.is_grad_enabled()), suppress(AllObserved):  # saves 3 % of the time on a CPU
        read_with(model, cache, observed, mask, embeddings, first, rope_lengths)
    return [layer.taken() for layer in observed]


def read_with(
    model: PreTrainedModel,
    cache: Cache,
    layers: Sequence[Any],
    mask: Tensor | None,
    embeddings: Tensor,
    first: Tensor,
    rope_lengths: Tensor | None = None,
) -> None:
    """Read observers [R, n, hidden] from positions `first` [R] on, with `layers` in place of those with full attention.

    `mask` and `rope_lengths` are as in `observe`.
    """
    count = embeddings.shape[1]
    # Layers with full attention know their padding; it is the bounded ones that need a mask.
    padded = None if mask is None or len(layers) == len(cache.layers) else functional.pad(mask, (0, count), value=True)
    run(
        decoder_of(model),
        as_observed(cache, layers),
        inputs_embeds=embeddings,
        position_ids=first[:, None] + torch.arange(count, device=embeddings.device),
        attention_mask=padded,
        rope_lengths=rope_lengths,
    )


def as_observed(cache: Cache, layers: Any) -> Cache:
    """A cache with other layers in place of those with full attention; observers change no recurrent state of it."""
    copied = with_full_layers(cache, layers).layers
    return Cache(layers=[ObservedRecurrence(one) if isinstance(one, LinearAttentionLayer) else one for one in copied])


class ObservedRecurrence(LinearAttentionLayer):
    """A recurrent state for observers: they advance it, but it is never stored, so that gradients can flow.

    Args:
        layer: The layer that it belongs to.
    """

    def __init__(self, layer: LinearAttentionLayer) -> None:
        vars(self).update(vars(layer))

    @override
    def update_conv_state(
        self, conv_states: Tensor, state_idx: int = 0, conv_kernel_size: int | None = None, **kwargs: object
    ) -> Tensor:
        before = self.conv_states[state_idx]
        assert before is not None
        return torch.cat([before, conv_states], dim=-1)

    @override
    def update_recurrent_state(self, recurrent_states: Tensor, state_idx: int = 0, **kwargs: object) -> Tensor:
        return recurrent_states


class ViewedLayer(OwnAttention, DynamicLayer):
    """Stored entries to which new tokens attend, and to each other, without being appended.

    Args:
        layer: The layer that stores the entries, or its entries.
        mask: [R, M] bool, False for left padding among the tokens that a layer from which nothing was evicted has
            stored; None for none.
    """

    keys: Tensor
    values: Tensor

    def __init__(self, layer: KeptLayer | LayerEntries, mask: Tensor | None = None) -> None:
        super().__init__()
        stored = layer.attended() if isinstance(layer, KeptLayer) else layer
        self.lazy_initialization(stored.keys, stored.values)
        self.keys, self.values = stored.keys, stored.values
        self.real = stored.real
        unmarked = mask is not None and (stored.real is None or len(mask) != len(stored.keys))  # rows share entries
        if mask is not None and unmarked and stored.keys.shape[2] >= mask.shape[1]:
            self.real = mask[:, None].to(stored.keys.device)


class ObservedLayer(ViewedLayer):
    """A layer to which observers attend. For `layer` and `mask` see `ViewedLayer`.

    `observer_mask` [R, n] bool is False where an observer is padding, which does not count. `keep` gets the attention
    [R, H, N] float32, reduced over the observers by `mean` or `max`. Large attention weights are not kept for the
    backward pass: they would take 2 GiB in all after 16K tokens, for 32 layers and heads and as many observers.
    """

    attention: Tensor | None = None
    is_taken = False

    def __init__(
        self,
        layer: KeptLayer | LayerEntries,
        mask: Tensor | None,
        observer_mask: Tensor | None,
        reduction: str,
        keep: Callable[[Tensor], Tensor],
    ) -> None:
        super().__init__(layer, mask)
        self.observer_mask, self.reduction, self.keep = observer_mask, reduction, keep

    def taken(self) -> Tensor:
        """The kept attention. Later calls of `attend`, when the backward pass recomputes the layer, keep none."""
        kept, self.attention = self.attention, None
        self.is_taken = True
        assert kept is not None
        return kept

    @override
    def attend(self, query: Tensor, key: Tensor, value: Tensor, softmax: Softmax) -> Tensor:
        look = functools.partial(self._look, softmax=softmax)
        weights = query.shape[:3].numel() * self.keys.shape[2] * torch.float32.itemsize
        if torch.is_grad_enabled() and weights >= RECOMPUTED:
            attention, output = checkpoint(look, query, key, value, use_reentrant=False, preserve_rng_state=False)
        else:
            attention, output = look(query, key, value)
        kept = self.keep(attention)  # also when recomputed: autograd must save the same tensors
        if not self.is_taken:
            self.attention = kept
        return output

    def _look(self, query: Tensor, key: Tensor, value: Tensor, softmax: Softmax) -> tuple[Tensor, Tensor]:
        """The attention to the stored entries, reduced over the observers, and the output [R, q, H, d]."""
        count, mask = query.shape[2], self.observer_mask
        if count <= ROWS_AT_ONCE:
            total, output = self._look_at_once(query, key, value, softmax, mask, self.reduction)
            if mask is None:
                return total, output
        else:
            blocks, reduction = [], "sum" if self.reduction == "mean" else self.reduction
            for start in range(0, count, ROWS_AT_ONCE):
                end = min(start + ROWS_AT_ONCE, count)
                own = key[:, :, :end], value[:, :, :end]
                of_block = None if mask is None else mask[:, start:end]
                blocks.append(self._look_at_once(query[:, :, start:end], *own, softmax, of_block, reduction))
            join = torch.maximum if self.reduction == "max" else torch.add
            total = functools.reduce(join, (each for each, _ in blocks))
            output = torch.cat([each for _, each in blocks], dim=1)
        if self.reduction == "mean" and mask is None:
            total = total / count
        elif self.reduction == "mean" and mask is not None:
            total = total / mask.sum(dim=1)[:, None, None].clamp(min=1).to(total.device)
        return total, output

    def _look_at_once(
        self, query: Tensor, key: Tensor, value: Tensor, softmax: Softmax, mask: Tensor | None, reduction: str
    ) -> tuple[Tensor, Tensor]:
        """As `_look`, for the last q of S observers, whose keys and values [R, K, S, d] these are."""
        rows, sharing, stored = query.shape[2], len(query) // len(self.keys), self.keys.shape[2]
        weights = _weights(query, self.keys, key, softmax, self.real)
        total = _reduced(weights[..., :stored], rows, sharing, mask, reduction)
        weights = weights.to(value.dtype)
        return total, _output(weights[..., :stored], weights[..., stored:], self.values, value, rows, sharing)


class AllObserved(Exception):
    """Ends a forward pass early: all layers have been observed."""


class LastObservedLayer(ObservedLayer):
    """The last layer that observers attend to; the forward pass ends in it."""

    @override
    def attend(self, query: Tensor, key: Tensor, value: Tensor, softmax: Softmax) -> Tensor:
        super().attend(query, key, value, softmax)
        raise AllObserved


def _weights(query: Tensor, keys: Tensor, own_keys: Tensor, softmax: Softmax, real: Tensor | None) -> Tensor:
    """Attention weights [B, K, (H / K) x (R / B) x q, N + S] float32 of observers, to stored entries and to each other.

    Queries [R, H, q, d] are those of the last q of S observers, causal among themselves; `own_keys` [R, K, S, d] are
    the keys of these. R / B neighbouring rows share a row of the entries' keys [B, K, N, d]; `real` [R, 1 or K, N] bool
    is False where a row does not see an entry.
    """
    sharing, (heads, rows), kv_heads = len(query) // len(keys), query.shape[1:3], keys.shape[1]
    grouped = query.reshape(len(query), kv_heads, -1, query.shape[3])
    count = keys.shape[2]
    hidden = None if real is None else ~real[:, :, None]
    if torch.is_grad_enabled() or sharing > 1 or query.element_size() == 2:
        stored = softmax.logits(_side_by_side(grouped, sharing, rows), keys)
        own = softmax.logits(grouped, own_keys)
        hidden = None if hidden is None else _side_by_side(hidden, sharing, 1)[:, :, None, :, None]
        _hide(stored.unflatten(2, (-1, sharing, rows)), own, rows, hidden)
        logits = torch.cat([stored, _side_by_side(own, sharing, rows)], dim=-1)
    else:
        joined = grouped.new_empty(*grouped.shape[:3], count + own_keys.shape[2])
        for products, each in zip(joined.flatten(0, 1).tensor_split([count], dim=-1), (keys, own_keys), strict=True):
            factors = grouped.flatten(0, 1), each.flatten(0, 1).mT.to(joined.dtype)
            torch.baddbmm(products, *factors, beta=0, alpha=softmax.scaling, out=products)
        logits = softmax.capped(joined.float())
        _hide(logits[..., :count], logits[..., count:], rows, hidden)
    return softmax.normalised(logits.unflatten(2, (heads // kv_heads, -1))).flatten(2, 3)


def _reduced(weights: Tensor, count: int, sharing: int, observer_mask: Tensor | None, reduction: str) -> Tensor:
    """Weights [B, K, (H / K) x (R / B) x q, N] over q = `count` observers -> [R, H, N]; masked, a mean is a sum."""
    if observer_mask is not None:
        by_row = _apart(weights, sharing, count).unflatten(2, (-1, count))
        by_row = by_row * observer_mask.to(weights.device)[:, None, None, :, None]
        return (by_row.amax(3) if reduction == "max" else by_row.sum(3)).flatten(1, 2)
    by_head = weights.unflatten(2, (-1, count))
    over = {"max": by_head.amax, "mean": by_head.mean, "sum": by_head.sum}[reduction]
    return _apart(over(3).flatten(1, 2), sharing, 1)


def _output(stored: Tensor, own: Tensor, values: Tensor, own_values: Tensor, count: int, sharing: int) -> Tensor:
    """The output [R, q, H, d] of weights for values [B, K, N, d] and [R, K, S, d], q being `count`."""
    of_stored, own = _apart(stored @ values, sharing, count), _apart(own, sharing, count)
    seen = torch.baddbmm(*(each.flatten(0, 1) for each in (of_stored, own, own_values))).to(values.dtype)
    by_head = seen.view_as(of_stored).unflatten(2, (-1, count)).flatten(1, 2)
    return by_head.transpose(1, 2).contiguous()


def _side_by_side(apart: Tensor, sharing: int, rows: int) -> Tensor:
    """[R, K, (H / K) x q, x] -> [R / sharing, K, (H / K) x sharing x q, x], q being `rows`."""
    if sharing == 1:
        return apart
    by_head = apart.unflatten(0, (-1, sharing)).unflatten(3, (-1, rows))
    return by_head.permute(0, 2, 3, 1, 4, 5).flatten(2, 4)


def _apart(side_by_side: Tensor, sharing: int, rows: int) -> Tensor:
    """`_side_by_side` undone."""
    if sharing == 1:
        return side_by_side
    by_head = side_by_side.unflatten(-2, (-1, sharing, rows))
    return by_head.movedim(-3, 1).flatten(0, 1).flatten(-3, -2)


def _hide(stored: Tensor, own: Tensor, rows: int, padding: Tensor | None) -> None:
    """Hide, in place, stored entries that are `padding`, which is broadcast to them, and observers that come later."""
    own.unflatten(2, (-1, rows))[..., -rows:].masked_fill_(later(rows, own.device), -torch.inf)
    if padding is not None:
        stored.masked_fill_(padding, -torch.inf)
