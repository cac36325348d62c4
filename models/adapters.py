"""Fingerprints of a model: of its own weights, and of the PEFT adapters that its owner has put on it."""

import hashlib
from collections.abc import Iterable, Iterator
from operator import attrgetter
from typing import Any

import torch
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils.other import AuxiliaryTrainingWrapper
from torch import Tensor, nn

from keepsight.models.decoder import values_of

FIRST = 64
"""Values of each weight in a fingerprint."""


def adapters_digest(model: nn.Module) -> str:
    """Digest of the weights of the active adapters, whatever their names; empty where none is active."""
    digest, found = hashlib.sha256(), False
    for layer in _adapted(model):
        if not layer.disable_adapters:
            for adapter in layer.active_adapters:
                for value in _values(layer, adapter):
                    found = True
                    digest.update(tensor_bytes(value) if isinstance(value, Tensor) else str(value).encode())
    return f"sha256:{digest.hexdigest()}" if found else ""


def weights_digest(model: nn.Module) -> str:
    """A cheap fingerprint of a model's own weights: the first values of each, without adapters.

    Returns:
        `sha256:` and the hexadecimal digest; it differs between dtypes.
    """
    of_adapters = {id(value) for layer in _adapted(model) for part in _parts(layer) for value in _tensors(part)}
    own = (values_of(model, *named) for named in model.named_parameters() if id(named[1]) not in of_adapters)
    return digest_of_first(own)


def digest_of_first(weights: Iterable[Tensor]) -> str:
    """`weights_digest` of a model that has these weights, in this order, of which only the first values are read."""
    first = torch.cat([value.detach().flatten()[:FIRST].float().cpu() for value in weights])
    return f"sha256:{hashlib.sha256(tensor_bytes(first)).hexdigest()}"


def tensor_bytes(tensor: Tensor) -> memoryview:
    """The bytes of a tensor."""
    return tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data


def _adapted(model: nn.Module) -> Iterator[Any]:
    """The modules that hold adapters."""
    return (each for each in model.modules() if isinstance(each, BaseTunerLayer | AuxiliaryTrainingWrapper))


def _parts(layer: Any) -> Iterator[Any]:
    """What a module holds of its adapters, by the adapters' names."""
    for name in (*layer.adapter_layer_names, *layer.other_param_names):
        try:
            yield attrgetter(name)(layer)
        except AttributeError:  # not all kinds of a layer have all
            continue


def _values(layer: Any, adapter: str) -> Iterator[Tensor | float]:
    """The tensors and factors of one adapter in a module."""
    for part in _parts(layer):
        if adapter in part:
            value = part[adapter]
            yield from [float(value)] if isinstance(value, int | float) else _tensors(value)


def _tensors(part: Any) -> Iterator[Tensor]:
    if isinstance(part, Tensor):
        yield part
    elif isinstance(part, nn.Module):
        yield from (*part.parameters(), *part.buffers())
