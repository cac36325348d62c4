"""LaCache (arXiv 2507.14204): a ladder of positions that shifts from layer to layer; nothing observes."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor
from transformers import PreTrainedModel
from typing_extensions import override

from keepsight.errors import UserError, require_whole
from keepsight.runtime.evict import Evict
from keepsight.runtime.importance import NO_POOL, Pool, Reduce
from keepsight.runtime.observe import Observer
from keepsight.runtime.state import State

_SINKS = 4


@dataclass(frozen=True)
class Ladder(Observer):
    """Entries that a ladder-shaped cache would drop later count more (LaCache, arXiv 2507.14204, section 3).

    A ladder is a run of consecutive entries. Each layer keeps a part of it that shifts by one entry from layer to
    layer, so that what one layer drops another one holds. A pass cuts all entries after the sinks into ladders and
    drops what a layer does not keep, oldest first; further passes do the same to the rest, until less than a ladder is
    left. The most recent entries, as many as there are layers, are spared. The budget decides where this stops.

    The published code evicts as tokens come in, a whole ladder at a time, so that it ends up below its budget, and
    lengthens its ladders after several passes. Here the whole prompt is read with full attention first, and the last
    ladder is dropped only as far as the budget requires.

    A span that covers all layers keeps every entry of a ladder in every layer. Then only age counts: StreamingLLM.

    Attributes:
        span: Number of layers that keep an entry.
        overlap: Number of layers that two neighbouring entries of a ladder share.
        sinks: Number of first entries outside all ladders; None for the method's own.
    """

    span: int = 16
    overlap: int = 0
    sinks: int | None = None

    def __post_init__(self) -> None:
        require_whole("lacache", 1, span=self.span)
        if type(self.overlap) is not int or not 0 <= self.overlap < self.span:
            raise UserError(f"lacache: overlap {self.overlap!r} must be a whole number below the span of {self.span}")
        require_whole("lacache", sinks=0 if self.sinks is None else self.sinks)

    @override
    def __call__(self, model: PreTrainedModel, state: State, reduce: Reduce) -> list[Tensor]:
        layers = len(state.cache.layers)
        scores = []
        for layer, (each, held) in enumerate(zip(state.entries(), state.held(), strict=True)):
            score = torch.zeros(each.keys.shape[:3], device=each.keys.device)
            for length in held.unique().tolist():
                ranks = self._ranks(length, layer, layers).to(score)
                score[..., score.shape[-1] - length :][(held == length).to(score.device)] = ranks
            scores.append(score)
        return scores

    @override
    def bound(self, budget: int | float, sinks: int, window: int) -> Observer:
        return replace(self, sinks=sinks) if self.sinks is None else self

    def shape(self, layers: int) -> tuple[int, int]:
        """Entries of a ladder, and how many of them each layer keeps (section 3.2)."""
        step = self.span - self.overlap
        length = 1 + max(0, -((self.span - layers) // step))
        return length, min(-(-self.span // step), length)

    def _ranks(self, length: int, layer: int, layers: int) -> Tensor:
        """[length]: when each entry is dropped, from 0."""
        ladder, kept = self.shape(layers)
        first = layer % (ladder - kept + 1)
        sinks = min(_SINKS if self.sinks is None else self.sinks, length)
        recent_from = max(length - layers, sinks)
        left, dropped = torch.arange(sinks, recent_from), []
        while len(left) >= ladder > kept:
            whole = len(left) // ladder * ladder
            ladders = left[:whole].view(-1, ladder)
            dropped += [torch.cat([ladders[:, :first], ladders[:, first + kept :]], dim=1).flatten()]
            left = torch.cat([ladders[:, first : first + kept].flatten(), left[whole:]])
        order = torch.cat([*dropped, left, torch.arange(recent_from, length), torch.arange(sinks)])
        return torch.empty(length).scatter_(0, order, torch.arange(length).float())


@dataclass(frozen=True)
class LaCache(Evict):
    """4 sinks, and a ladder of positions that shifts from layer to layer (LaCache, arXiv 2507.14204, section 3)."""

    observer: Observer = Ladder()
    pool: Pool = NO_POOL
    sinks: int = _SINKS
