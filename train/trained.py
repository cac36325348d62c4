"""What a training came to, for cards, tables and plots."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from keepsight.train.seen import Seen
from keepsight.train.settings import TrainSettings


@dataclass(frozen=True)
class Trained:
    """A module's training.

    Attributes:
        settings: Its optimisation.
        steps: Optimiser steps taken.
        samples: Number of samples, held-out ones included.
        samples_per_step: Samples per optimiser step, all processes together.
        log: Rows with `step` and `loss`, then the measurements: rows with `step`, numbers and lists.
        metrics: Numbers of the latest measurement, by name; empty where nothing was measured.
        held_out: What a card says of the held-out samples.
        seen: The prompts that the module was trained on, in earlier stages too; None where that is not known.
    """

    settings: TrainSettings
    steps: int
    samples: int
    samples_per_step: int
    log: list[dict[str, Any]] = field(default_factory=list)
    metrics: Mapping[str, float] = field(default_factory=dict)
    held_out: str = ""
    seen: Seen | None = None

    @property
    def losses(self) -> list[float]:
        """The logged losses."""
        return [row["loss"] for row in self.log if "loss" in row]
