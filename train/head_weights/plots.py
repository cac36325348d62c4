"""What the training of heads' weights came to: what eviction costs over steps, and the weights themselves."""

from collections.abc import Sequence

import numpy as np
from matplotlib.figure import Figure
from torch import Tensor

from keepsight.train.plots import CYCLE, LINES, Log, draw_line, series, tidy


def head_weights_figure(log: Log, weights: Tensor, budgets: Sequence[int]) -> Figure:
    """Two panels: held-out excess NLL over steps, a line for each budget, and the weight of each head.

    Args:
        log: Rows with `step` and `eval_excess_nll_at_BUDGET` in nats.
        weights: [L, K].
        budgets: Entries per layer and KV head.
    """
    figure = Figure(figsize=(10.5, 3.6), layout="constrained")
    curves, heads = figure.subplots(1, 2)
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
