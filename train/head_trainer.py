"""What the trainers of draft heads and retrieval heads share: the head's weights are saved, and nothing else."""

from dataclasses import asdict
from typing import TypeVar

from torch import Tensor
from typing_extensions import override

from keepsight.errors import UserError
from keepsight.train.distributed import target_is_divided
from keepsight.train.head_settings import DraftHeadSettings, RetrievalHeadSettings
from keepsight.train.module_trainer import ModuleTrainer
from keepsight.train.objective import HeadObjective
from keepsight.train.run import TrainingRun

HeadObjectiveT = TypeVar("HeadObjectiveT", bound=HeadObjective)


class HeadTrainer(ModuleTrainer[HeadObjectiveT]):
    """Trains a head.

    Args:
        objective: Holds the head and its target.
        settings: The head's variant and its optimisation.
        run: Where it is trained, and on what.
    """

    def __init__(
        self, objective: HeadObjectiveT, settings: DraftHeadSettings | RetrievalHeadSettings, run: TrainingRun
    ) -> None:
        recipe = self.settings_key.removesuffix(".train")
        shape = {f"{recipe}.{name}": value for name, value in asdict(settings).items() if name != "train"}
        super().__init__(objective, settings.train, run.with_start(shape))
        if target_is_divided(self.accelerator, objective):
            raise UserError(
                "ZeRO-3 divides what is trained, and a head is small: use recipes/accelerate/zero2.yaml, or where no "
                "GPU holds the target model.device_map=auto in one process"
            )

    @override
    def weights(self) -> dict[str, Tensor]:
        return {name: value.detach().cpu() for name, value in self.objective.head.state_dict().items()}

    @override
    def load_weights(self, weights: dict[str, Tensor]) -> None:
        self.objective.head.load_state_dict(weights)
