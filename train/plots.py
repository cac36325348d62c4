"""Training curves: a figure for each kind of training, drawn from its log."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, MaxNLocator, NullFormatter
from torch import Tensor

BLUE = "#0072B2"  # Okabe and Ito's colours, which colour-blind readers can tell apart
VERMILLION = "#D55E00"
GREEN = "#009E73"
GREY = "#8A8A8A"
CYCLE = (BLUE, VERMILLION, GREEN, "#CC79A7", "#E69F00", "#56B4E9", "#000000")
LINES = ("o-", "s--", "^:")
"""Past the first lines, colours repeat in another style."""
SMOOTHING = 0.95
"""Weight of the past in the running mean of the loss."""
_FIDELITY = {"kl": "KL divergence (nats)", "recall": "recall at the budget", "tau": "Kendall's tau"}
_LOSS = "Training loss, and KL divergence of held-out samples (nats)"

Log = Sequence[Mapping[str, Any]]
"""Rows of a trainer's log, each with `step`, in the order of the steps; values that are not finite are not drawn."""
Curve = tuple[str, str, str, str]
"""The key of a number in the log, its label, colour and line style."""


def series(log: Log, key: str) -> tuple[list[int], list[float]]:
    """The steps that logged a finite value under `key`, and the values."""
    steps = []
    values = []
    for row in log:
        if key in row and math.isfinite(row[key]):
            steps.append(row["step"])
            values.append(float(row[key]))
    return steps, values


def running_mean(values: Sequence[float]) -> list[float]:
    """Exponential running mean, corrected so that the first values are not drawn towards zero."""
    means = []
    total = 0.0
    norm = 0.0
    for value in values:
        total = SMOOTHING * total + (1 - SMOOTHING) * value
        norm = SMOOTHING * norm + (1 - SMOOTHING)
        means.append(total / norm)
    return means


def draw_line(
    panel: Axes, x_values: Sequence[int], values: Sequence[float], label: str, colour: str, line: str
) -> None:
    """A labelled line through the values; none when there is nothing to draw."""
    if values:
        panel.plot(x_values, values, line, color=colour, linewidth=1.6, markersize=4, label=label)


def tidy(panel: Axes, title: str, axis: str = "step") -> None:
    """Title, label of the horizontal axis and the look of a panel; an empty one says so."""
    panel.set_title(title, fontsize=10)
    panel.set_xlabel(axis, fontsize=9)
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


def _curves(panel: Axes, log: Log, title: str, *curves: Curve) -> None:
    """Draw numbers of the log over steps."""
    for key, label, colour, line in curves:
        steps, values = series(log, key)
        draw_line(panel, steps, values, label, colour, line)
    tidy(panel, title)


def _loss(panel: Axes, log: Log, title: str, *curves: Curve, scaled: bool = True) -> None:
    """Draw the logged training losses, faint, and their running mean, beside other numbers; logarithmic if `scaled`."""
    steps, losses = series(log, "loss")
    panel.plot(steps, losses, color=BLUE, linewidth=0.8, alpha=0.3)
    draw_line(panel, steps, running_mean(losses), "training (running mean)", BLUE, "-")
    if scaled:
        all_values = list(losses)
        for key, *_ in curves:
            _, values = series(log, key)
            all_values += values
        _log_scale(panel, all_values)
    _curves(panel, log, title, *curves)


def _first_and_last(panel: Axes, log: Log, key: str, title: str, axis: str, start: int = 0) -> None:
    """Draw the lists under `key` at the first and the last measurement; indices count from `start`."""
    rows = [row for row in log if key in row]
    if rows and rows[0]["step"] != rows[-1]["step"]:
        _draw_list(panel, rows[0], key, start, GREY, "o:")
    if rows:
        _draw_list(panel, rows[-1], key, start, BLUE, "o-")
    tidy(panel, title, axis)


def _draw_list(panel: Axes, row: Mapping[str, Any], key: str, start: int, colour: str, line: str) -> None:
    values = row[key]
    draw_line(panel, range(start, start + len(values)), values, f"step {row['step']}", colour, line)


def _log_scale(panel: Axes, values: Sequence[float]) -> None:
    """A logarithmic vertical axis with readable ticks, if all values are above zero."""
    if values and min(values) > 0:
        panel.set_yscale("log")
        panel.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        panel.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
        panel.yaxis.set_minor_formatter(NullFormatter())


def lookahead_figure(log: Log) -> Figure:
    """Five panels: KL and ranking over steps; KL, recall and tau by layer at the first and the last measurement."""
    figure = Figure(figsize=(10.5, 6.2), layout="constrained")
    panels = figure.subplot_mosaic("LLLPPP;kkrrtt")
    _loss(panels["L"], log, _LOSS, ("eval_kl", "held-out KL", VERMILLION, "s-"))
    recall = ("eval_recall", "recall at the budget", BLUE, "o-")
    tau = ("eval_tau", "Kendall's tau", GREEN, "^-")
    _curves(panels["P"], log, "Predicted against true importance, held-out", recall, tau)
    panels["P"].set_ylim(top=1.0)
    for name, label in _FIDELITY.items():
        _first_and_last(panels[name[0]], log, f"eval_{name}_by_layer", f"{label}, by layer", "layer")
    return figure


def ablation_figure(logs: Mapping[str, Log]) -> Figure:
    """Held-out KL, recall and tau over steps, a line for each cell."""
    figure = Figure(figsize=(12, 3.6), layout="constrained")
    panels = figure.subplots(1, len(_FIDELITY))
    for panel, (name, label) in zip(panels, _FIDELITY.items(), strict=True):
        for number, (cell, log) in enumerate(logs.items()):
            colour = CYCLE[number % len(CYCLE)]
            line = LINES[number // len(CYCLE) % len(LINES)]
            steps, values = series(log, f"eval_{name}")
            draw_line(panel, steps, values, cell, colour, line)
        tidy(panel, f"Held-out {label}")
    kl_values: list[float] = []
    for log in logs.values():
        _, values = series(log, "eval_kl")
        kl_values += values
    _log_scale(panels[0], kl_values)
    return figure


def eviction_figure(log: Log, weights: Tensor, budgets: Sequence[int]) -> Figure:
    """Three panels: the loss, held-out excess NLL at each budget, and the weight of each head, from [L, K]."""
    figure = Figure(figsize=(13, 3.6), layout="constrained")
    losses, curves, heads = figure.subplots(1, 3)
    _loss(losses, log, "Training loss: KL divergence of the answers (nats)")
    for number, budget in enumerate(budgets):
        steps, values = series(log, f"eval_excess_nll_at_{budget}")
        draw_line(curves, steps, values, f"{budget} entries", CYCLE[number % len(CYCLE)], LINES[0])
    tidy(curves, "Held-out excess NLL (nats)")
    logarithms = np.log2(weights.numpy()).T
    most = max(float(abs(logarithms).max()), 0.1)
    image = heads.imshow(logarithms, aspect="auto", cmap="RdBu_r", vmin=-most, vmax=most)
    figure.colorbar(image, ax=heads, label="log2 of the weight")
    heads.set_title("Weight of each head in the shared budget", fontsize=10)
    heads.set_xlabel("layer", fontsize=9)
    heads.set_ylabel("KV head", fontsize=9)
    heads.set_yticks(range(logarithms.shape[0]))
    return figure


def draft_head_figure(log: Log) -> Figure:
    """Five panels: loss, KL and agreement, accepted length over steps; acceptance and agreement by position."""
    figure = Figure(figsize=(10.5, 6.2), layout="constrained")
    panels = figure.subplot_mosaic("LLKKAA;pppggg")
    _loss(panels["L"], log, "Loss (nats)", scaled=False)
    kl = ("eval_kl", "KL (nats)", VERMILLION, "s-")
    agreement = ("eval_agreement", "top-1 agreement", GREEN, "^-")
    _curves(panels["K"], log, "Held-out answers, mean over a draft", kl, agreement)
    accepted = ("eval_accepted_length", "greedy drafts", BLUE, "o-")
    _curves(panels["A"], log, "Accepted tokens of a draft, held-out", accepted)
    axis = "position in the draft"
    _first_and_last(panels["p"], log, "eval_acceptance_by_position", "Accepted, given that all before are", axis, 1)
    _first_and_last(panels["g"], log, "eval_agreement_by_step", "Top-1 agreement with the model", axis, 1)
    return figure


def retrieval_figure(log: Log) -> Figure:
    """Two panels over steps: the KL divergence, and the hit rates at each budget."""
    figure = Figure(figsize=(10.5, 3.6), layout="constrained")
    loss, hits = figure.subplots(1, 2)
    _loss(loss, log, _LOSS, ("eval_kl", "held-out KL", VERMILLION, "s-"))
    budgets: dict[str, None] = {}
    for row in log:
        for key in row:
            if key.startswith("eval_hit_"):
                budgets[key.rpartition("_")[2]] = None
    for budget, colour in zip(budgets, (BLUE, GREEN, VERMILLION, GREY), strict=False):
        steps, values = series(log, f"eval_hit_{budget}")
        draw_line(hits, steps, values, f"{budget} entries", colour, "o-")
        window_steps, window_values = series(log, f"eval_window_hit_{budget}")
        hits.plot(window_steps, window_values, ":", color=colour)
    tidy(hits, "hit rate, held-out (dotted: first and latest entries)")
    return figure
