"""Counts that are rounded and still reach their sum."""

import heapq
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

Counts: TypeAlias = NDArray[np.int64]


def settle(counts: Counts, ideal: NDArray[Any], total: int, most: Counts) -> Counts:
    """Change rounded counts one by one, each time the one furthest from `ideal`, until they sum to `total`.

    Args:
        counts: Counts of any shape; ties go to the first.
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
    return np.array(settled).reshape(counts.shape)
