"""Several lookahead modules of one target that learn side by side, each from the same readings of it."""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function
from typing_extensions import override

from keepsight.train.dataset import Batch
from keepsight.train.lookahead.objective import Importances, LookaheadObjective
from keepsight.train.objective import ReplayedObjective
from keepsight.train.replay import Reading


class SideBySide(ReplayedObjective):
    """The target is read once for all cells; the loss is the sum of theirs, so that each learns as it would alone.

    Args:
        cells: The modules' objectives, on one target.

    Attributes:
        cells: The same.
        losses: Those of the cells since it was last emptied, [cells] float32 for each batch.
    """

    def __init__(self, cells: Sequence[LookaheadObjective]) -> None:
        super().__init__()
        self._registered = nn.ModuleList(cells)
        self.cells = tuple(cells)
        self.losses: list[Tensor] = []

    def parameters_of(self, cell: int) -> list[nn.Parameter]:
        """What a cell trains."""
        return [each for each in self.cells[cell].parameters() if each.requires_grad]

    @override
    def read(self, batch: Batch) -> Reading:
        return self.cells[0].read(batch)

    @override
    def kept_tokens(self, batch: Batch) -> int:
        return self.cells[0].kept_tokens(batch)

    @override
    def loss_of(self, reading: Reading, batch: Batch) -> Tensor:
        losses = [
            _with_gradients(cell.loss_of(reading, batch), self.parameters_of(place))
            for place, cell in enumerate(self.cells)
        ]
        self.losses.append(torch.stack(losses).detach())
        return torch.stack(losses).sum()

    @override
    def flops(self, batch: Batch) -> float:
        return self.cells[0].flops_of_reading(batch) + sum(cell.flops_of_looking(batch) for cell in self.cells)

    def importances(self, batch: Batch) -> Iterator[Importances]:
        """Target and predicted importance for each cell in turn."""
        reading = self.reading(batch)
        for cell in self.cells:
            yield cell.compared(reading, batch)


def _with_gradients(loss: Tensor, parameters: Sequence[nn.Parameter]) -> Tensor:
    """The same loss with its gradients computed already: their graph is freed before the next cell begins."""
    with torch.autocast(loss.device.type, enabled=False):
        gradients = torch.autograd.grad(loss, parameters)
    kept: Any = _Known.apply(loss.detach(), gradients, *parameters)
    return kept


class _Known(Function):
    @staticmethod
    def forward(ctx: Any, loss: Tensor, gradients: tuple[Tensor, ...], *parameters: Tensor) -> Tensor:
        ctx.gradients = gradients
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> Any:
        return None, None, *(upstream[0].to(gradient.device) * gradient for gradient in ctx.gradients)
