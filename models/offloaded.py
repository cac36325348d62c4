"""Models whose parts accelerate places: on several devices, or on the CPU or a disk until a layer runs."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from accelerate.utils import has_offloaded_params
from torch import Tensor, nn


def values_of(model: nn.Module, name: str, weight: Tensor) -> Tensor:
    """A weight of a model by its name, with its values wherever these are kept; on the meta device where nothing is."""
    part, _, own = name.rpartition(".")
    module: Any = model.get_submodule(part)
    kept: Tensor = module._hf_hook.weights_map[own] if weight.is_meta and has_offloaded_params(module) else weight
    return kept


def running_devices(model: nn.Module) -> list[torch.device]:
    """Where the parts of a model run, each device once, also of those whose weights are kept elsewhere."""
    placed = ((module, weight) for module in model.modules() for weight in module.parameters(recurse=False))
    return list(dict.fromkeys(_runs_on(module) if weight.is_meta else weight.device for module, weight in placed))


def is_spread(model: nn.Module) -> bool:
    """Whether accelerate placed the parts of a model, or of one within it, in several places."""
    return any(len(getattr(each, "hf_device_map", ())) > 1 for each in model.modules())


def on_each(tensor: Tensor | None) -> Callable[[torch.device], Any]:
    """What gives a tensor that layers on several devices read, or None: it is copied once to each device."""
    return functools.cache(lambda device: None if tensor is None else tensor.to(device))


def joined(layers: Sequence[Tensor]) -> Tensor:
    """What layers on several devices gave, concatenated on the first one's."""
    return torch.cat([each.to(layers[0].device) for each in layers])


def _runs_on(module: Any) -> torch.device:
    return torch.device(module._hf_hook.execution_device if has_offloaded_params(module) else "meta")
