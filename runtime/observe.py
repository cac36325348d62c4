"""Observe: a second, short pass after the prefill, whose queries score the entries.

What follows a prompt cannot change the prompt's keys and values (causality), so that any number of observers can run
after one prefill, and none of them changes the cache.
"""

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from transformers import PreTrainedModel
from transformers.cache_utils import Cache
from typing_extensions import override

from keepsight.models.decoder import decoder_of, has_latents
from keepsight.runtime.attention import run
from keepsight.runtime.cache import as_observed, marked
from keepsight.runtime.importance import ROWS_AT_ONCE, Reduce, observed_attention, reduce_group
from keepsight.runtime.look_after import AllSeen, LastLayer, WatchedLayer, no_entries
from keepsight.runtime.read_layer import ReadLayer, read_layers
from keepsight.runtime.softmax import Softmax
from keepsight.runtime.state import Needs, State
from keepsight.runtime.viewed_layers import ViewedLayer


class Observer(ABC):
    """Scorer of a state's entries. Observers hold no state and change none."""

    @abstractmethod
    def __call__(self, model: PreTrainedModel, state: State, reduce: Reduce) -> list[Tensor]:
        """Score each entry.

        Args:
            model: The target.
            state: A prompt that it has read, evicted from or not.
            reduce: Reduction over the observing queries and over the query heads of a KV head; unused by scorers
                without queries.

        Returns:
            For each layer, [B, K, C] float32 by KV head: higher is more important. Scores by query head, [B, H, C], are
            reduced by whoever asked, but then those of all layers take memory at once.
        """

    def needs(self) -> Needs:
        """What the prefill has to record for this observer."""
        return Needs()

    def positions(self) -> int:
        """Maximum number of positions after the prompt that the observing tokens take."""
        return 0

    def bound(self, budget: int | float, sinks: int, window: int) -> "Observer":
        """The observer with whatever it leaves open taken from the method that holds it, whose fields these are."""
        return self

    @property
    def adapter_digest(self) -> str | None:
        """Digest of the lookahead adapter that it observes with; None without one."""
        return None


class LayerObserver(Observer):
    """Scorer that needs no more than a layer's own entries and what was recorded when these were read.

    Entries can be evicted from a layer as soon as it is read.
    """

    @abstractmethod
    def score(self, layer: ReadLayer, reduction: str) -> Tensor:
        """Score each entry of a layer: [B, H, C] or [B, K, C] float32, reduced over the queries by `mean` or `max`."""

    @override
    def __call__(self, model: PreTrainedModel, state: State, reduce: Reduce) -> list[Tensor]:
        return [
            reduce_group(self.score(layer, reduce.queries), layer.held.keys.shape[1], reduce.heads)
            for layer in read_layers(model, state)
        ]


OfLayer = Callable[[int, Tensor], Tensor]
"""What is kept of the attention [B, H, N] of the layer at a place, an index among those with full attention."""


def all_heads(place: int, attention: Tensor) -> Tensor:
    """An `OfLayer`: the attention as it is."""
    return attention


def _none_of(place: int, attention: Tensor) -> Tensor:
    return no_entries(attention)


class AttentionRecorder:
    """Records each full-attention layer's attention of the last `rows` queries to the entries before them.

    Arguments are those of `observed_attention`; with `own` the queries' own entries are scored too.

    Attributes:
        by_layer: layer -> what is kept of [B, H, S - rows] float32, reduced over the queries; with `own` of [B, H, S].
    """

    def __init__(
        self,
        rows: int,
        *,
        key_mask: Tensor | None = None,
        query_mask: Tensor | None = None,
        reduction: str = "mean",
        keep: OfLayer = all_heads,
        own: bool = False,
    ) -> None:
        self.rows, self.reduction, self.keep, self.own = rows, reduction, keep, own
        self.key_mask, self.query_mask = key_mask, query_mask
        self.by_layer: dict[int, Tensor] = {}

    def __call__(
        self, layer: int, query: Tensor, key: Tensor, softmax: Softmax, real: Tensor | None, mask: Any
    ) -> None:
        """See `keepsight.runtime.attention.Recorder`."""
        if real is not None and self.query_mask is not None:
            real = real.clone()
            real[:, :, -self.rows :] &= self.query_mask[:, None].to(real.device)
        observed = observed_attention(
            query[:, :, -self.rows :],
            key,
            softmax,
            key.shape[2] - (0 if self.own else self.rows),
            key_mask=self.key_mask if real is None else real,
            query_mask=self.query_mask,
            reduction=self.reduction,
        )
        self.by_layer[layer] = self.keep(len(self.by_layer), observed)

    def taken(self) -> list[Tensor]:
        """The recorded tensors in the order of the layers, for the last time: see `WatchedLayer.taken`."""
        recorded, self.by_layer, self.keep = self.by_layer, {}, _none_of
        return [recorded[layer] for layer in sorted(recorded)]


def look_back(
    model: PreTrainedModel,
    state: State,
    embeddings: Tensor,
    *,
    reduce: Reduce,
    observer_mask: Tensor | None = None,
    combined: OfLayer = all_heads,
) -> list[Tensor]:
    """Let observers look back from the position of a state's next token; see `observe`.

    Each layer's attention is reduced to KV heads when it is computed, after `combined`, with which other observers add
    theirs: [B, K, N] float32 for each layer.
    """
    kv_heads = [each.keys.shape[1] for each in state.entries()]
    return observe(
        model,
        state.cache,
        state.tokens_mask,
        embeddings,
        first=state.next_position,
        observer_mask=observer_mask,
        reduction=reduce.queries,
        keep=lambda place, observed: reduce_group(combined(place, observed), kv_heads[place], reduce.heads),
        stops=True,
    )


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
) -> list[Tensor]:
    """Let observers look back at a cache.

    Args:
        model: The model that filled the cache, with the observers' adapter, if any, switched on.
        cache: Cache of N entries per head, from M >= N tokens; it is not changed.
        mask: [R, M] bool, False for left padding among the tokens; None when no row is padded. Where all layers have
            full attention, R may be a multiple of the cache's B rows, of which R / B rows of observers after one
            another then share each, and a row's mask may hide any entries.
        embeddings: [R, n, hidden], the observers' input embeddings.
        first: [R] int64, the first observer's position; the number of real tokens by default.
        observer_mask: [B, n] bool, False for padding on the right of the observers.
        reduction: Reduction over the observers: `mean` or `max`.
        keep: What is returned of a layer's attention, called as soon as that is computed.
        stops: Whether the pass may end in the middle of the model, once the last layer's entries are scored: hooks that
            others put around its modules are then not called.

    Returns:
        For each layer with full attention, what is kept of [R, H, N] float32, the observers' attention. Gradients flow
        to `embeddings` and to the model's trainable parameters; without gradients the result may be inference tensors.
    """
    seen = cache.get_seq_length()
    batch, count, _ = embeddings.shape
    if first is None:
        first = mask.sum(dim=1) if mask is not None else torch.full((batch,), seen, device=embeddings.device)
    look = functools.partial(
        run,
        decoder_of(model),
        inputs_embeds=embeddings,
        position_ids=first[:, None] + torch.arange(count, device=embeddings.device),
    )
    stored = [ViewedLayer(*each) for each in marked(cache, mask)]
    viewed = as_observed(cache, stored)
    # Layers with full attention know their padding; it is the bounded ones that need a mask.
    padded = None if mask is None or len(stored) == len(viewed) else functional.pad(mask, (0, count), value=True)
    if observer_mask is None and count <= ROWS_AT_ONCE and not has_latents(model):
        kinds = [WatchedLayer] * len(stored)
        if stops:
            kinds[-1] = LastLayer
        watched = [
            kind(each, reduction, functools.partial(keep, place))
            for place, (kind, each) in enumerate(zip(kinds, stored, strict=True))
        ]
        with torch.inference_mode(not torch.is_grad_enabled()), suppress(AllSeen):  # saves 3 % of the time on a CPU
            look(as_observed(viewed, watched), attention_mask=padded)
        return [layer.taken() for layer in watched]
    recorder = AttentionRecorder(count, query_mask=observer_mask, reduction=reduction, keep=keep)
    look(viewed, attention_mask=padded, recorder=recorder)
    return recorder.taken()
