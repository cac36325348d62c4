"""The plots of an evaluation: measures against budget, time or memory, scores by needle depth, top-k hit rates."""

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from statistics import fmean
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import FixedLocator, MaxNLocator, NullFormatter, NullLocator, PercentFormatter

from keepsight.eval.report.figures import MAX_COLUMNS, TEXT, Panel, Plot, Style, in_order, label_of, look, styles_of
from keepsight.eval.report.intervals import Estimate
from keepsight.eval.report.summary import Difference, SummaryRow, by_task_and_length, mean_over_tasks
from keepsight.eval.results import Row


@dataclass(frozen=True)
class Measure:
    """A column of the summary, and how its axis is drawn.

    Attributes:
        name: The column.
        label: Name in plots.
        scale: Sets the y-axis for values and the ends of their intervals.
    """

    name: str
    label: str
    scale: Callable[[Axes, list[float]], None]


@dataclass(frozen=True)
class Against:
    """What a measure is drawn against.

    Attributes:
        label: Name in plots.
        value: Reads it from a row of the summary; None where it was not measured.
        scale: Sets the x-axis for some values.
        apart: Whether methods are offset sideways by a few percent, so that intervals at equal values do not overlap.
    """

    label: str
    value: Callable[[SummaryRow], float | None]
    scale: Callable[[Axes, list[float]], None]
    apart: bool = False


def draw_curves(
    axes: Axes, rows: Sequence[SummaryRow], measure: Measure, against: Against, styles: Mapping[str, Style]
) -> None:
    """One line a method, and the full cache as a level.

    Args:
        axes: Where.
        rows: Rows of one task and length, or means over several.
        measure: The y-axis.
        against: The x-axis.
        styles: Styles of all methods of the run; the place of a method in it names its marks.
    """
    estimates = [row.estimates[measure.name] for row in rows]
    measure.scale(axes, [end for each in estimates for end in (each.value, *each.ends)])
    placed = [(row, value) for row in rows if (value := against.value(row)) is not None]
    against.scale(axes, [value for _, value in placed])
    numbers = {method: f"m{number}" for number, method in enumerate(styles)}
    for row in rows:
        if row.budget is None:
            _level(axes, row.estimates[measure.name].value, against.value(row), row.method, styles, numbers)
    placed = [(row, value) for row, value in placed if row.budget is not None]
    methods = in_order(row.method for row, _ in placed)
    for place, method in enumerate(methods):
        shift = 2 ** (0.04 * (place - (len(methods) - 1) / 2)) if against.apart else 1.0
        points = [(row, value * shift) for row, value in placed if row.method == method]
        points.sort(key=lambda point: budget_entries(point[0]) or 0)
        _line(axes, [(at, row.estimates[measure.name]) for row, at in points], method, styles, numbers)
    axes.set(xlabel=against.label, ylabel=measure.label)
    look(axes)


def _level(
    axes: Axes, level: float, at: float | None, method: str, styles: Mapping[str, Style], numbers: Mapping[str, str]
) -> None:
    """A method that keeps every entry: a level, and a point where it has a place on the x-axis."""
    style, number = styles[method], numbers[method]
    axes.axhline(level, color=style.colour, linestyle=style.line, linewidth=1, label=method, gid=f"{number}-level")
    if at is not None:
        axes.plot(at, level, "*", color=style.colour, markersize=8, gid=f"{number}-point")


def _line(
    axes: Axes,
    points: Sequence[tuple[float, Estimate]],
    method: str,
    styles: Mapping[str, Style],
    numbers: Mapping[str, str],
) -> None:
    style, number = styles[method], numbers[method]
    at, estimates = zip(*points, strict=True)
    low, high = zip(*(each.ends for each in estimates), strict=True)
    axes.vlines(at, low, high, style.colour, linewidth=1, alpha=0.5, gid=f"{number}-intervals")
    width = 2.0 if method == "lookaheadkv" else 1.4
    values = [each.value for each in estimates]
    (line,) = axes.plot(at, values, style.line, color=style.colour, linewidth=width, label=method)
    # A score of 0 lies on the edge of the panel.
    line.set(marker=style.marker, markersize=4.5, clip_on=False, gid=f"{number}-line")


def budget_scale(axes: Axes, budgets: list[float]) -> None:
    """A tick at each budget, equal ratios at equal distances."""
    ticks = sorted(set(budgets))
    if not ticks:
        axes.xaxis.set_major_locator(NullLocator())
        return
    axes.set_xscale("log", base=2)
    margin = 1.35 if len(ticks) > 1 else 2.0
    axes.set_xlim(ticks[0] / margin, ticks[-1] * margin)
    axes.xaxis.set_major_locator(FixedLocator(ticks))
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.set_xticklabels([f"{round(tick, 2):g}" for tick in ticks])


def budget_entries(row: SummaryRow) -> float | None:
    """The budget as a number of entries; the mean over prompts where it is a share of each."""
    return row.means["budget_entries"] if isinstance(row.budget, float) else row.budget


def budget_of(rows: Iterable[SummaryRow]) -> Against:
    """The axis of budgets: of shares where all are shares of the prompt."""
    are_shares = {isinstance(row.budget, float) for row in rows if row.budget is not None}
    return SHARE if are_shares == {True} else BUDGET


def _cost_scale(axes: Axes, values: list[float]) -> None:
    """Linear, or logarithmic where the values differ a lot."""
    if not values or min(values) <= 0 or max(values) < 4 * min(values):
        low, high = min(values, default=0.0), max(values, default=1.0)
        room = 0.08 * (high - low) or 0.1 * high or 1.0
        axes.set_xlim(low - room, high + room)
        axes.xaxis.set_major_locator(MaxNLocator(5))
    else:
        axes.set_xscale("log", base=2)
        axes.set_xlim(min(values) / 1.3, max(values) * 1.3)
        axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:.3g}")


def _unit_scale(axes: Axes, values: list[float]) -> None:
    """From 0, with room for every interval; a fifth of the range at least, so that noise does not look like a gain."""
    axes.set_ylim(0, min(1.05, max(0.2, 1.08 * max(values, default=1.0))))
    axes.yaxis.set_major_locator(MaxNLocator(5, steps=[1, 2, 2.5, 5, 10]))
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")


def _nats_scale(axes: Axes, values: list[float]) -> None:
    """Logarithmic above 0.01 nats, linear below, since an evicted cache may be as good as the full one, or better."""
    axes.set_yscale("symlog", linthresh=0.01, linscale=0.5)
    axes.set_ylim(min(-0.002, 1.6 * min(values, default=0.0)), max(0.1, 1.6 * max(values, default=0.0)))
    axes.yaxis.set_major_locator(FixedLocator([-1, -0.1, -0.01, 0, 0.01, 0.03, 0.1, 0.3, 1, 3, 10]))
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")


def _share_scale(axes: Axes, values: list[float]) -> None:
    axes.set_ylim(max(0.0, math.floor(10 * min(values, default=0.0) - 0.5) / 10), 1.02)
    axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))


def _difference_scale(axes: Axes, values: list[float]) -> None:
    """Around a line at zero; a tenth of the range at least on both sides."""
    axes.axhline(0, color=TEXT, linewidth=0.8)
    most = max(0.1, *(1.08 * abs(value) for value in values))
    axes.set_ylim(-most, most)
    axes.yaxis.set_major_locator(MaxNLocator(5))
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:+g}" if value else "0")


SCORE = Measure("score", "score", _unit_scale)
EXCESS_NLL = Measure("excess_nll", "excess NLL (nats/token)", _nats_scale)
AGREEMENT = Measure("agreement", "top-1 agreement", _share_scale)
DIFFERENCES = (
    Measure("score", "score difference", _difference_scale),
    Measure("excess_nll", "difference of excess NLL (nats)", _difference_scale),
    Measure("agreement", "agreement difference", _difference_scale),
)
BUDGET = Against("KV budget (entries per layer and head)", budget_entries, budget_scale, apart=True)
SHARE = Against("KV budget (share of the prompt)", lambda row: row.budget, budget_scale, apart=True)
TIME = Against("time to first token (s)", lambda row: row.means["time_to_first_token"], _cost_scale)
MEMORY = Against("KV cache (MiB)", lambda row: row.means["kv_mib"], _cost_scale)


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


_MAX_DEPTHS = 11
"""More depths than these are gathered into fifths."""
_COLOURS = "viridis"
_FIFTHS = (0.1, 0.3, 0.5, 0.7, 0.9)

Scores = dict[tuple[float, int], float]


def depth_plot(rows: Sequence[Row]) -> Plot | None:
    """A panel for each method and budget, the mean over tasks; None where no row says how deep its needle lies.

    Args:
        rows: Rows of `results.jsonl`, those of needle tasks with `depth`, 0 the beginning of the prompt and 1 its end.
    """
    deep = [row for row in rows if row.get("depth") is not None]
    if not deep:
        return None
    depths = sorted({round(row["depth"], 3) for row in deep})
    gathered = depths if len(depths) <= _MAX_DEPTHS else list(_FIFTHS)
    lengths = sorted({row["length"] for row in deep})
    panels = []
    for method in in_order(row["method"] for row in deep):
        of_method = [row for row in deep if row["method"] == method]
        for budget in sorted({row["budget"] for row in of_method}, key=lambda budget: budget or 0):
            scores = _means([row for row in of_method if row["budget"] == budget], gathered)
            title = label_of(method) if budget is None else f"{label_of(method)}, budget {budget}"
            draw = partial(_draw_depths, scores=scores, depths=gathered, lengths=lengths)
            panels.append(Panel(title, draw, method=method, budget=budget))
    return Plot("depth", panels)


def _means(rows: Sequence[Row], depths: list[float]) -> Scores:
    cells: dict[tuple[float, int], list[float]] = defaultdict(list)
    for row in rows:
        nearest = min(depths, key=lambda depth: abs(depth - row["depth"]))
        cells[nearest, row["length"]].append(row["score"])
    return {cell: fmean(scores) for cell, scores in cells.items()}


def _draw_depths(axes: Axes, scores: Scores, depths: list[float], lengths: list[int]) -> None:
    values = np.array([[scores.get((depth, length), np.nan) for length in lengths] for depth in depths])
    # Cells as paths, not as a picture: a page may load none.
    axes.pcolormesh(values, vmin=0, vmax=1, cmap=_COLOURS, edgecolors="white", linewidth=0.6)
    for (row, column), value in np.ndenumerate(values):
        if not np.isnan(value):
            colour, size = "white" if value < 0.6 else "black", 7 if len(lengths) <= 6 else 5
            middle = column + 0.5, row + 0.5
            axes.text(*middle, f"{value:.2f}", ha="center", va="center", color=colour, fontsize=size)
    axes.invert_yaxis()
    axes.xaxis.set_major_locator(FixedLocator([at + 0.5 for at in range(len(lengths))]))
    axes.set_xticklabels([str(length) for length in lengths], rotation=0 if len(lengths) <= 5 else 45)
    axes.yaxis.set_major_locator(FixedLocator([at + 0.5 for at in range(len(depths))]))
    axes.set_yticklabels([f"{depth:.0%}" for depth in depths])
    axes.tick_params(labelsize=8, colors=TEXT, length=0)
    axes.spines[:].set_visible(False)
    axes.set_xlabel("prompt length (tokens)", fontsize=8.5, color=TEXT)
    axes.set_ylabel("needle depth", fontsize=8.5, color=TEXT)


_MEASURES = {"hit": "top-k hit rate", "mass": "attention mass read"}


def hits_plot(rows: Sequence[dict[str, Any]]) -> Plot:
    """A row of two panels for each task and length.

    Args:
        rows: With `task`, `length`, `method`, `budget`, `hit` and `mass`.
    """
    styles, panels = styles_of(row["method"] for row in rows), []
    for task, length in sorted({(row["task"], row["length"]) for row in rows}):
        chosen = [row for row in rows if (row["task"], row["length"]) == (task, length)]
        for measure, label in _MEASURES.items():
            draw = partial(_draw_hits, rows=chosen, measure=measure, styles=styles)
            panels.append(Panel(f"{task}, {length} tokens: {label}", draw, task, length))
    return Plot("hits", panels, styles, columns=2)


def _draw_hits(axes: Axes, rows: Sequence[dict[str, Any]], measure: str, styles: Mapping[str, Style]) -> None:
    budget_scale(axes, [row["budget"] for row in rows])
    for method in sorted({row["method"] for row in rows}):
        points = sorted((row["budget"], row[measure]) for row in rows if row["method"] == method)
        style = styles[method]
        (line,) = axes.plot(*zip(*points, strict=True), style.line, color=style.colour)
        line.set(marker=style.marker or "o", markersize=4.5)
    look(axes)
    axes.set_ylim(0, 1.04)
    axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    axes.set_xlabel("budget (KV entries read per step and head)")
