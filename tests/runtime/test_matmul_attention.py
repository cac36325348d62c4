"""Attention by matrix products in bfloat16 is that of exact arithmetic, as nearly as the kernel of torch."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from keepsight import AdaKV
from keepsight.runtime import matmul_attention
from keepsight.runtime.matmul_attention import LEAST_QUERIES, attend_by_products, is_faster
from keepsight.runtime.state import State, prefill
from keepsight.serving.engine import Engine, Job
from tests.serving.test_engine import prompts, run
from tests.tiny import tiny_model

pytestmark = pytest.mark.usefixtures("without_gradients")


@pytest.fixture
def without_gradients() -> Any:
    with torch.no_grad():
        yield


@pytest.fixture
def everywhere(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """As on a processor where products are faster; numbers of queries that were attended so."""
    monkeypatch.setattr(matmul_attention, "_is_faster_here", lambda: True)
    queries = list[int]()
    attend = attend_by_products

    def counted(query: Tensor, *arguments: Any) -> Tensor:
        queries.append(query.shape[2])
        return attend(query, *arguments)

    monkeypatch.setattr("keepsight.runtime.attention.attend_by_products", counted)
    monkeypatch.setattr("keepsight.runtime.running_answers.attend_by_products", counted)
    return queries


def states(
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
                of_row = keys[row, head // group, seen].double() @ query[row, head, index].double()
                weights = (scaling * of_row).softmax(dim=0)
                output[row, index, head] = weights @ values[row, head // group, seen].double()
    return output


@pytest.mark.parametrize("block", [2**23, 2**12], ids=["one block", "several blocks"])
@pytest.mark.parametrize(("heads", "queries", "entries", "width"), [(4, 36, 36, 8), (6, 34, 90, 16), (2, 33, 70, 5)])
@pytest.mark.parametrize("masked", [False, True])
def test_as_exact_as_the_kernel(
    heads: int, queries: int, entries: int, width: int, masked: bool, block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where all logits are large, as all keys are alike: bfloat16 would round them to whole numbers."""
    monkeypatch.setattr(matmul_attention, "_BLOCK_BYTES", block)
    for offset in (0.0, 16.0):
        query, keys, values = states(heads, queries, entries, width, offset)
        mask = causal(queries, entries)
        scaling = width**-0.5
        expected = exact(query, keys, values, scaling, mask)
        output = attend_by_products(query, keys, values, scaling, mask if masked else None)
        assert output.is_contiguous() and output.dtype == torch.bfloat16
        kernel = functional.scaled_dot_product_attention(
            query, keys, values, attn_mask=mask, scale=scaling, enable_gqa=True
        ).transpose(1, 2)
        of_products = (output.double() - expected).abs().mean()
        of_kernel = (kernel.double() - expected).abs().mean()
        assert of_products <= 4 * of_kernel, f"offset {offset}"


def test_products_alone_would_be_off() -> None:
    """Without the reference that is subtracted: what the other test would not notice, if it were so."""
    query, keys, values = states(4, 40, 130, 16, offset=16.0)
    mask = causal(40, 130)
    expected = exact(query, keys, values, 0.25, mask)
    repeated = keys.repeat_interleave(2, dim=1)
    logits = ((query * 0.25) @ repeated.mT).masked_fill(~mask, -torch.inf)
    plain = (logits.softmax(dim=-1) @ values.repeat_interleave(2, dim=1)).transpose(1, 2)
    ours = attend_by_products(query, keys, values, 0.25)
    assert (plain.double() - expected).abs().mean() > 8 * (ours.double() - expected).abs().mean()


def test_masks_of_rows_and_queries_that_see_nothing() -> None:
    query, keys, values = states(4, 40, 40, 8, batch=2)
    mask = causal(40, 40).repeat(2, 1, 1, 1)
    mask[1, :, :, :12] = False  # padding on the left
    output = attend_by_products(query, keys, values, 0.3, mask)
    assert bool(output.isfinite().all())
    alone = attend_by_products(query[1:, :, 12:], keys[1:, :, 12:], values[1:, :, 12:], 0.3)
    torch.testing.assert_close(output[1:, 12:], alone, rtol=0, atol=0.05)
    without_padding = attend_by_products(query[:1], keys[:1], values[:1], 0.3)
    torch.testing.assert_close(output[:1], without_padding, rtol=0, atol=0.05)


def test_where_it_is_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    query, keys, values = states(4, LEAST_QUERIES, 60, 8)
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


def difference(state: State, other: State) -> float:
    return float((state.logits - other.logits).abs().max())


@pytest.mark.parametrize("chunk", [None, 50])
def test_a_prompt_is_read_so(chunk: int | None, everywhere: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """In whole and in parts, alone and padded; nothing else of the state changes."""
    model = tiny_model().bfloat16()
    ids = torch.stack([prompts(120)[0], prompts(120, 120)[1]])
    mask = torch.ones_like(ids)
    mask[1, :30] = 0
    state = prefill(model, ids, mask, chunk=chunk)
    alone = prefill(model, ids[:1], chunk=chunk)
    layers = model.config.num_hidden_layers
    sizes = [120] if chunk is None else [50, 50]  # the last 20 are few
    assert everywhere == [size for size in (*sizes, *sizes) for _ in range(layers)]
    monkeypatch.setattr(matmul_attention, "_is_faster_here", lambda: False)
    by_kernel = prefill(model, ids, mask, chunk=chunk)
    exactly = prefill(tiny_model().bfloat16().float(), ids, mask)
    assert difference(state, exactly) < 2 * difference(by_kernel, exactly) + 0.02
    assert float((state.logits[0] - alone.logits[0]).abs().max()) < 0.1


def test_a_prompt_is_read_so_beside_answers(everywhere: list[int]) -> None:
    model = tiny_model().bfloat16()
    engine = Engine(model, AdaKV(40, window=8), rows=3, prefill_tokens=48)
    first, second = (Job(ids, max_new_tokens=12, ignore_end=True) for ids in prompts(60, 150))
    engine.submit(first)
    engine.step()
    everywhere.clear()
    engine.submit(second)
    run(engine)
    layers = model.config.num_hidden_layers
    assert everywhere == [48] * (3 * layers), "three parts beside the answer; the last part is few tokens"
    assert len(first.result(0)) == len(second.result(0)) == 12
