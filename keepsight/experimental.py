"""Paths on a GPU that have not been shown to be faster there.

They are off unless `KEEPSIGHT_EXPERIMENTAL` names them (`kernel,streams`, or `all`); another path gives the same
result. `make test-gpu` and `make bench-gpu` turn all of them on, and `docs/performance.md` lists what is experimental.
"""

import os

from keepsight.errors import UserError

VARIABLE = "KEEPSIGHT_EXPERIMENTAL"
PATHS = {
    "kernel": "packed entries are read by a Triton kernel, which unpacks them in registers",
    "flex": "SpecKV's sparse prefill is one FlexAttention",
    "streams": "entries come from CPU memory on a stream of their own, beside the model",
    "graph": "a decoding step is replayed from a CUDA graph",
    "flash": "model.attention=auto takes flash_attention_2 where flash-attn is installed",
}
"""Each path by its name, and what it does."""


def is_on(path: str) -> bool:
    """Whether an experimental path is to be taken; UserError if the variable names one that does not exist."""
    names = set(filter(None, os.environ.get(VARIABLE, "").replace(" ", "").split(",")))
    unknown = names - {*PATHS, "all"}
    if unknown:
        raise UserError(
            f"{VARIABLE}: {min(unknown)!r} is unknown; choose from {', '.join(PATHS)}, or all",
            field=VARIABLE,
            code="unknown",
        )
    return path in names or "all" in names
