"""RandomEntries: a random choice of entries, the baseline under every method."""

from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel
from typing_extensions import override

from keepsight.errors import require_whole
from keepsight.runtime.evict import Evict
from keepsight.runtime.importance import NO_POOL, Pool
from keepsight.runtime.observe import Observer
from keepsight.runtime.state import State


@dataclass(frozen=True)
class Lots(Observer):
    """A random score from 0 to 1 for every entry, from the same seed at every call.

    An entry's score depends on its place among the real entries, its layer and its KV head, and on nothing else.

    Attributes:
        seed: Seed of the random generator.
    """

    seed: int = 0

    def __post_init__(self) -> None:
        require_whole("random", seed=self.seed)

    @override
    def __call__(self, model: PreTrainedModel, state: State, reduction: str) -> list[Tensor]:
        entries = state.entries()
        heads = entries[0].keys.shape[1]
        generator = torch.Generator().manual_seed(self.seed)
        # Entry after entry, so that a longer prompt changes nothing for the first ones.
        lots = torch.rand(state.length, len(entries), heads, generator=generator).permute(1, 2, 0)
        drawn = []
        for own, each in zip(lots.to(state.logits.device), entries, strict=True):
            of_rows = own[..., : each.keys.shape[2]].expand(len(each.keys), -1, -1)
            if each.real is not None:
                place = (each.real.long().cumsum(dim=-1) - 1).clamp(min=0)
                of_rows = of_rows.gather(-1, place.expand(-1, heads, -1))
            drawn.append(of_rows)
        return drawn


@dataclass(frozen=True)
class RandomEntries(Evict):
    """Keeps random entries; `observer=Lots(seed)` draws others."""

    observer: Observer = Lots()
    pool: Pool = NO_POOL
