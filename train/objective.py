"""What the objectives of all trainers share: a batch goes in, a loss comes out."""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from keepsight.train.dataset import Batch


class Objective(nn.Module, ABC):
    """A small module in training beside its frozen target, as the Trainer wraps it."""

    def forward(self, **values: Any) -> dict[str, Tensor]:
        """The fields of a `Batch`, as `collate` makes them -> `{"loss": scalar}`."""
        return {"loss": self.loss(Batch(**values))}

    @abstractmethod
    def loss(self, batch: Batch) -> Tensor:
        """The mean loss over the samples of a batch, a scalar; gradients flow to the trained module alone."""

    @contextmanager
    def measuring(self) -> Iterator[None]:
        """Evaluation mode without gradients within the block; afterwards the mode is what it was before."""
        training = self.training
        self.eval()
        try:
            with torch.no_grad():
                yield
        finally:
            self.train(training)


class HeadObjective(Objective):
    """An objective that trains a head.

    Attributes:
        head: The head in training.
    """

    head: nn.Module
