"""Training curves of a draft head: loss, accepted length, and acceptance by position in a draft."""

from matplotlib.figure import Figure

from keepsight.train.plots import BLUE, GREEN, VERMILLION, Log, draw_ends, draw_line, draw_loss, series, tidy

_PANELS = "LLKKAA;pppggg"


def draft_head_figure(log: Log) -> Figure:
    """Five panels: loss, KL and agreement, accepted length over steps; acceptance and agreement by position.

    Args:
        log: Rows with `step` and any of `loss`, `eval_kl`, `eval_agreement`, `eval_accepted_length`, and the lists
            `eval_acceptance_by_position`, `eval_agreement_by_step`.
    """
    figure = Figure(figsize=(10.5, 6.2), layout="constrained")
    panels = figure.subplot_mosaic(_PANELS)
    draw_loss(panels["L"], log)
    draw_line(panels["K"], *series(log, "eval_kl"), "KL (nats)", VERMILLION, "s-")
    draw_line(panels["K"], *series(log, "eval_agreement"), "top-1 agreement", GREEN, "^-")
    draw_line(panels["A"], *series(log, "eval_accepted_length"), "greedy drafts", BLUE, "o-")
    draw_ends(panels["p"], log, "eval_acceptance_by_position", 1)
    draw_ends(panels["g"], log, "eval_agreement_by_step", 1)
    titles = {
        "L": ("Loss (nats)", "step"),
        "K": ("Held-out answers, mean over a draft", "step"),
        "A": ("Accepted tokens of a draft, held-out", "step"),
        "p": ("Accepted, given that all before are", "position in the draft"),
        "g": ("Top-1 agreement with the target", "position in the draft"),
    }
    for name, (title, axis) in titles.items():
        panels[name].set_title(title, fontsize=10)
        panels[name].set_xlabel(axis, fontsize=9)
        tidy(panels[name])
    return figure
