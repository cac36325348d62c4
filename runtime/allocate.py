"""Allocation: how many entries each layer and KV head may keep, so that all of them together are exactly the budget."""

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor

from keepsight.errors import UserError


class Allocation(ABC):
    """Divides a budget over layers and KV heads."""

    @abstractmethod
    def __call__(self, importance: list[Tensor], budget: int) -> list[Tensor]:
        """Entries to keep.

        Args:
            importance: For each of L layers, [B, K, C] float32: +inf where an entry is protected, -inf for padding.
            budget: Entries per layer and KV head on average, the protected ones inside.

        Returns:
            L tensors [B, K] int64. In every row they sum up to L x K x budget, or to all real entries if these are
            fewer; no head gets more than it has, or fewer than it protects.
        """

    def check(self, budget: int, protected: int) -> None:
        """Refuse a budget under which a head could be left without entries.

        Raises:
            UserError: with one line that names the values.
        """


@dataclass(frozen=True)
class Uniform(Allocation):
    """The same number of entries in every layer and KV head."""

    def __call__(self, importance: list[Tensor], budget: int) -> list[Tensor]:
        """Divide; see `Allocation`."""
        return [real_entries(layer).clamp(max=budget) for layer in importance]


@dataclass(frozen=True)
class Pyramid(Allocation):
    """Fewer entries from layer to layer (PyramidKV, section 4; the integer schedule of KVCache-Factory).

    The schedule is over what is not protected. Prompts of fewer than twice that are divided evenly. Rounding makes
    the published schedule exceed the budget by up to 5 %; here the surplus is taken back from the layers that were
    rounded up most.

    Attributes:
        beta: The last layer gets 1 / beta of the average, the first one what is left to 2.
    """

    beta: int = 20

    def __post_init__(self) -> None:
        if type(self.beta) is not int or self.beta < 1:
            raise UserError(f"pyramidkv: beta {self.beta!r} must be a whole number of at least 1")

    def check(self, budget: int, protected: int) -> None:
        """See `Allocation.check`."""
        if not protected and (budget - protected) // self.beta < 1:
            raise UserError(
                f"pyramidkv: budget {budget} with beta {self.beta} leaves the last layer without entries; "
                f"give a budget of at least {self.beta}, or protect a window"
            )

    def __call__(self, importance: list[Tensor], budget: int) -> list[Tensor]:
        """Divide; see `Allocation`."""
        kv_heads, layers = importance[0].shape[1], len(importance)
        rows = []
        for row in range(len(importance[0])):
            real = int(real_entries(importance[0])[row, 0])
            protected = int(protected_entries(importance[0])[row, 0])
            free = budget - protected
            if real <= budget:
                caps = torch.full((layers,), real)
            elif real - protected < 2 * free:
                caps = torch.full((layers,), budget)
            else:
                published = pyramid_schedule(free, real - protected, layers, self.beta)
                ideal = torch.linspace(published[0], 2 * free - published[0], layers)
                caps = settle(torch.tensor(published), ideal, free * layers, real - protected) + protected
            rows.append(caps)
        caps = torch.stack(rows, dim=1).to(importance[0].device)  # [L, B]
        return [layer[:, None].expand(-1, kv_heads) for layer in caps]


def pyramid_schedule(budget: int, candidates: int, layers: int, beta: int = 20) -> list[int]:
    """PyramidKV's entries by layer, exactly as KVCache-Factory rounds them; their sum exceeds `budget` x `layers`.

    Args:
        budget: B, entries a layer without the window.
        candidates: Entries to choose from, the window excluded.
        layers: L.
        beta: See `Pyramid`.
    """
    smallest = budget // beta
    largest = 2 * budget - smallest
    if largest >= candidates:
        largest, smallest = candidates, 2 * budget - candidates
    step = (largest - smallest) // max(layers - 1, 1)
    return [largest - layer * step for layer in range(layers)]


@dataclass(frozen=True)
class Adaptive(Allocation):
    """Heads of a layer share its budget by where the most important entries are (AdaKV, section 4).

    Every head is promised a share of the average, its floor; protected entries are outside of both.

    Attributes:
        floor: The promised share, alpha.
        blend: True: a head gets (1 - alpha) of what it has among the layer's most important entries, plus its floor
            (AdaKV's code). False: at least its floor, and beyond it whatever is most important (kvpress).
        normalize: Whether a head's importance is scaled by the share of it that its own top entries hold, before
            heads are compared (KVCache-Factory's variant).
    """

    floor: float = 0.2
    blend: bool = True
    normalize: bool = False

    def __post_init__(self) -> None:
        if not 0 <= self.floor <= 1:
            raise UserError(f"adakv: floor {self.floor!r} must be between 0 and 1")

    def check(self, budget: int, protected: int) -> None:
        """See `Allocation.check`."""
        if not protected and int(budget * self.floor) < 1:
            raise UserError(
                f"adakv: budget {budget} with floor {self.floor} can leave a head without entries; "
                "raise the floor, or protect a window"
            )

    def __call__(self, importance: list[Tensor], budget: int) -> list[Tensor]:
        """Divide; see `Allocation`."""
        return [torch.stack([self._divide(row, budget) for row in layer]) for layer in importance]

    def _divide(self, importance: Tensor, budget: int) -> Tensor:
        """[K] entries for the heads of one row, from [K, C]."""
        protected, real = protected_entries(importance), real_entries(importance)
        heads = len(importance)
        total = min(budget * heads, int(real.sum())) - int(protected.sum())
        candidates = importance.masked_fill(torch.isposinf(importance), -torch.inf)
        share = total // heads
        ranked = self._comparable(candidates, share)
        available = real - protected
        if not self.blend:
            floor = (available.clamp(max=int(share * self.floor))).tolist()
            return protected + _top_counts(_promised(ranked, floor), total, available)
        counts = _top_counts(ranked, total, available)
        ideal = counts * (1 - self.floor) + share * self.floor
        published = (counts * (1 - self.floor) + int(share * self.floor)).round().long()
        return protected + settle(published, ideal, total, available)

    def _comparable(self, candidates: Tensor, share: int) -> Tensor:
        if not self.normalize:
            return candidates
        finite = candidates.masked_fill(torch.isinf(candidates), 0.0)
        held = finite.topk(min(share, finite.shape[1]), dim=-1).values.sum(-1) / finite.sum(-1).clamp(min=1e-30)
        return candidates * held.clamp(min=1e-30)[:, None]


def _promised(ranked: Tensor, floor: list[int]) -> Tensor:
    """Importance in which each head's `floor` best entries come before everything else."""
    result = ranked.clone()
    for head, count in enumerate(floor):
        result[head, ranked[head].argsort(descending=True, stable=True)[:count]] = torch.inf
    return result


def _top_counts(ranked: Tensor, total: int, available: Tensor) -> Tensor:
    """[K]: how many of the `total` best entries of all heads fall into each; ties go to the first head and index."""
    order = ranked.flatten().argsort(descending=True, stable=True)[:total]
    counts = torch.bincount(order // ranked.shape[1], minlength=len(ranked))
    return torch.minimum(counts, available)


def settle(counts: Tensor, ideal: Tensor, total: int, most: int | Tensor) -> Tensor:
    """Rounded counts changed one by one until they sum up to `total`, first where they are furthest from `ideal`.

    Args:
        counts: [n] int64.
        ideal: [n] float, what they were rounded from.
        total: The sum to reach.
        most: The largest count allowed, for all or [n]; their sum is at least `total`.
    """
    counts = torch.minimum(counts, torch.as_tensor(most, device=counts.device)).clamp(min=0)
    while (missing := total - int(counts.sum())) != 0:
        gap = (ideal - counts) * (1 if missing > 0 else -1)
        blocked = counts >= torch.as_tensor(most, device=counts.device) if missing > 0 else counts <= 0
        chosen = gap.masked_fill(blocked, -torch.inf).argsort(descending=True, stable=True)
        free = int((~blocked).sum())
        counts[chosen[: min(abs(missing), free)]] += 1 if missing > 0 else -1
    return counts


def real_entries(importance: Tensor) -> Tensor:
    """[..., C] -> [...] int64: entries that are not padding."""
    return (~torch.isneginf(importance)).sum(dim=-1)


def protected_entries(importance: Tensor) -> Tensor:
    """[..., C] -> [...] int64: entries that are always kept."""
    return torch.isposinf(importance).sum(dim=-1)


ALLOCATIONS: dict[str, type[Allocation]] = {"uniform": Uniform, "pyramidkv": Pyramid, "adakv": Adaptive}
