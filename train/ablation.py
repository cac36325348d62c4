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

    def values_of(self, row: Mapping[str, Any]) -> dict[str, Any]:
        """The cell's values of a log row, under the names that training the cell alone would log."""
        suffix = f"/{self.name}"
        values = {}
        for key, value in row.items():
            if key in ("step", "held_out") or key.endswith(suffix):
                values[key.removesuffix(suffix)] = value
        return values


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
            raise UserError(
                "train.precision=fp16: an ablation trains in bf16 or no", field="train.precision", code="conflict"
            )
        self._registered = nn.ModuleList(cell.objective for cell in cells)
        self.cells = tuple(cells)
        self.losses: list[Tensor] = []

    @override
    def decisive(self) -> dict[str, Any]:
        values_of_cells = [cell.objective.decisive() for cell in self.cells]
        values = {}
        for key, value in values_of_cells[0].items():
            if all(cell_values[key] == value for cell_values in values_of_cells):
                values[key] = value
        values["ablation.cells"] = [cell.name for cell in self.cells]
        return values

    @override
    def parameter_groups(self, settings: TrainSettings) -> list[dict[str, Any]]:
        groups = []
        for cell in self.cells:
            groups += cell.objective.parameter_groups(cell.settings)
        return groups

    @override
    def run_teacher(self, batch: Batch) -> TeacherOutputs:
        return self.cells[0].objective.run_teacher(batch)

    @override
    def kept_tokens(self, batch: Batch) -> int:
        return self.cells[0].objective.kept_tokens(batch)

    @override
    def loss_of(self, outputs: TeacherOutputs, batch: Batch) -> Tensor:
        cell_losses = []
        for cell in self.cells:
            loss = cell.objective.loss_of(outputs, batch)
            cell_losses.append(_with_gradients(loss, cell.objective.trained_parameters()))
        losses = torch.stack(cell_losses)
        self.losses.append(losses.detach())
        return losses.sum()

    @override
    def flops(self, batch: Batch) -> float:
        teacher = self.cells[0].objective.teacher_flops(batch)
        return teacher + sum(cell.objective.module_flops(batch) for cell in self.cells)

    @override
    def weights(self) -> dict[str, Tensor]:
        weights = {}
        for number, cell in enumerate(self.cells):
            for name, tensor in cell.objective.weights().items():
                weights[f"{number}.{name}"] = tensor
        return weights

    @override
    def load_weights(self, weights: dict[str, Tensor]) -> None:
        for number, cell in enumerate(self.cells):
            prefix = f"{number}."
            cell_weights = {}
            for name, tensor in weights.items():
                if name.startswith(prefix):
                    cell_weights[name.removeprefix(prefix)] = tensor
            cell.objective.load_weights(cell_weights)

    @override
    def measure(self, batches: Iterable[dict[str, Any]], budget: int) -> dict[str, Any]:
        kv_heads = cached_kv_heads(self.cells[0].objective.lookahead.model)
        with self.measuring():
            fidelities = measure_fidelity(self.importances, batches, kv_heads, budget)
        metrics = {}
        for cell, fidelity in zip(self.cells, fidelities, strict=True):
            for name, value in fidelity.metrics().items():
                metrics[f"{name}/{cell.name}"] = value
        return metrics

    def importances(self, batch: Batch) -> Iterator[Importances]:
        """Target and predicted importance for each cell in turn."""
        outputs = self.teacher_outputs(batch)
        for cell in self.cells:
            yield cell.objective.importances_from(outputs, batch)


class AblationTrainer(ModuleTrainer[SideBySide]):
    """Trains all cells; each has its own learning rate and clipping, and the order of samples of a training alone."""

    def __init__(self, cells: Sequence[Cell], run: TrainingRun) -> None:
        super().__init__(SideBySide(cells), cells[0].settings, run)

    def trained_cells(self) -> list[Trained]:
        """The result of the training of each cell."""
        together = self.trained()
        trained_cells = []
        for cell in self.objective.cells:
            log = [cell.values_of(row) for row in together.log]
            metrics = cell.values_of(together.metrics)
            trained_cells.append(replace(together, settings=cell.settings, log=log, metrics=metrics))
        return trained_cells

    def _clip_grad_norm(self, model: nn.Module) -> Tensor:
        """Clip each cell's gradients to its own maximum norm; returns the norm of all gradients before clipping."""
        norms: list[Any] = []
        for cell in self.objective.cells:
            parameters = cell.objective.trained_parameters()
            norms.append(self.accelerator.clip_grad_norm_(parameters, cell.settings.clip))
        return torch.stack(norms).norm()

    @override
    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        if "loss" in logs:
            means: Any = reduce(torch.stack(self.objective.losses).mean(dim=0), reduction="mean")
            self.objective.losses.clear()
            for cell, mean in zip(self.objective.cells, means.tolist(), strict=True):
                logs[f"loss/{cell.name}"] = mean
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
        gradients = [upstream[0].to(gradient.device) * gradient for gradient in ctx.gradients]
        return None, None, *gradients
