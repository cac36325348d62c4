"""Train the weights by which a lookahead module's heads share one budget."""

from statistics import fmean
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from keepsight.errors import UserError
from keepsight.models.processes import divided
from keepsight.train.dataset import Batch
from keepsight.train.distributed import target_is_divided
from keepsight.train.head_settings import HeadWeightsSettings
from keepsight.train.head_weights.objective import HeadWeightsObjective
from keepsight.train.module_trainer import ModuleTrainer
from keepsight.train.run import TrainingRun

_WEIGHTS = "log_weights"


class HeadWeightsTrainer(ModuleTrainer[HeadWeightsObjective]):
    """Saves the weights, and measures what evicting with them adds to the cross-entropy of held-out answers.

    Args:
        objective: Holds the weights, and the module whose importance they weigh.
        settings: Their training.
        run: Where they are trained, and on what.

    Raises:
        UserError: the target is divided over the processes.
    """

    weights_file = "head_weights.safetensors"
    settings_key = "head_weights.train"

    def __init__(self, objective: HeadWeightsObjective, settings: HeadWeightsSettings, run: TrainingRun) -> None:
        start = {"head_weights.budgets": settings.budgets, "head_weights.temperature": settings.temperature}
        super().__init__(objective, settings.train, run.with_start(start))
        if target_is_divided(self.accelerator, objective):
            raise UserError(
                "weights of heads need the whole target on each process: take recipes/accelerate/ddp.yaml or zero2.yaml"
            )

    @override
    def weights(self) -> dict[str, Tensor]:
        return {_WEIGHTS: self.objective.log_weights.detach().cpu()}

    @override
    def load_weights(self, weights: dict[str, Tensor]) -> None:
        with torch.no_grad():
            self.objective.log_weights.copy_(weights[_WEIGHTS])

    @override
    def measure(self) -> dict[str, Any]:
        with self.objective.measuring():
            by_batch = divided(lambda values: self.objective.excess_nll(Batch(**values)), self.held_out_batches())
        return {
            f"eval_excess_nll_at_{budget}": fmean(each for batch in by_batch for each in batch[budget])
            for budget in self.objective.budgets
        }
