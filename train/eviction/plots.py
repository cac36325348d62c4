"""What a training on what evicting costs came to: the cost over steps, and the weights of heads."""

from collections.abc import Sequence

import numpy as np
from matplotlib.figure import Figure
from torch import Tensor

from keepsight.train.plots import CYCLE, LINES, Log, draw_line, draw_loss, log_scale, series, tidy


def eviction_figure(log: Log, weights: Tensor, budgets: Sequence[int]) -> Figure:
    """Three panels: the loss and held-out excess NLL over steps, a line for each budget, and the weight of each head.

    Args:
        log: Rows with `step` and any of `loss` and `eval_excess_nll_at_BUDGET` in nats.
        weights: [L, K].
        budgets: Entries per layer and KV head.
    """
    figure = Figure(figsize=(13, 3.6), layout="constrained")
    losses, curves, heads = figure.subplots(1, 3)
    draw_loss(losses, log)
    log_scale(losses, series(log, "loss")[1])
    losses.set_title("Training loss: KL divergence of the answers (nats)", fontsize=10)
    losses.set_xlabel("step", fontsize=9)
    tidy(losses)
    for place, budget in enumerate(budgets):
        line = series(log, f"eval_excess_nll_at_{budget}")
        draw_line(curves, *line, f"{budget} entries", CYCLE[place % len(CYCLE)], LINES[0])
    curves.set_title("Held-out excess NLL (nats)", fontsize=10)
    curves.set_xlabel("step", fontsize=9)
    tidy(curves)
    logarithms = np.log2(weights.numpy()).T
    most = max(float(abs(logarithms).max()), 0.1)
    image = heads.imshow(logarithms, aspect="auto", cmap="RdBu_r", vmin=-most, vmax=most)
    figure.colorbar(image, ax=heads, label="log2 of the weight")
    heads.set_title("Weight of each head in the shared budget", fontsize=10)
    heads.set_xlabel("layer", fontsize=9)
    heads.set_ylabel("KV head", fontsize=9)
    heads.set_yticks(range(logarithms.shape[0]))
    return figure
