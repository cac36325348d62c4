"""The CUDA kernel against the operators that it stands for: run by Triton's interpreter, and compiled for GPUs."""

import importlib.util
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor

from keepsight.runtime import ragged_kernel
from keepsight.runtime.attention import Softmax
from keepsight.runtime.offload import FetchedEntries
from keepsight.runtime.quantized import kernel
from keepsight.runtime.quantized.kernel import attend_packed
from keepsight.runtime.quantized.packing import PackedEntries, Quantizer
from keepsight.runtime.quantized.specache import SpeCache
from tests.close import assert_close
from tests.runtime.scoring import score_answer
from tests.tiny import prompt_ids, tiny_model

KV_HEADS = 2
GROUP = 3
"""Query heads of a KV head."""
WIDTH = 24
RESIDUAL = 16
SCALING = 0.3
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several parts and blocks for a few entries."""
    monkeypatch.setattr(kernel, "PART", 32)
    monkeypatch.setattr(kernel, "BLOCK", 16)


def random_states(length: int, seed: int, heads: int = KV_HEADS, dtype: torch.dtype = torch.float32) -> Tensor:
    """Keys, values or queries [2, heads, length, WIDTH]."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(2, heads, length, WIDTH, generator=generator).to(DEVICE, dtype)


def random_queries(rows: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return random_states(rows, 5, KV_HEADS * GROUP, dtype)


def packed_entries(length: int, bits: int = 2, dtype: torch.dtype = torch.float32, answer: int = 3) -> PackedEntries:
    """Those of a prompt and a few tokens after it, which have moved the packed ones into a room with spare space."""
    keys = random_states(length, 0, dtype=dtype)
    values = random_states(length, 1, dtype=dtype)
    packed = PackedEntries.pack(Quantizer(bits, 8), RESIDUAL, keys[:, :, :-answer], values[:, :, :-answer])
    for token in range(length - answer, length):
        packed = packed.with_recent(keys[:, :, token : token + 1], values[:, :, token : token + 1]).packed()
    return packed


def fetched_entries(packed: PackedEntries, count: int) -> FetchedEntries:
    """Entries beside each other, as they come from the CPU: keys and values of one row."""
    generator = torch.Generator().manual_seed(2)
    indices = torch.stack(
        [torch.randperm(packed.packed_length, generator=generator)[:count] for _ in range(2 * KV_HEADS)]
    )
    keys_and_values = torch.cat([random_states(count, 3), random_states(count, 4)], dim=3)
    keys, values = keys_and_values.to(packed.recent_keys.dtype).chunk(2, dim=3)
    return FetchedEntries(indices.view(2, KV_HEADS, count).to(DEVICE), keys, values)


def assert_same(packed: PackedEntries, softmax: Softmax, rows: int = 1, fetched: FetchedEntries | None = None) -> None:
    """The kernel's attention and scores are those of the operators."""
    dtype = packed.recent_keys.dtype
    query = random_queries(rows, dtype)
    scored = packed.packed_length
    in_kernel = kernel.attend_in_kernel(query, packed, softmax, fetched, scored)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernel, "usable", lambda query: False)
        by_operators = attend_packed(query, packed, softmax, fetched, scored)
    for result, expected in zip(in_kernel, by_operators, strict=True):
        assert result.shape == expected.shape
        assert result.dtype == expected.dtype
        assert_close(result, expected, dtype)


@pytest.mark.parametrize(("length", "rows"), [(5, 1), (16, 2), (40, 2), (150, 1)])
def test_every_length(length: int, rows: int) -> None:
    """All recent, all keys packed, keys packed and values not, both; one part and several."""
    assert_same(packed_entries(length), Softmax(SCALING), rows)


@pytest.mark.parametrize(("bits", "dtype"), [(1, torch.float16), (2, torch.float16), (4, torch.float32)])
def test_every_number_of_bits_and_dtype(bits: int, dtype: torch.dtype) -> None:
    """Except bfloat16, whose numbers the interpreter multiplies as if they were whole."""
    assert_same(packed_entries(70, bits, dtype), Softmax(SCALING))


@pytest.mark.parametrize("apart", [True, False])
def test_fetched_entries_are_read_in_place_of_packed_ones(apart: bool) -> None:
    packed = packed_entries(90)
    fetched = fetched_entries(packed, 7)
    if apart:
        transposed_values = fetched.values.mT.contiguous().mT
        fetched = FetchedEntries(fetched.indices, fetched.keys.clone(), transposed_values)
    assert_same(packed, Softmax(SCALING), 2, fetched)

    query = random_queries(2)
    without_fetched = attend_packed(query, packed, Softmax(SCALING), None)[0]
    with_fetched = attend_packed(query, packed, Softmax(SCALING), fetched)[0]
    assert not torch.allclose(without_fetched, with_fetched, atol=1e-3)


def test_softcaps_and_sinks() -> None:
    packed = packed_entries(60)
    assert_same(packed, Softmax(SCALING, 5.0, torch.arange(6.0)), 2, fetched_entries(packed, 5))


def transposed_states(length: int, seed: int) -> Tensor:
    """States whose heads lie beside each other in memory, as a model's projections return them."""
    return random_states(length, seed).transpose(1, 2).contiguous().transpose(1, 2)


def test_prompts_whose_keys_are_transposed_and_nothing_is_packed() -> None:
    packed = PackedEntries.pack(Quantizer(2, 8), RESIDUAL, transposed_states(10, 0), transposed_states(10, 1))
    assert not packed.recent_keys.is_contiguous()
    assert_same(packed, Softmax(SCALING))


def test_queries_that_are_a_part_of_larger_rows() -> None:
    """As after a projection that makes queries, keys and values at once."""
    packed = packed_entries(40)
    wide = random_queries(1).repeat(1, 1, 1, 2)
    contiguous = wide[..., :WIDTH].contiguous()
    strided = wide[..., WIDTH:]
    result = kernel.attend_in_kernel(strided, packed, Softmax(SCALING), None, 5)
    expected = kernel.attend_in_kernel(contiguous, packed, Softmax(SCALING), None, 5)
    assert_close(result, expected)


def test_answers_are_those_without_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    method = SpeCache(1, 8, 16, 4)
    model = tiny_model(head_dim=16, pad_token_id=None)
    ids, _ = prompt_ids(40)
    answer = prompt_ids(3, seed=1)[0]
    expected, _ = score_answer(method.reader(model), method.start(model, ids), answer)
    usable = Mock(return_value=True)
    monkeypatch.setattr(kernel, "usable", usable)
    nll, _ = score_answer(method.reader(model), method.start(model, ids), answer)
    assert_close(nll, expected)
    usable.assert_called()


def test_it_is_not_used_where_triton_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KEEPSIGHT_EXPERIMENTAL", "kernel")
    monkeypatch.setattr(ragged_kernel, "HAS_TRITON", False)
    spec = importlib.util.spec_from_file_location("kernel_without_triton", kernel.__file__)
    assert spec is not None
    assert spec.loader is not None
    without_triton = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(without_triton)
    monkeypatch.setattr(without_triton, "can_compile", ragged_kernel.can_compile.__wrapped__)
    assert not hasattr(without_triton, "triton")
    assert not without_triton.usable(SimpleNamespace(is_cuda=True))
