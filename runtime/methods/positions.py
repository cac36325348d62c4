"""Methods that need no queries: StreamingLLM, LaCache, key norms and a random choice."""

import functools
import math
from abc import abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel
from typing_extensions import override

from keepsight.errors import Budget, Positive, UserError, Whole
from keepsight.runtime import registry
from keepsight.runtime.evict import Evict
from keepsight.runtime.importance import NO_POOL, Pool, Reduce
from keepsight.runtime.layer import KeptLayer
from keepsight.runtime.observe import LayerObserver, Observer
from keepsight.runtime.state import State


@registry.observer("recency")
@dataclass(frozen=True)
class Recency(LayerObserver):
    """Scores later entries higher."""

    signed = False

    @override
    def score(self, layer: KeptLayer, reduction: str) -> Tensor:
        keys = layer.entries().keys
        return torch.arange(keys.shape[2], dtype=torch.float32, device=keys.device).expand(*keys.shape[:2], -1)


@registry.observer("earliness")
@dataclass(frozen=True)
class Earliness(LayerObserver):
    """Scores earlier entries higher."""

    signed = True

    @override
    def score(self, layer: KeptLayer, reduction: str) -> Tensor:
        return -Recency().score(layer, reduction)


@registry.method("streamingllm", colour="#8A8A8A", marker="v")
@dataclass(frozen=True)
class StreamingLLM(Evict):
    """Keeps the first 4 entries (sinks) and the most recent ones (StreamingLLM, arXiv 2309.17453, section 3).

    `rerotate=True` numbers them by their place in the cache, as the paper and its code do.

    KVCache-Factory's version has a fixed number of recent entries, and spends the rest of the budget on sinks:
    `StreamingLLM(budget, observer=Earliness(), window=32)`.
    """

    observer: Observer = Recency()
    pool: Pool = NO_POOL
    sinks: int = 4


_SINKS = 4


class PositionObserver(Observer):
    """Scorer that looks at an entry's position alone, and at the number of entries of its head and of layers."""

    signed = False

    @abstractmethod
    def scores_by_position(self, length: int, layer: int, layers: int) -> Tensor:
        """[length] float32: the scores of a head's entries in one of the layers, the oldest entry first."""

    @override
    def __call__(self, model: PreTrainedModel, state: State, reduce: Reduce) -> list[Tensor]:
        layers = len(state.layers)
        scores = []
        for index, (entries, head_sizes) in enumerate(zip(state.entries(), state.counts(), strict=True)):
            keys = entries.keys
            layer_scores = torch.zeros(keys.shape[:3], dtype=torch.float32, device=keys.device)
            width = keys.shape[2]
            for size in head_sizes.unique().tolist():
                has_size = (head_sizes == size).to(keys.device)
                scores_of_size = self.scores_by_position(size, index, layers).to(layer_scores)
                layer_scores[..., width - size :][has_size] = scores_of_size  # real entries are on the right
            scores.append(layer_scores)
        return scores


@registry.observer("ladder")
@dataclass(frozen=True)
class Ladder(PositionObserver):
    """Entries that a ladder-shaped cache would drop later count more (LaCache, arXiv 2507.14204, section 3).

    A ladder is a run of consecutive entries. Each layer keeps a part of it that shifts by one entry from layer to
    layer, so that what one layer drops another one holds. A pass cuts all entries after the sinks into ladders and
    drops what a layer does not keep, oldest first; further passes do the same to the rest, until less than a ladder is
    left. The most recent entries, as many as there are layers, are spared. The budget decides where this stops.

    The last ladder is dropped only as far as the budget requires. The published code drops whole ladders, so that it
    ends up below its budget, and lengthens them after the first pass: `PublishedLadder`.

    A span that covers all layers keeps every entry of a ladder in every layer. Then only age counts: StreamingLLM.

    Attributes:
        span: Number of layers that keep an entry.
        overlap: Number of layers that two neighbouring entries of a ladder share.
        sinks: Number of first entries outside all ladders; None for the method's own.
    """

    span: Positive = 16
    overlap: Whole = 0
    sinks: Whole | None = None

    def __post_init__(self) -> None:
        if self.overlap >= self.span:
            raise UserError(
                f"lacache: overlap {self.overlap!r} must be a whole number below the span of {self.span}",
                field="overlap",
                code="range",
            )

    def shape(self, layers: int) -> tuple[int, int]:
        """Entries of a ladder, and how many of them each layer keeps (section 3.2)."""
        step = self.span - self.overlap
        ladder = 1 + max(0, math.ceil((layers - self.span) / step))
        rungs = math.ceil(self.span / step)
        return ladder, min(rungs, ladder)

    @override
    def scores_by_position(self, length: int, layer: int, layers: int) -> Tensor:
        """[length]: when each entry is dropped, from 0."""
        ladder, rungs = self.shape(layers)
        first = layer % (ladder - rungs + 1)
        sinks = _SINKS if self.sinks is None else self.sinks
        sinks = min(sinks, length)
        recent_from = max(length - layers, sinks)

        remaining = torch.arange(sinks, recent_from)
        dropped = []
        while len(remaining) >= ladder > rungs:
            in_ladders = len(remaining) // ladder * ladder
            ladders = remaining[:in_ladders].view(-1, ladder)
            beside = torch.cat([ladders[:, :first], ladders[:, first + rungs :]], dim=1)
            dropped.append(beside.flatten())
            remaining = torch.cat([ladders[:, first : first + rungs].flatten(), remaining[in_ladders:]])

        recent = torch.arange(recent_from, length)
        order = torch.cat([*dropped, remaining, recent, torch.arange(sinks)])
        ranks = torch.empty(length, dtype=torch.float32)
        return ranks.scatter_(0, order, torch.arange(length, dtype=torch.float32))


@registry.observer("published_ladder")
@dataclass(frozen=True)
class PublishedLadder(PositionObserver):
    """The entries that LaCache's code keeps of a whole prompt count more than all others (GATECH-EIC/LaCache).

    It reads the prompt with full attention, as here, and compacts it at once. One pass drops whole ladders, from the
    oldest on. Where that is not enough, a second pass begins again after the first entries: its ladders are so long
    that it is the last, and entries that a layer keeps of one of them are further apart.

    Where the code ends up below its budget, the newest of the entries that it drops fill the rest here; where above,
    its oldest ones leave first, but for the first entries. An entry that the code takes into two long ladders, as it
    can where a layer keeps several of each, is kept once. The code evicts again at every token of an answer.

    Attributes:
        span: Number of layers that keep an entry.
        overlap: Number of layers that two neighbouring entries of a ladder share.
        first: Number of first entries outside all ladders. None for those of the code's LongBench: as many as leave
            room for the recent entries, as many as there are layers, and one more, but at most 128. 64 for its needles,
            4 for its perplexities.
        budget: Entries of each head, or a ratio; None for the method's own.
    """

    span: Positive = 16
    overlap: Whole = 0
    first: Whole | None = None
    budget: Budget | None = None

    def __post_init__(self) -> None:
        Ladder(self.span, self.overlap)  # refuses an overlap that is not below the span

    @override
    def __call__(self, model: PreTrainedModel, state: State, reduce: Reduce) -> list[Tensor]:
        if self.budget is None:
            raise UserError(
                "published_ladder: the ladders depend on the budget; give it one, as in PublishedLadder(budget=64), or "
                "observe with a method, whose budget it takes",
                field="budget",
                code="missing",
            )
        return super().__call__(model, state, reduce)

    @override
    def scores_by_position(self, length: int, layer: int, layers: int) -> Tensor:
        """[length] float32: later entries count more, kept ones more than dropped ones, and the first ones most."""
        assert self.budget is not None
        budget = max(round(self.budget * length), 1) if isinstance(self.budget, float) else self.budget
        scores = torch.arange(length, dtype=torch.float32)
        if length <= budget:
            return scores
        first = self.first
        if first is None:
            first = min(128, max(1, length - layers - 1), budget - layers - 1)
        scores[self.kept(length, budget, first, layer, layers)] += length
        scores[:first] += length
        return scores

    def kept(self, length: int, budget: int, first: int, layer: int, layers: int) -> Tensor:
        """The indices [n] int64 of what the code keeps in a layer of a prompt of `length` > `budget` entries.

        n differs from the budget: it falls short by less than what one ladder drops, or exceeds it by half of what a
        short ladder drops, since the code allows for ladders that are not full yet.

        Of e entries in a ladder a layer keeps r and drops d = e - r. The surplus s = length - capacity, for a capacity
        of budget + d // 2, takes ceil(s / d) ladders, of which the first pass may make
        p = (capacity - first - layers) // r. What is left after p of them, s' = s - p d, takes ceil(s' / (e' - r)) long
        ladders, of e' = e + (a - 1) (e - 1) entries, whose kept ones are a = ceil(s' / (p d)) apart.
        """
        ladder, rungs = Ladder(self.span, self.overlap).shape(layers)
        entries = torch.arange(length)
        dropped_per_ladder = ladder - rungs
        if not dropped_per_ladder:  # every layer keeps its ladders whole: only the most recent entries are left
            return torch.cat([entries[:first], entries[length - budget + first :]])
        capacity = budget + dropped_per_ladder // 2
        surplus = length - capacity
        if surplus <= 0:
            return entries

        possible_ladders = (capacity - first - layers) // rungs
        if first < 0 or possible_ladders < 1:
            raise UserError(
                f"published_ladder: a budget of {budget} has no room for {max(first, 0)} first entries, the {layers} "
                f"recent ones, one for each layer, and {rungs} of a ladder; raise it, or lower first",
                field="budget",
                code="range",
            )
        most_dropped = possible_ladders * dropped_per_ladder
        if surplus <= most_dropped:
            ladder_count = math.ceil(surplus / dropped_per_ladder)
            return _compacted(entries, first, ladder_count, ladder, rungs, layer)

        entries = _compacted(entries, first, possible_ladders, ladder, rungs, layer)
        surplus -= most_dropped
        spacing = math.ceil(surplus / most_dropped)
        long_ladder = ladder + (spacing - 1) * (ladder - 1)
        ladder_count = math.ceil(surplus / (long_ladder - rungs))
        return _compacted(entries, first, ladder_count, long_ladder, rungs, layer, spacing)


def _compacted(
    entries: Tensor, first: int, ladder_count: int, ladder: int, rungs: int, layer: int, spacing: int = 1
) -> Tensor:
    """What is left of entries [n] when the ladders after the `first` entries drop what a layer does not keep.

    There are `ladder_count` ladders of `ladder` entries. A layer keeps `rungs` of these, each `spacing` after the
    one before, from the index layer % (ladder - rungs + 1) on.
    """
    rungs_of_layer = layer % (ladder - rungs + 1) + spacing * torch.arange(rungs)
    ladder_starts = torch.arange(ladder_count)[:, None] * ladder
    kept = (first + ladder_starts + rungs_of_layer).flatten()
    return torch.cat([entries[:first], entries[kept], entries[first + ladder_count * ladder :]])


@registry.method("lacache")
@dataclass(frozen=True)
class LaCache(Evict):
    """4 sinks, and a ladder of positions that shifts from layer to layer (LaCache, arXiv 2507.14204, section 3).

    As in the authors' code: `LaCache(budget, observer=PublishedLadder(), rerotate=True)`.
    """

    observer: Observer = Ladder()
    pool: Pool = NO_POOL
    sinks: int = _SINKS


@registry.observer("short_keys")
@dataclass(frozen=True)
class ShortKeys(LayerObserver):
    """Minus the L2 norm of each key, after RoPE (arXiv 2406.11430, section 2)."""

    signed = True

    @override
    def score(self, layer: KeptLayer, reduction: str) -> Tensor:
        return -layer.contents().keys.float().norm(dim=-1)


@registry.method("key_norm")
@dataclass(frozen=True)
class KeyNorm(Evict):
    """Keeps the entries with the shortest keys (arXiv 2406.11430, section 2), without sinks or window.

    KVCache-Factory evicts nothing from the first two layers, and so exceeds its budget. Here all layers count.
    """

    observer: Observer = ShortKeys()
    pool: Pool = NO_POOL


@registry.observer("random_scores")
@dataclass(frozen=True)
class RandomScores(Observer):
    """A random score from 0 to 1 for every entry, from the same seed at every call.

    An entry's score depends only on its place among the real entries, its layer and its KV head.

    Attributes:
        seed: Seed of the random generator.
    """

    seed: Whole = 0
    signed = False

    @override
    def __call__(self, model: PreTrainedModel, state: State, reduce: Reduce) -> list[Tensor]:
        layers = state.entries()
        scores = []
        for index, (keys, _, real) in enumerate(layers):
            batch, kv_heads, width, _ = keys.shape
            drawn = _draw(self.seed, width, len(layers), kv_heads)[index]
            layer_scores = drawn.to(keys.device).expand(batch, -1, -1)
            if real is not None:
                positions = (real.long().cumsum(dim=-1) - 1).clamp(min=0)  # among the real entries
                layer_scores = layer_scores.gather(-1, positions.expand(-1, kv_heads, -1))
            scores.append(layer_scores)
        return scores


@functools.lru_cache(maxsize=1)  # the layers of a prompt are scored one after the other
@torch.inference_mode(False)
def _draw(seed: int, length: int, layers: int, heads: int) -> Tensor:
    """[L, K, C], drawn entry after entry, so that a longer prompt changes nothing for the first ones."""
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(length, layers, heads, generator=generator, dtype=torch.float32).permute(1, 2, 0)


@registry.method("random")
@dataclass(frozen=True)
class RandomEntries(Evict):
    """Keeps random entries; `observer=RandomScores(seed)` draws others."""

    observer: Observer = RandomScores()
    pool: Pool = NO_POOL
