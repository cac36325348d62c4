"""Train a lookahead module."""

from dataclasses import asdict
from pathlib import Path
from typing import Any

from torch import Tensor
from typing_extensions import override

from keepsight.train.lookahead.measure import Fidelity, measure
from keepsight.train.lookahead.objective import LookaheadObjective
from keepsight.train.module_trainer import ModuleTrainer, run
from keepsight.train.settings import TrainSettings

_TOKENS = "tokens"


class LookaheadTrainer(ModuleTrainer):
    """Saves the adapter alone and measures fidelity by layer.

    Attributes:
        fidelity: The latest measurement.
    """

    objective: LookaheadObjective
    weights_file = "lookahead.safetensors"

    def __init__(self, objective: LookaheadObjective, settings: TrainSettings, work: Path, samples: list[Any]) -> None:
        super().__init__(objective, settings, work, samples)
        self.objective = objective
        self.fidelity: Fidelity | None = None

    @override
    def weights(self) -> dict[str, Tensor]:
        lookahead = self.objective.lookahead
        return lookahead.lora_state() | {_TOKENS: lookahead.tokens.detach().cpu()}

    @override
    def load_weights(self, weights: dict[str, Tensor]) -> None:
        lookahead = self.objective.lookahead
        lookahead.load_state(weights, weights.pop(_TOKENS).to(lookahead.tokens.device))

    @override
    def measure(self) -> dict[str, Any]:
        self.fidelity = measure(self.objective, self.held_out_batches(), self.settings.budget)
        return self.fidelity.metrics() | self.fidelity.by_layer()


def train(
    objective: LookaheadObjective, settings: TrainSettings, work: Path, samples: list[Any]
) -> tuple[LookaheadTrainer, bool]:
    """Train, going on from the last checkpoint in `work` when there is one.

    Returns:
        The trainer, and whether the training ran to its end (False after Ctrl-C).

    Raises:
        UserError: too few samples, other settings than the checkpoint's, or a loss that is not a number.
    """
    trainer = LookaheadTrainer(objective, settings, work, samples)
    shape = {f"lookahead.{key}": value for key, value in asdict(objective.lookahead.settings).items()}
    return trainer, run(trainer, shape)
