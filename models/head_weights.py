"""Weights of heads: what a lookahead module's importance is multiplied by before heads are compared."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from keepsight.errors import UserError

HeadWeights = tuple[tuple[float, ...], ...]
"""For each layer with full attention, a weight of each KV head."""
_LARGEST = float(np.finfo(np.float32).max)


def checked_weights(weights: Any, name: str) -> HeadWeights:
    """Weights as tuples.

    Raises:
        UserError: they are no rows of equally many numbers, above 0 and finite in float32; one line that begins with
            `name`.
    """
    rows = [*weights] if isinstance(weights, Sequence) and not isinstance(weights, str) else []
    whole = rows and all(isinstance(row, Sequence) and not isinstance(row, str) and row for row in rows)
    if not whole or len({len(row) for row in rows}) != 1 or not all(_is_weight(each) for row in rows for each in row):
        raise UserError(f"{name} must be a row for each layer, of a finite number above 0 for each KV head")
    return tuple(tuple(map(float, row)) for row in rows)


def _is_weight(value: Any) -> bool:
    return type(value) in (int, float) and 0 < value < _LARGEST and bool(np.float32(value) > 0)
