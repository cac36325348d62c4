"""Training curves: which values are drawn where."""

from typing import Any

import numpy as np
import pytest
import torch
from matplotlib.figure import Figure

from keepsight.train.plots import (
    ablation_figure,
    draft_head_figure,
    eviction_figure,
    lookahead_figure,
    retrieval_figure,
    running_mean,
)

Drawn = dict[str, dict[str, list[float]]]


def drawn(figure: Figure) -> Drawn:
    """For each panel by title, the values of each line by label; all that is done to draw them is done."""
    figure.draw_without_rendering()
    lines = {panel.get_title(): panel.get_lines() for panel in figure.axes}
    return {
        title: {str(line.get_label()): np.asarray(line.get_xydata()).ravel().tolist() for line in each}
        for title, each in lines.items()
    }


def evaluation(step: int, value: float) -> dict[str, Any]:
    row: dict[str, Any] = {"step": step}
    for offset, name in enumerate(("kl", "recall", "tau")):
        row[f"eval_{name}"] = value + offset / 10
        row[f"eval_{name}_by_layer"] = [value + offset / 10, value / 2]
    return row


def test_curves_of_a_lookahead_module() -> None:
    """What is not finite is left out; a list is drawn at the first and the last measurement."""
    losses = [{"step": step, "loss": 1 / step, "learning_rate": 1e-3} for step in range(1, 5)]
    log = [evaluation(0, 0.1), *losses[:2], evaluation(2, 0.3), *losses[2:], evaluation(4, 0.5)]
    log += [{"step": 5, "loss": float("nan")}]
    figure = lookahead_figure(log)
    assert figure.axes[0].get_yscale() == "log"
    loss, ranks, kl, _, tau = drawn(figure).values()
    assert loss["held-out KL"] == [0, 0.1, 2, 0.3, 4, 0.5]
    assert loss["training (running mean)"][1::2] == pytest.approx(running_mean([1, 1 / 2, 1 / 3, 1 / 4]))
    assert ranks["recall at the budget"] == pytest.approx([0, 0.2, 2, 0.4, 4, 0.6])
    assert ranks["Kendall's tau"] == pytest.approx([0, 0.3, 2, 0.5, 4, 0.7])
    assert kl == {"step 0": pytest.approx([0, 0.1, 1, 0.05]), "step 4": pytest.approx([0, 0.5, 1, 0.25])}
    assert tau["step 4"] == pytest.approx([0, 0.7, 1, 0.25])
    empty = [panel.get_title() for panel in lookahead_figure(losses).axes if panel.texts]
    assert len(empty) == 4 and "Training loss, and KL divergence of held-out samples (nats)" not in empty


def head_evaluation(step: int, value: float) -> dict[str, Any]:
    numbers = {"eval_kl": 3 * value, "eval_agreement": value, "eval_accepted_length": 5 * value}
    lists = {"eval_acceptance_by_position": [value, value / 2], "eval_agreement_by_step": [value, value / 3]}
    return {"step": step, **numbers, **lists}


def test_curves_of_a_draft_head() -> None:
    log = [head_evaluation(0, 0.1), {"step": 1, "loss": 9.0}, {"step": 2, "loss": 8.0}, head_evaluation(2, 0.4)]
    lines = drawn(draft_head_figure(log))
    assert lines["Accepted tokens of a draft, held-out"] == {"greedy drafts": pytest.approx([0, 0.5, 2, 2.0])}
    both = lines["Held-out answers, mean over a draft"]
    assert both == {"KL (nats)": pytest.approx([0, 0.3, 2, 1.2]), "top-1 agreement": pytest.approx([0, 0.1, 2, 0.4])}
    right = lines["Accepted, given that all before are"]
    assert right == {"step 0": pytest.approx([1, 0.1, 2, 0.05]), "step 2": pytest.approx([1, 0.4, 2, 0.2])}
    assert lines["Top-1 agreement with the model"]["step 2"] == pytest.approx([1, 0.4, 2, 0.4 / 3])
    assert "training (running mean)" in lines["Loss (nats)"]


def test_curves_of_a_retrieval_head() -> None:
    log = [{"step": 1, "loss": 30.0, "eval_kl": 15.0, "eval_hit_64": 0.25, "eval_window_hit_64": 0.125}]
    loss, hits = drawn(retrieval_figure(log)).values()
    assert loss["held-out KL"] == [1, 15.0]
    assert [*hits.values()] == [[1, 0.25], [1, 0.125]] and "64 entries" in hits


def test_curves_of_an_ablation_and_of_a_training_on_answers() -> None:
    cells = {"rank0": [evaluation(0, 0.1)], "rank2": [evaluation(0, 0.3), evaluation(2, 0.4)]}
    lines = drawn(ablation_figure(cells))["Held-out KL"]
    assert {name: lines[name] for name in cells} == {"rank0": [0, 0.1], "rank2": [0, 0.3, 2, 0.4]}
    figure = eviction_figure([{"step": 1, "loss": 2.0, "eval_excess_nll_at_6": 0.5}], torch.tensor([[1, 2.0]] * 3), [6])
    assert drawn(figure)["Held-out excess NLL (nats)"]["6 entries"] == [1, 0.5]
    (image,) = figure.axes[2].images
    assert np.asarray(image.get_array()).tolist() == [[0, 0, 0], [1, 1, 1]]
