"""Allocation: how many entries each layer and KV head keeps; their sum is exactly the budget.

Counts are numpy arrays: the CPU works on them without waiting for the device. `Adaptive` and `Global` compare scores on
the device and fetch nothing but the counts, for all layers at once.
"""

import heapq
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional
from typing_extensions import override

from keepsight.errors import Positive, Share, UserError
from keepsight.models.lookahead_settings import HeadWeights, checked_weights
from keepsight.runtime import registry
from keepsight.runtime.importance import stacked, top_mask
from keepsight.runtime.layer import Counts


class HeadSizes(NamedTuple):
    """How many entries each head has, and how many of them are protected.

    Attributes:
        real: [L, B, K], entries of each head, without padding.
        protected: [L, B, K], entries of each head that are always kept.
    """

    real: Counts
    protected: Counts

    @property
    def available(self) -> Counts:
        """[L, B, K], entries to choose from."""
        return self.real - self.protected


class Allocation(ABC):
    """Divides a budget over layers and KV heads.

    Attributes:
        reads_scores: Whether it depends on the entries' importance, and not on their number alone.
        across_layers: Whether it compares importance across layers, so that no layer can be evicted from before all are
            read.
    """

    reads_scores = True
    across_layers = False

    @abstractmethod
    def __call__(self, sizes: HeadSizes, budgets: list[int], importance: list[Tensor]) -> Counts:
        """Divide a budget.

        Args:
            sizes: Entries of the heads of L layers. After a prefill all heads have the same number, so that each layer
                can be divided alone, except by `Global` and `Pyramid`.
            budgets: For each of B rows, entries per layer and KV head on average, protected ones included.
            importance: For each layer, [B, K, C] float32: +inf where an entry is protected, -inf for padding; not
                looked at unless `reads_scores`.

        Returns:
            [L, B, K]: entries to keep. In every row they sum to L x K x budget, or to all real entries if these are
            fewer; no head gets more than it has, or fewer than it protects. Where a head of an evicted cache has fewer
            than its share, others get the rest.
        """

    def check(self, budget: int) -> None:
        """Refuse a budget under which a head could be left without entries, where none is protected."""


@registry.allocation("uniform")
@dataclass(frozen=True)
class Uniform(Allocation):
    """The same number of entries in every layer and KV head."""

    reads_scores = False

    @override
    def __call__(self, sizes: HeadSizes, budgets: list[int], importance: list[Tensor]) -> Counts:
        if (sizes.real >= (wanted := np.array(budgets)[:, None])).all():
            return np.broadcast_to(wanted, sizes.real.shape).copy()
        return np.stack([_evenly(sizes.real[:, row], budget) for row, budget in enumerate(budgets)], axis=1)


@registry.allocation("pyramidkv")
@dataclass(frozen=True)
class Pyramid(Allocation):
    """Budgets that shrink with depth (PyramidKV, arXiv 2406.02069, section 4; KVCache-Factory's integer schedule).

    The schedule divides the unprotected budget; prompts of fewer than twice as many tokens are divided evenly. Rounding
    makes the published schedule exceed the budget by up to 5 %; here the surplus is taken back from the layers that
    were rounded up most, the last ones.

    Attributes:
        beta: The last layer gets 1 / beta of the average, the first one 2 - 1 / beta.
    """

    reads_scores = False
    beta: Positive = 20

    @override
    def check(self, budget: int) -> None:
        if budget < self.beta:
            raise UserError(
                f"pyramidkv: budget {budget} with beta {self.beta} leaves the last layer without entries; "
                f"give a budget of at least {self.beta}, or protect a window"
            )

    @override
    def __call__(self, sizes: HeadSizes, budgets: list[int], importance: list[Tensor]) -> Counts:
        rows = enumerate(budgets)
        return np.stack([self._divide(sizes.real[:, row], sizes.protected[:, row], each) for row, each in rows], axis=1)

    def _divide(self, real: Counts, protected: Counts, budget: int) -> Counts:
        """Entries to keep [L, K] in one row, from its numbers of real and protected entries [L, K]."""
        available, free = real - protected, budget - int(protected.max())
        total = min(real.size * budget, int(real.sum())) - int(protected.sum())
        # Layers of different sizes have been evicted from by this schedule: the prompt was long enough.
        if real.min() == real.max() < 2 * free:
            published = [free] * len(real)
        else:
            published = pyramid_schedule(free, int(available.max()), len(real), self.beta)
        ideal, most = np.linspace(published[0], 2 * free - published[0], len(real)), available.min(axis=1)
        caps = adjust_to_sum(np.array(published), ideal, min(free * len(real), int(most.sum())), most)
        by_head = np.broadcast_to(caps[:, None], real.shape), np.broadcast_to(ideal[:, None], real.shape)
        return protected + adjust_to_sum(*by_head, total, available)


def pyramid_schedule(budget: int, candidates: int, layers: int, beta: int = 20) -> list[int]:
    """PyramidKV's entries by layer, exactly as KVCache-Factory rounds them; their sum exceeds `budget` x `layers`.

    `budget` is the average number of entries of a layer, `candidates` the number to choose from, both without the
    window; for `beta` see `Pyramid`.
    """
    smallest = budget // beta
    largest = 2 * budget - smallest
    if largest >= candidates:
        largest, smallest = candidates, 2 * budget - candidates
    step = (largest - smallest) // max(layers - 1, 1)
    return [largest - layer * step for layer in range(layers)]


@registry.allocation("adakv")
@dataclass(frozen=True)
class Adaptive(Allocation):
    """Heads of a layer share its budget by where its most important entries are (AdaKV, arXiv 2407.11550, algorithm 1).

    Every head is guaranteed a share of the average, its floor.

    Attributes:
        floor: The guaranteed share, alpha.
        blend: True: a head gets (1 - alpha) times the number of its unprotected entries among the layer's most
            important ones, plus its floor (AdaKV's code). False: a head gets at least its floor, protected entries
            included; importance alone decides about the rest (kvpress).
        normalize: Whether a head's importance is scaled by the share of it in the head's top entries before heads are
            compared (KVCache-Factory's variant; for importance of one sign).
    """

    floor: Share = 0.2
    blend: bool = True
    normalize: bool = False

    @override
    def check(self, budget: int) -> None:
        _check_promise("adakv", budget, self.floor)

    @override
    def __call__(self, sizes: HeadSizes, budgets: list[int], importance: list[Tensor]) -> Counts:
        kv_heads = sizes.real.shape[2]
        rows = [_evenly(row, budget * kv_heads) for row, budget in zip(sizes.real.sum(axis=2).T, budgets, strict=True)]
        totals = np.stack(rows, axis=1)
        free = totals - sizes.protected.sum(axis=2)
        promised = np.zeros_like(sizes.real)
        if not self.blend:
            averages = (totals // kv_heads * self.floor).astype(np.int64)[..., None]
            promised = np.minimum((averages - sizes.protected).clip(min=0), sizes.available)
        among_top = self._among_top(importance, free, promised)
        if not self.blend:
            return sizes.protected + among_top
        counts, share = np.empty_like(sizes.real), free // kv_heads
        for place in np.ndindex(*free.shape):
            ideal = among_top[place] * (1 - self.floor) + share[place] * self.floor
            rounded = blended(among_top[place], int(share[place]), self.floor)
            counts[place] = adjust_to_sum(rounded, ideal, int(free[place]), sizes.available[place])
        return sizes.protected + counts

    def _among_top(self, importance: list[Tensor], free: Counts, promised: Counts) -> Counts:
        """[L, B, K]: how many of the `free` [L, B] best entries of a layer fall into each head.

        The best `promised` [L, B, K] of a head come before all others; ties go to the first head and index.
        """
        most, device = int(free.max()), importance[0].device
        best = torch.cat([self._best(layers, free[of], most).to(device) for of, layers in stacked(importance)])
        if promised.any():
            best.masked_fill_(_ahead(promised, best), torch.inf)
        chosen = top_mask(best.flatten(2), free).view_as(best)
        return np.array(chosen.sum(dim=-1).tolist())  # the only thing to wait for

    def _best(self, importance: Tensor, totals: Counts, most: int) -> Tensor:
        """The highest importance values of each head, descending: [L, B, K, C] -> [L, B, K, most].

        `totals` [L, B], the entries that each layer divides over its heads, are read by `normalize` alone.
        """
        ranked = importance.nan_to_num(posinf=-torch.inf, neginf=-torch.inf)
        if self.normalize:
            shares = (totals // importance.shape[2]).ravel().tolist()
            rows = [_comparable(*row) for row in zip(ranked.flatten(0, 1), shares, strict=True)]
            ranked = torch.stack(rows).view_as(ranked)
        best = ranked.topk(min(most, ranked.shape[-1]), dim=-1).values
        return functional.pad(best, (0, most - best.shape[-1]), value=-torch.inf)


@registry.allocation("global")
@dataclass(frozen=True)
class Global(Allocation):
    """The heads of all layers share a budget by where the most important entries are.

    KVzip's eviction structure (arXiv 2505.23416, section 4.1), with a floor, and weights that a lookahead module may
    have learned (`keepsight finetune`).

    Attributes:
        floor: The share of the average that every head is guaranteed, protected entries included.
        weights: L rows of K numbers above 0, by which the importance of a head's entries is multiplied before heads are
            compared, and only then; None for 1. For importance that is not negative.
        page: Every head keeps a multiple of this number of entries, the page size of a serving engine; 1 for any
            number. The budget is met exactly only where the page divides it.
    """

    across_layers = True
    floor: Share = 0.2
    weights: HeadWeights | None = None
    page: Positive = 1

    def __post_init__(self) -> None:
        if self.weights is not None:
            object.__setattr__(self, "weights", checked_weights(self.weights, "global: weights"))

    @override
    def check(self, budget: int) -> None:
        _check_promise("global", budget, self.floor)

    @override
    def __call__(self, sizes: HeadSizes, budgets: list[int], importance: list[Tensor]) -> Counts:
        most = sizes.real[:, 0].size * np.array(budgets)
        free = np.minimum(most, sizes.real.sum(axis=(0, 2))) - sizes.protected.sum(axis=(0, 2))
        floors = np.array([int(budget * self.floor) for budget in budgets])[:, None]
        promised = np.minimum((floors - sizes.protected).clip(min=0), sizes.available)
        ranked = _alike(importance)
        if self.weights is not None:
            ranked *= self._weights_for(sizes.real)[:, None, :, None].to(ranked.device, non_blocking=True)
        if most_promised := int(promised.max()):
            best = ranked.topk(most_promised, dim=-1)  # which of equal ones does not matter: they are only counted
            values = best.values.masked_fill_(_ahead(promised, best.values), torch.inf)
            ranked.scatter_(-1, best.indices, values)
        counts = sizes.protected + _in_top(ranked, free)
        if self.page == 1:
            return counts
        rows = (each.swapaxes(0, 1) for each in (counts, sizes.real, sizes.protected))
        return np.stack([*map(self._in_pages, *rows)], axis=1)

    def _in_pages(self, counts: Counts, real: Counts, protected: Counts) -> Counts:
        """Counts [L, K] of one row, each changed to a multiple of the page above 0; their sum to the nearest one."""
        least, most = (-(-protected // self.page)).clip(min=1), real // self.page
        ideal, total = counts / self.page - least, round(int(counts.sum()) / self.page) - int(least.sum())
        if (most < least).any():
            raise UserError(f"global: a page of {self.page} entries is longer than what a head has; lower it")
        pages = adjust_to_sum(ideal.astype(np.int64), ideal, min(total, int((most - least).sum())), most - least)
        return (least + pages) * self.page

    def _weights_for(self, real: Counts) -> Tensor:
        weights = torch.tensor(self.weights, dtype=torch.float32)
        if (found := [*weights.shape]) != (expected := [*real.shape[::2]]):
            raise UserError(f"global: weights has shape {found}, this model's layers and KV heads are {expected}")
        return weights


def _in_top(ranked: Tensor, free: Counts) -> Counts:
    """[L, B, K]: how many of the `free` [B] best of all heads' [L, B, K, C] are in each; ties go to the first head."""
    ranked = ranked.transpose(0, 1)
    ends = torch.from_numpy(free.clip(min=1)[:, None] - 1).to(ranked.device, non_blocking=True)
    least = ranked.flatten(1).topk(max(int(free.max()), 1)).values.gather(1, ends)[..., None, None]
    numbers = torch.stack([(ranked > least).sum(dim=-1), (ranked == least).sum(dim=-1)])
    above, tied = np.array(numbers.flatten(2).tolist())  # [B, L * K]; the only thing to wait for
    left = free[:, None] - above.sum(axis=1, keepdims=True) - tied.cumsum(axis=1) + tied
    return (above + left.clip(0, tied)).reshape(ranked.shape[:3]).swapaxes(0, 1)


def _alike(importance: list[Tensor]) -> Tensor:
    """The importance of all layers as one tensor [L, B, K, C] on one device, -inf where nothing is to be chosen."""
    device, most = importance[0].device, max(each.shape[-1] for each in importance)
    parts = [layers.to(device) for _, layers in stacked(importance)]
    padded = [functional.pad(each, (0, most - each.shape[-1]), value=-torch.inf) for each in parts]
    return torch.cat(padded).nan_to_num_(posinf=-torch.inf, neginf=-torch.inf)


def _ahead(promised: Counts, best: Tensor) -> Tensor:
    """[..., n] bool: the first `promised` [...] of the best, which is [..., n]."""
    first = torch.from_numpy(promised).to(best.device, non_blocking=True)[..., None]
    return first > torch.arange(best.shape[-1], device=best.device)


def _comparable(candidates: Tensor, share: int) -> Tensor:
    """The importance [K, C] of a layer's heads, each scaled by the part of it in the head's `share` best entries."""
    ordered = candidates.sort(dim=-1, descending=True).values.nan_to_num(neginf=0.0)
    top, whole = ordered[:, :share].sum(-1, keepdim=True), ordered.sum(-1, keepdim=True)
    scaled = candidates * torch.where(whole == 0, 1.0, top / whole)
    return scaled.masked_fill(torch.isneginf(candidates), -torch.inf)


def blended(among_top: Counts, budget: int, floor: float) -> Counts:
    """AdaKV's entries by head, exactly as its code rounds them, in float32; their sum can miss `budget` x K.

    `among_top` [K] counts the layer's most important entries in each head, `budget` is that of a head without the
    window, and `floor` is alpha.
    """
    blend = among_top.astype(np.float32) * np.float32(1 - floor) + np.float32(int(budget * floor))
    return blend.round().astype(np.int64)


def _check_promise(name: str, budget: int, floor: float) -> None:
    if int(budget * floor) < 1:
        raise UserError(
            f"{name}: budget {budget} with floor {floor} can leave a head without entries; "
            "raise the floor or the budget, or protect a window"
        )


def _evenly(available: Counts, share: int) -> Counts:
    """`share` entries of each; where some have fewer, others get the difference."""
    total = min(available.size * share, int(available.sum()))
    return adjust_to_sum(available.clip(max=share), np.full(available.shape, share), total, available)


def adjust_to_sum(counts: Counts, ideal: NDArray[Any], total: int, most: Counts) -> Counts:
    """Change rounded counts one by one, each time the one furthest from `ideal`, until they sum to `total`.

    Counts, `ideal` (what they were rounded from) and `most` (the largest allowed, of a sum of at least `total`) have
    one shape; ties go to the first.
    """
    limits, wanted = most.flatten().tolist(), ideal.flatten().tolist()
    adjusted = [max(0, min(pair)) for pair in zip(counts.flatten().tolist(), limits, strict=True)]
    missing = total - sum(adjusted)
    step = 1 if missing > 0 else -1

    def place(index: int) -> tuple[float, int]:
        # Rounded, so that the noise of floats does not decide ties.
        return round((adjusted[index] - wanted[index]) * step, 6), index

    def can_change(index: int) -> bool:
        return adjusted[index] < limits[index] if step > 0 else adjusted[index] > 0

    waiting = [place(index) for index in range(len(adjusted)) if can_change(index)]
    heapq.heapify(waiting)
    for _ in range(abs(missing)):
        _, index = heapq.heappop(waiting)
        adjusted[index] += step
        if can_change(index):
            heapq.heappush(waiting, place(index))
    return np.array(adjusted).reshape(counts.shape)
