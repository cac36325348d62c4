"""Training curves of a lookahead module: the loss, and how well predicted importance ranks the prompt."""

from collections.abc import Mapping

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from keepsight.train.plots import (
    BLUE,
    CYCLE,
    GREEN,
    LINES,
    VERMILLION,
    Log,
    draw_ends,
    draw_line,
    draw_loss,
    log_scale,
    series,
    tidy,
)

_PANELS = "LLLPPP;kkrrtt"
"""Loss and ranking over steps; below them KL, recall and tau by layer."""
_BY_LAYER = {"kl": "KL divergence (nats)", "recall": "recall at the budget", "tau": "Kendall's tau"}


def lookahead_figure(log: Log) -> Figure:
    """Five panels: KL and ranking over steps; KL, recall and tau by layer at the first and the last measurement.

    Args:
        log: Rows with `step` and any of `loss`, `eval_kl`, `eval_recall`, `eval_tau` (floats; KL in nats, the others
            1 at best) and `eval_kl_by_layer`, `eval_recall_by_layer`, `eval_tau_by_layer` (a float for each layer).
    """
    figure = Figure(figsize=(10.5, 6.2), layout="constrained")
    panels = figure.subplot_mosaic(_PANELS)
    _loss_panel(panels["L"], log)
    _rank_panel(panels["P"], log)
    for name, label in _BY_LAYER.items():
        panel = panels[name[0]]
        draw_ends(panel, log, f"eval_{name}_by_layer", 0)
        panel.set_title(f"{label}, by layer", fontsize=10)
        panel.set_xlabel("layer", fontsize=9)
    for panel in panels.values():
        tidy(panel)
    return figure


def _loss_panel(panel: Axes, log: Log) -> None:
    draw_loss(panel, log)
    draw_line(panel, *series(log, "eval_kl"), "held-out KL", VERMILLION, "s-")
    log_scale(panel, series(log, "loss")[1] + series(log, "eval_kl")[1])
    panel.set_title("Training loss, and KL divergence of held-out samples (nats)", fontsize=10)
    panel.set_xlabel("step", fontsize=9)


def _rank_panel(panel: Axes, log: Log) -> None:
    draw_line(panel, *series(log, "eval_recall"), "recall at the budget", BLUE, "o-")
    draw_line(panel, *series(log, "eval_tau"), "Kendall's tau", GREEN, "^-")
    panel.set_title("Predicted against true importance, held-out", fontsize=10)
    panel.set_xlabel("step", fontsize=9)
    panel.set_ylim(top=1.0)


def ablation_figure(logs: Mapping[str, Log]) -> Figure:
    """Held-out KL, recall and tau over steps, a line for each cell.

    Args:
        logs: For each cell by name, rows as `lookahead_figure` takes them.
    """
    figure = Figure(figsize=(12, 3.6), layout="constrained")
    panels = figure.subplots(1, len(_BY_LAYER))
    for panel, (name, label) in zip(panels, _BY_LAYER.items(), strict=True):
        for place, (cell, log) in enumerate(logs.items()):
            colour, line = CYCLE[place % len(CYCLE)], LINES[place // len(CYCLE) % len(LINES)]
            draw_line(panel, *series(log, f"eval_{name}"), cell, colour, line)
        panel.set_title(f"Held-out {label}", fontsize=10)
        panel.set_xlabel("step", fontsize=9)
        tidy(panel)
    log_scale(panels[0], [value for log in logs.values() for value in series(log, "eval_kl")[1]])
    return figure
