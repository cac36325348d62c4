"""Random selections over a cache that grows, for layers on the CPU and on the device."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from keepsight.runtime.attention import Softmax, grouped_attention
from keepsight.runtime.sparse_read.cache import SelectedLayer, Selection

WIDTH, GROUP = 4, 2


@dataclass
class Walk:
    """Steps of random tokens. `fresh` is the share of a selection that a step draws anew.

    Attributes:
        batch, kv_heads, budget, start: Rows, KV heads, entries chosen, and entries before the first step.
        padding: Of each row, on the left; None for none.
    """

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
        return SelectedLayer(self._draw(self.start), self._draw(self.start), self.start, self.padding_tensor())

    def padding_tensor(self) -> Tensor | None:
        """[B] int64."""
        return None if self.padding is None else torch.tensor(self.padding)

    def steps(self, count: int) -> Iterator[tuple[Selection, tuple[Tensor, Tensor, Tensor]]]:
        """What each step chooses among the entries before it, and its query, key and value."""
        for length in range(self.start, self.start + count):
            query = torch.randn(self.batch, self.kv_heads * GROUP, 1, WIDTH, generator=self.random)
            yield self.chosen(length), (query, self._draw(1), self._draw(1))

    def chosen(self, length: int) -> Selection:
        """The most important entries of `length`; with probability `fresh` each entry's importance is another one."""
        shape = self.batch, self.kv_heads, length
        drawn = torch.rand(shape, generator=self.random)
        drawn[..., : self.importance.shape[2]] = torch.where(
            torch.rand(shape, generator=self.random)[..., : self.importance.shape[2]] < self.fresh,
            drawn[..., : self.importance.shape[2]],
            self.importance,
        )
        self.importance, padding = drawn, self.padding_tensor()
        if padding is not None:
            drawn = drawn.masked_fill(torch.arange(length) < padding[:, None, None], -1.0)
        indices = drawn.topk(min(self.budget, length)).indices
        return Selection(indices, None if padding is None else indices >= padding[:, None, None])

    def _draw(self, tokens: int) -> Tensor:
        return torch.randn(self.batch, self.kv_heads, tokens, WIDTH, generator=self.random)


def step(layer: SelectedLayer, chosen: Selection, states: tuple[Tensor, Tensor, Tensor]) -> Tensor:
    """A step as a retrieval head's reader takes it: announced, then computed."""
    layer.prepare(chosen)
    return layer.step(*states, Softmax(WIDTH**-0.5))


def by_loops(
    keys: Tensor, values: Tensor, chosen: Selection, padding: list[int] | None, states: tuple[Tensor, Tensor, Tensor]
) -> Tensor:
    """The attention [B, 1, H, d] of a step, head after head; keys and values [B, K, C, d] are those before it."""
    query, key, value = states
    output = torch.empty(len(query), 1, query.shape[1], WIDTH)
    for row in range(len(query)):
        for head in range(query.shape[1]):
            own = head // GROUP
            places = [place for place in chosen.indices[row, own].tolist() if place >= (padding or [0] * 99)[row]]
            seen = [torch.cat([each[row, own, places], new[row, own]]) for each, new in ((keys, key), (values, value))]
            keys_, values_ = (each[None, None] for each in seen)
            one = query[row : row + 1, head : head + 1]
            output[row, 0, head] = grouped_attention(one, keys_, values_, None, Softmax(WIDTH**-0.5))
    return output
