"""The plot of `keepsight bench hits`: top-k hit rate and attention mass against the budget."""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from matplotlib.axes import Axes
from matplotlib.ticker import PercentFormatter

from keepsight.eval.report.curves import budget_scale
from keepsight.eval.report.panels import Panel, Plot, look
from keepsight.eval.report.styles import Style, styles_of

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
            draw = partial(_draw, rows=chosen, measure=measure, styles=styles)
            panels.append(Panel(f"{task}, {length} tokens: {label}", draw, task, length))
    return Plot("hits", panels, styles, columns=2)


def _draw(axes: Axes, rows: Sequence[dict[str, Any]], measure: str, styles: Mapping[str, Style]) -> None:
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
