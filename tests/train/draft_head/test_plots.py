import numpy as np
import pytest

from keepsight.files import write_png
from keepsight.train.plots import draft_head_figure


def evaluation(step: int, value: float) -> dict:
    return {
        "step": step,
        "eval_kl": 3 * value,
        "eval_agreement": value,
        "eval_accepted_length": 5 * value,
        "eval_acceptance_by_position": [value, value / 2],
        "eval_agreement_by_step": [value, value / 3],
    }


LOG = [evaluation(0, 0.1), {"step": 1, "loss": 9.0}, {"step": 2, "loss": 8.0}, evaluation(2, 0.4)]


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
