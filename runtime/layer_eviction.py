"""Eviction during the prefill: each layer is compressed as soon as it is read.

What a layer computes does not depend on what others hold, so the same entries stay as with eviction after the prefill,
and only one layer is whole at a time. A prompt that is read in chunks is evicted from in the last chunk's pass.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from keepsight.models.decoder import has_latents, on_each
from keepsight.runtime.allocate import Allocation, Held
from keepsight.runtime.attention import Recorder
from keepsight.runtime.cache import full_layers
from keepsight.runtime.cache_layers import KeptLayer, LayerEntries
from keepsight.runtime.gather import kept_layer, kept_received, lengths_differ, select_top
from keepsight.runtime.latents import are_latents, expansions
from keepsight.runtime.read_layer import ReadLayer
from keepsight.runtime.rounding import Counts
from keepsight.runtime.softmax import Softmax
from keepsight.runtime.state import TraceRecorder


@dataclass
class LayerEviction:
    """Evicts from the layers of some prompts.

    Attributes:
        importance: The importance [B, K, N] of a layer's entries, as `Evict.importance`.
        allocate: Divides the budget over layers and KV heads.
        lengths: Tokens of each prompt.
        budgets: Budget of each prompt.
        protected: Number of a head's entries that are always kept.
        ragged: See `keepsight.runtime.gather.kept_layer`.
    """

    importance: Callable[[ReadLayer], Tensor]
    allocate: Allocation
    lengths: list[int]
    budgets: list[int]
    protected: int
    ragged: bool
    _of_all_layers: Counts | None = field(default=None, init=False)

    def recorder(self, model: PreTrainedModel, cache: Cache, record: TraceRecorder) -> Recorder:
        """What records a pass over the prompts' last tokens, and evicts; see `keepsight.runtime.prefill`.

        Attention goes on with the whole layer that it was given, which is freed after it.
        """
        layers, mask = len(full_layers(cache)), record.mask
        real_on = on_each(None if mask is None else mask[:, None])
        expand = expansions(model) if has_latents(model) else []

        def record_and_evict(
            index: int, query: Tensor, key: Tensor, softmax: Softmax, real: Tensor | None, model_mask: Any
        ) -> None:
            record(index, query, key, softmax, real, model_mask)
            layer: Any = cache.layers[index]
            place = len(record.softmax) - 1
            held = LayerEntries(layer.keys, layer.values, real_on(layer.keys.device))
            expansion = expand[place] if are_latents(model, held) else None
            recorded = record.queries.get(index), softmax, record.received.get(index)
            read = ReadLayer(place, layers, held, mask, record.ahead, expansion, *recorded)
            cache.layers[index], received = self.evict(read)
            if received is not None:
                record.received[index] = received

        return record_and_evict

    def evict(self, layer: ReadLayer) -> tuple[KeptLayer, Tensor | None]:
        """The layer of what stays, and the attention that this has received, [B, H, C] float32 or None."""
        importance = self.importance(layer)
        counts, marked = self._counts(layer, importance)
        (mask,), seen = select_top([importance], counts[None]), layer.held.keys.shape[2]
        kept = kept_layer(layer.held, mask, counts, seen, ragged=self.ragged, marked=marked)
        return kept, None if layer.received is None else kept_received(layer.received, mask, counts)

    def _counts(self, layer: ReadLayer, importance: Tensor) -> tuple[Counts, bool]:
        """[B, K], how many entries each head keeps, and whether those of other layers may keep others."""
        if self.allocate.reads_scores:
            return self.allocate(self._held(1, importance), self.budgets, [importance])[0], True
        if self._of_all_layers is None:
            self._of_all_layers = self.allocate(self._held(layer.layers, importance), self.budgets, [])
        return self._of_all_layers[layer.place], lengths_differ(self._of_all_layers)

    def _held(self, layers: int, importance: Tensor) -> Held:
        real = np.broadcast_to(np.array(self.lengths)[:, None], (layers, *importance.shape[:2]))
        return Held.of(real, self.protected)
