"""A trained LoRA as observers run it: no gradients, and as few operators as its matrices allow."""

import threading
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from keepsight.models.lora import Lora, hooked

_TOGETHER = ({"q_proj", "k_proj", "v_proj"}, {"gate_proj", "up_proj"})
"""Modules of one parent that read the same input."""


class FoldedLora:
    """The updates of a LoRA in a model's dtype: scaling folded into B, the A of modules with one input in one matrix.

    It stays as it is when the LoRA is trained further, and knows nothing of dropout.

    Args:
        lora: The trained LoRA.
        dtype: Dtype of the model.
    """

    def __init__(self, lora: Lora, dtype: torch.dtype) -> None:
        self._hooks: list[tuple[Any, _Hook]] = []
        self._inputs: list[_Input] = []
        together = defaultdict(list)
        for name, linear, update in lora.parts():
            parent, _, own = name.rpartition(".")
            kind = next((place for place, names in enumerate(_TOGETHER) if own in names), name)
            together[parent, kind].append((linear, update))
        for group in together.values():
            read = _Input([update.lora_A.detach().to(dtype) for _, update in group])
            self._inputs.append(read)
            for place, (linear, update) in enumerate(group):
                up = (update.lora_B.detach() * update.scaling).to(dtype)
                self._hooks.append((linear, _Hook(read, place, up.t())))

    @contextmanager
    def attached(self) -> Iterator[None]:
        """Within the block, the linear modules give their output plus the update."""
        try:
            with hooked(self._hooks):
                yield
        finally:
            for read in self._inputs:
                read.forget()


class _Pass(threading.local):
    """What a thread's pass over some modules has brought to their ranks already."""

    inputs: Tensor | None = None
    low: tuple[Tensor, ...] = ()
    left = 0


class _Input:
    """What one or more modules read, brought to their ranks at once.

    Args:
        downs: The A of each module, [r, in].
    """

    def __init__(self, downs: Sequence[Tensor]) -> None:
        self._down, self._rank = torch.cat([*downs]), len(downs[0])
        self._readers, self._pass = len(downs), _Pass()

    def low(self, place: int, inputs: Tensor) -> Tensor:
        """What the module at `place` makes of its inputs [..., in]: [m, r], m of all leading dimensions.

        Once all modules have it, the inputs are let go: those of all layers together would outweigh a layer's scores.
        """
        own = self._pass
        if inputs is not own.inputs:
            low = functional.linear(inputs, self._down.to(inputs)).flatten(0, -2)
            own.inputs, own.low, own.left = inputs, low.split(self._rank, dim=-1), self._readers
        low = own.low[place]
        own.left -= 1
        if not own.left:
            self.forget()
        return low

    def forget(self) -> None:
        """Hold on to no input."""
        self._pass.inputs, self._pass.low, self._pass.left = None, (), 0


class _Hook:
    """Adds a module's update to its output, in place."""

    def __init__(self, read: _Input, place: int, up: Tensor) -> None:
        self._read, self._place, self._up = read, place, up

    def __call__(self, module: Any, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
        low = self._read.low(self._place, inputs[0]).to(output.dtype)
        return output.flatten(0, -2).addmm_(low, self._up.to(output)).view(output.shape)
