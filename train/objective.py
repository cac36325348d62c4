"""What the objectives of all trainers share: a batch goes in, a loss comes out."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import override

from keepsight.train.dataset import Batch
from keepsight.train.replay import Reading, ReadingBuffer


class Objective(nn.Module, ABC):
    """A small module in training beside its frozen target, as the Trainer wraps it."""

    def forward(self, **values: Any) -> dict[str, Tensor]:
        """The fields of a `Batch`, as `collate` makes them -> `{"loss": scalar}`."""
        return {"loss": self.loss(Batch(**values))}

    @abstractmethod
    def loss(self, batch: Batch) -> Tensor:
        """The mean loss over the samples of a batch, a scalar; gradients flow to the trained module alone."""

    def flops(self, batch: Batch) -> float | None:
        """Floating-point operations of the loss of a batch and its gradients; None where they are not known."""
        return None

    @override
    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Load a DeepSpeed checkpoint, which holds only the trained parameters; the frozen ones stay as they are."""
        keys = super().load_state_dict(state_dict, strict=False, assign=assign)
        trained = {name for name, parameter in self.named_parameters() if parameter.requires_grad}
        if strict and (odd := trained.intersection(keys.missing_keys).union(keys.unexpected_keys)):
            raise RuntimeError(f"missing or surplus in the checkpoint: {min(odd)}")
        return keys

    @contextmanager
    def measuring(self) -> Iterator[None]:
        """Evaluation mode without gradients within the block; then the previous mode is restored."""
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


class ReplayedObjective(Objective):
    """An objective whose pass over the target can be kept and used several times; see `keepsight.train.replay`.

    Attributes:
        buffer: Where readings are kept; None where the target is read anew for each batch.
    """

    buffer: ReadingBuffer | None = None

    @override
    def loss(self, batch: Batch) -> Tensor:
        return self.loss_of(self.reading(batch), batch)

    @abstractmethod
    def read(self, batch: Batch) -> Reading:
        """What the target shows of a batch, without gradients; it does not depend on the module."""

    @abstractmethod
    def loss_of(self, reading: Reading, batch: Batch) -> Tensor:
        """`loss`, given what the target shows; all of `reading` is in float32 or the target's dtype."""

    def reading(self, batch: Batch) -> Reading:
        """The reading of a batch: the one that was kept, where readings are."""
        return self.read(batch) if self.buffer is None else self.buffer.take(batch, lambda: self.read(batch))

    def token_bytes(self, batch: Batch) -> float:
        """Bytes that a reading takes, when it is kept, per token; measured on a batch of one sample."""
        assert self.buffer is not None
        return self.buffer.bytes_of(self.read(batch)) / self.kept_tokens(batch)

    def kept_tokens(self, batch: Batch) -> int:
        """Number of tokens that the reading of a batch tells of, padding included."""
        ids, _ = batch.joined()
        return ids.numel()
