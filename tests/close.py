"""Tensors that are equal but for rounding."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

# Units of rounding of a tensor's largest entry. Processors and numbers of threads add up in different orders, and what
# that changes in one entry follows the size of all that were added, not of that entry. Seen on plain, AVX2 and AVX512
# kernels: up to 43 units in float32 (in gradients), 15 in float64, 4 in bfloat16.
UNITS = {torch.float64: 256, torch.float32: 256, torch.float16: 16, torch.bfloat16: 8}


def rounding(expected: Tensor, computed_in: torch.dtype | None = None) -> float:
    """How far apart two results that should be `expected` may be."""
    dtype = computed_in or expected.dtype
    finite = expected.detach().double()[expected.isfinite()]
    if not finite.numel():
        return 0.0
    return UNITS[dtype] * torch.finfo(dtype).eps * finite.abs().max().item()


def assert_close(actual: Any, expected: Any, computed_in: torch.dtype | None = None) -> None:
    """Fail unless two tensors, or sequences or mappings of tensors, are equal but for rounding.

    Args:
        actual: What is tested.
        expected: What it should be, of the same shapes and dtypes.
        computed_in: Coarsest dtype of the computation, where it is not that of `expected`.
    """
    if isinstance(expected, Mapping):
        assert actual.keys() == expected.keys()
        for name, tensor in expected.items():
            assert_close(actual[name], tensor, computed_in)
    elif isinstance(expected, Sequence):
        for actual_tensor, expected_tensor in zip(actual, expected, strict=True):
            assert_close(actual_tensor, expected_tensor, computed_in)
    else:
        torch.testing.assert_close(actual, expected, rtol=0, atol=rounding(expected, computed_in))
