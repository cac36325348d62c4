"""Methods that look at the geometry of keys and values alone: KeyDiff and CurDKV."""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional
from typing_extensions import override

from keepsight.errors import require_whole
from keepsight.runtime import registry
from keepsight.runtime.evict import Evict
from keepsight.runtime.importance import NO_POOL, Pool
from keepsight.runtime.layer import KeptLayer
from keepsight.runtime.observe import LayerObserver, Observer


@registry.observer("distinct_keys")
@dataclass(frozen=True)
class DistinctKeys(LayerObserver):
    """Minus the cosine of each key, after RoPE, with the mean of all keys of length 1 (KeyDiff, arXiv 2504.15364)."""

    signed = True

    @override
    def score(self, layer: KeptLayer, reduction: str) -> Tensor:
        keys, _, real = layer.attended()
        directions = functional.normalize(keys.float(), dim=-1)
        counted = directions if real is None else directions * real[..., None]
        anchor = functional.normalize(counted.sum(dim=2, keepdim=True), dim=-1)
        return -(directions * anchor).sum(dim=-1)


@registry.method("keydiff")
@dataclass(frozen=True)
class KeyDiff(Evict):
    """Keeps the keys that are least like the others, without sinks or window (KeyDiff, arXiv 2504.15364, section 4).

    The paper evicts after each block of a prompt that is read under the budget. Here the whole prompt is read with full
    attention first, as in kvpress, and `every` evicts from what is generated.
    """

    observer: Observer = DistinctKeys()
    pool: Pool = NO_POOL


@registry.observer("leverage")
@dataclass(frozen=True)
class Leverage(LayerObserver):
    """Squared norm of each key times that of its value, each as a share of its block (CurDKV, arXiv 2509.15038).

    Squared norms stand in for leverage scores: the paper's, after a random projection to 20 dimensions, on average.

    Attributes:
        block: Number of consecutive entries whose norms are compared; 0 for all.
    """

    block: int = 16
    signed = False

    def __post_init__(self) -> None:
        require_whole("curdkv", block=self.block)

    @override
    def score(self, layer: KeptLayer, reduction: str) -> Tensor:
        keys, values, real = layer.attended()
        squares = [each.float().square().sum(dim=-1) for each in (keys, values)]
        real = torch.ones_like(squares[0], dtype=torch.bool) if real is None else real.expand_as(squares[0])
        return self._share(squares[0] * real, real) * self._share(squares[1] * real, real)

    def _share(self, squares: Tensor, real: Tensor) -> Tensor:
        """[B, K, C], each divided by the sum of its block; blocks are counted from the first real entry on."""
        if self.block:
            blocks = (real.long().cumsum(dim=-1) - 1).clamp(min=0) // self.block
            sums = torch.zeros_like(squares).scatter_add_(-1, blocks, squares).gather(-1, blocks)
        else:
            sums = squares.sum(dim=-1, keepdim=True)
        return squares / sums.clamp(min=torch.finfo(torch.float32).tiny)


@registry.method("curdkv")
@dataclass(frozen=True)
class CurDKV(Evict):
    """Keeps 4 sinks and the entries of most leverage in keys and values (CurDKV, arXiv 2509.15038, algorithm 1).

    As kvpress has it: without the paper's random projection, and relative to the 16 entries of a block.
    """

    observer: Observer = Leverage()
    pool: Pool = NO_POOL
    sinks: int = 4
