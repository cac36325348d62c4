"""Training curves of a draft head: loss, accepted length, and acceptance by the token's place in a draft."""

from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from keepsight.train.plots import (
    BLUE,
    GREEN,
    VERMILLION,
    Log,
    draw_ends,
    draw_line,
    running_mean,
    series,
    tidy,
    write_png,
)

_PANELS = "LLKKAA;pppggg"


def plot_head_training(log: Log, path: Path) -> None:
    """Write a PNG of `head_figure`."""
    write_png(head_figure(log), path)


def head_figure(log: Log) -> Figure:
    """Five panels: loss, KL and agreement, accepted length over steps; acceptance and agreement by place in a draft.

    Args:
        log: Rows with `step` and any of `loss`, `eval_kl`, `eval_agreement`, `eval_accepted_length`, and the lists
            `eval_acceptance_by_position`, `eval_agreement_by_step`.
    """
    figure = Figure(figsize=(10.5, 6.2), layout="constrained")
    panels = figure.subplot_mosaic(_PANELS)
    _loss_panel(panels["L"], log)
    draw_line(panels["K"], *series(log, "eval_kl"), "KL (nats)", VERMILLION, "s-")
    draw_line(panels["K"], *series(log, "eval_agreement"), "same first choice", GREEN, "^-")
    draw_line(panels["A"], *series(log, "eval_accepted_length"), "greedy drafts", BLUE, "o-")
    draw_ends(panels["p"], log, "eval_acceptance_by_position", 1)
    draw_ends(panels["g"], log, "eval_agreement_by_step", 1)
    titles = {
        "L": ("Loss (nats)", "step"),
        "K": ("Held-out answers, mean over a draft", "step"),
        "A": ("Accepted tokens of a draft, held-out", "step"),
        "p": ("Right, given that all before are right", "token of the draft"),
        "g": ("Same first choice as the target", "token of the draft"),
    }
    for name, (title, axis) in titles.items():
        panels[name].set_title(title, fontsize=10)
        panels[name].set_xlabel(axis, fontsize=9)
        tidy(panels[name])
    return figure


def _loss_panel(panel: Axes, log: Log) -> None:
    steps, losses = series(log, "loss")
    panel.plot(steps, losses, color=BLUE, linewidth=0.8, alpha=0.3)
    draw_line(panel, steps, running_mean(losses), "training (running mean)", BLUE, "-")
