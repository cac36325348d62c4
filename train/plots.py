"""Training curves: the loss, and how well predicted importance ranks the prompt, over steps and by layer."""

import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, MaxNLocator, NullFormatter

DPI = 150
BLUE, VERMILLION, GREEN, GREY = "#0072B2", "#D55E00", "#009E73", "#8A8A8A"  # Okabe-Ito: apart for colour-blind readers
SMOOTHING = 0.95
"""Weight of the past in the running mean of the loss."""
PANELS = "LLLPPP;kkrrtt"
"""Loss and Predicted ranking over steps; below them kl, recall and tau by layer."""
BY_LAYER = {"kl": "KL divergence (nats)", "recall": "recall at the budget", "tau": "Kendall's tau"}

Log = Sequence[Mapping[str, Any]]


def plot_training(log: Log, path: Path) -> None:
    """Write a PNG of `training_figure`.

    Args:
        log: What the trainer logged, in the order of the steps.
        path: The file to write.
    """
    write_png(training_figure(log), path)


def write_png(figure: Figure, path: Path) -> None:
    """Write a figure so that `path` holds all of it or what it held before."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        figure.savefig(unfinished, format="png", dpi=DPI)
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)


def training_figure(log: Log) -> Figure:
    """Five panels: KL over steps, ranking over steps; by layer KL, recall and tau at the first and last evaluation.

    Args:
        log: Rows with `step` and any of `loss`, `eval_kl`, `eval_recall`, `eval_tau` (floats; KL in nats, the others
            1 at best) and `eval_kl_by_layer`, `eval_recall_by_layer`, `eval_tau_by_layer` (a float for each layer).
            Values that are missing or not finite are left out.
    """
    figure = Figure(figsize=(10.5, 6.2), layout="constrained")
    panels = figure.subplot_mosaic(PANELS)
    _loss_panel(panels["L"], log)
    _rank_panel(panels["P"], log)
    for name, label in BY_LAYER.items():
        _layer_panel(panels[name[0]], log, f"eval_{name}_by_layer", label)
    for panel in panels.values():
        tidy(panel)
    return figure


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


def _loss_panel(panel: Axes, log: Log) -> None:
    steps, losses = series(log, "loss")
    panel.plot(steps, losses, color=BLUE, linewidth=0.8, alpha=0.3)
    draw_line(panel, steps, running_mean(losses), "training (running mean)", BLUE, "-")
    held_out_steps, held_out = series(log, "eval_kl")
    draw_line(panel, held_out_steps, held_out, "held-out", VERMILLION, "s-")
    if losses + held_out and min(losses + held_out) > 0:
        panel.set_yscale("log")
        panel.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        panel.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
        panel.yaxis.set_minor_formatter(NullFormatter())
    panel.set_title("KL divergence (nats)", fontsize=10)
    panel.set_xlabel("step", fontsize=9)


def _rank_panel(panel: Axes, log: Log) -> None:
    draw_line(panel, *series(log, "eval_recall"), "recall at the budget", BLUE, "o-")
    draw_line(panel, *series(log, "eval_tau"), "Kendall's tau", GREEN, "^-")
    panel.set_title("Predicted against true importance, held-out", fontsize=10)
    panel.set_xlabel("step", fontsize=9)
    panel.set_ylim(top=1.0)


def _layer_panel(panel: Axes, log: Log, key: str, label: str) -> None:
    draw_ends(panel, log, key, 0)
    panel.set_title(f"{label}, by layer", fontsize=10)
    panel.set_xlabel("layer", fontsize=9)


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
