"""Observe: a second, short pass after the prefill, whose queries score the entries.

What follows a prompt cannot change the prompt's keys and values (causality), so that any number of observers can run
after one prefill, and none of them changes the cache.
"""

import functools
from abc import ABC, abstractmethod
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from transformers import PreTrainedModel
from transformers.cache_utils import Cache
from typing_extensions import override

from keepsight.models.decoder import decoder_of, has_latents
from keepsight.runtime.attention import OwnAttention, run
from keepsight.runtime.cache import as_observed, marked
from keepsight.runtime.cache_layers import ViewedLayer
from keepsight.runtime.importance import ROWS_AT_ONCE, observed_attention
from keepsight.runtime.look_after import LookAfter
from keepsight.runtime.read_layer import ReadLayer, read_layers
from keepsight.runtime.softmax import Softmax
from keepsight.runtime.state import Needs, State


class Observer(ABC):
    """Scorer of a state's entries. Observers hold no state and change none."""

    @abstractmethod
    def __call__(self, model: PreTrainedModel, state: State, reduction: str) -> list[Tensor]:
        """Score each entry.

        Args:
            model: The target.
            state: A prompt that it has read, evicted from or not.
            reduction: Reduction over the observing queries, `mean` or `max`; unused by scorers without queries.

        Returns:
            For each layer, [B, H, C] float32 by query head or [B, K, C] by KV head: higher is more important.
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
        """Score each entry of a layer: [B, H, C] or [B, K, C], see `Observer.__call__`."""

    @override
    def __call__(self, model: PreTrainedModel, state: State, reduction: str) -> list[Tensor]:
        return [self.score(layer, reduction) for layer in read_layers(model, state)]


class AttentionRecorder:
    """Records each full-attention layer's attention of the last `rows` queries to the entries before them.

    Attributes:
        by_layer: layer -> [B, H, S - rows] float32, reduced over the queries.
    """

    def __init__(
        self,
        rows: int,
        *,
        key_mask: Tensor | None = None,
        query_mask: Tensor | None = None,
        reduction: str = "mean",
    ) -> None:
        self.rows, self.reduction = rows, reduction
        self.key_mask, self.query_mask = key_mask, query_mask
        self.by_layer: dict[int, Tensor] = {}

    def __call__(self, layer: int, query: Tensor, key: Tensor, softmax: Softmax, real: Tensor | None) -> None:
        """See `keepsight.runtime.attention.Recorder`."""
        if real is not None and self.query_mask is not None:
            real = real.clone()
            real[:, :, -self.rows :] &= self.query_mask[:, None]
        self.by_layer[layer] = observed_attention(
            query[:, :, -self.rows :],
            key,
            softmax,
            key.shape[2] - self.rows,
            key_mask=self.key_mask if real is None else real,
            query_mask=self.query_mask,
            reduction=self.reduction,
        )

    def layers(self) -> list[Tensor]:
        """The recorded tensors in the order of the layers."""
        return [self.by_layer[layer] for layer in sorted(self.by_layer)]


class _WatchedLayer(ViewedLayer, OwnAttention):
    """A layer to which observers attend, without a copy of its entries; all that is new observes.

    Attributes:
        importance: [B, H, N] float32, reduced over the observers; set once they have attended.
    """

    importance: Tensor

    def __init__(self, keys: Tensor, values: Tensor, real: Tensor | None, reduction: str) -> None:
        super().__init__(keys, values, real)
        self.reduction = reduction

    def look(self, query: Tensor, key: Tensor, softmax: Softmax) -> LookAfter:
        """Score the entries."""
        seen = LookAfter.of(query, self.keys, key, softmax, self.real)
        self.importance = seen.importance(self.reduction)
        return seen

    @override
    def update(self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object) -> Any:
        return key_states, value_states

    @override
    def attend(self, query: Tensor, key: Tensor, value: Tensor, softmax: Softmax) -> Tensor:
        return self.look(query, key, softmax).output(self.values, value)


class _LastLayer(_WatchedLayer):
    """The last layer that observers look back at; nothing is asked of the model after it."""

    @override
    def attend(self, query: Tensor, key: Tensor, value: Tensor, softmax: Softmax) -> Tensor:
        self.look(query, key, softmax)
        raise _AllSeen


class _AllSeen(Exception):
    """Ends a pass."""


def look_back(
    model: PreTrainedModel,
    state: State,
    embeddings: Tensor,
    *,
    observer_mask: Tensor | None = None,
    reduction: str = "mean",
) -> list[Tensor]:
    """Let observers look back from the position of a state's next token; see `observe`."""
    return observe(
        model,
        state.cache,
        state.tokens_mask,
        embeddings,
        first=state.next_position,
        observer_mask=observer_mask,
        reduction=reduction,
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
    stops: bool = False,
) -> list[Tensor]:
    """Let observers look back at a cache.

    Args:
        model: The model that filled the cache, with the observers' adapter, if any, switched on.
        cache: Cache of N entries per head, from M >= N tokens; it is not changed.
        mask: [B, M] bool, False for left padding among the tokens; None when no row is padded.
        embeddings: [B, n, hidden], the observers' input embeddings.
        first: [B] int64, the first observer's position; the number of real tokens by default.
        observer_mask: [B, n] bool, False for padding on the right of the observers.
        reduction: Reduction over the observers: `mean` or `max`.
        stops: Whether the pass may end in the middle of the model, once the last layer's entries are scored: hooks that
            others put around its modules are then not called.

    Returns:
        For each layer with full attention, [B, H, N] float32: the observers' attention. Gradients flow to `embeddings`
        and to the model's trainable parameters; without gradients the result may be inference tensors.
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
        kinds = [_WatchedLayer] * len(stored)
        if stops:
            kinds[-1] = _LastLayer
        watched = [kind(each.keys, each.values, each.real, reduction) for kind, each in zip(kinds, stored, strict=True)]
        with torch.inference_mode(not torch.is_grad_enabled()), suppress(_AllSeen):  # saves 3 % of the time on a CPU
            look(as_observed(viewed, watched), attention_mask=padded)
        return [layer.importance for layer in watched]
    recorder = AttentionRecorder(count, query_mask=observer_mask, reduction=reduction)
    look(viewed, attention_mask=padded, recorder=recorder)
    return recorder.layers()
