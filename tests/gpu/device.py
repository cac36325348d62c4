"""Where the tests marked `gpu` run: on CUDA, or they are skipped.

`KEEPSIGHT_TEST_DEVICE=cpu pytest tests/gpu` runs what does not need CUDA itself on the CPU: it tests the tests.
"""

import os
from typing import Any

import pytest
import torch

DEVICE = torch.device(os.environ.get("KEEPSIGHT_TEST_DEVICE", "cuda"))
ON_CUDA = DEVICE.type == "cuda"
_AVAILABLE = not ON_CUDA or torch.cuda.is_available()
GPU = [pytest.mark.gpu, pytest.mark.skipif(not _AVAILABLE, reason="needs CUDA, and torch finds no GPU here")]
"""For `pytestmark`."""
CUDA_ALONE = pytest.mark.skipif(not ON_CUDA, reason="needs CUDA itself: streams, syncs or memory_stats")
FLOATS = [torch.float32, torch.bfloat16, torch.float16]
SINGLE = FLOATS[:1] if not ON_CUDA else FLOATS
"""What kernels are compared in: Triton's interpreter, which stands in without CUDA, knows no bfloat16."""


def there(value: Any) -> Any:
    """A tensor or a model, or several tensors, on the device."""
    if isinstance(value, list | tuple):
        return [tensor.to(DEVICE) for tensor in value]
    return value.to(DEVICE)


def settled() -> None:
    """Wait for the device."""
    if ON_CUDA:
        torch.cuda.synchronize()
