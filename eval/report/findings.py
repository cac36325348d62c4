"""The sentences at the head of a report: the best predicting method against the best other one, budget by budget."""

from collections.abc import Sequence
from itertools import groupby

from keepsight.eval.report.figures import label_of
from keepsight.eval.report.intervals import Estimate
from keepsight.eval.report.summary import SummaryRow, difference, mean_over_tasks, number_text
from keepsight.eval.results import FULL

OURS = "lookaheadkv"
"""Methods whose name begins with this word are compared with the others."""
BOUNDS = ("oracle", "exact_topk", "random")
"""Methods that no method competes with: the bounds from above and below."""
_MOST = 4


def findings(summary: Sequence[SummaryRow]) -> list[str]:
    """A sentence for each of the smallest budgets, about the means over tasks; the measure is excess NLL.

    Without a row of `OURS` the best method is compared with the second best.
    """
    mean = mean_over_tasks(summary)
    full = next((row for row in mean if row.method == FULL), None)
    evicting = [row for row in mean if row.budget is not None and kind_of(row.method) not in BOUNDS]
    return [_finding([*rows], full) for _, rows in groupby(evicting, lambda row: row.budget)][:_MOST]


def kind_of(method: str) -> str:
    """A method's name without its options."""
    return method.partition(" ")[0]


def _finding(rows: list[SummaryRow], full: SummaryRow | None) -> str:
    rows.sort(key=lambda row: (row.excess_nll, -row.score))
    best = next((row for row in rows if kind_of(row.method) == OURS), rows[0])
    other = next((row for row in rows if row is not best and kind_of(row.method) != OURS), None)
    budget = best.budget
    place = f"{100 * budget:g} % of the prompt" if isinstance(budget, float) else f"{budget} entries"
    sentence = (
        f"At {place} {label_of(best.method)} has an excess NLL of {number_text(best.excess_nll, 3)} nats per token"
    )
    if pair := difference(best, other):
        sentence += _compared(pair.estimates["excess_nll"], f"{label_of(pair.against)}, the best other method")
    scores = [f"Score {number_text(best.score, 2)}"]
    scores += [f"{label_of(other.method)} {number_text(other.score, 2)}"] if other else []
    scores += [f"full cache {number_text(full.score, 2)}"] if full else []
    return f"{sentence}. {', '.join(scores)}; {best.n} samples."


def _compared(found: Estimate, other: str) -> str:
    """`, 0.55 less than snapkv (95 % interval 0.40 to 0.71)`; level with it where the interval holds zero."""
    ends = found.interval
    word, sign = ("less", -1) if found.value < 0 else ("more", 1)
    size = number_text(sign * found.value, 3)
    if ends is None:
        return f", {size} {word} than {other}"
    low, high = sorted(sign * end for end in ends)
    span = f"95 % interval {number_text(low, 3)} to {number_text(high, 3)}"
    return f", {size} {word} than {other} ({span})" if low > 0 else f": level with {other} ({size} {word}, {span})"
