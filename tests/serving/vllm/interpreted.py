"""Loads the backend of `keepsight.serving.vllm.ragged_triton` with vLLM's Triton sources, in Triton's interpreter.

vLLM's CPU build does not import Triton. So the modules in `SOURCES` are read from its files, and stand-ins take the
place of all others. Run with TRITON_INTERPRET=1 and vLLM's folder as the argument: it compares a step with a loop.
"""

import enum
import importlib.abc
import importlib.machinery
import importlib.util
import sys
import types
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import torch
import triton
from torch import Tensor
from triton import language as tl

SOURCES = {
    "vllm.v1.attention.backends.triton_attn",
    "vllm.v1.attention.ops.triton_unified_attention",
    "vllm.v1.attention.ops.triton_attention_helpers",
    "vllm.v1.attention.ops.triton_reshape_and_cache_flash",
    "vllm.utils.math_utils",
}
LAYERS, BLOCKS, HEADS, SIZE, WIDTH, GROUP = 2, 12, 2, 16, 32, 2


class Mode(enum.IntEnum):
    """vLLM's KVQuantMode."""

    NONE = 0
    FP8_PER_TENSOR = 1
    INT8_PER_TOKEN_HEAD = 2
    FP8_PER_TOKEN_HEAD = 3
    INT4_PER_TOKEN_HEAD = 4


PLATFORM = MagicMock()
PLATFORM.fp8_dtype.return_value = torch.float8_e4m3fn
for question in ("is_cuda", "is_xpu", "is_rocm", "is_device_capability", "is_device_capability_family"):
    getattr(PLATFORM, question).return_value = False
PLATFORM.is_cuda_alike.return_value = False
KINDS = SimpleNamespace(DECODER="decoder", ENCODER="encoder", ENCODER_ONLY="only", ENCODER_DECODER="both")
FP8 = "vllm.model_executor.layers.quantization.utils.quant_utils"
GIVEN: dict[str, dict[str, Any]] = {
    FP8: {"get_fp8_min_max": lambda: (-448.0, 448.0)},
    "vllm.envs": {"VLLM_BATCH_INVARIANT": False},
    "vllm.platforms": {"current_platform": PLATFORM},
    "vllm.triton_utils": {"triton": triton, "tl": tl},
    "vllm.utils.torch_utils": {"is_quantized_kv_cache": lambda dtype: False, "get_dtype_size": lambda t: t.itemsize},
    "vllm.v1.kv_cache_interface": {"KVQuantMode": Mode},
    "vllm.v1.attention.backend": {"AttentionType": KINDS},
}


class StandIn(types.ModuleType):
    """A module whose classes are empty, and whose functions do nothing."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__path__ = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        value: Any = MagicMock()
        if name[0].isupper():
            generic = {"__class_getitem__": classmethod(lambda cls, key: cls), "NEVER": 0, "ALWAYS": 1, "LBHNC": 2}
            value = type(name, (), generic)
        setattr(self, name, value)
        return value


class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds the modules of vLLM in its folder, or makes stand-ins."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name.partition(".")[0] != "vllm":
            return None
        if name in SOURCES:
            file = self.folder.parent.joinpath(*name.split(".")).with_suffix(".py")
            return importlib.util.spec_from_file_location(name, file)
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: Any) -> types.ModuleType:
        module = StandIn(spec.name)
        for name, value in GIVEN.get(spec.name, {}).items():
            setattr(module, name, value)
        return module

    def exec_module(self, module: types.ModuleType) -> None:
        """Nothing."""


def slow(query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """One query [d] at the end of keys and values [n, d]."""
    weights = (keys @ query * WIDTH**-0.5).softmax(0)
    return weights @ values


def main(folder: Path) -> None:
    """A step of three requests: one with a prefix and a question of 3 tokens, one with a token, an ordinary one."""
    sys.meta_path.insert(0, Finder(folder))
    from keepsight.serving.vllm import ragged
    from keepsight.serving.vllm.ragged_triton import RaggedTritonImpl

    torch.cuda.get_device_capability = lambda device=None: (9, 0)
    torch.manual_seed(0)
    impl: Any = object.__new__(RaggedTritonImpl)
    settings = {"num_heads": HEADS * GROUP, "num_kv_heads": HEADS, "head_size": WIDTH, "scale": WIDTH**-0.5}
    settings |= {"sliding_window": (-1, -1), "logits_soft_cap": 0, "kv_cache_dtype": "auto", "attn_type": "decoder"}
    settings |= {"_is_per_token_head_quant": False, "sinks": None, "alibi_slopes": None}
    vars(impl).update(settings)
    buffer = torch.randn(LAYERS, BLOCKS, HEADS, SIZE, 2 * WIDTH)
    names = [f"layer {index}" for index in range(LAYERS)]
    layers = [
        SimpleNamespace(layer_name=name, impl=impl, _k_scale=torch.ones(1), _v_scale=torch.ones(1)) for name in names
    ]
    shared = ragged.shared_by(dict(zip(names, layers, strict=True)), dict(zip(names, buffer, strict=True)))
    assert shared is not None and impl.shared is shared

    pages = torch.tensor([[1, 3], [2, 2]])  # of each layer and head: 8 pages in 2 blocks of 4
    total = int(pages.sum())
    prefix = {"keys": torch.randn(total * SIZE, WIDTH), "values": torch.randn(total * SIZE, WIDTH), "pages": pages}
    header: Any = SimpleNamespace(page=SIZE, shape=(LAYERS, HEADS, WIDTH))
    tables = torch.tensor([[5, 2, 7], [3, 9, 1], [4, 0, 0]])
    lengths = torch.tensor([2 * SIZE + 5, 2 * SIZE + 1, 9])  # the first two have 2 blocks of placeholders
    starts = torch.tensor([0, 3, 4, 5])
    for row in (0, 1):
        ragged.load(layers[0], shared.layout, header, prefix, tables[row].tolist(), 0, torch.float32)
        shared.prefixes[int(tables[row, 0])] = ragged.Pages(pages)
    metadata = SimpleNamespace(
        num_actual_tokens=5, query_start_loc=starts.int(), block_table=tables.int(), seq_lens=lengths.int(), causal=True
    )

    first_pages = (pages.flatten().cumsum(0) - pages.flatten()).view_as(pages)
    for index, layer in enumerate(layers):
        query = torch.randn(5, HEADS * GROUP, WIDTH)
        output = torch.zeros_like(query)
        impl.forward(layer, query, None, None, buffer[index], metadata, output)
        for row in range(3):
            for head in range(HEADS):
                own_blocks = tables[row, 2:] if row < 2 else tables[row]
                own = int(lengths[row]) - (2 * SIZE if row < 2 else 0)
                entries = buffer[index, own_blocks, head].flatten(0, 1)[:own]
                keys, values = entries.split(WIDTH, dim=1)
                if row < 2:
                    first = int(first_pages[index, head]) * SIZE
                    stop = first + int(pages[index, head]) * SIZE
                    keys = torch.cat([prefix["keys"][first:stop], keys])
                    values = torch.cat([prefix["values"][first:stop], values])
                count = int(starts[row + 1] - starts[row])
                for token in range(count):
                    seen = len(keys) - (count - 1 - token)
                    for member in range(head * GROUP, (head + 1) * GROUP):
                        place = int(starts[row]) + token
                        expected = slow(query[place, member], keys[:seen], values[:seen])
                        torch.testing.assert_close(output[place, member], expected, atol=1e-5, rtol=1e-4)
    print("equal")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
