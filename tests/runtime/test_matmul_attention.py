"""Attention by matrix products in bfloat16 is that of exact arithmetic, as nearly as the kernel of torch."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from keepsight import AdaKV
from keepsight.runtime import matmul_attention
from keepsight.runtime.matmul_attention import LEAST_QUERIES, attend_by_products, is_faster
from keepsight.runtime.state import prefill
from keepsight.serving.engine import Engine, Job
from tests.serving.test_engine import prompts, run
from tests.tiny import tiny_model

pytestmark = pytest.mark.usefixtures("without_gradients")


@pytest.fixture
def without_gradients() -> Any:
    with torch.no_grad():
        yield


@pytest.fixture
def query_counts(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """As on a processor where products are faster: how many queries each product attended."""
    monkeypatch.setattr(matmul_attention, "_is_faster_here", lambda: True)
    counts: list[int] = []
    attend = attend_by_products

    def counted(query: Tensor, *arguments: Any) -> Tensor:
        counts.append(query.shape[2])
        return attend(query, *arguments)

    monkeypatch.setattr("keepsight.runtime.attention.attend_by_products", counted)
    monkeypatch.setattr("keepsight.runtime.running_answers.attend_by_products", counted)
    return counts


def random_states(
    heads: int, queries: int, entries: int, width: int, offset: float = 0.0, batch: int = 1
) -> tuple[Tensor, Tensor, Tensor]:
    """Queries as a model makes them, and keys and values with room behind them."""
    torch.manual_seed(heads + queries)
    query = 2 * torch.randn(batch, queries, heads, width).transpose(1, 2) + offset / 4
    keys = torch.randn(batch, 2, entries + 8, width)[:, :, :entries] + offset
    values = torch.randn(batch, 2, entries + 8, width)[:, :, :entries]
    return query.bfloat16(), keys.bfloat16(), values.bfloat16()


def causal(queries: int, entries: int) -> Tensor:
    positions = torch.arange(entries)
    return (positions <= positions[entries - queries :, None])[None, None]


def exact(query: Tensor, keys: Tensor, values: Tensor, scaling: float, mask: Tensor) -> Tensor:
    """In float64, query by query: [B, q, H, v]."""
    batch, heads, queries, _ = query.shape
    group = heads // keys.shape[1]
    output = torch.empty(batch, queries, heads, values.shape[3], dtype=torch.float64)
    for row in range(batch):
        for head in range(heads):
            for index in range(queries):
                seen = mask[row % len(mask), 0, index]
                logits = keys[row, head // group, seen].double() @ query[row, head, index].double()
                weights = (scaling * logits).softmax(dim=0)
                output[row, index, head] = weights @ values[row, head // group, seen].double()
    return output


def mean_error(output: Tensor, expected: Tensor) -> float:
    return float((output.double() - expected).abs().mean())


@pytest.mark.parametrize("block", [2**23, 2**12], ids=["one block", "several blocks"])
@pytest.mark.parametrize(("heads", "queries", "entries", "width"), [(4, 36, 36, 8), (6, 34, 90, 16), (2, 33, 70, 5)])
@pytest.mark.parametrize("masked", [False, True])
def test_as_exact_as_the_kernel(
    heads: int, queries: int, entries: int, width: int, masked: bool, block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where all logits are large, as all keys are alike: bfloat16 would round them to whole numbers."""
    monkeypatch.setattr(matmul_attention, "_BLOCK_BYTES", block)
    for offset in (0.0, 16.0):
        query, keys, values = random_states(heads, queries, entries, width, offset)
        mask = causal(queries, entries)
        scaling = width**-0.5
        expected = exact(query, keys, values, scaling, mask)
        output = attend_by_products(query, keys, values, scaling, mask if masked else None)
        assert output.is_contiguous()
        assert output.dtype == torch.bfloat16
        by_kernel = functional.scaled_dot_product_attention(
            query, keys, values, attn_mask=mask, scale=scaling, enable_gqa=True
        ).transpose(1, 2)
        assert mean_error(output, expected) <= 4 * mean_error(by_kernel, expected), f"offset {offset}"


def test_products_alone_would_be_off() -> None:
    """Without the reference that is subtracted: what the other test would not notice, if it were so."""
    query, keys, values = random_states(4, 40, 130, 16, offset=16.0)
    mask = causal(40, 130)
    expected = exact(query, keys, values, 0.25, mask)
    repeated_keys = keys.repeat_interleave(2, dim=1)
    repeated_values = values.repeat_interleave(2, dim=1)
    logits = ((query * 0.25) @ repeated_keys.mT).masked_fill(~mask, -torch.inf)
    products_alone = (logits.softmax(dim=-1) @ repeated_values).transpose(1, 2)
    output = attend_by_products(query, keys, values, 0.25)
    assert mean_error(products_alone, expected) > 8 * mean_error(output, expected)


def test_masks_of_rows_and_queries_that_see_nothing() -> None:
    query, keys, values = random_states(4, 40, 40, 8, batch=2)
    mask = causal(40, 40).repeat(2, 1, 1, 1)
    mask[1, :, :, :12] = False  # padding on the left
    output = attend_by_products(query, keys, values, 0.3, mask)
    assert bool(output.isfinite().all())
    alone = attend_by_products(query[1:, :, 12:], keys[1:, :, 12:], values[1:, :, 12:], 0.3)
    torch.testing.assert_close(output[1:, 12:], alone, rtol=0, atol=0.05)
    without_padding = attend_by_products(query[:1], keys[:1], values[:1], 0.3)
    torch.testing.assert_close(output[:1], without_padding, rtol=0, atol=0.05)


def test_where_it_is_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    query, keys, values = random_states(4, LEAST_QUERIES, 60, 8)
    monkeypatch.setattr(matmul_attention, "_is_faster_here", lambda: True)
    assert is_faster(query, keys, values)
    assert not is_faster(query[:, :, 1:], keys, values), "few queries"
    assert not is_faster(query.float(), keys.float(), values.float()), "another dtype"
    with torch.enable_grad():
        assert not is_faster(query, keys, values), "gradients may be asked for"
    monkeypatch.setattr(matmul_attention, "_is_faster_here", lambda: False)
    assert not is_faster(query, keys, values)


@pytest.mark.parametrize(
    ("capabilities", "faster"),
    [({"avx512_bf16": True}, True), ({"avx512_bf16": True, "amx_bf16": True}, False), ({"avx2": True}, False)],
)
def test_which_processors(capabilities: dict[str, bool], faster: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: capabilities, raising=False)
    assert matmul_attention._is_faster_here.__wrapped__() is faster


def difference(logits: Tensor, expected: Tensor) -> float:
    return float((logits - expected).abs().max())


@pytest.mark.parametrize("chunk", [None, 50])
def test_a_prompt_is_read_so(chunk: int | None, query_counts: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """At once and in chunks, alone and padded; nothing else of the state changes."""
    model = tiny_model().bfloat16()
    ids = torch.stack([prompts(120)[0], prompts(120, 120)[1]])
    mask = torch.ones_like(ids)
    mask[1, :30] = 0
    state = prefill(model, ids, mask, chunk=chunk)
    alone = prefill(model, ids[:1], chunk=chunk)
    layers = model.config.num_hidden_layers
    sizes = [120] if chunk is None else [50, 50]  # the last 20 are few
    assert query_counts == [size for size in (*sizes, *sizes) for _ in range(layers)]

    monkeypatch.setattr(matmul_attention, "_is_faster_here", lambda: False)
    by_kernel = prefill(model, ids, mask, chunk=chunk)
    in_float32 = prefill(tiny_model().bfloat16().float(), ids, mask)
    error = difference(state.logits, in_float32.logits)
    kernel_error = difference(by_kernel.logits, in_float32.logits)
    assert error < 2 * kernel_error + 0.02
    assert difference(state.logits[0], alone.logits[0]) < 0.1


def test_a_prompt_is_read_so_beside_answers(query_counts: list[int]) -> None:
    model = tiny_model().bfloat16()
    engine = Engine(model, AdaKV(40, window=8), rows=3, prefill_tokens=48)
    answering, late = (Job(ids, max_new_tokens=12, ignore_end=True) for ids in prompts(60, 150))
    engine.submit(answering)
    engine.step()
    query_counts.clear()
    engine.submit(late)
    run(engine)
    layers = model.config.num_hidden_layers
    assert query_counts == [48] * (3 * layers), "three parts beside the answer; the last part is few tokens"
    assert len(answering.result(0)) == len(late.result(0)) == 12
