"""Curves of a retrieval head's distillation: the loss, and the hit rate at each budget, over steps."""

from pathlib import Path

from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from keepsight.files import atomic_files
from keepsight.train.plots import BLUE, DPI, GREEN, GREY, VERMILLION, Log, running_mean, series


def plot_distillation(log: Log, path: Path) -> None:
    """Write a PNG of `distillation_figure`; `path` holds all of it or what it held before."""
    with atomic_files(path.parent, last=path.name) as unfinished:
        distillation_figure(log).savefig(unfinished / path.name, format="png", dpi=DPI)


def distillation_figure(log: Log) -> Figure:
    """Two panels.

    Args:
        log: Rows with `step` and any of `loss`, `eval_kl` (nats), and `eval_hit_B`, `eval_window_hit_B` (shares) for
            each budget B. Values that are missing or not finite are left out.
    """
    figure = Figure(figsize=(10.5, 3.6), layout="constrained")
    loss, hits = figure.subplots(1, 2)
    steps, losses = series(log, "loss")
    loss.plot(steps, losses, color=BLUE, linewidth=0.8, alpha=0.3)
    loss.plot(steps, running_mean(losses), color=BLUE, label="training (running mean, softened)")
    loss.plot(*series(log, "eval_kl"), "s-", color=VERMILLION, markersize=4, label="held-out, temperature 1")
    loss.set_title("KL divergence (nats)", fontsize=10)
    budgets = dict.fromkeys(key for row in log for key in row if key.startswith("eval_hit_"))
    for key, colour in zip(budgets, (BLUE, GREEN, VERMILLION, GREY), strict=False):
        budget = key.removeprefix("eval_hit_")
        hits.plot(*series(log, key), "o-", color=colour, markersize=4, label=f"{budget} entries")
        hits.plot(*series(log, f"eval_window_hit_{budget}"), ":", color=colour)
    hits.set_title("hit rate, held-out (dotted: first and latest entries)", fontsize=10)
    for panel in (loss, hits):
        panel.set_xlabel("step", fontsize=9)
        panel.xaxis.set_major_locator(MaxNLocator(6, integer=True, min_n_ticks=1))
        panel.grid(axis="y", color="#d4d4d4", linewidth=0.6)
        panel.spines[["top", "right"]].set_visible(False)
        if panel.get_legend_handles_labels()[1]:
            panel.legend(frameon=False, fontsize=8)
    return figure
