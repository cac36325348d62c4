"""What a training is given beside the module: where it works, and on what."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from typing_extensions import Self

from keepsight.data_gen.store import TrainingSample
from keepsight.train.seen import NOTHING, Seen
from keepsight.train.settings import ReplaySettings


@dataclass(frozen=True)
class TrainingRun:
    """A training of a module.

    Attributes:
        work: Folder for checkpoints, logs and measurements.
        samples: Training and held-out ones together.
        start: What must be the same when the training is resumed, beside its settings, by its name in a recipe.
        replay: How readings of the target are kept, where the settings' `replays` is above 1.
        seen: Prompts that the module was trained on in earlier stages; None where that is not known.
    """

    work: Path
    samples: Sequence[TrainingSample]
    start: Mapping[str, Any] = field(default_factory=dict)
    replay: ReplaySettings = field(default_factory=ReplaySettings)
    seen: Seen | None = NOTHING

    def with_start(self, values: Mapping[str, Any]) -> Self:
        """The same run, with further values that must be the same when it is resumed."""
        return replace(self, start={**values, **self.start})
