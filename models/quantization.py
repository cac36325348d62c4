"""Targets that are quantised while they are loaded, or lie on several GPUs and the CPU."""

from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from typing import Any

import torch
from accelerate.utils import get_max_memory
from torch import nn
from transformers import BitsAndBytesConfig

from keepsight.errors import UserError

QUANTIZE = ("nf4", "int8")


def placement(
    quantize: str | None, device_map: str | Mapping[str, str] | None, devices: Sequence[str], dtype: torch.dtype
) -> dict[str, Any]:
    """Arguments of `from_pretrained` for where weights go and how they are stored; none for the ordinary case.

    Args:
        quantize: `nf4`, in 4 bits (arXiv 2305.14314, with the second quantisation of its scales), or `int8`
            (arXiv 2208.07339); None for neither.
        device_map: `auto` for the devices and, where these are full, the CPU and then the disk, or a device for each
            part by its name; None for the first device alone.
        devices: Where the model may run.
        dtype: What is computed in.

    Raises:
        UserError: a value is unknown, or bitsandbytes is not installed.
    """
    if isinstance(device_map, str) and device_map != "auto":
        raise UserError(f"model.device_map={device_map} is unknown here; choose auto, or null for model.device alone")
    if quantize is None:
        return _spread(device_map, devices) if device_map else {}
    if quantize not in QUANTIZE:
        raise UserError(f"model.quantize={quantize} is unknown; choose one of {', '.join(QUANTIZE)}, or null")
    if find_spec("bitsandbytes") is None:
        raise UserError(f"model.quantize={quantize} needs the package bitsandbytes; run `pip install bitsandbytes`")
    kinds: dict[str, dict[str, Any]] = {
        "nf4": {
            "load_in_4bit": True,
            "bnb_4bit_quant_type": "nf4",
            "bnb_4bit_use_double_quant": True,
            "bnb_4bit_compute_dtype": dtype,
        },
        "int8": {"load_in_8bit": True},
    }
    placed = _spread(device_map or {"": devices[0]}, devices)
    return {**placed, "quantization_config": BitsAndBytesConfig(**kinds[quantize])}


def _spread(device_map: str | Mapping[str, str], devices: Sequence[str]) -> dict[str, Any]:
    if device_map != "auto":
        return {"device_map": device_map}
    own = [torch.device(each).index or 0 for each in devices]
    memory = {each: most for each, most in get_max_memory().items() if each in own or not isinstance(each, int)}
    return {"device_map": "auto", "max_memory": memory}


def keep_gradients(model: nn.Module) -> None:
    """Have bitsandbytes leave 4-bit weights on a CPU as they are, so that gradients flow through them.

    On processors with AVX512-BF16 it would pack them at the first pass without gradients, for inference alone.
    """
    for module in model.modules():
        if hasattr(module, "support_avx512bf16_for_cpu"):
            module.support_avx512bf16_for_cpu = False  # type: ignore[assignment]
