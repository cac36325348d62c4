"""StreamingLLM (arXiv 2309.17453): the first entries and the most recent ones; nothing observes."""

from dataclasses import dataclass

import torch
from torch import Tensor
from typing_extensions import override

from keepsight.runtime.evict import Evict
from keepsight.runtime.importance import NO_POOL, Pool
from keepsight.runtime.observe import LayerObserver, Observer
from keepsight.runtime.read_layer import ReadLayer


@dataclass(frozen=True)
class Recency(LayerObserver):
    """Scores later entries higher."""

    @override
    def score(self, layer: ReadLayer, reduction: str) -> Tensor:
        keys = layer.held.keys
        return torch.arange(keys.shape[2], dtype=torch.float32, device=keys.device).expand(*keys.shape[:2], -1)


@dataclass(frozen=True)
class Earliness(LayerObserver):
    """Scores earlier entries higher."""

    @override
    def score(self, layer: ReadLayer, reduction: str) -> Tensor:
        return -Recency().score(layer, reduction)


@dataclass(frozen=True)
class StreamingLLM(Evict):
    """Keeps the first 4 entries (sinks) and the most recent ones (StreamingLLM, arXiv 2309.17453, section 3).

    KVCache-Factory's has a fixed number of recent entries, and spends the rest of the budget on sinks:
    `StreamingLLM(budget, observer=Earliness(), window=32)`.
    """

    observer: Observer = Recency()
    pool: Pool = NO_POOL
    sinks: int = 4
