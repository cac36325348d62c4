"""What the training curves of all trainers share: colours, lines, and the look of a panel."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.ticker import LogLocator, MaxNLocator, NullFormatter

BLUE, VERMILLION, GREEN, GREY = "#0072B2", "#D55E00", "#009E73", "#8A8A8A"  # Okabe-Ito: apart for colour-blind readers
CYCLE = (BLUE, VERMILLION, GREEN, "#CC79A7", "#E69F00", "#56B4E9", "#000000")
LINES = ("o-", "s--", "^:")
"""Past the first lines, colours repeat in another style."""
SMOOTHING = 0.95
"""Weight of the past in the running mean of the loss."""

Log = Sequence[Mapping[str, Any]]
"""Rows of a trainer's log, each with `step`, in the order of the steps; values that are not finite are not drawn."""


def series(log: Log, key: str) -> tuple[list[int], list[float]]:
    """The steps that logged a finite value under `key`, and the values."""
    points = [(row["step"], float(row[key])) for row in log if key in row and math.isfinite(row[key])]
    return [step for step, _ in points], [value for _, value in points]


def running_mean(values: Sequence[float], weight: float = SMOOTHING) -> list[float]:
    """Exponential running mean, corrected so that the first values are not drawn towards zero."""
    means, total, norm = [], 0.0, 0.0
    for value in values:
        total = weight * total + (1 - weight) * value
        norm = weight * norm + (1 - weight)
        means.append(total / norm)
    return means


def draw_loss(panel: Axes, log: Log) -> None:
    """The logged training losses, faint, and their running mean."""
    steps, losses = series(log, "loss")
    panel.plot(steps, losses, color=BLUE, linewidth=0.8, alpha=0.3)
    draw_line(panel, steps, running_mean(losses), "training (running mean)", BLUE, "-")


def draw_ends(panel: Axes, log: Log, key: str, start: int) -> None:
    """The lists under `key` at the first and the last measurement; their places count from `start`."""
    rows = [row for row in log if key in row]
    ends = {rows[0]["step"]: (rows[0], GREY, "o:"), rows[-1]["step"]: (rows[-1], BLUE, "o-")} if rows else {}
    for step, (row, colour, line) in ends.items():
        draw_line(panel, range(start, start + len(row[key])), row[key], f"step {step}", colour, line)


def draw_line(panel: Axes, places: Sequence[int], values: Sequence[float], label: str, colour: str, line: str) -> None:
    """A labelled line through the values; none when there is nothing to draw."""
    if values:
        panel.plot(places, values, line, color=colour, linewidth=1.6, markersize=4, label=label)


def log_scale(panel: Axes, values: Sequence[float]) -> None:
    """A logarithmic vertical axis with readable ticks, if all values are above zero."""
    if values and min(values) > 0:
        panel.set_yscale("log")
        panel.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        panel.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
        panel.yaxis.set_minor_formatter(NullFormatter())


def tidy(panel: Axes) -> None:
    """The look of all panels; one that is empty says so."""
    panel.xaxis.set_major_locator(MaxNLocator(6, integer=True, min_n_ticks=1))
    panel.grid(axis="y", color="#d4d4d4", linewidth=0.6)
    panel.set_axisbelow(True)
    panel.spines[["top", "right"]].set_visible(False)
    panel.tick_params(labelsize=8)
    if panel.get_legend_handles_labels()[1]:
        panel.legend(frameon=False, fontsize=8)
    else:
        panel.set(xticks=[], yticks=[])
        panel.text(0.5, 0.5, "nothing logged", transform=panel.transAxes, ha="center", va="center", color=GREY)
