"""KeyNorm (arXiv 2406.11430): entries with short keys are kept; nothing observes."""

from dataclasses import dataclass

from torch import Tensor
from typing_extensions import override

from keepsight.runtime.evict import Evict
from keepsight.runtime.importance import NO_POOL, Pool
from keepsight.runtime.observe import LayerObserver, Observer
from keepsight.runtime.read_layer import ReadLayer


@dataclass(frozen=True)
class ShortKeys(LayerObserver):
    """Minus the L2 norm of each key, after RoPE (arXiv 2406.11430, section 2)."""

    @override
    def score(self, layer: ReadLayer, reduction: str) -> Tensor:
        return -layer.held.keys.float().norm(dim=-1)


@dataclass(frozen=True)
class KeyNorm(Evict):
    """Keeps the entries with the shortest keys (arXiv 2406.11430, section 2), without sinks or window.

    KVCache-Factory leaves the first two layers whole, and so exceeds its budget. Here all layers count.
    """

    observer: Observer = ShortKeys()
    pool: Pool = NO_POOL
