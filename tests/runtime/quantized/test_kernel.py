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

KV_HEADS, GROUP, WIDTH, RESIDUAL = 2, 3, 24, 16
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several parts and blocks for a few entries."""
    monkeypatch.setattr(kernel, "PART", 32)
    monkeypatch.setattr(kernel, "BLOCK", 16)


def states(length: int, seed: int, heads: int = KV_HEADS, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(2, heads, length, WIDTH, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def entries(length: int, bits: int = 2, dtype: torch.dtype = torch.float32, answer: int = 3) -> PackedEntries:
    """Those of a prompt and a few tokens after it, which have moved the packed ones into a room with spare space."""
    keys, values = states(length, 0, dtype=dtype), states(length, 1, dtype=dtype)
    packed = PackedEntries.pack(Quantizer(bits, 8), RESIDUAL, keys[:, :, :-answer], values[:, :, :-answer])
    for token in range(length - answer, length):
        packed = packed.with_recent(keys[:, :, token : token + 1], values[:, :, token : token + 1]).packed()
    return packed


def some_fetched(packed: PackedEntries, count: int) -> FetchedEntries:
    """Entries beside each other, as they come from the CPU: keys and values of one row."""
    places = torch.Generator().manual_seed(2)
    indices = torch.stack([torch.randperm(packed.packed_length, generator=places)[:count] for _ in range(2 * KV_HEADS)])
    rows = torch.cat([states(count, 3), states(count, 4)], dim=3).to(packed.recent_keys.dtype)
    return FetchedEntries(indices.view(2, KV_HEADS, count).to(DEVICE), *rows.chunk(2, dim=3))


def assert_same(packed: PackedEntries, softmax: Softmax, rows: int = 1, fetched: FetchedEntries | None = None) -> None:
    query, scored = states(rows, 5, KV_HEADS * GROUP, packed.recent_keys.dtype), packed.packed_length
    found = kernel.attend_in_kernel(query, packed, softmax, fetched, scored)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernel, "usable", lambda query: False)
        expected = attend_packed(query, packed, softmax, fetched, scored)
    for one, other in zip(found, expected, strict=True):
        assert (one.shape, one.dtype) == (other.shape, other.dtype)
        assert_close(one, other, packed.recent_keys.dtype)


@pytest.mark.parametrize(("length", "rows"), [(5, 1), (16, 2), (40, 2), (150, 1)])
def test_every_length(length: int, rows: int) -> None:
    """All recent, all keys packed, keys packed and values not, both; one part and several."""
    assert_same(entries(length), Softmax(0.3), rows)


@pytest.mark.parametrize(("bits", "dtype"), [(1, torch.float16), (2, torch.float16), (4, torch.float32)])
def test_every_number_of_bits_and_dtype(bits: int, dtype: torch.dtype) -> None:
    """Except bfloat16, whose numbers the interpreter multiplies as if they were whole."""
    assert_same(entries(70, bits, dtype), Softmax(0.3))


@pytest.mark.parametrize("apart", [True, False])
def test_fetched_entries_are_read_in_place_of_packed_ones(apart: bool) -> None:
    packed = entries(90)
    fetched = some_fetched(packed, 7)
    if apart:
        fetched = FetchedEntries(fetched.indices, fetched.keys.clone(), fetched.values.mT.contiguous().mT)
    assert_same(packed, Softmax(0.3), 2, fetched)
    query = states(2, 5, KV_HEADS * GROUP)
    without, read = (attend_packed(query, packed, Softmax(0.3), each)[0] for each in (None, fetched))
    assert not torch.allclose(without, read, atol=1e-3)


def test_softcaps_and_sinks() -> None:
    packed = entries(60)
    assert_same(packed, Softmax(0.3, 5.0, torch.arange(6.0)), 2, some_fetched(packed, 5))


def test_prompts_whose_keys_are_transposed_and_nothing_is_packed() -> None:
    """As a model makes them."""
    keys, values = (states(10, seed).transpose(1, 2).contiguous().transpose(1, 2) for seed in (0, 1))
    packed = PackedEntries.pack(Quantizer(2, 8), RESIDUAL, keys, values)
    assert not packed.recent_keys.is_contiguous()
    assert_same(packed, Softmax(0.3))


def test_queries_that_are_a_part_of_larger_rows() -> None:
    """As after a projection that makes queries, keys and values at once."""
    packed, wide = entries(40), states(1, 5, KV_HEADS * GROUP).repeat(1, 1, 1, 2)
    whole, part = wide[..., :WIDTH].contiguous(), wide[..., WIDTH:]
    found, expected = (kernel.attend_in_kernel(each, packed, Softmax(0.3), None, 5) for each in (part, whole))
    assert_close(found, expected)


def test_answers_are_those_without_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    method, model, (ids, _) = SpeCache(1, 8, 16, 4), tiny_model(head_dim=16, pad_token_id=None), prompt_ids(40)
    answer = prompt_ids(3, seed=1)[0]
    expected, _ = score_answer(method.reader(model), method.start(model, ids), answer)
    usable = Mock(return_value=True)
    monkeypatch.setattr(kernel, "usable", usable)
    found, _ = score_answer(method.reader(model), method.start(model, ids), answer)
    assert_close(found, expected)
    usable.assert_called()


def test_it_is_not_used_where_triton_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KEEPSIGHT_EXPERIMENTAL", "kernel")
    monkeypatch.setattr(ragged_kernel, "HAS_TRITON", False)
    spec = importlib.util.spec_from_file_location("kernel_without_triton", kernel.__file__)
    assert spec is not None and spec.loader is not None
    without = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(without)
    monkeypatch.setattr(without, "can_compile", ragged_kernel.can_compile.__wrapped__)
    assert not hasattr(without, "triton") and not without.usable(SimpleNamespace(is_cuda=True))
