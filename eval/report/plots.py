"""The plots of an evaluation: measures against budget, time or memory, scores by needle depth, top-k hit rates."""

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from itertools import product
from statistics import fmean
from typing import Any, NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import FixedLocator, MaxNLocator, NullFormatter, NullLocator, PercentFormatter

from keepsight.eval.report.figures import (
    MAX_COLUMNS,
    TEXT,
    Panel,
    Plot,
    label_of,
    look,
    mark_break,
    styles_of,
)
from keepsight.eval.report.summary import SummaryRow, by_task_and_length, mean_over_tasks
from keepsight.eval.results import Row
from keepsight.runtime.registry import Style

_MAX_DEPTHS = 11
"""More depths than these are binned into fifths."""
_FIFTHS = [0.1, 0.3, 0.5, 0.7, 0.9]
SAMPLES_A_CELL = 3
"""Heat maps with fewer samples in a cell would show noise, and are not drawn."""

Curves = Sequence[SummaryRow]
Styles = Mapping[str, Style]
Scale = Callable[[Axes, list[float]], None]
"""Sets an axis for the values on it, ends of intervals included."""


class Measure(NamedTuple):
    """A column of the summary on the y-axis, with its label and scale."""

    name: str
    label: str
    scale: Scale


class Against(NamedTuple):
    """An x-axis: label, a row's value (None if not measured), scale, and whether methods are offset sideways."""

    label: str
    value: Callable[[SummaryRow], float | None]
    scale: Scale
    apart: bool = False


def overview_plot(summary: Curves) -> Plot:
    """Score, excess NLL and top-1 agreement against the budget, each the mean over tasks."""
    styles, mean = styles_of(row.method for row in summary), mean_over_tasks(summary)
    measures = {"score": SCORE, "excess NLL": EXCESS_NLL, "top-1 agreement": AGREEMENT}
    panels = [_panel(title, mean, measure, _budget_of(mean), styles) for title, measure in measures.items()]
    return Plot("overview", panels, styles, columns=3)


def tradeoffs_plot(summary: Curves) -> Plot:
    """Score and excess NLL against time to first token and memory, for each length the mean over tasks.

    The second figure of LookaheadKV (arXiv 2603.10899) shows the first of these.
    """
    styles, panels = styles_of(row.method for row in summary), []
    for length in sorted({row.length for row in summary}):
        mean = mean_over_tasks([row for row in summary if row.length == length])
        for (title, measure), against in product({"score": SCORE, "excess NLL": EXCESS_NLL}.items(), (TIME, MEMORY)):
            panels.append(_panel(f"{title}, {length} tokens", mean, measure, against, styles, length=length))
    return Plot("tradeoffs", panels, styles)


def scores_plot(summary: Curves) -> Plot:
    """Score against the budget, a panel for each task and length."""
    return _small_multiples("scores", summary, SCORE)


def excess_nll_plot(summary: Curves) -> Plot:
    """Excess NLL against the budget, a panel for each task and length."""
    return _small_multiples("excess_nll", summary, EXCESS_NLL)


def comparison_plot(differences: Mapping[str, Curves]) -> Plot:
    """Paired differences against the budget, a row of panels for each name of a run."""
    styles, panels = styles_of(each.method for found in differences.values() for each in found), []
    for name, found in differences.items():
        rows = [each for each in found if each.budget is not None]
        panels += [_panel(name, rows, measure, _budget_of(rows), styles) for measure in DIFFERENCES] if rows else []
    return Plot("comparison", panels, styles, columns=len(DIFFERENCES))


def depth_plot(rows: Sequence[Row]) -> Plot | None:
    """Heat maps of the score by needle depth and prompt length, one for each method and budget, the mean over tasks.

    A depth of 0 is the beginning of the prompt, 1 its end. Where cells would have fewer than `SAMPLES_A_CELL` samples,
    depths are binned into fifths; where that is not enough, or no row has a depth, there is no plot.
    """
    deep = [row for row in rows if row.get("depth") is not None]
    if not deep:
        return None
    found = sorted({round(row["depth"], 3) for row in deep})
    lengths = sorted({row["length"] for row in deep})
    for depths in (found, _FIFTHS) if len(found) <= _MAX_DEPTHS else (_FIFTHS,):
        cells = _cells(deep, depths, lengths)
        if all(len(scores) >= SAMPLES_A_CELL for own in cells.values() for scores in own.values()):
            break
    else:
        return None
    panels = []
    for method, budget in sorted(cells, key=lambda place: (place[0], place[1] or 0)):
        values = np.full((len(depths), len(lengths)), np.nan)
        for place, scores in cells[method, budget].items():
            values[place] = fmean(scores)
        title = label_of(method) if budget is None else f"{label_of(method)}, budget {budget}"
        draw = partial(_draw_depths, values=values, depths=depths, lengths=lengths)
        panels.append(Panel(title, draw, method=method, budget=budget))
    return Plot("depth", panels)


def _cells(
    rows: Sequence[Row], depths: list[float], lengths: list[int]
) -> dict[tuple[str, Any], dict[tuple[int, int], list[float]]]:
    """For each method and budget the scores by row (the nearest depth) and column (the length)."""
    cells: dict[tuple[str, Any], dict[tuple[int, int], list[float]]] = defaultdict(lambda: defaultdict(list))
    for row in rows:
        nearest = int(np.abs(np.array(depths) - row["depth"]).argmin())
        cells[row["method"], row["budget"]][nearest, lengths.index(row["length"])].append(row["score"])
    return cells


def hits_plot(rows: Sequence[dict[str, Any]]) -> Plot:
    """Top-k hit rate and attention mass against the budget, a row of two panels for each task and length."""
    styles, panels = styles_of(row["method"] for row in rows), []
    for task, length in sorted({(row["task"], row["length"]) for row in rows}):
        chosen = [row for row in rows if (row["task"], row["length"]) == (task, length)]
        for measure, label in {"hit": "top-k hit rate", "mass": "attention mass read"}.items():
            draw = partial(_draw_hits, rows=chosen, measure=measure, styles=styles)
            panels.append(Panel(f"{task}, {length} tokens: {label}", draw, task, length))
    return Plot("hits", panels, styles, columns=2)


def _small_multiples(name: str, summary: Curves, measure: Measure) -> Plot:
    styles, groups = styles_of(row.method for row in summary), by_task_and_length(summary)
    panels = [
        _panel(f"{task}, {length} tokens", rows, measure, _budget_of(rows), styles, task=task, length=length)
        for (task, length), rows in groups.items()
    ]
    tasks, lengths = {task for task, _ in groups}, {length for _, length in groups}
    complete = len(groups) == len(tasks) * len(lengths) and len(lengths) <= MAX_COLUMNS
    step = len(lengths) if complete else 1  # the lengths of a task stay side by side
    return Plot(name, panels, styles, max(1, min(MAX_COLUMNS // step * step, len(groups))))


def _panel(title: str, rows: Curves, measure: Measure, against: Against, styles: Styles, **place: Any) -> Panel:
    draw = partial(_draw_curves, rows=rows, measure=measure, against=against, styles=styles)
    return Panel(title, draw, **place)


def _draw_curves(axes: Axes, rows: Curves, measure: Measure, against: Against, styles: Styles) -> None:
    """One line a method, and the full cache as a level; the place of a method in `styles` names its marks."""
    estimates = [row.estimates[measure.name] for row in rows]
    measure.scale(axes, [end for each in estimates for end in (each.value, *each.ends)])
    against.scale(axes, [value for row in rows if (value := against.value(row)) is not None])
    numbers = {method: f"m{number}" for number, method in enumerate(styles)}
    for row in rows:
        if row.budget is None:  # keeps every entry: a level, and a point where it has a place on the x-axis
            style, number, level = styles[row.method], numbers[row.method], row.estimates[measure.name].value
            gid = f"{number}-level"
            axes.axhline(level, color=style.colour, linestyle=style.line, linewidth=1, label=row.method, gid=gid)
            if (at := against.value(row)) is not None:
                axes.plot(at, level, "*", color=style.colour, markersize=8, gid=f"{number}-point")
    placed = [(row, value) for row in rows if row.budget is not None and (value := against.value(row)) is not None]
    methods = sorted({row.method for row, _ in placed})
    for place, method in enumerate(methods):
        style, number = styles[method], numbers[method]
        shift = 2 ** (0.04 * (place - (len(methods) - 1) / 2)) if against.apart else 1.0
        own = sorted((each for each in placed if each[0].method == method), key=lambda each: _entries(each[0]) or 0)
        places, found = [value * shift for _, value in own], [row.estimates[measure.name] for row, _ in own]
        low, high = zip(*(each.ends for each in found), strict=True)
        axes.vlines(places, low, high, style.colour, linewidth=1, alpha=0.5, gid=f"{number}-intervals")
        values, width = [each.value for each in found], 2.0 if method == "lookaheadkv" else 1.4
        (line,) = axes.plot(places, values, style.line, color=style.colour, linewidth=width, label=method)
        # A score of 0 lies on the edge of the panel.
        line.set(marker=style.marker, markersize=4.5, clip_on=False, gid=f"{number}-line")
    axes.set(xlabel=against.label, ylabel=measure.label)
    look(axes)


def _draw_depths(axes: Axes, values: Any, depths: list[float], lengths: list[int]) -> None:
    # Cells as paths, not as a picture: a page may load none.
    axes.pcolormesh(values, vmin=0, vmax=1, cmap="viridis", edgecolors="white", linewidth=0.6)
    for (row, column), value in np.ndenumerate(values):
        if not np.isnan(value):
            colour, size = "white" if value < 0.6 else "black", 7 if len(lengths) <= 6 else 5
            middle = column + 0.5, row + 0.5
            axes.text(*middle, f"{value:.2f}", ha="center", va="center", color=colour, fontsize=size)
    axes.invert_yaxis()
    axes.set_xticks(np.arange(len(lengths)) + 0.5, map(str, lengths), rotation=0 if len(lengths) <= 5 else 45)
    axes.set_yticks(np.arange(len(depths)) + 0.5, [f"{depth:.0%}" for depth in depths])
    axes.tick_params(labelsize=8, colors=TEXT, length=0)
    axes.spines[:].set_visible(False)
    axes.set_xlabel("prompt length (tokens)", fontsize=8.5, color=TEXT)
    axes.set_ylabel("needle depth", fontsize=8.5, color=TEXT)


def _draw_hits(axes: Axes, rows: Sequence[dict[str, Any]], measure: str, styles: Styles) -> None:
    _budget_scale(axes, [row["budget"] for row in rows])
    for method in sorted({row["method"] for row in rows}):
        points = sorted((row["budget"], row[measure]) for row in rows if row["method"] == method)
        style = styles[method]
        (line,) = axes.plot(*zip(*points, strict=True), style.line, color=style.colour)
        line.set(marker=style.marker or "o", markersize=4.5)
    look(axes)
    axes.set_ylim(0, 1.04)
    axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    axes.set_xlabel("budget (KV entries read per step and head)")


def _entries(row: SummaryRow) -> float | None:
    """The budget as a number of entries; the mean over prompts where it is a share of each."""
    return row.means["budget_entries"] if isinstance(row.budget, float) else row.budget


def _budget_of(rows: Iterable[SummaryRow]) -> Against:
    """The axis of budgets: of shares where all are shares of the prompt."""
    are_shares = {isinstance(row.budget, float) for row in rows if row.budget is not None}
    return SHARE if are_shares == {True} else BUDGET


# Scales


def _budget_scale(axes: Axes, budgets: list[float]) -> None:
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
    mark_break(axes, 0.01)
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")


def _share_scale(axes: Axes, values: list[float]) -> None:
    low = max(0.0, math.floor(10 * min(values, default=0.0) - 0.5) / 10)
    axes.set_ylim(low, 1.02)
    if low:
        mark_break(axes, low + 0.05 * (1.02 - low))
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
_LABELS = {"score": "score difference", "excess_nll": "difference of excess NLL (nats)"}
_LABELS["agreement"] = "agreement difference"
DIFFERENCES = [Measure(name, label, _difference_scale) for name, label in _LABELS.items()]
BUDGET = Against("KV budget (entries per layer and head)", _entries, _budget_scale, apart=True)
SHARE = Against("KV budget (share of the prompt)", lambda row: row.budget, _budget_scale, apart=True)
TIME = Against("time to first token (s)", lambda row: row.means["time_to_first_token"], _cost_scale)
MEMORY = Against("KV cache (MiB)", lambda row: row.means["kv_mib"], _cost_scale)
