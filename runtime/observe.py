"""Observe: a second, short pass after the prefill, whose queries score the entries.

What follows a prompt cannot change the prompt's keys and values (causality), so that any number of observers can run
after one prefill, and none of them changes the cache.
"""

import functools
from abc import ABC, abstractmethod
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import Cache
from typing_extensions import override

from keepsight.runtime.attention import OwnAttention, record_attention
from keepsight.runtime.cache import ViewedLayer, view
from keepsight.runtime.importance import ROWS_AT_ONCE, attend_after, observed_attention
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


class AttentionRecorder:
    """Records each layer's attention of the last `rows` queries to the entries before them.

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

    def __call__(self, layer: int, query: Tensor, key: Tensor, scaling: float, real: Tensor | None) -> None:
        """See `keepsight.runtime.attention.Recorder`."""
        if real is not None and self.query_mask is not None:
            real = real.clone()
            real[:, :, -self.rows :] &= self.query_mask[:, None]
        self.by_layer[layer] = observed_attention(
            query[:, :, -self.rows :],
            key,
            scaling,
            key.shape[2] - self.rows,
            key_mask=self.key_mask if real is None else real,
            query_mask=self.query_mask,
            reduction=self.reduction,
        )

    def layers(self) -> list[Tensor]:
        """The recorded tensors in the order of the layers."""
        return [self.by_layer[layer] for layer in sorted(self.by_layer)]


class _WatchedLayer(ViewedLayer):
    """A layer without padding that records how observers attend to its entries; all that is appended observes.

    Attributes:
        importance: [B, H, N] float32, reduced over the observers; set once they have attended.
    """

    importance: Tensor

    def __init__(self, keys: Tensor, values: Tensor, reduction: str) -> None:
        super().__init__(keys, values)
        self.reduction = reduction

    @override
    def update(self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object) -> Any:
        return _Look(self, key_states, value_states), value_states


class _Look(OwnAttention):
    """Observers that attend to a layer and to each other, without a copy of the layer's entries."""

    def __init__(self, layer: _WatchedLayer, keys: Tensor, values: Tensor) -> None:
        self.layer, self.keys, self.values = layer, keys, values

    @override
    def attend(self, query: Tensor, scaling: float) -> Tensor:
        layer = self.layer
        layer.importance, output = attend_after(
            query, (layer.keys, layer.values), (self.keys, self.values), scaling, layer.reduction
        )
        return output


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
        state.mask,
        embeddings,
        first=state.lengths,
        observer_mask=observer_mask,
        reduction=reduction,
    )


def observe(
    model: PreTrainedModel,
    cache: Cache,
    mask: Tensor | None,
    embeddings: Tensor,
    *,
    prompt_length: int | None = None,
    first: Tensor | None = None,
    observer_mask: Tensor | None = None,
    reduction: str = "mean",
) -> list[Tensor]:
    """Let observers look back at a cache.

    Args:
        model: The model that filled the cache, with the observers' adapter, if any, switched on.
        cache: Cache whose first N entries are observed; it is not changed.
        mask: [B, N] bool, False for left padding; None when no row is padded.
        embeddings: [B, n, hidden], the observers' input embeddings.
        prompt_length: N; the whole cache by default.
        first: [B] int64, the first observer's position; the number of real entries by default.
        observer_mask: [B, n] bool, False for padding on the right of the observers.
        reduction: Reduction over the observers: `mean` or `max`.

    Returns:
        For each layer, [B, H, N] float32: the observers' attention. Gradients flow to `embeddings` and to the model's
        trainable parameters; without gradients the result may be inference tensors.
    """
    record_attention(model)
    viewed = view(cache, prompt_length)
    length = viewed.get_seq_length()
    batch, count, _ = embeddings.shape
    if first is None:
        first = mask.sum(dim=1) if mask is not None else torch.full((batch,), length, device=embeddings.device)
    key_mask = join_masks(mask, observer_mask, batch, length, count, embeddings.device)
    look = functools.partial(
        model.base_model,
        inputs_embeds=embeddings,
        position_ids=first[:, None] + torch.arange(count, device=embeddings.device),
        use_cache=True,
    )
    stored: list[Any] = viewed.layers
    if key_mask is None and count <= ROWS_AT_ONCE and all(layer.real is None for layer in stored):
        watched: list[Any] = [_WatchedLayer(layer.keys, layer.values, reduction) for layer in stored]
        with torch.inference_mode(not torch.is_grad_enabled()):  # saves 3 % of the time on a CPU
            look(past_key_values=Cache(layers=watched))
        return [layer.importance for layer in watched]
    recorder = AttentionRecorder(count, key_mask=key_mask, query_mask=observer_mask, reduction=reduction)
    look(past_key_values=viewed, attention_mask=key_mask, recorder=recorder)
    return recorder.layers()


def join_masks(
    prompt: Tensor | None, rest: Tensor | None, batch: int, length: int, count: int, device: torch.device
) -> Tensor | None:
    """[B, length + count] bool from the masks of a prompt and of what follows it; None when nothing is padded."""
    if prompt is None and rest is None:
        return None
    real = torch.ones(batch, 1, dtype=torch.bool, device=device)
    parts = (
        prompt if prompt is not None else real.expand(-1, length),
        rest if rest is not None else real.expand(-1, count),
    )
    return torch.cat(parts, dim=1)
