"""From `results.jsonl` to means: `summary.csv` and the table that the terminal shows."""

import csv
import io
import math
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

from keepsight.eval.results import FULL
from keepsight.files import write_text

COLUMNS = ("task", "length", "method", "budget", "n", "score", "excess_nll", "agreement")
MAX_BLOCKS = 4
"""Up to so many pairs of task and length get a block of their own in the terminal."""


@dataclass(frozen=True)
class SummaryRow:
    """Means over the samples of one task, length, method and budget.

    Attributes:
        task: Name of the task; a sentence such as `mean of 3 tasks` in what `mean_over_tasks` returns.
        length: Nominal prompt length in tokens; 0 for a mean over lengths.
        method: Name of the method; `full` is the cache with nothing evicted.
        budget: KV entries per layer and KV head; None for the full cache.
        n: Number of samples.
        score: Mean score of the task's metric, 0 to 1.
        excess_nll: Delta NLL vs. full cache: mean negative log-likelihood of the full cache's own answer under the
            evicted cache, minus that under the full cache, in nats per token.
        agreement: Top-1 agreement: share of the full cache's answer tokens that stay the arg-max, 0 to 1.
        effective_n: Number of equally weighted samples with the same variance; `n` where nothing is reweighted.
        excess_nll_error: Standard error of `excess_nll` over samples; 0 for a single sample.
        agreement_error: Standard error of `agreement` over samples; 0 for a single sample.
    """

    task: str
    length: int
    method: str
    budget: int | None
    n: int
    score: float
    excess_nll: float
    agreement: float
    effective_n: float
    excess_nll_error: float
    agreement_error: float


def summarize(rows: Iterable[dict[str, Any]]) -> list[SummaryRow]:
    """Mean over samples for each task, length, method and budget, in the order of `summary.csv`.

    Args:
        rows: Rows of `results.jsonl`.
    """
    groups: dict[tuple[str, int, str, int | None], list[dict[str, Any]]] = defaultdict(list)
    for row in rows:
        groups[row["task"], row["length"], row["method"], row["budget"]].append(row)
    return sorted((_mean_over_samples(*key, group) for key, group in groups.items()), key=_file_order)


def write_summary(rows: Iterable[dict[str, Any]], path: Path) -> None:
    """Write `summary.csv`: the columns `COLUMNS`, floats with 4 decimals, an empty budget for the full cache."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(COLUMNS)
    for row in summarize(rows):
        writer.writerow([_cell(getattr(row, column)) for column in COLUMNS])
    write_text(path, text.getvalue())


def mean_over_tasks(summary: Sequence[SummaryRow]) -> list[SummaryRow]:
    """Mean over tasks for each method and budget; every task weighs the same, and within it every sample.

    Returns:
        Rows with length 0, in the order of `ranked`.
    """
    names = {row.task for row in summary}
    title = f"mean of {len(names)} tasks" if len(names) > 1 else next(iter(names), "")
    variants: dict[tuple[str, int | None], list[SummaryRow]] = defaultdict(list)
    for row in summary:
        variants[row.method, row.budget].append(row)
    return ranked(_weighted_mean(title, rows) for rows in variants.values())


def by_task_and_length(summary: Iterable[SummaryRow]) -> dict[tuple[str, int], list[SummaryRow]]:
    """The rows of each task and length, both ascending; within one in the order of `ranked`."""

    def place(row: SummaryRow) -> tuple[str, int]:
        return row.task, row.length

    return {key: ranked(rows) for key, rows in groupby(sorted(summary, key=place), place)}


def ranked(rows: Iterable[SummaryRow]) -> list[SummaryRow]:
    """Rows by budget, the full cache first; at equal budget the best score first, then the lowest delta NLL."""
    return sorted(rows, key=lambda row: (row.budget or 0, -row.score, row.excess_nll, row.method))


def share_of_full(row: SummaryRow, rows: Iterable[SummaryRow]) -> float | None:
    """`row.score` as a share of the full cache's score among `rows`; None where that is missing or zero."""
    full = next((other.score for other in rows if other.method == FULL), 0.0)
    return row.score / full if full else None


def summary_table(summary: Sequence[SummaryRow]) -> str:
    """A plain-text table for the terminal: the mean over tasks last, after a block for each of a few tasks."""
    groups = by_task_and_length(summary)
    blocks = [_block(f"{task}, {length} tokens", rows) for (task, length), rows in groups.items()]
    if len(blocks) == 1:
        return blocks[0]
    mean = mean_over_tasks(summary)
    if not mean:
        return ""
    shown = blocks if len(blocks) <= MAX_BLOCKS else []
    return "\n\n".join([*shown, _block(f"{mean[0].task}, all lengths", mean)])


def wilson_interval(share: float, n: float) -> tuple[float, float]:
    """95 % Wilson score interval of a mean of `n` values between 0 and 1.

    It is the interval of a proportion (Wilson, 1927); for graded scores, whose variance is smaller, it is too wide
    rather than too narrow.
    """
    z = 1.96
    centre = (share + z * z / (2 * n)) / (1 + z * z / n)
    half = z / (1 + z * z / n) * math.sqrt(max(share * (1 - share), 0.0) / n + z * z / (4 * n * n))
    return centre - half, centre + half


def _mean_over_samples(
    task: str, length: int, method: str, budget: int | None, rows: list[dict[str, Any]]
) -> SummaryRow:
    values = {name: [float(row[name]) for row in rows] for name in ("score", "excess_nll", "agreement")}
    means = {name: statistics.fmean(column) for name, column in values.items()}
    errors = {f"{name}_error": _standard_error(values[name]) for name in ("excess_nll", "agreement")}
    return SummaryRow(task, length, method, budget, len(rows), **means, effective_n=len(rows), **errors)


def _weighted_mean(title: str, rows: list[SummaryRow]) -> SummaryRow:
    samples: dict[str, int] = defaultdict(int)
    for row in rows:
        samples[row.task] += row.n
    weights = [row.n / samples[row.task] / len(samples) for row in rows]

    def mean(value: Callable[[SummaryRow], float]) -> float:
        return math.fsum(weight * value(row) for weight, row in zip(weights, rows, strict=True))

    def error(value: Callable[[SummaryRow], float]) -> float:
        return math.hypot(*(weight * value(row) for weight, row in zip(weights, rows, strict=True)))

    return SummaryRow(
        task=title,
        length=0,
        method=rows[0].method,
        budget=rows[0].budget,
        n=sum(row.n for row in rows),
        score=mean(lambda row: row.score),
        excess_nll=mean(lambda row: row.excess_nll),
        agreement=mean(lambda row: row.agreement),
        effective_n=1 / math.fsum(w * w / row.effective_n for w, row in zip(weights, rows, strict=True)),
        excess_nll_error=error(lambda row: row.excess_nll_error),
        agreement_error=error(lambda row: row.agreement_error),
    )


def _standard_error(values: list[float]) -> float:
    return statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else 0.0


def _file_order(row: SummaryRow) -> tuple[str, int, bool, str, int]:
    return row.task, row.length, row.method != FULL, row.method, row.budget or 0


def _cell(value: object) -> object:
    if isinstance(value, float):
        return f"{round(value, 4) + 0.0:.4f}"  # adding zero turns -0.0 into 0.0
    return "" if value is None else value


def _block(title: str, rows: Sequence[SummaryRow]) -> str:
    width = max(len("method"), *(len(row.method) for row in rows))
    columns = f"{'score':>6}  {'':<12}  {'delta NLL vs. full':>18}  {'top-1 agreement':>15}  {'n':>4}"
    lines = [title, f"{'budget':>6}  {'method':<{width}}  {columns}"]
    previous: object = object()
    for row in rows:
        budget = "all" if row.budget is None else str(row.budget)
        share = share_of_full(row, rows)
        of_full = "" if row.method == FULL or share is None else f"{share:.2f} of full"
        lines.append(
            f"{budget if row.budget != previous else '':>6}  {row.method:<{width}}  {row.score:6.3f}  {of_full:<12}  "
            f"{round(row.excess_nll, 3) + 0.0:18.3f}  {row.agreement:15.3f}  {row.n:4d}"
        )
        previous = row.budget
    return "\n".join(lines)
