"""Train on what evicting costs the target's answers: weights of heads, or a lookahead module with them."""

from statistics import fmean
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import override

from keepsight.errors import UserError
from keepsight.models.distributed import divided
from keepsight.train.dataset import Batch
from keepsight.train.distributed import target_is_divided
from keepsight.train.eviction.finetune import FinetuneObjective
from keepsight.train.eviction.head_weights import HeadWeightsObjective
from keepsight.train.eviction.objective import EvictionObjective
from keepsight.train.head_settings import EvictionSettings, FinetuneSettings
from keepsight.train.lookahead.trainer import load_weights, weights_of
from keepsight.train.module_trainer import ModuleTrainer
from keepsight.train.run import TrainingRun

_WEIGHTS = "log_weights"
EvictionObjectiveT = TypeVar("EvictionObjectiveT", bound=EvictionObjective)


class EvictionTrainer(ModuleTrainer[EvictionObjectiveT]):
    """Saves the weights of heads, and measures what evicting adds to the cross-entropy of held-out answers.

    Args:
        objective: What is trained.
        settings: Its training.
        run: Where it is trained, and on what.

    Attributes:
        deciding: The settings beside the optimisation, by their names in a recipe.
        weights_rate: Name in a recipe of the rate at which the weights of heads learn.

    Raises:
        UserError: the target is divided over the processes.
    """

    weights_rate: ClassVar[str]

    def __init__(self, objective: EvictionObjectiveT, settings: EvictionSettings, run: TrainingRun) -> None:
        self.deciding = settings.deciding(self.settings_key)
        super().__init__(objective, settings.train, run.with_start(self.deciding))
        if target_is_divided(self.accelerator, objective):
            raise UserError(
                "what evicting costs is learned with the whole target on each process: take "
                "recipes/accelerate/ddp.yaml or zero2.yaml"
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


class HeadWeightsTrainer(EvictionTrainer[HeadWeightsObjective]):
    """Trains the weights of heads alone."""

    weights_file = "head_weights.safetensors"
    settings_key = "head_weights.train"
    weights_rate = "head_weights.train.learning_rate"


class FinetuneTrainer(EvictionTrainer[FinetuneObjective]):
    """Trains a lookahead module and the weights of its heads, at learning rates of their own.

    Raises:
        UserError: the launcher uses DeepSpeed.
    """

    weights_file = "finetuned.safetensors"
    settings_key = "finetune.train"
    weights_rate = "finetune.head_weights_rate"

    def __init__(self, objective: FinetuneObjective, settings: FinetuneSettings, run: TrainingRun) -> None:
        super().__init__(objective, settings, run)
        self._rate = settings.head_weights_rate
        if self.is_deepspeed_enabled:  # in a test, ZeRO-2 gave the last of the weights of heads other gradients
            raise UserError("finetune is not for DeepSpeed: what it trains is small; take recipes/accelerate/ddp.yaml")

    @override
    def create_optimizer(self, model: nn.Module | None = None) -> Optimizer:
        is_new = self.optimizer is None
        optimizer: Any = super().create_optimizer(model)
        if is_new:
            weights = self.objective.log_weights
            for group in optimizer.param_groups:
                group["params"] = [each for each in group["params"] if each is not weights]
            optimizer.add_param_group({"params": [weights], "lr": self._rate, "weight_decay": 0.0})
        return optimizer

    @override
    def weights(self) -> dict[str, Tensor]:
        return super().weights() | weights_of(self.objective.lookahead)

    @override
    def load_weights(self, weights: dict[str, Tensor]) -> None:
        super().load_weights({_WEIGHTS: weights.pop(_WEIGHTS)})
        load_weights(self.objective.lookahead, weights)
