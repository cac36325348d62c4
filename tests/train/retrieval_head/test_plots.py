"""The curves of a retrieval head's training."""

import numpy as np
import pytest

from keepsight.train.plots import retrieval_figure


def test_a_divergence_that_falls_far_stays_readable() -> None:
    log = [{"step": step, "loss": loss, "eval_kl": loss / 2} for step, loss in ((1, 30.0), (500, 0.03))]
    loss, hits = retrieval_figure(log).axes
    assert (loss.get_yscale(), hits.get_yscale()) == ("log", "linear")
    held_out = next(line for line in loss.get_lines() if line.get_label() == "held-out KL")
    assert np.asarray(held_out.get_ydata()).tolist() == pytest.approx([15.0, 0.015])
    low, high = loss.get_ylim()
    assert 0 < low < 0.015 and high > 30
