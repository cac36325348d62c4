"""Hooks that record a model's features (the outputs of chosen layers) and watch the inputs of its attention."""

import functools
import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn

from keepsight.errors import UserError
from keepsight.models.decoder import attention_of, decoder_layers, decoder_of, full_attention_layers
from keepsight.models.lora import hooked
from keepsight.runtime.attention import Reader


class RecordFeatures(ExitStack):
    """While entered, keeps the outputs of chosen decoder layers, `layers`, of a model's latest forward pass.

    The index one past the last layer means the input of the lm_head: the last layer's output after the final norm. A
    `UserError` if the base model has no such layer.
    """

    def __init__(self, model: Reader, layers: Sequence[int]) -> None:
        super().__init__()
        self._layers = layers
        self._outputs: dict[int, Tensor] = {}
        if not layers:
            return
        base_model: Any = model  # only models are asked for features
        decoder: Any = decoder_of(base_model)
        self._device = base_model.device
        modules = [*decoder_layers(base_model), decoder]
        for layer in layers:
            if not 0 <= layer < len(modules):
                raise UserError(
                    f"feature layer {layer} is out of range: the base model's layers are 0 to {len(modules) - 2}, "
                    f"and {len(modules) - 1} is what its final norm gives",
                    field="features",
                    code="range",
                )
        hooks = [(modules[layer], functools.partial(self._keep, index)) for index, layer in enumerate(layers)]
        self.enter_context(hooked(hooks))

    def outputs(self) -> tuple[Tensor, ...]:
        """For each of the layers, [B, q, hidden] of the q tokens of the latest pass, on the model's first device."""
        return tuple(self._outputs[index].to(self._device) for index in range(len(self._layers)))

    def after(self, before: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """`outputs` of the latest pass appended to `before`, those of earlier tokens; empty before the first pass."""
        latest = self.outputs()
        if not before:
            return latest
        appended = []
        for earlier_output, output in zip(before, latest, strict=True):
            appended.append(torch.cat([earlier_output, output], dim=1))
        return tuple(appended)

    def _keep(self, index: int, module: nn.Module, inputs: Any, output: Any) -> None:
        self._outputs[index] = output if isinstance(output, Tensor) else output[0]


def in_this_thread(hook: Callable[..., Any]) -> Callable[..., Any]:
    """A hook of a module that does nothing in other threads, which may use the model too."""
    thread = threading.get_ident()

    def call_in_thread(*args: Any) -> Any:
        return hook(*args) if threading.get_ident() == thread else None

    return call_in_thread


class WatchInputs(ExitStack):
    """While entered, calls `watch` with the attention input of each layer with full attention.

    Its arguments are the decoder layer's index, its attention module, and the module's input [B, q, hidden]. A
    `UserError` if the model's attention modules are not known.
    """

    def __init__(self, model: Reader, watch: Callable[[int, nn.Module, Tensor], None]) -> None:
        super().__init__()
        self._watch = watch
        base_model: Any = model
        modules = {index: attention_of(base_model, index) for index in full_attention_layers(base_model.config)}
        for index, module in modules.items():
            hook = in_this_thread(functools.partial(self._call_watch, index))
            self.callback(module.register_forward_pre_hook(hook, with_kwargs=True).remove)

    def _call_watch(self, index: int, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        hidden = kwargs["hidden_states"] if "hidden_states" in kwargs else args[0]
        self._watch(index, module, hidden)
