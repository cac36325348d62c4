"""Hooks that record a model's features (the outputs of chosen layers) and watch the inputs of its attention."""

import functools
import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any, cast

import torch
from torch import Tensor, nn

from keepsight.errors import UserError
from keepsight.models.decoder import attention_of, decoder_of, full_attention_layers
from keepsight.models.lora import hooked
from keepsight.runtime.attention import Reader


class RecordFeatures(ExitStack):
    """While entered, keeps the outputs of chosen decoder layers, `layers`, of a model's latest forward pass.

    The index one past the last layer means the input of the lm_head: the last layer's output after the final norm. A
    `UserError` if the base model has no such layer.
    """

    def __init__(self, model: Reader, layers: Sequence[int]) -> None:
        super().__init__()
        self._layers, target = layers, cast(Any, model)  # only models are asked for features
        self._device = target.device if layers else None
        decoder: Any = decoder_of(target) if layers else None
        outputs = [*decoder.layers, decoder] if layers else []
        if wrong := [layer for layer in layers if not 0 <= layer < len(outputs)]:
            raise UserError(
                f"feature layer {wrong[0]} is out of range: the base model's layers are 0 to {len(outputs) - 2}, "
                f"and {len(outputs) - 1} is what its final norm gives"
            )
        self._outputs: dict[int, Tensor] = {}
        hooks = ((outputs[layer], functools.partial(self._keep, place)) for place, layer in enumerate(layers))
        self.enter_context(hooked(hooks))

    def outputs(self) -> tuple[Tensor, ...]:
        """For each of the layers, [B, q, hidden] of the q tokens of the latest pass, on the model's first device."""
        return tuple(self._outputs[place].to(self._device) for place in range(len(self._layers)))

    def after(self, before: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """`outputs` of the latest pass appended to `before`, those of earlier tokens; empty before the first pass."""
        new = self.outputs()
        return tuple(torch.cat(pair, dim=1) for pair in zip(before, new, strict=True)) if before else new

    def _keep(self, place: int, module: nn.Module, inputs: Any, output: Any) -> None:
        self._outputs[place] = output if isinstance(output, Tensor) else output[0]


def in_this_thread(hook: Callable[..., Any]) -> Callable[..., Any]:
    """A hook of a module that does nothing in other threads, which may use the model too."""
    mine = threading.get_ident()

    def only(*args: Any) -> Any:
        return hook(*args) if threading.get_ident() == mine else None

    return only


class WatchInputs(ExitStack):
    """While entered, calls `watch` with the attention input of each layer with full attention.

    Its arguments are the decoder layer's index, its attention module, and the module's input [B, q, hidden]. A
    `UserError` if the model's attention modules are not known.
    """

    def __init__(self, model: Reader, watch: Callable[[int, nn.Module, Tensor], None]) -> None:
        super().__init__()
        target: Any = model
        modules = {index: attention_of(target, index) for index in full_attention_layers(target.config)}
        for index, module in modules.items():
            hook = in_this_thread(functools.partial(self._hand_on, watch, index))
            self.callback(module.register_forward_pre_hook(hook, with_kwargs=True).remove)

    @staticmethod
    def _hand_on(watch: Callable[..., None], index: int, module: nn.Module, inputs: Any, named: dict[str, Any]) -> None:
        watch(index, module, named["hidden_states"] if "hidden_states" in named else inputs[0])
