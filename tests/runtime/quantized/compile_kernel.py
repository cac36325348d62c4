"""Compile the kernel of packed attention for a GPU, which need not be there: python -m THIS fp32|fp16|bf16."""

import inspect
import sys
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from keepsight.runtime.quantized import kernel

INTEGERS = ("key_codes", "value_codes"), ("slots",)
FLOATS = ("outputs", "totals", "logits"), ("scaling",)
OF_MODEL = ["query", "key_scale", "key_zero", "value_scale", "value_zero"]
OF_MODEL += ["recent_keys", "recent_values", "fetched_keys", "fetched_values"]
CONSTANTS: dict[str, Any] = {"SOFTCAP": 5.0, "BITS": 2, "GROUP": 32, "WIDTH": 96, "COLUMNS": 128, "ROWS": 8}
CONSTANTS |= {"PADDED": 16, "QUERIES": 2, "PART": kernel.PART, "BLOCK": kernel.BLOCK, "FETCHED": True}


def compiled(dtype: str) -> Any:
    """The kernel for a model in `dtype`, on an A100."""
    types = dict.fromkeys(OF_MODEL, f"*{dtype}") | dict.fromkeys(CONSTANTS, "constexpr")
    for names, kind in zip((*INTEGERS, *FLOATS), ("*u8", "*i32", "*fp32", "fp32"), strict=True):
        types |= dict.fromkeys(names, kind)
    signature = {name: types.get(name, "i32") for name in inspect.signature(kernel.attend_part).parameters}
    source = ASTSource(triton.jit(kernel.attend_part), signature, CONSTANTS)
    return triton.compile(source, target=GPUTarget("cuda", 80, 32), options={"num_stages": kernel.STAGES})


if __name__ == "__main__":
    made = compiled(sys.argv[1])
    print("mma.sync" in made.asm["ptx"], len(made.asm["cubin"]) > 1000, made.metadata.shared)
