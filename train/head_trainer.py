"""What the trainers of draft heads and retrieval heads share: the head's weights are saved, and nothing else."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeVar

from torch import Tensor
from typing_extensions import override

from keepsight.data_gen.shards import TrainingSample
from keepsight.errors import UserError
from keepsight.train.distributed import target_is_divided
from keepsight.train.head_settings import DraftHeadSettings, RetrievalHeadSettings
from keepsight.train.module_trainer import ModuleTrainer
from keepsight.train.objective import HeadObjective
from keepsight.train.seen import NOTHING, Seen
from keepsight.train.settings import ReplaySettings

HeadObjectiveT = TypeVar("HeadObjectiveT", bound=HeadObjective)


class HeadTrainer(ModuleTrainer[HeadObjectiveT]):
    """Trains a head.

    Args:
        objective: Holds the head and its target.
        settings: The head's variant and its optimisation.
        work: Folder for checkpoints, logs and measurements.
        samples: Training and held-out ones together.
        start: What else must be the same when the training is resumed, by its name in a recipe.
        replay: How readings of the target are kept, where `settings.train.replays` is above 1.
        seen: Prompts that the head was trained on in earlier stages; None where that is not known.
    """

    def __init__(
        self,
        objective: HeadObjectiveT,
        settings: DraftHeadSettings | RetrievalHeadSettings,
        work: Path,
        samples: Sequence[TrainingSample],
        start: Mapping[str, Any] | None = None,
        replay: ReplaySettings | None = None,
        seen: Seen | None = NOTHING,
    ) -> None:
        recipe = self.settings_key.removesuffix(".train")
        shape = {f"{recipe}.{name}": value for name, value in asdict(settings).items() if name != "train"}
        super().__init__(objective, settings.train, work, samples, {**shape, **(start or {})}, replay, seen)
        if target_is_divided(self.accelerator, objective):
            raise UserError("ZeRO-3 divides what is trained, and a head is small: use recipes/accelerate/zero2.yaml")

    @override
    def weights(self) -> dict[str, Tensor]:
        return {name: value.detach().cpu() for name, value in self.objective.head.state_dict().items()}

    @override
    def load_weights(self, weights: dict[str, Tensor]) -> None:
        self.objective.head.load_state_dict(weights)
