"""Heat maps of the score by needle depth and prompt length, one for each method and budget."""

from collections import defaultdict
from collections.abc import Sequence
from functools import partial
from statistics import fmean

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import FixedLocator

from keepsight.eval.report.panels import TEXT, Panel, Plot
from keepsight.eval.report.styles import in_order, label_of
from keepsight.eval.results import Row

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
            draw = partial(_draw, scores=scores, depths=gathered, lengths=lengths)
            panels.append(Panel(title, draw, method=method, budget=budget))
    return Plot("depth", panels)


def _means(rows: Sequence[Row], depths: list[float]) -> Scores:
    cells: dict[tuple[float, int], list[float]] = defaultdict(list)
    for row in rows:
        nearest = min(depths, key=lambda depth: abs(depth - row["depth"]))
        cells[nearest, row["length"]].append(row["score"])
    return {cell: fmean(scores) for cell, scores in cells.items()}


def _draw(axes: Axes, scores: Scores, depths: list[float], lengths: list[int]) -> None:
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
