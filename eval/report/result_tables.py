"""The tables of scores: over all tasks, by task and length, and the paired differences of methods."""

from collections.abc import Sequence

from keepsight.eval.report.differences import differences
from keepsight.eval.report.summary import (
    MEANS,
    MEASURES,
    SummaryRow,
    by_task_and_length,
    mean_over_tasks,
    share_of_full,
)
from keepsight.eval.report.tables import Cells, Column, Table

PLACE = (Column("task", "task", is_text=True), Column("length", "length"))
VARIANT = (Column("budget", "budget"), Column("method", "method", is_text=True))
_SCORES = (
    Column("score", "score"),
    Column("of_full", "of full", digits=2),
    Column("excess_nll", "excess NLL"),
    Column("agreement", "top-1 agreement"),
    Column("recall", "recall@k", digits=2),
    Column("mass", "attention mass", digits=2),
    Column("tau", "τ", digits=2),
    Column("same_tokens", "same tokens", digits=1),
    Column("n", "n"),
)
_DIFFERENCES = (
    *VARIANT,
    Column("against", "minus", is_text=True),
    Column("score", "score", is_signed=True),
    Column("excess_nll", "excess NLL", is_signed=True),
    Column("agreement", "top-1 agreement", is_signed=True),
    Column("n", "n"),
)


def overall_table(summary: Sequence[SummaryRow]) -> Table:
    """The mean over tasks of every method and budget."""
    mean = mean_over_tasks(summary)
    title = f"{mean[0].task}, all lengths" if mean else "no results"
    caption = f"Score and fidelity with 95 % intervals over samples: {title}."
    return Table("overall", caption, (*VARIANT, *_SCORES), _score_rows(mean))


def task_table(summary: Sequence[SummaryRow]) -> Table:
    """Every method and budget at each task and length."""
    rows = [
        {"task": task, "length": length, **row}
        for (task, length), group in by_task_and_length(summary).items()
        for row in _score_rows(group)
    ]
    caption = "Score and fidelity by task and prompt length, with 95 % intervals over samples."
    return Table("by_task", caption, (*PLACE, *VARIANT, *_SCORES), rows)


def difference_table(summary: Sequence[SummaryRow]) -> Table:
    """Every pair of methods at equal budget, and each against the full cache, over all tasks."""
    rows: list[Cells] = [
        {
            "budget": each.row.budget,
            "method": each.row.method,
            "against": each.against.method,
            **each.estimates,
            "n": each.row.n,
        }
        for each in differences(mean_over_tasks(summary))
    ]
    caption = "Paired differences of methods over the same samples, with 95 % intervals."
    return Table("differences", caption, _DIFFERENCES, rows)


def _score_rows(rows: Sequence[SummaryRow]) -> list[Cells]:
    return [
        {
            "budget": row.budget,
            "method": row.method,
            **{name: row.estimates[name] for name in MEASURES},
            "of_full": share_of_full(row, rows),
            **{name: row.means[name] for name in MEANS},
            "n": row.n,
        }
        for row in rows
    ]
