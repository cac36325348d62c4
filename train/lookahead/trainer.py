"""Train a lookahead module."""

from dataclasses import asdict
from typing import Any

from torch import Tensor
from typing_extensions import override

from keepsight.models.lookahead import Lookahead
from keepsight.train.lookahead.measure import measure_lookahead
from keepsight.train.lookahead.objective import LookaheadObjective
from keepsight.train.module_trainer import ModuleTrainer
from keepsight.train.run import TrainingRun
from keepsight.train.settings import TrainSettings

_TOKENS = "tokens"


class LookaheadTrainer(ModuleTrainer[LookaheadObjective]):
    """Saves the soft tokens and the LoRA, and measures fidelity by layer.

    Args:
        objective: Holds the module and its target.
        settings: Its optimisation.
        run: Where it is trained, and on what.
    """

    weights_file = "lookahead.safetensors"

    def __init__(self, objective: LookaheadObjective, settings: TrainSettings, run: TrainingRun) -> None:
        shape = {f"lookahead.{key}": value for key, value in asdict(objective.lookahead.settings).items()}
        super().__init__(objective, settings, run.with_start(shape))

    @override
    def weights(self) -> dict[str, Tensor]:
        return weights_of(self.objective.lookahead)

    @override
    def load_weights(self, weights: dict[str, Tensor]) -> None:
        load_weights(self.objective.lookahead, weights)

    @override
    def measure(self) -> dict[str, Any]:
        fidelity = measure_lookahead(self.objective, self.held_out_batches(), self.settings.budget)
        return fidelity.metrics() | fidelity.by_layer()


def weights_of(lookahead: Lookahead) -> dict[str, Tensor]:
    """A module's tensors, as a checkpoint holds them."""
    return lookahead.lora_state() | {_TOKENS: lookahead.tokens.detach().cpu()}


def load_weights(lookahead: Lookahead, weights: dict[str, Tensor]) -> None:
    """Load what `weights_of` returned."""
    lookahead.load_state(weights, weights.pop(_TOKENS).to(lookahead.tokens.device))
