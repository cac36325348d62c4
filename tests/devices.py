"""Pretended devices: operations run on the CPU, and fail where they would mix the tensors of two accelerators.

A storage carries the name of its device, which `Tensor.device` reports and `Tensor.to` changes. `HOST` plays the CPU:
of its tensors an operation elsewhere takes numbers and indices alone, as on CUDA. Backward passes are watched too.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from accelerate import Accelerator, dispatch_model
from torch import Tensor
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import TrainingArguments

from keepsight.models.decoder import decoder_of

HOST = torch.device("cpu")
FIRST = torch.device("cpu", 0)
SECOND = torch.device("cpu", 1)
_COPIES = ("aten::_to_copy", "aten::copy_")
_INDEXED = ("aten::index", "aten::index_put", "aten::index_put_", "aten::_unsafe_index", "aten::_index_put_impl_")
_NAMED: list[Any] = []
"""Storages that have a name: torch 2.7 forgets it when a storage is written to a file and nothing else holds it."""
_to: Any = torch.Tensor.to
_nn: Any = torch._C._nn  # pyright: ignore[reportAttributeAccessIssue]


@contextmanager
def several_devices() -> Iterator[None]:
    """Within the block `FIRST` and `SECOND` are devices of their own, and trainings begin on `FIRST`."""
    with pytest.MonkeyPatch.context() as patch, _Watch():
        patch.setattr(Accelerator, "device", FIRST)
        patch.setattr(TrainingArguments, "device", property(lambda arguments: arguments._setup_devices and FIRST))
        patch.setattr(Tensor, "device", property(device_of), raising=False)
        patch.setattr(Tensor, "to", _to_device)
        patch.setattr(Tensor, "cpu", lambda tensor: _to_device(tensor, HOST))
        patch.setattr(Tensor, "numpy", _numpy_of_host(Tensor.numpy))
        patch.setattr(torch, "tensor", _on_named_device(torch.tensor))
        for owner, name in ((Tensor, "new_tensor"), (Tensor, "__deepcopy__"), (_nn, "pad_sequence")):
            patch.setattr(owner, name, _on_device_of_first(getattr(owner, name)))
        attention = functional.scaled_dot_product_attention
        patch.setattr(functional, "scaled_dot_product_attention", _with_mask_here(attention))
        yield
    _NAMED.clear()


def in_halves(model: Any) -> Any:
    """A model whose second half of layers is on `SECOND`, and all before on `FIRST`, as accelerate places them."""
    decoder = decoder_of(model)
    decoder_name = next(name for name, module in model.named_modules() if module is decoder)
    devices: dict[str, Any] = {}
    for name, _ in decoder.named_children():
        if name != "layers":
            devices[f"{decoder_name}.{name}"] = SECOND if name == "norm" else FIRST
    for index in range(len(decoder.layers)):
        is_late = index >= len(decoder.layers) / 2
        devices[f"{decoder_name}.layers.{index}"] = SECOND if is_late else FIRST
    for name, _ in model.named_modules():
        if name and "." not in name and not decoder_name.startswith(name):
            devices[name] = SECOND
    return dispatch_model(model, devices, main_device=FIRST, skip_keys=model._skip_keys_device_placement)


def device_of(tensor: Tensor) -> torch.device:
    """The device that a tensor pretends to be on."""
    if tensor.is_meta:
        return torch.device("meta")
    return getattr(tensor.untyped_storage(), "pretended", HOST)


def _place(tensor: Tensor, device: torch.device | str | None) -> Tensor:
    if not tensor.is_meta:
        storage: Any = tensor.untyped_storage()
        storage.pretended = HOST if device is None else torch.device(device)
        _NAMED.append(storage)
    return tensor


class _Watch(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        options = kwargs or {}
        device = _device_for(func._schema.name, args, options)
        result = func(*args, **options)
        for tensor in _tensors_in(tree_leaves(result)):
            has_device = tensor.is_meta or hasattr(tensor.untyped_storage(), "pretended")
            if not has_device:
                _place(tensor, device)
        return result


def _tensors_in(values: Iterable[Any]) -> list[Tensor]:
    return [value for value in values if isinstance(value, Tensor)]


def _device_for(name: str, args: Any, options: dict[str, Any]) -> torch.device:
    """Where the result of an operation lies."""
    if name in _COPIES:  # of autograd's, which knows the CPU alone; others are those of `_to_device`
        return device_of(args[0])
    if name.startswith(("aten::_foreach_", "aten::_fused_")):  # torch sorts such lists by device
        lists = [arg for arg in args if isinstance(arg, list) and arg]
        devices = [_common_device(name, _tensors_in(column)) for column in zip(*lists, strict=True)]
        return devices[0] or HOST
    if name in _INDEXED:
        indices = [index for index in args[1] if index is not None and device_of(index) != HOST]
        args = (args[0], indices, *args[2:])
    tensors = [*_without_host_numbers(args), *_without_host_numbers(options.values())]
    for arg in args:
        if isinstance(arg, list | tuple):
            tensors += _tensors_in(arg)
    common = _common_device(name, tensors)
    device = options.get("device")
    if device is not None and (device != HOST or common is None):
        return device  # the CPU's beside a tensor is autograd's, which knows no other device
    return common or HOST


def _without_host_numbers(values: Iterable[Any]) -> list[Tensor]:
    """The tensors among some values, without numbers on `HOST` unless they are all such."""
    tensors = _tensors_in(values)
    return [tensor for tensor in tensors if tensor.dim() or device_of(tensor) != HOST] or tensors


def _common_device(name: str, tensors: Iterable[Tensor]) -> torch.device | None:
    """The device of all tensors of an operation; None where there are none, an error where there are several."""
    devices = {device_of(tensor) for tensor in tensors}
    if len(devices) > 1:
        raise RuntimeError(f"{name}: tensors on {', '.join(sorted(map(str, devices)))}")
    return devices.pop() if devices else None


class _Move(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, device: torch.device) -> Tensor:
        ctx.device = device_of(tensor)
        return _place(tensor.clone(), device)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return _place(gradients[0].clone(), ctx.device), None


def _to_device(tensor: Tensor, *args: Any, **options: Any) -> Tensor:
    """In place of `Tensor.to`."""
    others = _tensors_in((*args, options.pop("other", None)))
    device, dtype, _, _ = _nn._parse_to(*args, **options)
    if others:
        device = device_of(others[0])
    converted: Tensor = tensor if dtype is None else _to(tensor, dtype)
    if device is not None and device.type == "meta":
        return _to(converted, device)
    if device is None or tensor.is_meta or device == device_of(tensor):
        return converted.clone() if options.get("copy") else converted
    moved: Tensor = _Move.apply(converted, device)
    return moved


def _on_named_device(make: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """A function that makes a tensor on the device that it is told."""
    return lambda *args, **options: _place(make(*args, **options), options.get("device"))


def _on_device_of_first(make: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """A function that makes a tensor beside its first argument, a tensor or a list of some."""

    def make_beside(first: Any, *args: Any, **options: Any) -> Tensor:
        tensor = first if isinstance(first, Tensor) else first[0]
        return _place(make(first, *args, **options), device_of(tensor))

    return make_beside


def _with_mask_here(attend: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Makes the causal mask here: where torch (2.7, of grouped heads) makes it, it knows the CPU alone."""

    def attend_with_mask(query: Tensor, key: Tensor, value: Tensor, is_causal: bool = False, **options: Any) -> Tensor:
        if is_causal:
            mask = torch.ones(query.shape[-2], key.shape[-2], dtype=torch.bool).tril()
            options |= {"attn_mask": _place(mask, device_of(query))}
        return attend(query, key, value, **options)

    return attend_with_mask


def _numpy_of_host(numpy: Any) -> Callable[..., Any]:
    """The array of a tensor, which must be on `HOST`."""

    def checked(tensor: Tensor, *args: Any, **options: Any) -> Any:
        if device_of(tensor) != HOST:
            raise TypeError(f"numpy of a tensor on {device_of(tensor)}")
        return numpy(tensor, *args, **options)

    return checked
