"""Random selections over a cache that grows, for layers on the CPU and on the device."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from keepsight.runtime.attention import Softmax
from keepsight.runtime.sparse_read.cache import SelectedLayer, Selection

WIDTH, GROUP = 4, 2


@dataclass
class Walk:
    """Steps of random tokens after `start` entries; `fresh` is the share of a selection that a step draws anew."""

    batch: int
    kv_heads: int
    budget: int
    start: int
    fresh: float = 0.2
    padding: list[int] | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        self.random = torch.Generator().manual_seed(self.seed)
        self.importance = torch.rand(self.batch, self.kv_heads, 0)

    def layer(self) -> SelectedLayer:
        """What the walk starts from."""
        padding = None if self.padding is None else torch.tensor(self.padding)
        return SelectedLayer(self._draw(self.start), self._draw(self.start), self.start, padding)

    def steps(self, count: int) -> Iterator[tuple[Selection, tuple[Tensor, Tensor, Tensor]]]:
        """What each step selects among the entries before it, and its query, key and value."""
        for length in range(self.start, self.start + count):
            query = torch.randn(self.batch, self.kv_heads * GROUP, 1, WIDTH, generator=self.random)
            yield self.selection(length), (query, self._draw(1), self._draw(1))

    def selection(self, length: int) -> Selection:
        """The most important entries of `length`; with probability `fresh` each entry's importance is another one."""
        drawn = torch.rand(self.batch, self.kv_heads, length, generator=self.random)
        before = drawn[..., : self.importance.shape[2]]
        fresh = torch.rand(before.shape, generator=self.random) < self.fresh
        before.copy_(torch.where(fresh, before, self.importance))
        self.importance = drawn
        if self.padding is None:
            return Selection(drawn.topk(min(self.budget, length)).indices, None)
        padding = torch.tensor(self.padding)[:, None, None]
        indices = drawn.masked_fill(torch.arange(length) < padding, -1.0).topk(min(self.budget, length)).indices
        return Selection(indices, indices >= padding)

    def _draw(self, tokens: int) -> Tensor:
        return torch.randn(self.batch, self.kv_heads, tokens, WIDTH, generator=self.random)


def step(layer: SelectedLayer, selection: Selection, states: tuple[Tensor, Tensor, Tensor]) -> Tensor:
    """A step as a retrieval head's reader takes it: announced, then computed."""
    layer.prepare(selection)
    return layer.step(*states, Softmax(WIDTH**-0.5))
