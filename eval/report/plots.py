"""The plots of an evaluation: measures against budget, time or memory, scores by needle depth, top-k hit rates."""

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import product
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
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
from keepsight.eval.report.summary import Frame, are_shares, by_task_and_length, mean_over_tasks
from keepsight.eval.results import Row
from keepsight.runtime.registry import Style

_MAX_DEPTHS = 11
"""More depths than these are binned into fifths."""
_FIFTHS = [0.1, 0.3, 0.5, 0.7, 0.9]
SAMPLES_A_CELL = 3
"""Heat maps with fewer samples in a cell would show noise, and are not drawn."""

Styles = Mapping[str, Style]
Scale = Callable[[Axes, list[float]], None]
"""Sets an axis for the values on it, ends of intervals included."""


class Measure(NamedTuple):
    """A column of the summary on the y-axis, with its label and scale."""

    name: str
    label: str
    scale: Scale


class Against(NamedTuple):
    """An x-axis: label, the rows' values (NaN if not measured), scale, and whether methods are offset sideways."""

    label: str
    values: Callable[[Frame], Any]
    scale: Scale
    apart: bool = False


def overview_plot(summary: Frame) -> Plot:
    """Score, excess NLL and top-1 agreement against the budget, each the mean over tasks."""
    styles, mean = styles_of(summary["method"]), mean_over_tasks(summary)
    measures = {"score": SCORE, "excess NLL": EXCESS_NLL, "top-1 agreement": AGREEMENT}
    panels = [_panel(title, mean, measure, _budget_of(mean), styles) for title, measure in measures.items()]
    return Plot("overview", panels, styles, columns=3)


def tradeoffs_plot(summary: Frame) -> Plot:
    """Score and excess NLL against time to first token and memory, for each length the mean over tasks.

    The second figure of LookaheadKV (arXiv 2603.10899) shows the first of these.
    """
    styles, panels = styles_of(summary["method"]), []
    for length, rows in summary.groupby("length"):
        mean = mean_over_tasks(rows)
        for (title, measure), against in product({"score": SCORE, "excess NLL": EXCESS_NLL}.items(), (TIME, MEMORY)):
            panels.append(_panel(f"{title}, {length} tokens", mean, measure, against, styles, length=length))
    return Plot("tradeoffs", panels, styles)


def scores_plot(summary: Frame) -> Plot:
    """Score against the budget, a panel for each task and length."""
    return _small_multiples("scores", summary, SCORE)


def excess_nll_plot(summary: Frame) -> Plot:
    """Excess NLL against the budget, a panel for each task and length."""
    return _small_multiples("excess_nll", summary, EXCESS_NLL)


def comparison_plot(differences: Mapping[str, Frame]) -> Plot:
    """Paired differences against the budget, a row of panels for each name of a run."""
    styles, panels = styles_of(pd.concat(differences.values())["method"]), []
    for name, found in differences.items():
        rows = found[found["budget"].notna()]
        panels += [_panel(name, rows, measure, _budget_of(rows), styles) for measure in DIFFERENCES if len(rows)]
    return Plot("comparison", panels, styles, columns=len(DIFFERENCES))


def depth_plot(rows: Sequence[Row]) -> Plot | None:
    """Heat maps of the score by needle depth and prompt length, one for each method and budget, the mean over tasks.

    A depth of 0 is the beginning of the prompt, 1 its end. Where cells would have fewer than `SAMPLES_A_CELL` samples,
    depths are binned into fifths; where that is not enough, or no row has a depth, there is no plot.
    """
    names = ["method", "budget", "length", "depth", "score"]
    deep = pd.DataFrame([row for row in rows if row.get("depth") is not None], columns=names, dtype=object)
    found, lengths = sorted({round(depth, 3) for depth in deep["depth"]}), sorted({*deep["length"]})
    for depths in (found, _FIFTHS) if len(found) <= _MAX_DEPTHS else (_FIFTHS,):
        deep["row"] = [int(np.abs(np.array(depths) - depth).argmin()) for depth in deep["depth"]]
        if deep.groupby(["method", "budget", "row", "length"], dropna=False).size().min() >= SAMPLES_A_CELL:
            break
    else:
        return None
    panels = []
    deep = deep.assign(order=deep["budget"].astype(float).fillna(0), score=deep["score"].astype(float))
    for _, own in deep.groupby(["method", "order"]):
        method, budget = own["method"].iloc[0], own["budget"].iloc[0]
        cells = own.pivot_table(index="row", columns="length", values="score")
        values = cells.reindex(index=range(len(depths)), columns=lengths).to_numpy()
        title = label_of(method) if budget is None else f"{label_of(method)}, budget {budget}"
        draw = partial(_draw_depths, values=values, depths=depths, lengths=lengths)
        panels.append(Panel(title, draw, method=method, budget=budget))
    return Plot("depth", panels)


def hits_plot(rows: Frame) -> Plot:
    """Top-k hit rate and attention mass against the budget, a row of two panels for each task and length."""
    styles, panels = styles_of(rows["method"]), []
    for (task, length), chosen in rows.groupby(["task", "length"]):
        for measure, label in {"hit": "top-k hit rate", "mass": "attention mass read"}.items():
            draw = partial(_draw_hits, rows=chosen, measure=measure, styles=styles)
            panels.append(Panel(f"{task}, {length} tokens: {label}", draw, task, length))
    return Plot("hits", panels, styles, columns=2)


def _small_multiples(name: str, summary: Frame, measure: Measure) -> Plot:
    styles, groups = styles_of(summary["method"]), by_task_and_length(summary)
    panels = [
        _panel(f"{task}, {length} tokens", rows, measure, _budget_of(rows), styles, task=task, length=length)
        for (task, length), rows in groups.items()
    ]
    tasks, lengths = {task for task, _ in groups}, {length for _, length in groups}
    complete = len(groups) == len(tasks) * len(lengths) and len(lengths) <= MAX_COLUMNS
    step = len(lengths) if complete else 1  # the lengths of a task stay side by side
    return Plot(name, panels, styles, max(1, min(MAX_COLUMNS // step * step, len(groups))))


def _panel(title: str, rows: Frame, measure: Measure, against: Against, styles: Styles, **place: Any) -> Panel:
    draw = partial(_draw_curves, rows=rows, measure=measure, against=against, styles=styles)
    return Panel(title, draw, **place)


def _draw_curves(axes: Axes, rows: Frame, measure: Measure, against: Against, styles: Styles) -> None:
    """One line a method, and the full cache as a level; the place of a method in `styles` names its marks."""
    rows = rows.assign(shown=rows[measure.name], at=against.values(rows))
    measure.scale(axes, [end for each in rows["shown"] for end in (each.value, *each.ends)])
    against.scale(axes, rows["at"].dropna().tolist())
    numbers = {method: f"m{number}" for number, method in enumerate(styles)}
    for row in rows[rows["budget"].isna()].itertuples():
        # The full cache: a level, and a point where it has a place on the x-axis.
        style, number, level = styles[row.method], numbers[row.method], row.shown.value
        gid = f"{number}-level"
        axes.axhline(level, color=style.colour, linestyle=style.line, linewidth=1, label=row.method, gid=gid)
        if not math.isnan(row.at):
            axes.plot(row.at, level, "*", color=style.colour, markersize=8, gid=f"{number}-point")
    methods = rows[rows["budget"].notna() & rows["at"].notna()].groupby("method")
    for place, (method, own) in enumerate(methods):
        style, number = styles[method], numbers[method]
        shift = 2 ** (0.04 * (place - (len(methods) - 1) / 2)) if against.apart else 1.0
        own = own.loc[_entries(own).sort_values(kind="stable").index]
        places, values, width = own["at"] * shift, own["shown"].astype(float), 2.0 if method == "lookaheadkv" else 1.4
        low, high = zip(*(each.ends for each in own["shown"]), strict=True)
        axes.vlines(places, low, high, style.colour, linewidth=1, alpha=0.5, gid=f"{number}-intervals")
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


def _draw_hits(axes: Axes, rows: Frame, measure: str, styles: Styles) -> None:
    _budget_scale(axes, rows["budget"].tolist())
    for method, own in rows.sort_values("budget").groupby("method"):
        style = styles[method]
        (line,) = axes.plot(own["budget"], own[measure], style.line, color=style.colour)
        line.set(marker=style.marker or "o", markersize=4.5)
    look(axes)
    axes.set_ylim(0, 1.04)
    axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    axes.set_xlabel("budget (KV entries read per step and head)")


def _entries(rows: Frame) -> Any:
    """The budgets as numbers of entries; the mean over prompts where they are shares of each."""
    return rows["budget"].astype(float).mask(are_shares(rows), rows["budget_entries"])


def _budget_of(rows: Frame) -> Against:
    """The axis of budgets: of shares where all are shares of the prompt."""
    evicting = rows[rows["budget"].notna()]
    return SHARE if len(evicting) and are_shares(evicting).all() else BUDGET


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
SHARE = Against("KV budget (share of the prompt)", lambda rows: rows["budget"].astype(float), _budget_scale, apart=True)
TIME = Against("time to first token (s)", lambda rows: rows["time_to_first_token"], _cost_scale)
MEMORY = Against("KV cache (MiB)", lambda rows: rows["kv_mib"], _cost_scale)
