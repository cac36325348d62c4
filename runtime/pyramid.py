"""PyramidKV's allocation: budgets that shrink with depth."""

from dataclasses import dataclass

import numpy as np
from torch import Tensor
from typing_extensions import override

from keepsight.errors import UserError, require_whole
from keepsight.runtime.allocate import Allocation, Held
from keepsight.runtime.rounding import Counts, settle


@dataclass(frozen=True)
class Pyramid(Allocation):
    """Budgets that shrink with depth (PyramidKV, arXiv 2406.02069, section 4; KVCache-Factory's integer schedule).

    The schedule divides what is not protected; prompts of less than twice that are divided evenly. Rounding makes the
    published schedule exceed the budget by up to 5 %; here the surplus is taken back from the layers that were rounded
    up most, the last ones.

    Attributes:
        beta: The last layer gets 1 / beta of the average, the first one 2 - 1 / beta.
    """

    reads_scores = False
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
    def __call__(self, held: Held, budgets: list[int], importance: list[Tensor]) -> Counts:
        rows = enumerate(budgets)
        return np.stack([self._divide(held.real[:, row], held.protected[:, row], each) for row, each in rows], axis=1)

    def _divide(self, real: Counts, protected: Counts, budget: int) -> Counts:
        """[L, K] entries to keep, from the numbers of one row's real and protected ones [L, K]."""
        available, free = real - protected, budget - int(protected.max())
        total = min(real.size * budget, int(real.sum())) - int(protected.sum())
        # Layers that differ were evicted from by this schedule before: the prompt was long enough.
        if real.min() == real.max() < 2 * free:
            published = [free] * len(real)
        else:
            published = pyramid_schedule(free, int(available.max()), len(real), self.beta)
        ideal, most = np.linspace(published[0], 2 * free - published[0], len(real)), available.min(axis=1)
        caps = settle(np.array(published), ideal, min(free * len(real), int(most.sum())), most)
        by_head = np.broadcast_to(caps[:, None], real.shape), np.broadcast_to(ideal[:, None], real.shape)
        return protected + settle(*by_head, total, available)


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
