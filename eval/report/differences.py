"""Paired differences of method against method: over the same samples, drawn together."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations

from keepsight.eval.report.intervals import Estimate
from keepsight.eval.report.summary import MEASURES, SummaryRow
from keepsight.eval.results import FULL


@dataclass(frozen=True)
class Difference:
    """A method minus another one, over the same samples.

    Attributes:
        row: The method.
        against: The other one.
        estimates: By the names in `MEASURES`.
    """

    row: SummaryRow
    against: SummaryRow
    estimates: dict[str, Estimate]


def difference(row: SummaryRow, against: SummaryRow) -> Difference | None:
    """One row minus another one; None where their samples are not the same."""
    if row.samples != against.samples:
        return None
    return Difference(row, against, {name: row.estimates[name] - against.estimates[name] for name in MEASURES})


def differences(rows: Sequence[SummaryRow]) -> list[Difference]:
    """All pairs of methods at equal budget, the better score first, and every method against the full cache.

    Args:
        rows: Rows of one task and length, or means over tasks, in the order of `ranked`.
    """
    full = [row for row in rows if row.method == FULL]
    evicting = [row for row in rows if row.method != FULL]
    pairs = [(row, other) for row in evicting for other in full]
    pairs += [(row, other) for row, other in combinations(evicting, 2) if row.budget == other.budget]
    found = [difference(*pair) for pair in pairs]
    return [each for each in found if each is not None]
