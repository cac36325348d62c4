"""Whether a stage of `keepsight fit` made the module better: paired differences on its held-out samples."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from keepsight.eval.report.intervals import LEAST_SAMPLES, Estimate, estimate
from keepsight.files import whole_lines
from keepsight.train.trainer import MEASUREMENTS


@dataclass(frozen=True)
class Verdict:
    """A stage's module against the one that the stage started from.

    Attributes:
        stage: The stage.
        before: The stage whose module it started from.
        difference: Mean of the paired differences in excess NLL, in nats per token; negative where the stage's module
            is better.
    """

    stage: str
    before: str
    difference: Estimate

    @property
    def is_worse(self) -> bool:
        """Whether the stage's module is worse beyond its 95 % interval; with a few samples nothing is said."""
        interval = self.difference.interval
        return self.difference.n >= LEAST_SAMPLES and interval is not None and interval[0] > 0

    def sentence(self) -> str:
        """One line on the difference, and on which module is the better one."""
        samples = int(self.difference.n)
        change = f"changed the excess NLL of {samples} held-out samples by {self.difference.value:+.3f} nats"
        if self.difference.interval is None or samples < LEAST_SAMPLES:
            return f"{self.stage} {change}: too few samples to tell whether it helped; its module is used."

        low, high = self.difference.interval
        change += f" (95 % interval {low:+.3f} to {high:+.3f})"
        if low > 0:
            return f"{self.stage} {change}: it made the module worse, so that of {self.before} is used."
        if high < 0:
            return f"{self.stage} {change}: it made the module better, and its module is used."
        return f"{self.stage} {change}: the interval covers zero, so it may have helped or not; its module is used."


def verdict_of(out: Path, stage: str, before: str) -> Verdict | None:
    """The verdict on an eviction stage of a fit in `out`; None where the measurements that it takes are not there."""
    measurements = whole_lines(out / stage / "training" / MEASUREMENTS)
    if len(measurements) < 2 or measurements[0].get("held_out") != measurements[-1].get("held_out"):
        return None
    loss_before = _excess_nll_by_sample(measurements[0])
    loss_after = _excess_nll_by_sample(measurements[-1])
    if not loss_before or loss_before.keys() != loss_after.keys():
        return None
    differences = [loss_after[sample] - loss_before[sample] for sample in loss_before]
    return Verdict(stage, before, estimate(differences, "held-out samples"))


def _excess_nll_by_sample(measurement: Mapping[str, Any]) -> dict[int, float]:
    """The excess NLL of each held-out sample by its index: the mean over budgets, question seen and unseen."""
    losses = dict[int, list[float]]()
    for prefix in ("eval_", "eval_unseen_"):
        indices = measurement.get(f"{prefix}samples", [])
        for index, loss in zip(indices, measurement.get(f"{prefix}by_sample", []), strict=True):
            sample = index if index >= 0 else ~index  # a sample that was split before its question
            losses.setdefault(sample, []).append(loss)
    return {sample: fmean(sample_losses) for sample, sample_losses in losses.items()}
