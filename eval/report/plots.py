"""The plots of an evaluation: measures against budget, time or memory, scores by needle depth, top-k hit rates."""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.ticker import FixedLocator, MaxNLocator, NullFormatter, NullLocator, PercentFormatter

from keepsight.eval.record import FULL, ResultRow
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
    is_offset: bool = False


# The plots of a report


def overview_plot(summary: Frame) -> Plot:
    """Score, excess NLL and top-1 agreement against the budget, each the mean over tasks."""
    styles = styles_of(summary["method"])
    mean = mean_over_tasks(summary)
    against = _budget_of(mean)
    panels = [
        Panel("score", Curves(mean, SCORE, against, styles)),
        Panel("excess NLL", Curves(mean, EXCESS_NLL, against, styles)),
        Panel("top-1 agreement", Curves(mean, AGREEMENT, against, styles)),
    ]
    return Plot("overview", panels, styles, columns=3)


def tradeoffs_plot(summary: Frame) -> Plot:
    """Score and excess NLL against time to first token and memory, for each length the mean over tasks.

    The second figure of LookaheadKV (arXiv 2603.10899) shows the first of these.
    """
    styles = styles_of(summary["method"])
    panels = []
    for length, rows in summary.groupby("length"):
        mean = mean_over_tasks(rows)
        for title, measure in (("score", SCORE), ("excess NLL", EXCESS_NLL)):
            for against in (TIME, MEMORY):
                curves = Curves(mean, measure, against, styles)
                panels.append(Panel(f"{title}, {length} tokens", curves, length=length))
    return Plot("tradeoffs", panels, styles)


def scores_plot(summary: Frame) -> Plot:
    """Score against the budget, a panel for each task and length."""
    return _plot_by_task("scores", summary, SCORE)


def excess_nll_plot(summary: Frame) -> Plot:
    """Excess NLL against the budget, a panel for each task and length."""
    return _plot_by_task("excess_nll", summary, EXCESS_NLL)


def _plot_by_task(name: str, summary: Frame, measure: Measure) -> Plot:
    styles = styles_of(summary["method"])
    panels = []
    tasks = set()
    lengths = set()
    for (task, length), rows in by_task_and_length(summary).items():
        curves = Curves(rows, measure, _budget_of(rows), styles)
        panels.append(Panel(f"{task}, {length} tokens", curves, task, length))
        tasks.add(task)
        lengths.add(length)

    columns = MAX_COLUMNS
    if len(lengths) <= MAX_COLUMNS and len(panels) == len(tasks) * len(lengths):
        columns -= columns % len(lengths)  # the lengths of a task stay side by side
    return Plot(name, panels, styles, max(1, min(columns, len(panels))))


_VARIED = re.compile(r"(.*\S) ([\w.]+)=(-?\d+(?:\.\d+)?)")
"""The name of a variant that ends in an option and its number, as `vary` and `bits=` make them."""


def options_plot(summary: Frame) -> Plot | None:
    """Score and excess NLL against an option's value, a line for each method and budget, the mean over tasks.

    Two panels for each option that has two values or more among the methods' names; None where none has.
    """
    mean = mean_over_tasks(summary)
    rows = []
    for _, row in mean.iterrows():
        varied = _VARIED.fullmatch(row["method"])
        if varied is None:
            continue
        method, option, value = varied.groups()
        name = method if pd.isna(row["budget"]) else f"{method}, budget {row['budget']:g}"
        rows.append({"line": name, "option": option, "value": float(value), "index": row.name})
    values = pd.DataFrame(rows, columns=["line", "option", "value", "index"])
    counts: Any = values.groupby(["line", "option"])["value"].transform("nunique")
    values = values[counts > 1]
    if values.empty:
        return None
    full = mean[mean["method"] == FULL]
    styles = styles_of([*values["line"], *full["method"]])
    panels = []
    for option, of_option in values.groupby("option", sort=False):
        shown = mean.loc[of_option["index"]].assign(line=[*of_option["line"]], value=[*of_option["value"]])
        for measure in (SCORE, EXCESS_NLL):
            panels.append(
                Panel(f"{measure.label} by {option}", OptionCurves(shown, full, measure, str(option), styles))
            )
    return Plot("options", panels, styles, columns=2)


def comparison_plot(differences: Mapping[str, Frame]) -> Plot:
    """Paired differences against the budget, a row of panels for each name of a run."""
    styles = styles_of(pd.concat(differences.values())["method"])
    panels = []
    for name, of_run in differences.items():
        rows = of_run[of_run["budget"].notna()]
        if len(rows) == 0:
            continue
        for measure in DIFFERENCES:
            panels.append(Panel(name, Curves(rows, measure, _budget_of(rows), styles)))
    return Plot("comparison", panels, styles, columns=len(DIFFERENCES))


def depth_plot(rows: Sequence[ResultRow]) -> Plot | None:
    """Heat maps of the score by needle depth and prompt length, one for each method and budget, the mean over tasks.

    A depth of 0 is the beginning of the prompt, 1 its end. Where cells would have fewer than `SAMPLES_A_CELL` samples,
    depths are binned into fifths; where that is not enough, or no row has a depth, there is no plot.
    """
    columns = ["method", "budget", "length", "depth", "score"]
    rows_with_depth = []
    for row in rows:
        if row.depth is not None:
            rows_with_depth.append(vars(row))
    deep = pd.DataFrame(rows_with_depth, columns=columns, dtype=object)
    depths = sorted({round(depth, 3) for depth in deep["depth"]})
    lengths = sorted(set(deep["length"]))
    binned = _binned(deep, depths) if len(depths) <= _MAX_DEPTHS else None
    if binned is None:
        depths = _FIFTHS
        binned = _binned(deep, depths)
    if binned is None:
        return None

    panels = []
    binned = binned.assign(order=binned["budget"].astype(float).fillna(0), score=binned["score"].astype(float))
    for _, rows_of_variant in binned.groupby(["method", "order"]):
        method = rows_of_variant["method"].iloc[0]
        budget = rows_of_variant["budget"].iloc[0]
        cells = rows_of_variant.pivot_table(index="row", columns="length", values="score")
        values = cells.reindex(index=range(len(depths)), columns=lengths).to_numpy()
        title = label_of(method) if budget is None else f"{label_of(method)}, budget {budget}"
        panels.append(Panel(title, HeatMap(values, depths, lengths), method=method, budget=budget))
    return Plot("depth", panels)


def _binned(deep: Frame, depths: Sequence[float]) -> Frame | None:
    """Rows with the index of the nearest of `depths` as `row`; None where a cell has too few samples."""
    rows = [int(np.abs(np.array(depths) - depth).argmin()) for depth in deep["depth"]]
    binned = deep.assign(row=rows)
    samples = binned.groupby(["method", "budget", "row", "length"], dropna=False).size()
    return binned if samples.min() >= SAMPLES_A_CELL else None


def hits_plot(rows: Frame) -> Plot:
    """Top-k hit rate, attention mass and overlap against the budget, a row of panels for each task and length."""
    styles = styles_of(rows["method"])
    panels = []
    for (task, length), rows_of_task in rows.groupby(["task", "length"]):
        prompts = f"{task}, {length} tokens"
        for title, measure in (("top-k hit rate", "hit"), ("attention mass read", "mass"), ("overlap", "overlap")):
            panels.append(Panel(f"{prompts}: {title}", HitCurves(rows_of_task, measure, styles), task, length))
    return Plot("hits", panels, styles, columns=3)


def predicted_plot(rows: Frame, by_layer_or_head: Frame | None, points: Mapping[str, list[list[float]]]) -> Plot:
    """Recall and mass of predicted entries against the budget; recall by layer; a draft's scores against the model's.

    `rows` are means; `by_layer_or_head` means by layer, head or both; `points` pairs of numbers by method.
    """
    styles = styles_of(rows["method"])
    panels = []
    for (task, length), rows_of_task in rows.groupby(["task", "length"]):
        prompts = f"{task}, {length} tokens"
        for title, measure in (("recall", "recall"), ("attention mass", "mass")):
            curves = HitCurves(rows_of_task, measure, styles, "KV entries per head")
            panels.append(Panel(f"{prompts}: {title}", curves, task, length))
    if by_layer_or_head is not None and "layer" in by_layer_or_head:
        largest = by_layer_or_head[by_layer_or_head["budget"] == by_layer_or_head["budget"].max()]
        means = largest.groupby(["method", "layer"], sort=False)[["recall", "cosine"]].mean().reset_index()
        for measure in ("recall", "cosine"):
            panels.append(Panel(f"{measure} by layer", LayerCurves(means, measure, styles)))
    for name, pairs in points.items():
        panels.append(Panel(f"{label_of(name)}: a point a token", Scatter(pairs, styles[name])))
    return Plot("importance", panels, styles, columns=2)


def queries_plot(rows: Frame, by_layer: bool) -> Plot:
    """Similarity of queries: boxes of the prompts' means, curves by position, and means by layer (DapQ, figure 2)."""
    of_prompts = rows.groupby(["content", "position", "prompt"], sort=False)["after RoPE"].mean().reset_index()
    panels = [
        Panel("after RoPE, a value a prompt", Boxes(of_prompts)),
        Panel("after RoPE, by position", PositionCurves(of_prompts)),
    ]
    if by_layer:
        at_answer = rows[rows["position"] == "1"]
        panels.append(Panel("by layer, at the answer's positions", QueryLayers(at_answer, "after RoPE")))
        panels.append(
            Panel("by layer, at the prompt's start", QueryLayers(rows[rows["position"] == "0"], "after RoPE"))
        )
    return Plot("queries", panels, columns=2)


# What panels draw


@dataclass(frozen=True)
class Curves:
    """One line a method, and the full cache as a level; the index of a method in `styles` names its marks."""

    rows: Frame
    measure: Measure
    against: Against
    styles: Styles

    def __call__(self, axes: Axes) -> None:
        """Draw them."""
        rows = self.rows.assign(shown=self.rows[self.measure.name], at=self.against.values(self.rows))
        ends = []
        for estimate in rows["shown"]:
            ends += [estimate.value, *estimate.ends]
        self.measure.scale(axes, ends)
        self.against.scale(axes, rows["at"].dropna().tolist())
        numbers = {method: f"m{number}" for number, method in enumerate(self.styles)}

        for row in rows[rows["budget"].isna()].itertuples():
            # The full cache: a level, and a point where it has a place on the x-axis.
            style = self.styles[row.method]
            level = row.shown.value
            gid = f"{numbers[row.method]}-level"
            axes.axhline(level, color=style.colour, linestyle=style.line, linewidth=1, label=row.method, gid=gid)
            if not math.isnan(row.at):
                gid = f"{numbers[row.method]}-point"
                axes.plot(row.at, level, "*", color=style.colour, markersize=8, gid=gid)

        methods = rows[rows["budget"].notna() & rows["at"].notna()].groupby("method")
        for index, (method, rows_of_method) in enumerate(methods):
            shift = 1.0
            if self.against.is_offset:
                shift = 2 ** (0.04 * (index - (len(methods) - 1) / 2))
            self._draw_line(axes, method, rows_of_method, shift, numbers[method])
        axes.set(xlabel=self.against.label, ylabel=self.measure.label)
        look(axes)

    def _draw_line(self, axes: Axes, method: str, rows: Frame, shift: float, number: str) -> None:
        style = self.styles[method]
        rows = rows.loc[_entries(rows).sort_values(kind="stable").index]
        x = rows["at"] * shift
        low = []
        high = []
        for estimate in rows["shown"]:
            low.append(estimate.ends[0])
            high.append(estimate.ends[1])
        axes.vlines(x, low, high, style.colour, linewidth=1, alpha=0.5, gid=f"{number}-intervals")
        width = 2.0 if method == "lookaheadkv" else 1.4
        values = rows["shown"].astype(float)
        (line,) = axes.plot(x, values, style.line, color=style.colour, linewidth=width, label=method)
        # A score of 0 lies on the edge of the panel.
        line.set(marker=style.marker, markersize=4.5, clip_on=False, gid=f"{number}-line")


@dataclass(frozen=True)
class OptionCurves:
    """One line a method and budget: a measure against an option's value, and the full cache as a level."""

    rows: Frame
    full: Frame
    measure: Measure
    option: str
    styles: Styles

    def __call__(self, axes: Axes) -> None:
        """Draw them."""
        ends = []
        for estimate in [*self.rows[self.measure.name], *self.full[self.measure.name]]:
            ends += [estimate.value, *estimate.ends]
        self.measure.scale(axes, ends)
        values = sorted(set(self.rows["value"]))
        if values[0] > 0 and values[-1] >= 4 * values[0]:
            axes.set_xscale("log", base=2)
        axes.xaxis.set_major_locator(FixedLocator(values))
        axes.xaxis.set_minor_locator(NullLocator())
        axes.set_xticklabels([f"{value:g}" for value in values])
        for _, row in self.full.iterrows():
            style = self.styles[row["method"]]
            axes.axhline(row[self.measure.name].value, color=style.colour, linestyle="--", linewidth=1)
        for line, rows in self.rows.sort_values("value").groupby("line", sort=False):
            style = self.styles[line]
            ends_of_points = [estimate.ends for estimate in rows[self.measure.name]]
            low, high = zip(*ends_of_points, strict=True)
            axes.vlines(rows["value"], low, high, style.colour, linewidth=1, alpha=0.5)
            points = rows[self.measure.name].astype(float)
            (drawn,) = axes.plot(rows["value"], points, style.line, color=style.colour, label=line)
            drawn.set(marker=style.marker or "o", markersize=4.5, clip_on=False)
        axes.set(xlabel=self.option, ylabel=self.measure.label)
        look(axes)


@dataclass(frozen=True)
class HeatMap:
    """Mean scores [depths, lengths], NaN where nothing was measured, as coloured cells with their numbers."""

    values: Any
    depths: Sequence[float]
    lengths: Sequence[int]

    def __call__(self, axes: Axes) -> None:
        """Draw it."""
        # Cells as paths, not as a picture: a page may load none.
        axes.pcolormesh(self.values, vmin=0, vmax=1, cmap="viridis", edgecolors="white", linewidth=0.6)
        size = 7 if len(self.lengths) <= 6 else 5
        for (row, column), value in np.ndenumerate(self.values):
            if np.isnan(value):
                continue
            colour = "white" if value < 0.6 else "black"
            text = f"{value:.2f}"
            axes.text(column + 0.5, row + 0.5, text, ha="center", va="center", color=colour, fontsize=size)
        axes.invert_yaxis()
        rotation = 0 if len(self.lengths) <= 5 else 45
        axes.set_xticks(np.arange(len(self.lengths)) + 0.5, map(str, self.lengths), rotation=rotation)
        axes.set_yticks(np.arange(len(self.depths)) + 0.5, [f"{depth:.0%}" for depth in self.depths])
        axes.tick_params(labelsize=8, colors=TEXT, length=0)
        axes.spines[:].set_visible(False)
        axes.set_xlabel("prompt length (tokens)", fontsize=8.5, color=TEXT)
        axes.set_ylabel("needle depth", fontsize=8.5, color=TEXT)


@dataclass(frozen=True)
class HitCurves:
    """One line a method: a share of entries or attention against the budget."""

    rows: Frame
    measure: str
    styles: Styles
    of_budget: str = "KV entries read per step and head"

    def __call__(self, axes: Axes) -> None:
        """Draw them."""
        _budget_scale(axes, self.rows["budget"].tolist())
        for method, rows_of_method in self.rows.sort_values("budget").groupby("method"):
            style = self.styles[method]
            (line,) = axes.plot(rows_of_method["budget"], rows_of_method[self.measure], style.line, color=style.colour)
            line.set(marker=style.marker or "o", markersize=4.5)
        look(axes)
        axes.set_ylim(0, 1.04)
        axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
        axes.set_xlabel(f"budget ({self.of_budget})")


@dataclass(frozen=True)
class LayerCurves:
    """One line a method: a mean of each layer."""

    rows: Frame
    measure: str
    styles: Styles

    def __call__(self, axes: Axes) -> None:
        """Draw them."""
        for method, rows_of_method in self.rows.sort_values("layer").groupby("method"):
            style = self.styles[method]
            axes.plot(rows_of_method["layer"], rows_of_method[self.measure], style.line, color=style.colour)
        look(axes)
        axes.set(xlabel="layer", ylabel=self.measure)


_CONTENT_COLOURS = {"same": "#0072B2", "other": "#D55E00", "text": "#009E73"}


@dataclass(frozen=True)
class Boxes:
    """A box for each content and position: the median, the quartiles and the range."""

    rows: Frame

    def __call__(self, axes: Axes) -> None:
        """Draw them."""
        names = []
        values = []
        for (content, position), group in self.rows.groupby(["content", "position"], sort=False):
            names.append(f"{content}, {position}")
            values.append(group["after RoPE"].to_numpy())
        axes.boxplot(values, whis=(0, 100), widths=0.6, medianprops={"color": "#D55E00"})
        axes.set_xticks(range(1, len(names) + 1), names, rotation=90)
        axes.set_ylabel("cosine similarity")
        look(axes)
        axes.tick_params(axis="x", labelsize=6)


@dataclass(frozen=True)
class PositionCurves:
    """One line a content: the mean over prompts by position, drawn positions left out."""

    rows: Frame

    def __call__(self, axes: Axes) -> None:
        """Draw them."""
        shares = pd.to_numeric(self.rows["position"], errors="coerce")
        placed = self.rows.assign(share=shares).dropna(subset=["share"])
        for content, of_content in placed.groupby("content", sort=False):
            means = of_content.groupby("share")["after RoPE"].mean()
            axes.plot(means.index, means, "o-", color=_CONTENT_COLOURS[str(content)], markersize=4, label=content)
        axes.legend(frameon=False, fontsize=8)
        look(axes)
        axes.set(xlabel="position, a share of the prompt", ylabel="cosine similarity")


@dataclass(frozen=True)
class QueryLayers:
    """One line a content: the mean of each layer."""

    rows: Frame
    measure: str

    def __call__(self, axes: Axes) -> None:
        """Draw them."""
        for content, of_content in self.rows.groupby("content", sort=False):
            means = of_content.groupby("layer")[self.measure].mean()
            axes.plot(means.index, means, color=_CONTENT_COLOURS[str(content)], label=content)
        axes.legend(frameon=False, fontsize=8)
        look(axes)
        axes.set(xlabel="layer", ylabel="cosine similarity")


@dataclass(frozen=True)
class Scatter:
    """Pairs of numbers as points, both axes logarithmic: the base model's score and the draft's."""

    pairs: list[list[float]]
    style: Style

    def __call__(self, axes: Axes) -> None:
        """Draw them; pairs with a zero have no place."""
        positive = [pair for pair in self.pairs if min(pair) > 0]
        for reference, score in positive:
            axes.plot(reference, score, ".", color=self.style.colour, markersize=3)
        if positive:
            axes.set(xscale="log", yscale="log")
        look(axes)
        axes.set(xlabel="score by the base model", ylabel="score by the draft")


def _entries(rows: Frame) -> Any:
    """The budgets as numbers of entries; the mean over prompts where they are shares of each."""
    return rows["budget"].astype(float).mask(are_shares(rows), rows["budget_entries"])


def _shares(rows: Frame) -> Any:
    return rows["budget"].astype(float)


def _seconds(rows: Frame) -> Any:
    return rows["time_to_first_token"]


def _mebibytes(rows: Frame) -> Any:
    return rows["kv_mib"]


def _budget_of(rows: Frame) -> Against:
    """The axis of budgets: of shares where all are shares of the prompt."""
    evicting = rows[rows["budget"].notna()]
    if len(evicting) and are_shares(evicting).all():
        return SHARE
    return BUDGET


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
        low = min(values, default=0.0)
        high = max(values, default=1.0)
        margin = 0.08 * (high - low) or 0.1 * high or 1.0
        axes.set_xlim(low - margin, high + margin)
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
    most = max(0.1, 1.08 * max(map(abs, values)))
    axes.set_ylim(-most, most)
    axes.yaxis.set_major_locator(MaxNLocator(5))
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:+g}" if value else "0")


SCORE = Measure("score", "score", _unit_scale)
EXCESS_NLL = Measure("excess_nll", "excess NLL (nats/token)", _nats_scale)
AGREEMENT = Measure("agreement", "top-1 agreement", _share_scale)
DIFFERENCES = [
    Measure("score", "score difference", _difference_scale),
    Measure("excess_nll", "difference of excess NLL (nats)", _difference_scale),
    Measure("agreement", "agreement difference", _difference_scale),
]
BUDGET = Against("KV budget (entries per layer and head)", _entries, _budget_scale, is_offset=True)
SHARE = Against("KV budget (share of the prompt)", _shares, _budget_scale, is_offset=True)
TIME = Against("time to first token (s)", _seconds, _cost_scale)
MEMORY = Against("KV cache (MiB)", _mebibytes, _cost_scale)
