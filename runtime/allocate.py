"""Allocation: how many entries each layer and KV head keeps; their sum is exactly the budget.

Counts are numpy arrays: the CPU works on them without waiting for the device. `Adaptive` and `Global` compare scores on
the device and fetch nothing but the counts, for all layers at once.
"""

import heapq
import math
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
from keepsight.runtime.importance import stack_layers, top_mask
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

    @property
    def meets_budget_exactly(self) -> bool:
        """Whether the budget is met exactly, and a prompt within it is left as it is."""
        return True

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
            fewer (to no more than that, unless the allocation `meets_budget_exactly`); no head gets more than it has,
            or fewer than it protects. Where a head of an evicted cache has fewer than its share, others get the rest.
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
        row_budgets = np.array(budgets)[:, None]
        if (sizes.real >= row_budgets).all():
            return np.broadcast_to(row_budgets, sizes.real.shape).copy()
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
                f"give a budget of at least {self.beta}, or protect a window",
                field="budget",
                code="range",
            )

    @override
    def __call__(self, sizes: HeadSizes, budgets: list[int], importance: list[Tensor]) -> Counts:
        row_counts = []
        for row, budget in enumerate(budgets):
            row_counts.append(self._divide(sizes.real[:, row], sizes.protected[:, row], budget))
        return np.stack(row_counts, axis=1)

    def _divide(self, real: Counts, protected: Counts, budget: int) -> Counts:
        """Entries to keep [L, K] in one row, from its numbers of real and protected entries [L, K]."""
        layers = len(real)
        available = real - protected
        free = budget - int(protected.max())
        # Layers of different sizes have been evicted from by this schedule: the prompt was long enough.
        if real.min() == real.max() < 2 * free:
            published = [free] * layers
        else:
            published = pyramid_schedule(free, int(available.max()), layers, self.beta)

        ideal = np.linspace(published[0], 2 * free - published[0], layers)
        layer_limits = available.min(axis=1)
        layer_total = min(free * layers, int(layer_limits.sum()))
        by_layer = adjust_to_sum(np.array(published), ideal, layer_total, layer_limits)

        total = min(real.size * budget, int(real.sum())) - int(protected.sum())
        by_head = np.broadcast_to(by_layer[:, None], real.shape)
        ideal_by_head = np.broadcast_to(ideal[:, None], real.shape)
        return protected + adjust_to_sum(by_head, ideal_by_head, total, available)


def pyramid_schedule(budget: int, candidates: int, layers: int, beta: int = 20) -> list[int]:
    """PyramidKV's entries by layer, exactly as KVCache-Factory rounds them; their sum exceeds `budget` x `layers`.

    `budget` is the average number of entries of a layer, `candidates` the number to choose from, both without the
    window; for `beta` see `Pyramid`.
    """
    smallest = budget // beta
    largest = 2 * budget - smallest
    if largest >= candidates:
        largest = candidates
        smallest = 2 * budget - candidates
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
        layer_entries = sizes.real.sum(axis=2)
        row_totals = [_evenly(layer_entries[:, row], budget * kv_heads) for row, budget in enumerate(budgets)]
        totals = np.stack(row_totals, axis=1)  # [L, B]
        free = totals - sizes.protected.sum(axis=2)

        if not self.blend:
            averages = (totals // kv_heads * self.floor).astype(np.int64)[..., None]
            promised = np.minimum((averages - sizes.protected).clip(min=0), sizes.available)
            return sizes.protected + self._among_top(importance, free, promised)

        among_top = self._among_top(importance, free, np.zeros_like(sizes.real))
        shares = free // kv_heads
        counts = np.empty_like(sizes.real)
        for index in np.ndindex(*free.shape):
            ideal = among_top[index] * (1 - self.floor) + shares[index] * self.floor
            rounded = blended(among_top[index], int(shares[index]), self.floor)
            counts[index] = adjust_to_sum(rounded, ideal, int(free[index]), sizes.available[index])
        return sizes.protected + counts

    def _among_top(self, importance: list[Tensor], free: Counts, promised: Counts) -> Counts:
        """[L, B, K]: how many of the `free` [L, B] best entries of a layer fall into each head.

        The best `promised` [L, B, K] of a head come before all others; ties go to the first head and index.
        """
        device = importance[0].device
        largest = int(free.max())
        best_by_stack = []
        for indices, layers in stack_layers(importance):
            best_by_stack.append(self._best(layers, free[indices], largest).to(device))
        best = torch.cat(best_by_stack)

        if promised.any():
            best.masked_fill_(_is_promised(promised, best), torch.inf)
        top = top_mask(best.flatten(2), free).view_as(best)
        return np.array(top.sum(dim=-1).tolist())  # the only thing to wait for

    def _best(self, importance: Tensor, free: Counts, count: int) -> Tensor:
        """The highest importance values of each head, descending: [L, B, K, C] -> [L, B, K, count].

        `free` [L, B], the entries that each layer divides over its heads, is read by `normalize` alone.
        """
        ranked = importance.nan_to_num(posinf=-torch.inf, neginf=-torch.inf)
        if self.normalize:
            shares = (free // importance.shape[2]).ravel().tolist()
            normalized = [_normalized(heads, share) for heads, share in zip(ranked.flatten(0, 1), shares, strict=True)]
            ranked = torch.stack(normalized).view_as(ranked)
        best = ranked.topk(min(count, ranked.shape[-1]), dim=-1).values
        return functional.pad(best, (0, count - best.shape[-1]), value=-torch.inf)


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
        heads = sizes.real[:, 0].size
        totals = np.minimum(heads * np.array(budgets), sizes.real.sum(axis=(0, 2)))
        free = totals - sizes.protected.sum(axis=(0, 2))
        floors = np.array([int(budget * self.floor) for budget in budgets])[:, None]
        promised = np.minimum((floors - sizes.protected).clip(min=0), sizes.available)

        ranked = _as_one_tensor(importance)
        if self.weights is not None:
            ranked *= self._weights_for(sizes.real)[:, None, :, None].to(ranked.device, non_blocking=True)
        most_promised = int(promised.max())
        if most_promised:
            best = ranked.topk(most_promised, dim=-1)  # which of equal ones does not matter: they are only counted
            values = best.values.masked_fill_(_is_promised(promised, best.values), torch.inf)
            ranked.scatter_(-1, best.indices, values)

        counts = sizes.protected + _count_top(ranked, free)
        if self.page == 1:
            return counts
        rows = []
        for row in range(len(budgets)):
            rows.append(self._in_pages(counts[:, row], sizes.real[:, row], sizes.protected[:, row]))
        return np.stack(rows, axis=1)

    def _in_pages(self, counts: Counts, real: Counts, protected: Counts) -> Counts:
        """Counts [L, K] of one row, each changed to a multiple of the page above 0; their sum to the nearest one."""
        least_pages = (-(-protected // self.page)).clip(min=1)
        most_pages = real // self.page
        if (most_pages < least_pages).any():
            raise UserError(
                f"global: a page of {self.page} entries is longer than what a head has; lower it",
                field="page",
                code="range",
            )

        ideal = counts / self.page - least_pages
        limits = most_pages - least_pages
        total = round(int(counts.sum()) / self.page) - int(least_pages.sum())
        more_pages = adjust_to_sum(ideal.astype(np.int64), ideal, min(total, int(limits.sum())), limits)
        return (least_pages + more_pages) * self.page

    def _weights_for(self, real: Counts) -> Tensor:
        weights = torch.tensor(self.weights, dtype=torch.float32)
        shape = [*weights.shape]
        expected = [*real.shape[::2]]
        if shape != expected:
            raise UserError(
                f"global: weights has shape {shape}, this model's layers and KV heads are {expected}",
                field="weights",
                code="model",
            )
        return weights


@registry.allocation("threshold")
@dataclass(frozen=True)
class Threshold(Allocation):
    """Heads keep the entries whose importance reaches a threshold.

    The prompt decides how many; the budget is the upper limit.

    For scores with a level of their own: DMS evicts below 0 (arXiv 2506.05345), KVzap below its tau (arXiv 2601.07891,
    section 3.3). Where more than the budget are left, the most important ones of all heads and layers stay.

    Attributes:
        least: The least importance that stays.
    """

    across_layers = True
    least: float = 0.0

    def __post_init__(self) -> None:
        if not math.isfinite(self.least):
            raise UserError(f"threshold: least {self.least!r} must be a finite number", field="least", code="range")

    @property
    @override
    def meets_budget_exactly(self) -> bool:
        return False

    @override
    def check(self, budget: int) -> None:
        raise UserError(
            "threshold: can leave a head without entries; protect sinks or a window", field="window", code="range"
        )

    @override
    def __call__(self, sizes: HeadSizes, budgets: list[int], importance: list[Tensor]) -> Counts:
        head_counts = [(layer_importance >= self.least).sum(dim=-1) for layer_importance in importance]
        device = head_counts[0].device
        important = np.array(torch.stack([counts.to(device) for counts in head_counts]).tolist())
        return np.minimum(important, Global(floor=0.0)(sizes, budgets, importance))


def _count_top(ranked: Tensor, free: Counts) -> Counts:
    """[L, B, K]: how many of the `free` [B] best of all heads' [L, B, K, C] are in each; ties go to the first head."""
    by_row = ranked.transpose(0, 1)
    best = by_row.flatten(1).topk(max(int(free.max()), 1)).values
    ends = torch.from_numpy(free.clip(min=1)[:, None] - 1).to(ranked.device, non_blocking=True)
    threshold = best.gather(1, ends)[..., None, None]
    head_counts = torch.stack([(by_row > threshold).sum(dim=-1), (by_row == threshold).sum(dim=-1)])
    above, tied = np.array(head_counts.flatten(2).tolist())  # [B, L * K]; the only thing to wait for

    tied_in_heads_before = tied.cumsum(axis=1) - tied
    left = free[:, None] - above.sum(axis=1, keepdims=True) - tied_in_heads_before
    counts = above + left.clip(0, tied)
    return counts.reshape(by_row.shape[:3]).swapaxes(0, 1)


def _as_one_tensor(importance: list[Tensor]) -> Tensor:
    """The importance of all layers as one tensor [L, B, K, C] on one device, -inf where nothing is to be chosen."""
    device = importance[0].device
    longest = max(layer_importance.shape[-1] for layer_importance in importance)
    padded = []
    for _, layers in stack_layers(importance):
        padded.append(functional.pad(layers.to(device), (0, longest - layers.shape[-1]), value=-torch.inf))
    return torch.cat(padded).nan_to_num_(posinf=-torch.inf, neginf=-torch.inf)


def _is_promised(promised: Counts, best: Tensor) -> Tensor:
    """[..., n] bool: the first `promised` [...] of the best, which is [..., n]."""
    limits = torch.from_numpy(promised).to(best.device, non_blocking=True)[..., None]
    return limits > torch.arange(best.shape[-1], device=best.device)


def _normalized(importance: Tensor, share: int) -> Tensor:
    """The importance [K, C] of a layer's heads, each scaled by the part of it in the head's `share` best entries."""
    ordered = importance.sort(dim=-1, descending=True).values.nan_to_num(neginf=0.0)
    top_sum = ordered[:, :share].sum(-1, keepdim=True)
    total = ordered.sum(-1, keepdim=True)
    scaled = importance * torch.where(total == 0, 1.0, top_sum / total)
    return scaled.masked_fill(torch.isneginf(importance), -torch.inf)


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
            "raise the floor or the budget, or protect a window",
            field="budget",
            code="range",
        )


def _evenly(available: Counts, share: int) -> Counts:
    """`share` entries of each; where some have fewer, others get the difference."""
    total = min(available.size * share, int(available.sum()))
    return adjust_to_sum(available.clip(max=share), np.full(available.shape, share), total, available)


def shortened(real: Counts, short: Counts, order: NDArray[Any], budget: int) -> Counts:
    """Entries of heads that keep all they have, but for the first units of an order, which are short.

    No more units are short than the budget requires, and these share what is left of it. Where even that is too much,
    all heads keep the same number.

    Args:
        real: [U, h], entries of the h heads of each of U units, such as the KV heads of a layer.
        short: [U, h], the least that short ones keep.
        order: [U] int64, the units, the one to be short first before the others.
        budget: Entries of a head on average.

    Returns:
        [U, h]: they sum to U x h x budget, or to all entries if these are fewer.
    """
    total = min(real.size * budget, int(real.sum()))
    counts = real.copy()
    is_short = np.zeros(len(real), dtype=bool)
    for unit in order.tolist():
        if counts.sum() <= total:
            break
        counts[unit] = np.minimum(real[unit], short[unit])
        is_short[unit] = True
    left = total - int(counts.sum())
    if left < 0:
        return _evenly(real, budget)
    if not left:
        return counts

    share = left / real[is_short].size
    ideal = counts + share * is_short[:, None]
    return adjust_to_sum(ideal.astype(np.int64).clip(max=real), ideal, total, real)


def adjust_to_sum(counts: Counts, ideal: NDArray[Any], total: int, limits: Counts) -> Counts:
    """Change rounded counts one by one, each time the one furthest from `ideal`, until they sum to `total`.

    Counts, `ideal` (what they were rounded from) and `limits` (the largest allowed, of a sum of at least `total`) have
    one shape; ties go to the first.
    """
    flat_limits = limits.flatten().tolist()
    flat_ideal = ideal.flatten().tolist()
    adjusted = []
    for count, limit in zip(counts.flatten().tolist(), flat_limits, strict=True):
        adjusted.append(max(0, min(count, limit)))
    missing = total - sum(adjusted)
    step = 1 if missing > 0 else -1

    def rank(index: int) -> tuple[float, int]:
        # Rounded, so that the noise of floats does not decide ties.
        return round((adjusted[index] - flat_ideal[index]) * step, 6), index

    def can_change(index: int) -> bool:
        return adjusted[index] < flat_limits[index] if step > 0 else adjusted[index] > 0

    changeable = [rank(index) for index in range(len(adjusted)) if can_change(index)]
    heapq.heapify(changeable)
    for _ in range(abs(missing)):
        _, index = heapq.heappop(changeable)
        adjusted[index] += step
        if can_change(index):
            heapq.heappush(changeable, rank(index))
    return np.array(adjusted).reshape(counts.shape)
