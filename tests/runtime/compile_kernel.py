"""Compile a kernel for a GPU, which need not be present: python -m THIS packed|ragged fp32|fp16|bf16."""

import inspect
import sys
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from keepsight.runtime import ragged_kernel
from keepsight.runtime.quantized import kernel

FIXED_TYPES = {
    "key_codes": "*u8",
    "value_codes": "*u8",
    "starts": "*i64",
    "ends": "*i64",
    "outputs": "*fp32",
    "totals": "*fp32",
    "logits": "*fp32",
    "slots": "*i32",
    "scaling": "fp32",
}
"""Types of arguments that do not depend on the model; an argument without a line is an int32."""
MODEL_TENSORS = [
    "query",
    "keys",
    "values",
    "key_scale",
    "key_zero",
    "value_scale",
    "value_zero",
    "recent_keys",
    "recent_values",
    "fetched_keys",
    "fetched_values",
]
"""Arguments in the dtype of the model."""
SHAPES: dict[str, Any] = {"SOFTCAP": 5.0, "WIDTH": 96, "COLUMNS": 128, "PADDED": 16}
PACKED = {"BITS": 2, "GROUP": 32, "ROWS": 8, "QUERIES": 2, "PART": kernel.PART, "BLOCK": kernel.BLOCK, "FETCHED": True}
RAGGED = {"PART": ragged_kernel.PART, "BLOCK": ragged_kernel.BLOCK, "PADDED": ragged_kernel.MOST_ROWS}


def compiled(name: str, dtype: str) -> Any:
    """A kernel for a model in `dtype`, on an A100."""
    kernels: dict[str, tuple[Any, dict[str, Any], dict[str, int]]] = {
        "packed": (kernel.attend_part, SHAPES | PACKED, {"num_stages": kernel.STAGES}),
        "ragged": (ragged_kernel.attend_part, SHAPES | RAGGED, {"num_stages": ragged_kernel.STAGES}),
    }
    function, constants, stages = kernels[name]
    types = FIXED_TYPES | dict.fromkeys(MODEL_TENSORS, f"*{dtype}") | dict.fromkeys(constants, "constexpr")
    arguments = inspect.signature(function).parameters
    signature = {argument: types.get(argument, "i32") for argument in arguments}
    source = ASTSource(triton.jit(function), signature, constants)
    return triton.compile(source, target=GPUTarget("cuda", 80, 32), options=stages)


if __name__ == "__main__":
    binary = compiled(*sys.argv[1:])
    uses_tensor_cores = "mma.sync" in binary.asm["ptx"]
    has_code = len(binary.asm["cubin"]) > 1000
    print(uses_tensor_cores, has_code, binary.metadata.shared)
