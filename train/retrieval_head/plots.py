"""Curves of a retrieval head's distillation: the loss, and the hit rate at each budget."""

from matplotlib.figure import Figure

from keepsight.train.plots import BLUE, GREEN, GREY, VERMILLION, Log, draw_line, draw_loss, log_scale, series, tidy


def retrieval_figure(log: Log) -> Figure:
    """Two panels: the KL divergence and the hit rates over steps.

    Args:
        log: Rows with `step` and any of `loss`, `eval_kl` (nats), and `eval_hit_B`, `eval_window_hit_B` (shares) for
            each budget B.
    """
    figure = Figure(figsize=(10.5, 3.6), layout="constrained")
    loss, hits = figure.subplots(1, 2)
    draw_loss(loss, log)
    draw_line(loss, *series(log, "eval_kl"), "held-out KL", VERMILLION, "s-")
    log_scale(loss, series(log, "loss")[1] + series(log, "eval_kl")[1])
    loss.set_title("Training loss, and KL divergence of held-out samples (nats)", fontsize=10)
    budgets = dict.fromkeys(key for row in log for key in row if key.startswith("eval_hit_"))
    for key, colour in zip(budgets, (BLUE, GREEN, VERMILLION, GREY), strict=False):
        budget = key.removeprefix("eval_hit_")
        draw_line(hits, *series(log, key), f"{budget} entries", colour, "o-")
        hits.plot(*series(log, f"eval_window_hit_{budget}"), ":", color=colour)
    hits.set_title("hit rate, held-out (dotted: first and latest entries)", fontsize=10)
    for panel in (loss, hits):
        panel.set_xlabel("step", fontsize=9)
        tidy(panel)
    return figure
