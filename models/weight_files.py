"""Tensors read strictly from a safetensors file: missing, surplus, misshapen and non-finite ones are named."""

from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from keepsight.errors import UserError
from keepsight.files import file_digest

LARGEST_SIZE = 1 << 24
"""Of what a configuration may say: no width, vocabulary or number of heads is larger."""
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def check_digest(path: Path, expected: str, said_by: str) -> None:
    """Check a file against the digest recorded in the file named `said_by`.

    Raises:
        UserError: it differs.
    """
    if (found := file_digest(path)) != expected:
        raise UserError(f"{path}: its digest is {found}, {said_by} says {expected}; fetch it again")


def read_tensors(path: Path) -> dict[str, Tensor]:
    """The tensors of a file by name, on the CPU.

    Raises:
        UserError: it is no safetensors file.
    """
    try:
        with safe_open(path, framework="pt") as tensors:
            return {name: tensors.get_tensor(name) for name in tensors.keys()}  # noqa: SIM118
    except SafetensorError as error:
        raise UserError(f"{path}: not a safetensors file ({error}); fetch it again") from None


def check_names_and_shapes(path: Path, tensors: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    """Check that a file's tensors are those of a module, whose `state_dict` is `expected`.

    Raises:
        UserError: a tensor is missing, surplus, or of another shape.
    """
    missing, surplus = sorted(expected.keys() - tensors.keys()), sorted(tensors.keys() - expected.keys())
    for names, fault in ((missing, "missing"), (surplus, "surplus")):
        if names:
            more = f", and {len(names) - 1} more" if len(names) > 1 else ""
            raise UserError(f"{path}: tensor {names[0]!r} is {fault}{more}; the configuration beside it differs")
    for name, tensor in tensors.items():
        given, needed = list(tensor.shape), list(expected[name].shape)
        if given != needed:
            raise UserError(f"{path}: tensor {name!r} has shape {given}, the configuration beside it needs {needed}")


def as_weights(path: Path, tensors: Mapping[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    """The tensors in another dtype.

    Raises:
        UserError: a tensor is quantised or, in that dtype, not finite.
    """
    weights = {}
    for name, tensor in tensors.items():
        if tensor.dtype not in _DTYPES:
            raise UserError(f"{path}: tensor {name!r} is {tensor.dtype}; expected float32, bfloat16 or float16")
        weights[name] = tensor.to(dtype)
        if not weights[name].isfinite().all():
            raise UserError(f"{path}: tensor {name!r} holds NaN or infinity in {dtype}; fetch it again")
    return weights


def one_line(error: Exception) -> str:
    """The message of an error on one line, cut off after 200 characters."""
    return " ".join(str(error).split())[:200]
