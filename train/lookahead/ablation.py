"""Train several lookahead modules side by side, each as it would be trained alone."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from accelerate.utils import reduce
from torch import Tensor, nn
from typing_extensions import override

from keepsight.errors import UserError
from keepsight.train.lookahead.measure import measure_cells
from keepsight.train.lookahead.objective import LookaheadObjective
from keepsight.train.lookahead.side_by_side import SideBySide
from keepsight.train.lookahead.trainer import load_weights, weights_of
from keepsight.train.module_trainer import ModuleTrainer
from keepsight.train.run import TrainingRun
from keepsight.train.settings import LookaheadTrainSettings
from keepsight.train.trained import Trained


@dataclass(frozen=True)
class Cell:
    """One of the modules.

    Attributes:
        name: Unique among the cells.
        objective: Holds the module.
        settings: Its optimisation; learning rate, clipping and the loss are its own, the rest is the same for all.
    """

    name: str
    objective: LookaheadObjective
    settings: LookaheadTrainSettings


class AblationTrainer(ModuleTrainer[SideBySide]):
    """Each cell sees the samples in the order of a training alone, and has its own learning rate and clipping.

    Args:
        cells: The modules, at least one.
        run: Where they are trained, and on what.

    Raises:
        UserError: the training is in fp16, whose loss must be scaled before gradients are made, or with DeepSpeed.
    """

    weights_file = "cells.safetensors"

    def __init__(self, cells: Sequence[Cell], run: TrainingRun) -> None:
        first, shapes = cells[0].settings, [asdict(cell.objective.lookahead.settings) for cell in cells]
        shared = {key: value for key, value in shapes[0].items() if all(each[key] == value for each in shapes)}
        shape: dict[str, Any] = {f"lookahead.{key}": value for key, value in shared.items()}
        shape["ablation.cells"] = [cell.name for cell in cells]
        if first.precision == "fp16":
            raise UserError("train.precision=fp16: an ablation trains in bf16 or no")
        super().__init__(SideBySide([cell.objective for cell in cells]), first, run.with_start(shape))
        if self.is_deepspeed_enabled:
            raise UserError("an ablation clips each cell's gradients by itself: take recipes/accelerate/ddp.yaml")
        self.cells = cells

    def trained_cells(self) -> list[Trained]:
        """What the training of each cell came to."""
        whole = self.trained()
        return [
            replace(whole, settings=cell.settings, log=_own(whole.log, cell), metrics=_own([whole.metrics], cell)[0])
            for cell in self.cells
        ]

    @override
    def create_optimizer(self, model: Any = None) -> torch.optim.Optimizer:
        if self.optimizer is None:
            kind, options = self.get_optimizer_cls_and_kwargs(self.args, model)
            groups = [
                {"params": self.objective.parameters_of(place), "lr": cell.settings.learning_rate}
                for place, cell in enumerate(self.cells)
            ]
            self.optimizer = kind(groups, weight_decay=self.args.weight_decay, **options)
        return self.optimizer

    def _clip_grad_norm(self, model: nn.Module) -> Tensor:
        """Clip the gradients of each cell to its own norm; returns the norm of all before."""
        norms: list[Any] = [
            self.accelerator.clip_grad_norm_(self.objective.parameters_of(place), cell.settings.clip)
            for place, cell in enumerate(self.cells)
        ]
        return torch.stack(norms).norm()

    @override
    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        if "loss" in logs:
            means: Any = reduce(torch.stack(self.objective.losses).mean(dim=0), reduction="mean")
            self.objective.losses.clear()
            logs |= {f"loss/{cell.name}": mean for cell, mean in zip(self.cells, means.tolist(), strict=True)}
        super().log(logs, *args, **kwargs)

    @override
    def weights(self) -> dict[str, Tensor]:
        return {
            f"{place}.{name}": tensor
            for place, cell in enumerate(self.cells)
            for name, tensor in weights_of(cell.objective.lookahead).items()
        }

    @override
    def load_weights(self, weights: dict[str, Tensor]) -> None:
        for place, cell in enumerate(self.cells):
            own = f"{place}."
            named = {name.removeprefix(own): each for name, each in weights.items() if name.startswith(own)}
            load_weights(cell.objective.lookahead, named)

    @override
    def measure(self) -> dict[str, Any]:
        measured = measure_cells(self.objective, self.held_out_batches(), self.settings.budget)
        return {
            f"{key}/{cell.name}": value
            for cell, fidelity in zip(self.cells, measured, strict=True)
            for key, value in {**fidelity.metrics(), **fidelity.by_layer()}.items()
        }


def _own(rows: Sequence[Mapping[str, Any]], cell: Cell) -> list[dict[str, Any]]:
    """One cell's part of the rows, under the names that a training of it alone would use."""
    end = f"/{cell.name}"
    return [
        {key.removesuffix(end): value for key, value in row.items() if key == "step" or key.endswith(end)}
        for row in rows
    ]
