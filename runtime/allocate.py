"""Allocation: how many entries each layer and KV head keeps; together they are exactly the budget."""

import heapq
from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor
from typing_extensions import override

from keepsight.errors import UserError, require_whole
from keepsight.runtime.importance import top_mask


class Allocation(ABC):
    """Divides a budget over layers and KV heads."""

    @abstractmethod
    def __call__(self, importance: list[Tensor], budget: int) -> list[Tensor]:
        """Divide a budget.

        Args:
            importance: For each of L layers, [B, K, C] float32: +inf where an entry is protected, -inf for padding.
            budget: Entries per layer and KV head on average, protected ones included.

        Returns:
            L tensors [B, K] int64: entries to keep. In every row they sum to L x K x budget, or to all real entries if
            these are fewer; no head gets more than it has, or fewer than it protects. Where a head of an evicted cache
            has fewer than its share, others get the rest.
        """

    def check(self, budget: int, protected: int) -> None:
        """Refuse a budget under which a head could be left without entries.

        Raises:
            UserError: with one line that names the values.
        """


@dataclass(frozen=True)
class Uniform(Allocation):
    """The same number of entries in every layer and KV head."""

    @override
    def __call__(self, importance: list[Tensor], budget: int) -> list[Tensor]:
        real = torch.stack([count_real(layer) for layer in importance])
        return list(torch.stack([_evenly(row, budget) for row in real.unbind(1)], dim=1))


@dataclass(frozen=True)
class Pyramid(Allocation):
    """Budgets that shrink with depth (PyramidKV, arXiv 2406.02069, section 4; KVCache-Factory's integer schedule).

    The schedule divides what is not protected; prompts of less than twice that are divided evenly. Rounding makes the
    published schedule exceed the budget by up to 5 %; here the surplus is taken back from the layers that were rounded
    up most, the last ones.

    Attributes:
        beta: The last layer gets 1 / beta of the average, the first one 2 - 1 / beta.
    """

    beta: int = 20

    def __post_init__(self) -> None:
        require_whole("pyramidkv", 1, beta=self.beta)

    @override
    def check(self, budget: int, protected: int) -> None:
        if not protected and budget // self.beta < 1:
            raise UserError(
                f"pyramidkv: budget {budget} with beta {self.beta} leaves the last layer without entries; "
                f"give a budget of at least {self.beta}, or protect a window"
            )

    @override
    def __call__(self, importance: list[Tensor], budget: int) -> list[Tensor]:
        real = torch.stack([count_real(layer) for layer in importance])
        protected = torch.stack([count_protected(layer) for layer in importance])
        rows = [self._divide(*row, budget) for row in zip(real.unbind(1), protected.unbind(1), strict=True)]
        return list(torch.stack(rows, dim=1))

    def _divide(self, real: Tensor, protected: Tensor, budget: int) -> Tensor:
        """[L, K] entries to keep, from the numbers of one row's real and protected ones [L, K]."""
        available, longest, free = real - protected, int(real.max()), budget - int(protected.max())
        total = min(real.numel() * budget, int(real.sum())) - int(protected.sum())
        # Layers that differ were evicted from by this schedule before: the prompt was long enough.
        if bool((real == longest).all()) and longest < 2 * free:
            published = [free] * len(real)
        else:
            published = pyramid_schedule(free, int(available.max()), len(real), self.beta)
        ideal = torch.linspace(published[0], 2 * free - published[0], len(real), dtype=torch.float64)
        most = available.amin(dim=1)
        caps = settle(torch.tensor(published), ideal, min(free * len(real), int(most.sum())), most)
        by_head = [each[:, None].expand(-1, real.shape[1]) for each in (caps, ideal)]
        return protected + settle(by_head[0], by_head[1], total, available).to(real.device)


def pyramid_schedule(budget: int, candidates: int, layers: int, beta: int = 20) -> list[int]:
    """PyramidKV's entries by layer, exactly as KVCache-Factory rounds them; their sum exceeds `budget` x `layers`.

    Args:
        budget: B, entries a layer without the window.
        candidates: Entries to choose from, the window excluded.
        layers: L.
        beta: Steepness; see `Pyramid`.
    """
    smallest = budget // beta
    largest = 2 * budget - smallest
    if largest >= candidates:
        largest, smallest = candidates, 2 * budget - candidates
    step = (largest - smallest) // max(layers - 1, 1)
    return [largest - layer * step for layer in range(layers)]


@dataclass(frozen=True)
class Adaptive(Allocation):
    """Heads of a layer share its budget by where its most important entries are (AdaKV, arXiv 2407.11550, section 4).

    Every head is guaranteed a share of the average, its floor.

    Attributes:
        floor: The guaranteed share, alpha.
        blend: True: of what is not protected, a head gets (1 - alpha) of what it has among the layer's most important
            entries, plus its floor (AdaKV's code). False: at least its floor, protected entries included, and beyond
            it by importance alone (kvpress).
        normalize: Whether a head's importance is scaled by the share that its own top entries hold before heads are
            compared (KVCache-Factory's variant; for importance of one sign).
    """

    floor: float = 0.2
    blend: bool = True
    normalize: bool = False

    def __post_init__(self) -> None:
        if type(self.floor) not in (int, float) or not 0 <= self.floor <= 1:
            raise UserError(f"adakv: floor {self.floor!r} must be between 0 and 1")

    @override
    def check(self, budget: int, protected: int) -> None:
        if not protected and int(budget * self.floor) < 1:
            raise UserError(
                f"adakv: budget {budget} with floor {self.floor} can leave a head without entries; "
                "raise the floor or the budget, or protect a window"
            )

    @override
    def __call__(self, importance: list[Tensor], budget: int) -> list[Tensor]:
        of_layers = torch.stack([count_real(layer).sum(dim=-1) for layer in importance], dim=1)
        totals = [_evenly(row, budget * importance[0].shape[1]).tolist() for row in of_layers]
        return [
            torch.stack([self._divide(row, total[index]) for row, total in zip(layer, totals, strict=True)])
            for index, layer in enumerate(importance)
        ]

    def _divide(self, importance: Tensor, total: int) -> Tensor:
        """[K] entries to keep per head of one row, from its importance [K, C]."""
        protected = count_protected(importance)
        available = count_real(importance) - protected
        free, average = total - int(protected.sum()), total // len(importance)
        share = free // len(importance)
        ranked = self._comparable(importance.masked_fill(torch.isposinf(importance), -torch.inf), share)
        if not self.blend:
            promised = (int(average * self.floor) - protected).clamp(min=0)
            first = top_mask(ranked, torch.minimum(promised, available))
            return protected + _among_top(ranked.masked_fill(first, torch.inf), free)
        among_top = _among_top(ranked, free)
        ideal = among_top.double() * (1 - self.floor) + share * self.floor
        return protected + settle(blended(among_top, share, self.floor), ideal, free, available)

    def _comparable(self, candidates: Tensor, share: int) -> Tensor:
        if not self.normalize:
            return candidates
        ordered = candidates.sort(dim=-1, descending=True).values.nan_to_num(neginf=0.0)
        held, whole = ordered[:, :share].sum(-1, keepdim=True), ordered.sum(-1, keepdim=True)
        scaled = candidates * torch.where(whole == 0, 1.0, held / whole)
        return scaled.masked_fill(torch.isneginf(candidates), -torch.inf)


def blended(among_top: Tensor, budget: int, floor: float) -> Tensor:
    """AdaKV's entries by head, exactly as its code rounds them; their sum can miss `budget` x K.

    Args:
        among_top: [K] int64, number of the layer's most important entries in each head.
        budget: B, entries a head without the window.
        floor: Alpha.
    """
    return (among_top * (1 - floor) + int(budget * floor)).round().long()


def _among_top(ranked: Tensor, total: int) -> Tensor:
    """[K]: how many of the `total` best entries of all heads fall into each; ties go to the first head and index."""
    return top_mask(ranked.flatten(), total).view_as(ranked).sum(dim=-1)


def _evenly(available: Tensor, share: int) -> Tensor:
    """`share` of each; what some lack is taken from the others."""
    total = min(available.numel() * share, int(available.sum()))
    return settle(available.clamp(max=share), torch.full_like(available, share), total, available)


def settle(counts: Tensor, ideal: Tensor, total: int, most: Tensor) -> Tensor:
    """Change rounded counts one by one, each time the one furthest from `ideal`, until they sum to `total`.

    Args:
        counts: Counts of any shape, int64; ties go to the first.
        ideal: The values that they were rounded from, of the same shape.
        total: The sum to reach.
        most: The largest count allowed for each; their sum is at least `total`.
    """
    limits, wanted = most.flatten().tolist(), ideal.flatten().tolist()
    settled = [max(0, min(pair)) for pair in zip(counts.flatten().tolist(), limits, strict=True)]
    missing = total - sum(settled)
    step = 1 if missing > 0 else -1

    def place(index: int) -> tuple[float, int]:
        # Rounded, so that the noise of floats does not decide ties.
        return round((settled[index] - wanted[index]) * step, 6), index

    def can_change(index: int) -> bool:
        return settled[index] < limits[index] if step > 0 else settled[index] > 0

    waiting = [place(index) for index in range(len(settled)) if can_change(index)]
    heapq.heapify(waiting)
    for _ in range(abs(missing)):
        _, index = heapq.heappop(waiting)
        settled[index] += step
        if can_change(index):
            heapq.heappush(waiting, place(index))
    return torch.tensor(settled, device=counts.device).view(counts.shape)


def count_real(importance: Tensor) -> Tensor:
    """Number of entries that are not padding, [..., C] -> [...] int64."""
    return (~torch.isneginf(importance)).sum(dim=-1)


def count_protected(importance: Tensor) -> Tensor:
    """Number of entries that are always kept, [..., C] -> [...] int64."""
    return torch.isposinf(importance).sum(dim=-1)


ALLOCATIONS: dict[str, type[Allocation]] = {"uniform": Uniform, "pyramidkv": Pyramid, "adakv": Adaptive}
