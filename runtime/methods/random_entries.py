"""RandomEntries: a random choice of entries, the baseline for every method."""

import functools
from dataclasses import dataclass

import torch
from torch import Tensor
from typing_extensions import override

from keepsight.errors import require_whole
from keepsight.runtime.evict import Evict
from keepsight.runtime.importance import NO_POOL, Pool
from keepsight.runtime.observe import LayerObserver, Observer
from keepsight.runtime.read_layer import ReadLayer


@dataclass(frozen=True)
class RandomScores(LayerObserver):
    """A random score from 0 to 1 for every entry, from the same seed at every call.

    An entry's score depends only on its place among the real entries, its layer and its KV head.

    Attributes:
        seed: Seed of the random generator.
    """

    seed: int = 0

    def __post_init__(self) -> None:
        require_whole("random", seed=self.seed)

    @override
    def score(self, layer: ReadLayer, reduction: str) -> Tensor:
        keys, _, real = layer.held
        rows, heads, length, _ = keys.shape
        scores = _drawn(self.seed, length, layer.layers, heads)[layer.place].to(keys.device).expand(rows, -1, -1)
        if real is None:
            return scores
        place = (real.long().cumsum(dim=-1) - 1).clamp(min=0)
        return scores.gather(-1, place.expand(-1, heads, -1))


@functools.lru_cache(maxsize=1)  # the layers of a prompt are scored one after the other
@torch.inference_mode(False)
def _drawn(seed: int, length: int, layers: int, heads: int) -> Tensor:
    """[L, K, C], drawn entry after entry, so that a longer prompt changes nothing for the first ones."""
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(length, layers, heads, generator=generator).permute(1, 2, 0)


@dataclass(frozen=True)
class RandomEntries(Evict):
    """Keeps random entries; `observer=RandomScores(seed)` draws others."""

    observer: Observer = RandomScores()
    pool: Pool = NO_POOL
