"""Training curves: which values are drawn where."""

import math
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.axes import Axes

from keepsight.files import DPI, write_png
from keepsight.train.plots import draft_head_figure, lookahead_figure, retrieval_figure, running_mean, series

LAYERS = 4


def evaluation(step: int, value: float) -> dict[str, Any]:
    row: dict[str, Any] = {"step": step}
    for offset, name in enumerate(("kl", "recall", "tau")):
        row[f"eval_{name}"] = value + offset / 10
        row[f"eval_{name}_by_layer"] = [value + offset / 10 + layer / 100 for layer in range(LAYERS)]
    return row


@pytest.fixture
def log() -> list[dict[str, Any]]:
    losses = [{"step": step, "loss": 1 / step, "learning_rate": 1e-3} for step in range(1, 11)]
    return [evaluation(0, 0.1), *losses[:5], evaluation(5, 0.3), *losses[5:], evaluation(10, 0.5)]


def panels(log: list[dict[str, Any]]) -> dict[str, Axes]:
    return {panel.get_title(): panel for panel in lookahead_figure(log).axes}


def lines(panel: Axes) -> dict[str, tuple[list[float], list[float]]]:
    drawn = {}
    for line in panel.get_lines():
        x, y = np.asarray(line.get_xdata(), float), np.asarray(line.get_ydata(), float)
        drawn[str(line.get_label())] = (x.tolist(), y.tolist())
    return drawn


def test_loss_and_held_out_kl_over_steps(log: list[dict[str, Any]]) -> None:
    panel = panels(log)["Training loss, and KL divergence of held-out samples (nats)"]
    drawn = lines(panel)
    assert drawn["held-out KL"] == ([0, 5, 10], [0.1, 0.3, 0.5])
    steps, means = drawn["training (running mean)"]
    assert steps == list(range(1, 11))
    assert means == pytest.approx(running_mean([1 / step for step in steps]))
    assert any(y == pytest.approx([1 / step for step in steps]) for _, y in drawn.values())
    assert panel.get_yscale() == "log"


def test_recall_and_tau_over_steps(log: list[dict[str, Any]]) -> None:
    drawn = lines(panels(log)["Predicted against true importance, held-out"])
    assert drawn["recall at the budget"] == ([0, 5, 10], pytest.approx([0.2, 0.4, 0.6]))
    assert drawn["Kendall's tau"] == ([0, 5, 10], pytest.approx([0.3, 0.5, 0.7]))


@pytest.mark.parametrize(
    ("title", "offset"),
    [
        ("KL divergence (nats), by layer", 0.0),
        ("recall at the budget, by layer", 0.1),
        ("Kendall's tau, by layer", 0.2),
    ],
)
def test_layers_at_the_first_and_the_last_evaluation(log: list[dict[str, Any]], title: str, offset: float) -> None:
    drawn = lines(panels(log)[title])
    assert list(drawn) == ["step 0", "step 10"]
    assert drawn["step 0"] == ([0, 1, 2, 3], pytest.approx([0.1 + offset + layer / 100 for layer in range(LAYERS)]))
    assert drawn["step 10"][1] == pytest.approx([0.5 + offset + layer / 100 for layer in range(LAYERS)])


def test_a_log_without_evaluations_says_so(log: list[dict[str, Any]]) -> None:
    drawn = panels([row for row in log if "loss" in row])
    empty = [title for title, panel in drawn.items() if any("nothing logged" in t.get_text() for t in panel.texts)]
    assert len(empty) == 4
    assert "KL divergence (nats)" not in empty


def test_one_evaluation_is_drawn_once() -> None:
    assert list(lines(panels([evaluation(0, 0.1)])["Kendall's tau, by layer"])) == ["step 0"]


def test_values_that_are_not_finite_are_left_out() -> None:
    log: list[dict[str, Any]] = [{"step": 1, "loss": 1.0}, {"step": 2, "loss": math.nan}, {"step": 3}]
    assert series(log, "loss") == ([1], [1.0])


def test_running_mean_starts_at_the_first_value() -> None:
    assert running_mean([2.0, 2.0, 2.0]) == pytest.approx([2.0, 2.0, 2.0])
    assert running_mean([1.0, 0.0], weight=0.5) == pytest.approx([1.0, 0.25 / 0.75])


def test_png_has_the_size_of_the_figure(log: list[dict[str, Any]], tmp_path: Path) -> None:
    write_png(tmp_path / "out" / "training.png", lookahead_figure(log))
    content = (tmp_path / "out" / "training.png").read_bytes()
    width, height = lookahead_figure(log).get_size_inches() * DPI
    assert content.startswith(b"\x89PNG")
    assert struct.unpack(">II", content[16:24]) == (int(width), int(height))
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["training.png"]


def head_evaluation(step: int, value: float) -> dict:
    return {
        "step": step,
        "eval_kl": 3 * value,
        "eval_agreement": value,
        "eval_accepted_length": 5 * value,
        "eval_acceptance_by_position": [value, value / 2],
        "eval_agreement_by_step": [value, value / 3],
    }


LOG = [head_evaluation(0, 0.1), {"step": 1, "loss": 9.0}, {"step": 2, "loss": 8.0}, head_evaluation(2, 0.4)]


def test_curves_over_steps_and_lists_by_place_in_a_draft(tmp_path):
    drawn = {
        panel.get_title(): {
            line.get_label(): np.asarray(line.get_xydata()).ravel().tolist() for line in panel.get_lines()
        }
        for panel in draft_head_figure(LOG).axes
    }
    assert drawn["Accepted tokens of a draft, held-out"] == {"greedy drafts": pytest.approx([0, 0.5, 2, 2.0])}
    both = drawn["Held-out answers, mean over a draft"]
    assert both["KL (nats)"] == pytest.approx([0, 0.3, 2, 1.2])
    assert both["top-1 agreement"] == pytest.approx([0, 0.1, 2, 0.4])
    right = drawn["Accepted, given that all before are"]
    assert right == {"step 0": pytest.approx([1, 0.1, 2, 0.05]), "step 2": pytest.approx([1, 0.4, 2, 0.2])}
    assert drawn["Top-1 agreement with the model"]["step 2"] == pytest.approx([1, 0.4, 2, 0.4 / 3])
    assert "training (running mean)" in drawn["Loss (nats)"]
    write_png(tmp_path / "training.png", draft_head_figure(LOG))
    assert (tmp_path / "training.png").read_bytes().startswith(b"\x89PNG")


def test_a_training_that_measured_nothing_is_drawn():
    panels = draft_head_figure([row for row in LOG if "loss" in row]).axes
    assert sum(any("nothing logged" in text.get_text() for text in panel.texts) for panel in panels) == 4


def test_a_divergence_that_falls_far_stays_readable() -> None:
    log = [{"step": step, "loss": loss, "eval_kl": loss / 2} for step, loss in ((1, 30.0), (500, 0.03))]
    loss, hits = retrieval_figure(log).axes
    assert (loss.get_yscale(), hits.get_yscale()) == ("log", "linear")
    held_out = next(line for line in loss.get_lines() if line.get_label() == "held-out KL")
    assert np.asarray(held_out.get_ydata()).tolist() == pytest.approx([15.0, 0.015])
    low, high = loss.get_ylim()
    assert 0 < low < 0.015 and high > 30
