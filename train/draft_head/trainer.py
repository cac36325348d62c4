"""Train an EAGLE-3 draft head."""

from dataclasses import asdict
from pathlib import Path
from typing import Any

from torch import Tensor
from typing_extensions import override

from keepsight.train.draft_head.measure import measure_head
from keepsight.train.draft_head.objective import DraftHeadObjective
from keepsight.train.head_settings import DraftHeadSettings
from keepsight.train.module_trainer import ModuleTrainer, run


class DraftHeadTrainer(ModuleTrainer):
    """Saves the head alone and measures how long its drafts are accepted."""

    objective: DraftHeadObjective
    weights_file = "draft_head.safetensors"
    settings_key = "draft_head.train"

    def __init__(
        self, objective: DraftHeadObjective, settings: DraftHeadSettings, work: Path, samples: list[Any]
    ) -> None:
        super().__init__(objective, settings.train, work, samples)
        self.objective = objective

    @override
    def weights(self) -> dict[str, Tensor]:
        return {name: value.detach().cpu() for name, value in self.objective.head.state_dict().items()}

    @override
    def load_weights(self, weights: dict[str, Tensor]) -> None:
        self.objective.head.load_state_dict(weights)

    @override
    def measure(self) -> dict[str, Any]:
        with self.accelerator.autocast():
            return measure_head(self.objective, self.held_out_batches()).values()


def train_draft_head(
    objective: DraftHeadObjective, settings: DraftHeadSettings, work: Path, samples: list[Any], init: str = ""
) -> tuple[DraftHeadTrainer, bool]:
    """Train, going on from the last checkpoint in `work` when there is one.

    Args:
        objective: With head and target.
        settings: Shape and optimisation.
        work: Folder for checkpoints, logs and measurements.
        samples: All of them.
        init: What the head started from, for the comparison with a training that is gone on with.

    Returns:
        The trainer, and whether the training ran to its end (False after Ctrl-C).

    Raises:
        UserError: too few samples, other settings than the checkpoint's, or a loss that is not a number.
    """
    trainer = DraftHeadTrainer(objective, settings, work, samples)
    shape = {f"draft_head.{key}": value for key, value in asdict(settings).items() if key != "train"}
    shape["command.init"] = init
    return trainer, run(trainer, shape)
