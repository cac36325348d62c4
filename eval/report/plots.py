"""The plots of an evaluation run."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from keepsight.eval.report.curves import (
    AGREEMENT,
    DIFFERENCES,
    EXCESS_NLL,
    MEMORY,
    SCORE,
    TIME,
    Against,
    Measure,
    budget_of,
    draw_curves,
)
from keepsight.eval.report.differences import Difference
from keepsight.eval.report.panels import MAX_COLUMNS, Panel, Plot
from keepsight.eval.report.styles import Style, styles_of
from keepsight.eval.report.summary import SummaryRow, by_task_and_length, mean_over_tasks

Curves = Sequence[SummaryRow]


def overview_plot(summary: Curves) -> Plot:
    """Score, excess NLL and top-1 agreement against the budget, each the mean over tasks."""
    styles, mean = _styles(summary), mean_over_tasks(summary)
    measures = {"score": SCORE, "excess NLL": EXCESS_NLL, "top-1 agreement": AGREEMENT}
    panels = [_panel(title, mean, measure, budget_of(mean), styles) for title, measure in measures.items()]
    return Plot("overview", panels, styles, columns=3)


def scores_plot(summary: Curves) -> Plot:
    """Score against the budget, a panel for each task and length."""
    return _small_multiples("scores", summary, SCORE)


def excess_nll_plot(summary: Curves) -> Plot:
    """Excess NLL against the budget, a panel for each task and length."""
    return _small_multiples("excess_nll", summary, EXCESS_NLL)


def tradeoffs_plot(summary: Curves) -> Plot:
    """Score and excess NLL against time to first token and memory, for each length the mean over tasks.

    The second figure of LookaheadKV (arXiv 2603.10899) shows the first of these.
    """
    styles, panels = _styles(summary), []
    for length in sorted({row.length for row in summary}):
        mean = mean_over_tasks([row for row in summary if row.length == length])
        for title, measure in (("score", SCORE), ("excess NLL", EXCESS_NLL)):
            for against in (TIME, MEMORY):
                panels.append(_panel(f"{title}, {length} tokens", mean, measure, against, styles, length=length))
    return Plot("tradeoffs", panels, styles)


def comparison_plot(differences: Mapping[str, Sequence[Difference]]) -> Plot:
    """Paired differences against the budget, a row of panels for each name of a run."""
    styles, panels = styles_of(each.row.method for found in differences.values() for each in found), []
    for name, found in differences.items():
        rows = [replace(each.row, estimates=each.estimates) for each in found if each.row.budget is not None]
        panels += [_panel(name, rows, measure, budget_of(rows), styles) for measure in DIFFERENCES] if rows else []
    return Plot("comparison", panels, styles, columns=len(DIFFERENCES))


def _styles(summary: Curves) -> dict[str, Style]:
    return styles_of(row.method for row in summary)


def _small_multiples(name: str, summary: Curves, measure: Measure) -> Plot:
    styles, groups = _styles(summary), by_task_and_length(summary)
    panels = [
        _panel(f"{task}, {length} tokens", rows, measure, budget_of(rows), styles, task=task, length=length)
        for (task, length), rows in groups.items()
    ]
    return Plot(name, panels, styles, _columns(list(groups)))


def _columns(groups: list[tuple[str, int]]) -> int:
    tasks, lengths = {task for task, _ in groups}, {length for _, length in groups}
    complete = len(groups) == len(tasks) * len(lengths) and len(lengths) <= MAX_COLUMNS
    step = len(lengths) if complete else 1  # the lengths of a task stay side by side
    return max(1, min(MAX_COLUMNS // step * step, len(groups)))


def _panel(
    title: str, rows: Curves, measure: Measure, against: Against, styles: Mapping[str, Style], **place: Any
) -> Panel:
    draw = partial(draw_curves, rows=rows, measure=measure, against=against, styles=styles)
    return Panel(title, draw, **place)
