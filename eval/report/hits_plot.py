"""The plot of `keepsight hits`: top-k hit rate and attention mass against the budget."""

from collections.abc import Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter

from keepsight.eval.report.plots import frame
from keepsight.eval.report.styles import label_of, style_of

_MEASURES = {"hit": "top-k hit rate", "mass": "attention mass read"}


def hits_figure(rows: Sequence[dict[str, Any]]) -> Figure:
    """A row of two panels for each task and length.

    Args:
        rows: With `task`, `length`, `method`, `budget`, `hit` and `mass`.
    """
    groups = sorted({(row["task"], row["length"]) for row in rows})
    figure = Figure(figsize=(7.2, 0.5 + 2.4 * max(len(groups), 1)), layout="constrained")
    grid = figure.subplots(max(len(groups), 1), 2, squeeze=False)
    for panels, (task, length) in zip(grid, groups, strict=False):
        chosen = [row for row in rows if (row["task"], row["length"]) == (task, length)]
        for panel, (measure, label) in zip(panels, _MEASURES.items(), strict=True):
            _draw(panel, chosen, measure)
            panel.set_title(f"{task}, {length} tokens: {label}", fontsize=9)
    figure.supxlabel("budget (KV entries read per step and head)", fontsize=9)
    handles, labels = grid[0][0].get_legend_handles_labels()
    if handles:
        figure.legend(handles, labels, loc="outside upper center", ncols=4, frameon=False, fontsize=8.5)
    return figure


def _draw(panel: Axes, rows: Sequence[dict[str, Any]], measure: str) -> None:
    for method in sorted({row["method"] for row in rows}):
        points = sorted((row["budget"], row[measure]) for row in rows if row["method"] == method)
        style = style_of(method)
        (line,) = panel.plot(*zip(*points, strict=True), style.line, color=style.colour, label=label_of(method))
        line.set(marker=style.marker or "o", markersize=4.5)
    frame(panel, sorted({row["budget"] for row in rows}))
    panel.set_ylim(0, 1.04)
    panel.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
