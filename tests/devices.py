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
FIRST, SECOND = torch.device("cpu", 0), torch.device("cpu", 1)
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
        patch.setattr(TrainingArguments, "device", property(lambda given: given._setup_devices and FIRST))
        patch.setattr(Tensor, "device", property(device_of), raising=False)
        patch.setattr(Tensor, "to", _moved)
        patch.setattr(Tensor, "cpu", lambda given: _moved(given, HOST))
        patch.setattr(Tensor, "numpy", _numpy_of(Tensor.numpy))
        patch.setattr(torch, "tensor", _made(torch.tensor))
        for owner, name in ((Tensor, "new_tensor"), (Tensor, "__deepcopy__"), (_nn, "pad_sequence")):
            patch.setattr(owner, name, _like_first(getattr(owner, name)))
        patch.setattr(functional, "scaled_dot_product_attention", _attending(functional.scaled_dot_product_attention))
        yield
    _NAMED.clear()


def in_halves(model: Any) -> Any:
    """A model whose second half of layers is on `SECOND`, and all before on `FIRST`, as accelerate places them."""
    decoder = decoder_of(model)
    start = next(name for name, module in model.named_modules() if module is decoder)
    parts = {f"{start}.{name}": name == "norm" for name, _ in decoder.named_children() if name != "layers"}
    parts |= {f"{start}.layers.{place}": place >= len(decoder.layers) / 2 for place in range(len(decoder.layers))}
    others = [name for name, _ in model.named_modules() if name and not start.startswith(name) and "." not in name]
    places: dict[str, Any] = {name: SECOND if later else FIRST for name, later in parts.items()}
    places |= dict.fromkeys(others, SECOND)
    return dispatch_model(model, places, main_device=FIRST, skip_keys=model._skip_keys_device_placement)


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
        name, options = func._schema.name, kwargs or {}
        device = _device_for(name, args, options)
        result = func(*args, **options)
        for each in tree_leaves(result):
            if isinstance(each, Tensor) and not (each.is_meta or hasattr(each.untyped_storage(), "pretended")):
                _place(each, device)
        return result


def _device_for(name: str, args: Any, options: dict[str, Any]) -> torch.device:
    """Where the result of an operation lies."""
    if name in _COPIES:  # of autograd's, which knows the CPU alone; others are `_moved`
        return device_of(args[0])
    if name.startswith(("aten::_foreach_", "aten::_fused_")):  # torch sorts such lists by device
        columns = zip(*(each for each in args if isinstance(each, list) and each), strict=True)
        places = [_common(name, column) for column in columns]
        return places[0] or HOST
    if name in _INDEXED:
        args = args[0], [each for each in args[1] if each is not None and device_of(each) != HOST], *args[2:]
    lists = [each for arg in args if isinstance(arg, list | tuple) for each in arg]
    found = _common(name, [*_numbers_aside(args), *_numbers_aside(options.values()), *lists])
    device = options.get("device")  # beside a tensor, the CPU's is autograd's, which knows no other
    return device if device is not None and (device != HOST or found is None) else found or HOST


def _numbers_aside(given: Iterable[Any]) -> list[Any]:
    tensors = [each for each in given if isinstance(each, Tensor)]
    return [each for each in tensors if each.dim() or device_of(each) != HOST] or tensors


def _common(name: str, given: Iterable[Any]) -> torch.device | None:
    found = {device_of(each) for each in given if isinstance(each, Tensor)}
    if len(found) > 1:
        raise RuntimeError(f"{name}: tensors on {', '.join(sorted(map(str, found)))}")
    return found.pop() if found else None


class _Move(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, given: Tensor, device: torch.device) -> Tensor:
        ctx.device = device_of(given)
        return _place(given.clone(), device)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return _place(gradients[0].clone(), ctx.device), None


def _moved(given: Tensor, *args: Any, **options: Any) -> Tensor:
    others = [each for each in (*args, options.pop("other", None)) if isinstance(each, Tensor)]
    device, dtype, _, _ = _nn._parse_to(*args, **options)
    device = device_of(others[0]) if others else device
    here: Tensor = given if dtype is None else _to(given, dtype)
    if device is not None and device.type == "meta":
        return _to(here, device)
    if device is None or given.is_meta or device == device_of(given):
        return here.clone() if options.get("copy") else here
    moved: Tensor = _Move.apply(here, device)
    return moved


def _made(make: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return lambda *args, **options: _place(make(*args, **options), options.get("device"))


def _like_first(make: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def made(given: Any, *args: Any, **options: Any) -> Tensor:
        return _place(make(given, *args, **options), device_of(given if isinstance(given, Tensor) else given[0]))

    return made


def _attending(attend: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Makes the causal mask here: where torch (2.7, of grouped heads) makes it, it knows the CPU alone."""

    def attended(query: Tensor, key: Tensor, value: Tensor, is_causal: bool = False, **options: Any) -> Tensor:
        if is_causal:
            seen = torch.ones(query.shape[-2], key.shape[-2], dtype=torch.bool).tril()
            options |= {"attn_mask": _place(seen, device_of(query))}
        return attend(query, key, value, **options)

    return attended


def _numpy_of(numpy: Any) -> Callable[..., Any]:
    def checked(given: Tensor, *args: Any, **options: Any) -> Any:
        if device_of(given) != HOST:
            raise TypeError(f"numpy of a tensor on {device_of(given)}")
        return numpy(given, *args, **options)

    return checked
