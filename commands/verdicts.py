"""Whether a stage of `keepsight fit` made the module better: paired differences on its held-out samples."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from keepsight.eval.report.intervals import FEW, Estimate, estimate
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
        ends = self.difference.interval
        return self.difference.n >= FEW and ends is not None and ends[0] > 0

    def sentence(self) -> str:
        """One line on the difference, and on which module is the better one."""
        ends, samples = self.difference.interval, int(self.difference.n)
        change = f"changed the excess NLL of {samples} held-out samples by {self.difference.value:+.3f} nats"
        if ends is None or samples < FEW:
            return f"{self.stage} {change}: too few samples to tell whether it helped; its module is used."
        change += f" (95 % interval {ends[0]:+.3f} to {ends[1]:+.3f})"
        if ends[0] > 0:
            return f"{self.stage} {change}: it made the module worse, so that of {self.before} is used."
        if ends[1] < 0:
            return f"{self.stage} {change}: it made the module better, and its module is used."
        return f"{self.stage} {change}: the interval covers zero, so it may have helped or not; its module is used."


def verdict_of(out: Path, stage: str, before: str) -> Verdict | None:
    """The verdict on an eviction stage of a fit in `out`; None where the measurements that it takes are not there."""
    measured = whole_lines(out / stage / "training" / MEASUREMENTS)
    if len(measured) < 2 or measured[0].get("held_out") != measured[-1].get("held_out"):
        return None
    earlier, later = _by_sample(measured[0]), _by_sample(measured[-1])
    if not earlier or earlier.keys() != later.keys():
        return None
    return Verdict(stage, before, estimate([later[index] - earlier[index] for index in earlier], "held-out samples"))


def _by_sample(measured: Mapping[str, Any]) -> dict[int, float]:
    """The excess NLL of each held-out sample by its index: the mean over budgets, question seen and unseen."""
    values = dict[int, list[float]]()
    for prefix in ("eval_", "eval_unseen_"):
        indices = measured.get(f"{prefix}samples", [])
        for index, value in zip(indices, measured.get(f"{prefix}by_sample", []), strict=True):
            own = index if index >= 0 else ~index  # a sample that was split before its question
            values.setdefault(own, []).append(value)
    return {index: fmean(each) for index, each in values.items()}
