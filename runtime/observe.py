"""Observers score a state's entries. Many run a second, short pass whose queries attend to the cache.

Tokens after a prompt cannot change the prompt's keys and values (causality), so any number of observers can run after
one prefill, and none of them changes the cache.

Several rows of observers may share the entries of one row, each under a mask of its own. They then attend
side by side, as further queries of that row: [R, H, q, d] is taken as [B, H, (R / B) x q, d], and no entry is repeated.
"""

import functools
from abc import ABC, abstractmethod
from collections.abc import Sequence
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
from keepsight.models.decoder import decoder_of, embedded_inputs
from keepsight.runtime import registry
from keepsight.runtime.attention import OpenCache, OwnAttention, Softmax, heads_of_layers, later, recurrent_of, run
from keepsight.runtime.images import Images
from keepsight.runtime.importance import (
    ROWS_AT_ONCE,
    Reduce,
    combine,
    observed_attention,
    recorded_queries,
    reduce_group,
)
from keepsight.runtime.layer import KeptLayer, LayerEntries
from keepsight.runtime.state import Needs, State, full_layers, has_bounded, with_full_layers, with_observers
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

    def tail(
        self,
        model: PreTrainedModel,
        tokens: Tensor,
        mask: Tensor | None,
        reduce: Reduce,
        images: Images | None = None,
    ) -> Tail | None:
        """The observers, to be read in one pass with a prompt; None where they are not known before it is read.

        `tokens` [B, N] int64 are the prompts, `mask` [B, N] is 0 for their padding, `images` are those in them, and
        `reduce` is as in a call. What the tail scores is what a call returns.
        """
        return None

    def check_model(self, model: PreTrainedModel) -> None:
        """Refuse (`UserError`) a model, loaded or on the meta device, that this observer cannot score for."""

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
        recorded = recorded_queries(layer, self.window)
        keys, _, real = layer.attended()
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


@dataclass(frozen=True)
class LayerScores:
    """Turns the attention that observers pay to a layer into scores of its KV heads' entries.

    Attributes:
        layer: The layer whose entries are scored.
        reduce: Reduction over the observing queries and over the query heads of a KV head.
        observer_mask: [B, n] bool, False where an observer is padding.
        window: Number of the prompt's last tokens that observe too, by their recorded queries.
        unseen: Number of entries at the prompt's end that come after the observers' place; their attention is 0.
    """

    layer: KeptLayer
    reduce: Reduce
    observer_mask: Tensor
    window: int = 0
    unseen: int = 0

    def __call__(self, attention: Tensor) -> Tensor:
        """The scores [B, K, N] float32, from the observers' reduced attention [B, H, N - unseen]."""
        over_queries = self.reduce.queries
        attention = functional.pad(attention, (0, self.unseen))
        if self.window:
            window_attention = PromptWindow(self.window).score(self.layer, over_queries)
            attention = combine(window_attention, attention, self.window, self.observer_mask, over_queries)
        return reduce_group(attention, self.layer.kv_heads, self.reduce.heads)


def look_back(
    model: PreTrainedModel,
    state: State,
    embeddings: Tensor,
    *,
    reduce: Reduce,
    observer_mask: Tensor | None = None,
    window: int = 0,
    start: int = 0,
    stops: bool = True,
) -> list[Tensor]:
    """Let observers look back from the position of a state's next token, or `start` tokens after it; see `observe`.

    The last `window` tokens that the state has read observe too, or as many as all layers have recorded. Each layer's
    attention is reduced to KV heads as soon as it is computed: that of all layers would take too much memory at once.

    Returns:
        For each layer, the scores of its entries, [B, K, N] float32.

    Raises:
        UserError: `start` is before the prompt, or is not 0 though entries were evicted before or a layer is bounded.
    """
    batch, observers = embeddings.shape[:2]
    rope_lengths = state.rope_lengths + start + observers
    state = with_observers(model, state, start + observers)
    if window:
        recorded_windows = [recorded_queries(layer, window).queries.shape[2] for layer in state.layers]
        window = min(recorded_windows, default=0)

    counted = observer_mask
    if counted is None:
        counted = embeddings.new_ones((batch, observers), dtype=torch.bool)
    unseen = max(-start, 0)
    layer_scores = [LayerScores(layer, reduce, counted, window, unseen) for layer in state.layers]

    seen_state = _before(state, start) if start else state
    return observe(
        model,
        seen_state.cache,
        seen_state.tokens_mask,
        embeddings,
        first=seen_state.lengths + seen_state.rope_offset + max(start, 0),
        observer_mask=observer_mask,
        reduction=reduce.queries,
        layer_scores=layer_scores,
        stops=stops,
        rope_lengths=rope_lengths,
    )


def _before(state: State, start: int) -> State:
    """A copy of a state as it was `-start` tokens ago, or as it is where `start` is not below 0."""
    width = state.tokens.shape[1]
    if has_bounded(state.cache) or any(layer.keys.shape[2] != width for layer in state.layers):
        raise UserError(
            f"draft tokens: start {start} needs full attention in all layers and a prompt from which nothing was "
            "evicted yet; leave it at 0",
            field="start",
            code="state",
        )
    if -start >= int(state.lengths.min()):
        raise UserError(
            f"draft tokens: start {start} is before a prompt of {int(state.lengths.min())} tokens",
            field="start",
            code="range",
        )
    return state.copy().crop(max(-start, 0), state.logits)


def observe(
    model: PreTrainedModel,
    cache: Cache,
    mask: Tensor | None,
    embeddings: Tensor,
    *,
    first: Tensor | None = None,
    observer_mask: Tensor | None = None,
    reduction: str = "mean",
    layer_scores: Sequence[LayerScores] | None = None,
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
        layer_scores: For each layer with full attention, what turns its attention into scores as soon as it is
            computed; None to return the attention as it is.
        stops: Whether the pass may end in the middle of the model, once the last layer's entries are scored: forward
            hooks around its modules are then not called.
        rope_lengths: [R] int64, the length of the text whose RoPE the cache's keys have, where it depends on one.

    Returns:
        For each layer with full attention, the observers' attention [R, H, N] float32, or its scores. Gradients flow
        to `embeddings` and to the model's trainable parameters; without gradients the result may be inference tensors.
    """
    if first is None:
        if mask is None:
            first = torch.full((len(embeddings),), cache.get_seq_length(), device=embeddings.device)
        else:
            first = mask.sum(dim=1)

    layers = []
    for index, layer in enumerate(full_layers(cache)):
        scores = None if layer_scores is None else layer_scores[index]
        layers.append(ObservedLayer(layer, mask, observer_mask, reduction, scores))
    if stops and layers:
        layers[-1].is_last = True

    with torch.inference_mode(not torch.is_grad_enabled()), suppress(AllObserved):  # saves 3 % of the time on a CPU
        read_embeddings(model, cache, layers, mask, embeddings, first, rope_lengths)
    return [layer.take_scores() for layer in layers]


def read_embeddings(
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
    observers = embeddings.shape[1]
    attention_mask = None  # layers with full attention know their padding
    if mask is not None and has_bounded(cache):
        attention_mask = functional.pad(mask, (0, observers), value=True)
    run(
        decoder_of(model),
        as_observed(cache, layers),
        **embedded_inputs(model, embeddings),
        position_ids=first[:, None] + torch.arange(observers, device=embeddings.device),
        attention_mask=attention_mask,
        rope_lengths=rope_lengths,
    )


def as_observed(cache: Cache, layers: Any) -> Cache:
    """A cache with other layers in place of those with full attention; observers change no recurrent state of it."""
    observed_layers = []
    layers_of_cache: list[Any] = with_full_layers(cache, layers).layers
    for layer in layers_of_cache:
        recurrent = recurrent_of(layer)
        if recurrent is not None:
            layer.recurrent = ObservedRecurrence(recurrent)
        if isinstance(layer, LinearAttentionLayer):
            layer = ObservedRecurrence(layer)
        observed_layers.append(layer)
    return OpenCache(layers=observed_layers)


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
    can_be_shared = True

    def __init__(self, layer: KeptLayer | LayerEntries, mask: Tensor | None = None) -> None:
        super().__init__()
        stored = layer.attended() if isinstance(layer, KeptLayer) else layer
        self.lazy_initialization(stored.keys, stored.values)
        self.keys = stored.keys
        self.values = stored.values
        self.real = stored.real

        if mask is None:
            return
        nothing_evicted = stored.keys.shape[2] >= mask.shape[1]
        rows_share_entries = len(mask) != len(stored.keys)
        if nothing_evicted and (stored.real is None or rows_share_entries):
            self.real = mask[:, None].to(stored.keys.device)


class AllObserved(Exception):
    """Ends a forward pass early: all layers have been observed."""


class ObservedLayer(ViewedLayer):
    """A layer whose entries are scored by the attention that observers pay to them.

    Large attention weights are not kept for the backward pass: they would take 2 GiB in all after 16K tokens, for 32
    layers and heads and as many observers.

    Args:
        layer: As in `ViewedLayer`.
        mask: As in `ViewedLayer`.
        observer_mask: [R, n] bool, False where an observer is padding, which does not count; None for none.
        reduction: Reduction of the attention over the observers: `mean` or `max`.
        layer_scores: Turns the reduced attention [R, H, N] float32 into scores; None to keep it as it is.

    Attributes:
        scores: The scores, or the attention, until they are taken.
        is_last: Whether the forward pass ends in this layer, since no layer after it is observed.
    """

    scores: Tensor | None = None
    is_last = False
    _is_taken = False

    def __init__(
        self,
        layer: KeptLayer | LayerEntries,
        mask: Tensor | None,
        observer_mask: Tensor | None,
        reduction: str,
        layer_scores: LayerScores | None = None,
    ) -> None:
        super().__init__(layer, mask)
        self.observer_mask = observer_mask
        self.reduction = reduction
        self.layer_scores = layer_scores
        self.readers = layer.readers if isinstance(layer, KeptLayer) else 1
        self._attention = list[Tensor]()  # of the layers that have read the entries so far

    def take_scores(self) -> Tensor:
        """The scores, which the layer no longer holds afterwards.

        When the backward pass recomputes the layer, `attend` is called again; those scores are not stored.
        """
        scores = self.scores
        assert scores is not None
        self.scores = None
        self._is_taken = True
        return scores

    @override
    def attend(self, query: Tensor, key: Tensor, value: Tensor, softmax: Softmax) -> Tensor:
        weight_bytes = query.shape[:3].numel() * self.keys.shape[2] * torch.float32.itemsize
        if torch.is_grad_enabled() and weight_bytes >= RECOMPUTED:
            attention, output = checkpoint(
                self._attend, query, key, value, softmax, use_reentrant=False, preserve_rng_state=False
            )
        else:
            attention, output = self._attend(query, key, value, softmax)

        self._attention.append(attention)
        if len(self._attention) < self.readers:
            return output
        attention = heads_of_layers(self._attention, self.keys.shape[1])
        self._attention.clear()

        # Also when the layer is recomputed: autograd must save the same tensors.
        scores = attention if self.layer_scores is None else self.layer_scores(attention)
        if not self._is_taken:
            self.scores = scores
        if self.is_last:
            raise AllObserved
        return output

    def _attend(self, query: Tensor, key: Tensor, value: Tensor, softmax: Softmax) -> tuple[Tensor, Tensor]:
        """The attention [R, H, N] to the stored entries, reduced over the observers, and the output [R, n, H, d].

        The observers are taken in blocks, which bounds the memory of their weights.
        """
        observers = query.shape[2]
        totals = []
        outputs = []
        for start in range(0, observers, ROWS_AT_ONCE):
            end = min(start + ROWS_AT_ONCE, observers)
            block_mask = None if self.observer_mask is None else self.observer_mask[:, start:end]
            block_attention, block_output = self._attend_block(
                query[:, :, start:end], key[:, :, :end], value[:, :, :end], softmax, block_mask
            )
            totals.append(block_attention)
            outputs.append(block_output)
        output = outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=1)

        if self.reduction == "max":
            return functools.reduce(torch.maximum, totals), output
        total = functools.reduce(torch.add, totals)
        if self.observer_mask is None:
            return total / observers, output
        counted = self.observer_mask.sum(dim=1)[:, None, None].clamp(min=1)
        return total / counted.to(total.device), output

    def _attend_block(
        self, query: Tensor, key: Tensor, value: Tensor, softmax: Softmax, mask: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """As `_attend`, for the last q of S observers, whose keys and values [R, K, S, d] these are.

        Their attention is their sum where the reduction is a mean.
        """
        queries = query.shape[2]
        rows_sharing = len(query) // len(self.keys)
        stored = self.keys.shape[2]
        weights = _weights(query, self.keys, key, softmax, self.real)
        attention = _reduced(weights[..., :stored], queries, rows_sharing, mask, self.reduction)

        weights = weights.to(value.dtype)
        output = _output(weights[..., :stored], weights[..., stored:], self.values, value, queries, rows_sharing)
        return attention, output


def _weights(query: Tensor, keys: Tensor, own_keys: Tensor, softmax: Softmax, real: Tensor | None) -> Tensor:
    """Attention weights [B, K, (H / K) x (R / B) x q, N + S] float32 of observers, to stored entries and to each other.

    Queries [R, H, q, d] are those of the last q of S observers, causal among themselves; `own_keys` [R, K, S, d] are
    the keys of these. R / B neighbouring rows share a row of the entries' keys [B, K, N, d]; `real` [R, 1 or K, N] bool
    is False where a row does not see an entry.
    """
    heads, queries = query.shape[1:3]
    kv_heads, stored = keys.shape[1:3]
    rows_sharing = len(query) // len(keys)
    grouped = query.reshape(len(query), kv_heads, -1, query.shape[3])
    padding = None if real is None else ~real[:, :, None]

    if torch.is_grad_enabled() or rows_sharing > 1 or query.element_size() == 2 or softmax.bias is not None:
        stored_logits = softmax.logits(_fold_sharing_rows(grouped, rows_sharing, queries), keys)
        own_logits = softmax.logits(grouped, own_keys)
        if padding is not None:
            padding = _fold_sharing_rows(padding, rows_sharing, 1)[:, :, None, :, None]
        _hide(stored_logits.unflatten(2, (-1, rows_sharing, queries)), own_logits, queries, padding)
        logits = torch.cat([stored_logits, _fold_sharing_rows(own_logits, rows_sharing, queries)], dim=-1)
    else:
        # Both products go straight into one tensor: concatenating them would copy the larger.
        products = grouped.new_empty(*grouped.shape[:3], stored + own_keys.shape[2])
        _write_products(products[..., :stored], grouped, keys, softmax.scaling)
        _write_products(products[..., stored:], grouped, own_keys, softmax.scaling)
        logits = softmax.capped(products.float())
        _hide(logits[..., :stored], logits[..., stored:], queries, padding)

    by_query_head = logits.unflatten(2, (heads // kv_heads, -1))
    return softmax.normalised(by_query_head, _fold_sharing_rows(grouped, rows_sharing, queries)).flatten(2, 3)


def _write_products(products: Tensor, grouped: Tensor, keys: Tensor, scaling: float) -> None:
    """Write `scaling` times the products of queries [B, K, r, d] and keys [B, K, N, d] to a view [B, K, r, N]."""
    products = products.flatten(0, 1)
    grouped = grouped.flatten(0, 1)
    transposed_keys = keys.flatten(0, 1).mT.to(products.dtype)
    torch.baddbmm(products, grouped, transposed_keys, beta=0, alpha=scaling, out=products)


def _reduced(weights: Tensor, queries: int, rows_sharing: int, observer_mask: Tensor | None, reduction: str) -> Tensor:
    """Weights [B, K, (H / K) x (R / B) x q, N] -> [R, H, N], the sum or maximum over the q observing queries."""
    if observer_mask is not None:
        by_row = _unfold_sharing_rows(weights, rows_sharing, queries).unflatten(2, (-1, queries))
        by_row = by_row * observer_mask.to(weights.device)[:, None, None, :, None]
        reduced = by_row.amax(3) if reduction == "max" else by_row.sum(3)
        return reduced.flatten(1, 2)
    by_head = weights.unflatten(2, (-1, queries))
    reduced = by_head.amax(3) if reduction == "max" else by_head.sum(3)
    return _unfold_sharing_rows(reduced.flatten(1, 2), rows_sharing, 1)


def _output(
    stored_weights: Tensor, own_weights: Tensor, values: Tensor, own_values: Tensor, queries: int, rows_sharing: int
) -> Tensor:
    """The output [R, q, H, d] of weights for values [B, K, N, d] and [R, K, S, d]."""
    stored_output = _unfold_sharing_rows(stored_weights @ values, rows_sharing, queries)
    own_weights = _unfold_sharing_rows(own_weights, rows_sharing, queries)
    output = torch.baddbmm(stored_output.flatten(0, 1), own_weights.flatten(0, 1), own_values.flatten(0, 1))
    output = output.to(values.dtype).view_as(stored_output)
    by_head = output.unflatten(2, (-1, queries)).flatten(1, 2)
    return by_head.transpose(1, 2).contiguous()


def _fold_sharing_rows(unfolded: Tensor, rows_sharing: int, queries: int) -> Tensor:
    """Rows that share entries become further queries of one row, so that the entries are multiplied once.

    [R, K, (H / K) x q, x] -> [R / s, K, (H / K) x s x q, x], for s = `rows_sharing` neighbouring rows of q queries.
    """
    if rows_sharing == 1:
        return unfolded
    by_head = unfolded.unflatten(0, (-1, rows_sharing)).unflatten(3, (-1, queries))
    return by_head.permute(0, 2, 3, 1, 4, 5).flatten(2, 4)


def _unfold_sharing_rows(folded: Tensor, rows_sharing: int, queries: int) -> Tensor:
    """`_fold_sharing_rows` undone: [R / s, K, (H / K) x s x q, x] -> [R, K, (H / K) x q, x].

    With all heads in one dimension, [R / s, H x s x q, x] -> [R, H x q, x].
    """
    if rows_sharing == 1:
        return folded
    by_head = folded.unflatten(-2, (-1, rows_sharing, queries))
    return by_head.movedim(-3, 1).flatten(0, 1).flatten(-3, -2)


def _hide(stored_logits: Tensor, own_logits: Tensor, queries: int, padding: Tensor | None) -> None:
    """Hide, in place, stored entries that are `padding`, which is broadcast to them, and observers that come later."""
    by_query = own_logits.unflatten(2, (-1, queries))
    by_query[..., -queries:].masked_fill_(later(queries, own_logits.device), -torch.inf)
    if padding is not None:
        stored_logits.masked_fill_(padding, -torch.inf)
