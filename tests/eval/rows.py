"""Rows of two runs side by side."""

from collections.abc import Iterable, Sequence
from typing import Any

import pytest

from keepsight.eval.record import ResultRow, RowStore
from keepsight.eval.sweep import Variant, plan, sweep
from keepsight.eval.tasks.samples import RenderedSample
from keepsight.models.targets import Target

CLOCKS = {"seconds": 0, "time_to_first_token": 0, "tokens_per_second": 0, "rows": 0, "date": ""}


def without_clocks(rows: Iterable[ResultRow | dict[str, Any]]) -> list[dict[str, Any]]:
    """The columns of rows, without what clocks decide."""
    return [columns_of(row) | CLOCKS for row in rows]


def columns_of(row: ResultRow | dict[str, Any]) -> dict[str, Any]:
    return row.columns() if isinstance(row, ResultRow) else row


def comparable(rows: Iterable[ResultRow | dict[str, Any]]) -> list[dict[str, Any]]:
    """Without what clocks and the order of additions decide."""
    rounded = without_clocks(rows)
    for columns in rounded:
        columns["excess_nll"] = pytest.approx(columns["excess_nll"], abs=1e-4)
    return rounded


def swept(
    target: Target,
    samples: Sequence[RenderedSample],
    variants: Sequence[Variant],
    question: str = "seen",
    store: RowStore | None = None,
    **options: Any,
) -> list[list[ResultRow]]:
    """The rows of a sweep over samples; those that the store has are not measured again."""
    groups = plan(target, samples, variants, question)
    return list(sweep(target, groups, variants, 100_000, store or RowStore(), question, **options))
