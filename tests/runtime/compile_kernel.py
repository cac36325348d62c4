"""Compile a kernel for a GPU, which need not be there: python -m THIS packed|ragged fp32|fp16|bf16."""

import inspect
import sys
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from keepsight.runtime import ragged_kernel
from keepsight.runtime.quantized import kernel

TYPES = dict.fromkeys(("key_codes", "value_codes"), "*u8") | dict.fromkeys(("starts", "ends"), "*i64")
TYPES |= dict.fromkeys(("outputs", "totals", "logits"), "*fp32") | {"slots": "*i32", "scaling": "fp32"}
OF_MODEL = ["query", "keys", "values", "key_scale", "key_zero", "value_scale", "value_zero"]
OF_MODEL += ["recent_keys", "recent_values", "fetched_keys", "fetched_values"]
SHAPES: dict[str, Any] = {"SOFTCAP": 5.0, "WIDTH": 96, "COLUMNS": 128, "PADDED": 16}
PACKED = {"BITS": 2, "GROUP": 32, "ROWS": 8, "QUERIES": 2, "PART": kernel.PART, "BLOCK": kernel.BLOCK, "FETCHED": True}
RAGGED = {"PART": ragged_kernel.PART, "BLOCK": ragged_kernel.BLOCK, "PADDED": ragged_kernel.MOST_ROWS}


def compiled(name: str, dtype: str) -> Any:
    """A kernel for a model in `dtype`, on an A100."""
    of_kernel: dict[str, tuple[Any, dict[str, Any], dict[str, int]]] = {
        "packed": (kernel.attend_part, SHAPES | PACKED, {"num_stages": kernel.STAGES}),
        "ragged": (ragged_kernel.attend_part, SHAPES | RAGGED, {"num_stages": ragged_kernel.STAGES}),
    }
    function, constants, stages = of_kernel[name]
    types = TYPES | dict.fromkeys(OF_MODEL, f"*{dtype}") | dict.fromkeys(constants, "constexpr")
    signature = {each: types.get(each, "i32") for each in inspect.signature(function).parameters}
    source = ASTSource(triton.jit(function), signature, constants)
    return triton.compile(source, target=GPUTarget("cuda", 80, 32), options=stages)


if __name__ == "__main__":
    made = compiled(*sys.argv[1:])
    print("mma.sync" in made.asm["ptx"], len(made.asm["cubin"]) > 1000, made.metadata.shared)
