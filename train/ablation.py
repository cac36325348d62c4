"""Train several lookahead modules side by side, each as it would be trained alone."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from accelerate.utils import reduce
from torch import Tensor, nn
from torch.autograd import Function
from typing_extensions import override

from keepsight.errors import UserError
from keepsight.models.decoder import cached_kv_heads
from keepsight.train.dataset import Batch
from keepsight.train.fidelity import Importances, measure_fidelity
from keepsight.train.importance import ImportanceObjective
from keepsight.train.objective import ReplayedObjective
from keepsight.train.replay import TeacherOutputs
from keepsight.train.settings import LookaheadTrainSettings, TrainSettings
from keepsight.train.trainer import ModuleTrainer, Trained, TrainingRun


@dataclass(frozen=True)
class Cell:
    """One of the modules of an ablation.

    Attributes:
        name: Unique among the cells.
        objective: Holds the module.
        settings: Its training settings; only learning rate, clipping and the loss may differ between cells.
    """

    name: str
    objective: ImportanceObjective
    settings: LookaheadTrainSettings

    def of(self, row: Mapping[str, Any]) -> dict[str, Any]:
        """The cell's values of a log row, under the names that training the cell alone would log."""
        end = f"/{self.name}"
        shared = "step", "held_out"
        return {key.removesuffix(end): value for key, value in row.items() if key in shared or key.endswith(end)}


class SideBySide(ReplayedObjective):
    """Objective of an ablation: the sum of the cells' losses on shared teacher outputs; each trains as it would alone.

    Attributes:
        cells: The modules, at least one, on one base model.
        losses: The cells' losses, [cells] float32 for each batch since the last log entry.

    Raises:
        UserError: the training is in fp16, whose loss must be scaled before its gradients are computed.
    """

    weights_file = "cells.safetensors"
    launchers = ("zero3", "fsdp2")  # ZeRO-2 would clip the gradients of all cells by one norm

    def __init__(self, cells: Sequence[Cell]) -> None:
        super().__init__()
        if cells[0].settings.precision == "fp16":
            raise UserError("train.precision=fp16: an ablation trains in bf16 or no")
        self._registered = nn.ModuleList(cell.objective for cell in cells)
        self.cells = tuple(cells)
        self.losses: list[Tensor] = []

    @override
    def decisive(self) -> dict[str, Any]:
        shapes = [cell.objective.decisive() for cell in self.cells]
        shared = {key: value for key, value in shapes[0].items() if all(each[key] == value for each in shapes)}
        return shared | {"ablation.cells": [cell.name for cell in self.cells]}

    @override
    def parameter_groups(self, settings: TrainSettings) -> list[dict[str, Any]]:
        return [group for cell in self.cells for group in cell.objective.parameter_groups(cell.settings)]

    @override
    def run_teacher(self, batch: Batch) -> TeacherOutputs:
        return self.cells[0].objective.run_teacher(batch)

    @override
    def kept_tokens(self, batch: Batch) -> int:
        return self.cells[0].objective.kept_tokens(batch)

    @override
    def loss_of(self, outputs: TeacherOutputs, batch: Batch) -> Tensor:
        objectives = [cell.objective for cell in self.cells]
        losses = [_with_gradients(each.loss_of(outputs, batch), each.trained_parameters()) for each in objectives]
        self.losses.append(torch.stack(losses).detach())
        return torch.stack(losses).sum()

    @override
    def flops(self, batch: Batch) -> float:
        teacher = self.cells[0].objective.teacher_flops(batch)
        return teacher + sum(cell.objective.module_flops(batch) for cell in self.cells)

    @override
    def weights(self) -> dict[str, Tensor]:
        named = ((place, cell.objective.weights()) for place, cell in enumerate(self.cells))
        return {f"{place}.{name}": tensor for place, weights in named for name, tensor in weights.items()}

    @override
    def load_weights(self, weights: dict[str, Tensor]) -> None:
        for place, cell in enumerate(self.cells):
            own = f"{place}."
            named = {name.removeprefix(own): each for name, each in weights.items() if name.startswith(own)}
            cell.objective.load_weights(named)

    @override
    def measure(self, batches: Iterable[dict[str, Any]], budget: int) -> dict[str, Any]:
        kv_heads = cached_kv_heads(self.cells[0].objective.lookahead.model)
        with self.measuring():
            measured = measure_fidelity(self.importances, batches, kv_heads, budget)
        pairs = zip(self.cells, measured, strict=True)
        return {f"{key}/{cell.name}": value for cell, each in pairs for key, value in each.metrics().items()}

    def importances(self, batch: Batch) -> Iterator[Importances]:
        """Target and predicted importance for each cell in turn."""
        outputs = self.teacher_outputs(batch)
        for cell in self.cells:
            yield cell.objective.compared(outputs, batch)


class AblationTrainer(ModuleTrainer[SideBySide]):
    """Trains all cells; each has its own learning rate and clipping, and the order of samples of a training alone."""

    def __init__(self, cells: Sequence[Cell], run: TrainingRun) -> None:
        super().__init__(SideBySide(cells), cells[0].settings, run)

    def trained_cells(self) -> list[Trained]:
        """The result of the training of each cell."""
        whole = self.trained()
        parts = ((cell, [*map(cell.of, whole.log)], cell.of(whole.metrics)) for cell in self.objective.cells)
        return [replace(whole, settings=cell.settings, log=log, metrics=metrics) for cell, log, metrics in parts]

    def _clip_grad_norm(self, model: nn.Module) -> Tensor:
        """Clip each cell's gradients to its own maximum norm; returns the norm of all gradients before clipping."""
        norms: list[Any] = [
            self.accelerator.clip_grad_norm_(cell.objective.trained_parameters(), cell.settings.clip)
            for cell in self.objective.cells
        ]
        return torch.stack(norms).norm()

    @override
    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        if "loss" in logs:
            means: Any = reduce(torch.stack(self.objective.losses).mean(dim=0), reduction="mean")
            self.objective.losses.clear()
            pairs = zip(self.objective.cells, means.tolist(), strict=True)
            logs |= {f"loss/{cell.name}": mean for cell, mean in pairs}
        super().log(logs, *args, **kwargs)


def _with_gradients(loss: Tensor, parameters: Sequence[nn.Parameter]) -> Tensor:
    """The loss with its gradients already computed, so that its graph is freed before the next cell runs."""
    with torch.autocast(loss.device.type, enabled=False):
        gradients = torch.autograd.grad(loss, parameters)
    result: Any = _KnownGradients.apply(loss.detach(), gradients, *parameters)
    return result


class _KnownGradients(Function):
    @staticmethod
    def forward(ctx: Any, loss: Tensor, gradients: tuple[Tensor, ...], *parameters: Tensor) -> Tensor:
        ctx.gradients = gradients
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> Any:
        return None, None, *(upstream[0].to(gradient.device) * gradient for gradient in ctx.gradients)
