"""Train a lookahead module."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from torch import Tensor
from typing_extensions import override

from keepsight.data_gen.shards import TrainingSample
from keepsight.models.lookahead import Lookahead
from keepsight.train.lookahead.measure import Fidelity, measure_lookahead
from keepsight.train.lookahead.objective import LookaheadObjective
from keepsight.train.module_trainer import ModuleTrainer
from keepsight.train.seen import NOTHING, Seen
from keepsight.train.settings import ReplaySettings, TrainSettings

_TOKENS = "tokens"


class LookaheadTrainer(ModuleTrainer[LookaheadObjective]):
    """Saves the soft tokens and the LoRA, and measures fidelity by layer.

    Args:
        objective: Holds the module and its target.
        settings: Its optimisation.
        work: Folder for checkpoints, logs and measurements.
        samples: Training and held-out ones together.
        replay: How readings of the target are kept, where `settings.replays` is above 1.
        start: What else must be the same when the training is resumed, by its name in a recipe.
        seen: Prompts that the module was trained on in earlier stages; None where that is not known.

    Attributes:
        fidelity: The latest measurement.
    """

    weights_file = "lookahead.safetensors"

    def __init__(
        self,
        objective: LookaheadObjective,
        settings: TrainSettings,
        work: Path,
        samples: Sequence[TrainingSample],
        replay: ReplaySettings | None = None,
        start: Mapping[str, Any] | None = None,
        seen: Seen | None = NOTHING,
    ) -> None:
        shape = {f"lookahead.{key}": value for key, value in asdict(objective.lookahead.settings).items()}
        super().__init__(objective, settings, work, samples, {**shape, **(start or {})}, replay, seen)
        self.fidelity: Fidelity | None = None

    @override
    def weights(self) -> dict[str, Tensor]:
        return weights_of(self.objective.lookahead)

    @override
    def load_weights(self, weights: dict[str, Tensor]) -> None:
        load_weights(self.objective.lookahead, weights)

    @override
    def measure(self) -> dict[str, Any]:
        self.fidelity = measure_lookahead(self.objective, self.held_out_batches(), self.settings.budget)
        return self.fidelity.metrics() | self.fidelity.by_layer()


def weights_of(lookahead: Lookahead) -> dict[str, Tensor]:
    """A module's tensors, as a checkpoint holds them."""
    return lookahead.lora_state() | {_TOKENS: lookahead.tokens.detach().cpu()}


def load_weights(lookahead: Lookahead, weights: dict[str, Tensor]) -> None:
    """Load what `weights_of` returned."""
    lookahead.load_state(weights, weights.pop(_TOKENS).to(lookahead.tokens.device))
