"""Plots of an evaluation run: score, delta NLL and top-1 agreement against the budget, one line per method."""

import io
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import matplotlib
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, MaxNLocator, NullFormatter, NullLocator, PercentFormatter

from keepsight.eval.report.styles import STYLES, label_of, style_of
from keepsight.eval.report.summary import SummaryRow, by_task_and_length, mean_over_tasks, wilson_interval
from keepsight.eval.results import FULL
from keepsight.files import write_png

PANEL = (2.9, 2.35)
"""Width and height of one panel, in inches."""
MAX_COLUMNS = 4
TEXT, GRID = "#262626", "#d4d4d4"


@dataclass(frozen=True)
class Measure:
    """A column of the summary, and how it is drawn.

    Attributes:
        label: Name in plots.
        value: The column.
        interval: Ends of its 95 % interval.
        scale: Sets the y-axis for some values.
    """

    label: str
    value: Callable[[SummaryRow], float]
    interval: Callable[[SummaryRow], tuple[float, float]]
    scale: Callable[[Axes, list[float]], None]


def plot_scores(summary: Sequence[SummaryRow], path: Path) -> None:
    """Write a PNG of `scores_figure`."""
    write_png(path, scores_figure(summary))


def plot_excess_nll(summary: Sequence[SummaryRow], path: Path) -> None:
    """Write a PNG of `excess_nll_figure`."""
    write_png(path, excess_nll_figure(summary))


def scores_figure(summary: Sequence[SummaryRow]) -> Figure:
    """Score against budget, a panel for each task and length, with 95 % intervals."""
    return _small_multiples(summary, SCORE)


def excess_nll_figure(summary: Sequence[SummaryRow]) -> Figure:
    """Delta NLL vs. full cache against budget, a panel for each task and length, with 95 % intervals."""
    return _small_multiples(summary, EXCESS_NLL)


def overview_figure(summary: Sequence[SummaryRow]) -> Figure:
    """Score, delta NLL and top-1 agreement against budget, each the mean over tasks, side by side."""
    figure, panels = _panels(3, 3)
    mean = mean_over_tasks(summary)
    for panel, measure in zip(panels, (SCORE, EXCESS_NLL, AGREEMENT), strict=True):
        _draw(panel, mean, measure)
        panel.set_title(measure.label, fontsize=9, color=TEXT)
    _finish(figure, mean)
    return figure


def as_svg(figure: Figure, salt: str) -> str:
    """A figure as an `<svg>` element for a page: transparent, its text in the page's own colour and font.

    Args:
        figure: What to draw.
        salt: Makes the element's identifiers differ from those of the page's other figures.
    """
    text = io.StringIO()
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": salt}):
        figure.savefig(text, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    svg = text.getvalue()
    svg = svg[svg.index("<svg") :].strip()
    return svg.replace(TEXT, "currentColor").replace(GRID, "var(--line)").replace("'DejaVu Sans'", "system-ui")


def _small_multiples(summary: Sequence[SummaryRow], measure: Measure) -> Figure:
    groups = by_task_and_length(summary)
    figure, panels = _panels(len(groups), _columns(list(groups)))
    for panel, ((task, length), rows) in zip(panels, groups.items(), strict=True):
        _draw(panel, rows, measure)
        panel.set_title(f"{task}, {length} tokens", fontsize=9, color=TEXT)
    figure.supylabel(measure.label, fontsize=9, color=TEXT)
    _finish(figure, summary)
    return figure


def _columns(groups: list[tuple[str, int]]) -> int:
    tasks, lengths = {task for task, _ in groups}, {length for _, length in groups}
    complete = len(groups) == len(tasks) * len(lengths) and len(lengths) <= MAX_COLUMNS
    step = len(lengths) if complete else 1  # the lengths of a task stay side by side
    return max(1, min(MAX_COLUMNS // step * step, len(groups)))


def _panels(count: int, columns: int) -> tuple[Figure, Iterator[Axes]]:
    rows = max(1, math.ceil(count / columns))
    size = (max(PANEL[0] * columns + 0.3, 5.0), PANEL[1] * rows + 0.45)
    figure = Figure(figsize=size, layout="constrained")
    grid = figure.subplots(rows, columns, squeeze=False).ravel()
    for unused in grid[count:]:
        unused.remove()
    return figure, iter(grid[:count])


def _draw(panel: Axes, rows: Sequence[SummaryRow], measure: Measure) -> None:
    for whole in (row for row in rows if row.budget is None):  # they keep every entry: a level, not a point
        style = style_of(whole.method)
        panel.axhline(measure.value(whole), color=style.colour, linestyle=style.line, linewidth=1, label=whole.method)
    measure.scale(panel, [measure.value(row) for row in rows])
    rows = [row for row in rows if row.budget is not None]
    methods = _methods(rows)
    for place, method in enumerate(methods):
        points = sorted((row for row in rows if row.method == method), key=lambda row: row.budget or 0)
        _line(panel, points, measure, 2 ** (0.04 * (place - (len(methods) - 1) / 2)))
    frame(panel, sorted({row.budget for row in rows if row.budget is not None}))


def _line(panel: Axes, points: list[SummaryRow], measure: Measure, shift: float) -> None:
    """One method. `shift` moves it sideways by a few percent, so that intervals of equal scores stay apart."""
    style, method = style_of(points[0].method), points[0].method
    budgets = [(row.budget or 1) * shift for row in points]
    values = [measure.value(row) for row in points]
    ends = [measure.interval(row) for row in points]
    panel.vlines(budgets, [low for low, _ in ends], [high for _, high in ends], style.colour, linewidth=1, alpha=0.55)
    width = 2.0 if method == "lookaheadkv" else 1.4
    (line,) = panel.plot(budgets, values, style.line, color=style.colour, linewidth=width, label=method)
    line.set(marker=style.marker, markersize=4.5, clip_on=False)  # a score of 0 lies on the edge of the panel


def frame(panel: Axes, budgets: list[int]) -> None:
    """Axes and grid of a panel that shows values against these budgets."""
    panel.grid(axis="y", color=GRID, linewidth=0.6)
    panel.set_axisbelow(True)
    panel.spines[["top", "right"]].set_visible(False)
    panel.spines[["left", "bottom"]].set_color(TEXT)
    panel.tick_params(labelsize=8, colors=TEXT)
    if not budgets:
        panel.xaxis.set_major_locator(NullLocator())
        return
    panel.set_xscale("log", base=2)
    margin = 1.35 if len(budgets) > 1 else 2.0
    panel.set_xlim(budgets[0] / margin, budgets[-1] * margin)
    panel.xaxis.set_major_locator(FixedLocator(budgets))
    panel.xaxis.set_minor_formatter(NullFormatter())
    panel.set_xticklabels([str(budget) for budget in budgets])


def _finish(figure: Figure, rows: Sequence[SummaryRow]) -> None:
    shown: dict[str, Artist] = {}
    for panel in figure.axes:
        for handle, label in zip(*panel.get_legend_handles_labels(), strict=True):
            shown.setdefault(label, handle)
    figure.supxlabel("KV budget (entries per layer and KV head)", fontsize=9, color=TEXT)
    order = [method for method in (FULL, *_methods(rows)) if method in shown]
    if order:
        handles, labels = [shown[method] for method in order], [label_of(method) for method in order]
        look = {"ncols": min(len(order), int(figure.get_figwidth() / 1.2)), "frameon": False, "labelcolor": TEXT}
        figure.legend(handles, labels, loc="outside upper center", fontsize=8.5, **look)


def _methods(rows: Sequence[SummaryRow]) -> list[str]:
    """The methods that evict: those with a style of their own first, in the order of `STYLES`."""
    named = list(STYLES)
    evicting = {row.method for row in rows} - {FULL}
    return sorted(evicting, key=lambda method: (named.index(method) if method in STYLES else len(named), method))


def _unit_scale(panel: Axes, values: list[float]) -> None:
    panel.set_ylim(0, min(1.05, max(0.05, 1.25 * max(values, default=1.0))))
    panel.yaxis.set_major_locator(MaxNLocator(5, steps=[1, 2, 2.5, 5, 10]))
    panel.yaxis.set_major_formatter(lambda value, _: f"{value:g}")


def _nats_scale(panel: Axes, values: list[float]) -> None:
    """Logarithmic above 0.01 nats, linear below, since an evicted cache may be as good as the full one, or better."""
    panel.set_yscale("symlog", linthresh=0.01, linscale=0.5)
    panel.set_ylim(min(-0.002, 1.6 * min(values, default=0.0)), max(0.1, 1.6 * max(values, default=0.0)))
    panel.yaxis.set_major_locator(FixedLocator([-10, -1, -0.1, -0.01, 0, 0.01, 0.1, 1, 10]))
    panel.yaxis.set_major_formatter(lambda value, _: f"{value:g}")


def _share_scale(panel: Axes, values: list[float]) -> None:
    panel.set_ylim(max(0.0, math.floor(10 * min(values, default=0.0) - 0.5) / 10), 1.02)
    panel.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))


SCORE = Measure("score", lambda row: row.score, lambda row: wilson_interval(row.score, row.effective_n), _unit_scale)
EXCESS_NLL = Measure(
    "delta NLL vs. full cache (nats/token)",
    lambda row: row.excess_nll,
    lambda row: (row.excess_nll - 1.96 * row.excess_nll_error, row.excess_nll + 1.96 * row.excess_nll_error),
    _nats_scale,
)
AGREEMENT = Measure(
    "top-1 agreement",
    lambda row: row.agreement,
    lambda row: (row.agreement - 1.96 * row.agreement_error, min(1.0, row.agreement + 1.96 * row.agreement_error)),
    _share_scale,
)
