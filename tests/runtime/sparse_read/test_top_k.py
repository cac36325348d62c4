"""Which entries are chosen, against loops; methods that read a few on a tiny DeepSeek-V3, whose heads share latents."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional
from transformers.cache_utils import Cache

from keepsight.runtime.attention import Softmax
from keepsight.runtime.layer import KeptLayer
from keepsight.runtime.retrieval.specontext import retrieval_cache
from keepsight.runtime.sparse_read.cache import Selection, with_expanded_latents
from keepsight.runtime.sparse_read.selection import TopAttention, TopPages
from keepsight.runtime.state import cache_bytes, prefill, read
from tests.close import assert_close
from tests.models.retrieval_heads import tiny_deepseek
from tests.refused import refused
from tests.runtime.retrieval.test_reader import answer_of, method_of
from tests.runtime.sparse_read.slow_selection import ranked, top_attention
from tests.tiny import prompt_ids

LENGTHS = [40, 7, 23]
SCALING = 0.5


def random_step(heads: int, kv_heads: int, rows: int = 3, length: int = 41) -> tuple[Tensor, Tensor]:
    """A query [B, H, 1, 6] and keys [B, K, 41, 6], the token's own last."""
    generator = torch.Generator().manual_seed(heads + kv_heads)
    query = torch.randn(rows, heads, 1, 6, generator=generator)
    keys = torch.randn(rows, kv_heads, length, 6, generator=generator)
    return query, keys


def positions_of(selection: Selection, row: int, kv_head: int) -> list[int]:
    """The real positions that a KV head selected, ascending."""
    indices = selection.indices[row, kv_head]
    if selection.real is not None:
        indices = indices[selection.real[row, kv_head]]
    return sorted(indices.tolist())


def kv_heads_of(query: Tensor, keys: Tensor) -> Iterator[tuple[int, int, Tensor, Tensor]]:
    """Row, KV head, the queries [G, d] of its group and its keys [C + 1, d]."""
    group = query.shape[1] // keys.shape[1]
    for row in range(len(query)):
        for kv_head in range(keys.shape[1]):
            queries = query[row, kv_head * group : (kv_head + 1) * group, 0]
            yield row, kv_head, queries, keys[row, kv_head]


@pytest.mark.parametrize("heads, kv_heads", [(4, 4), (4, 2), (4, 1)])
@pytest.mark.parametrize("budget, sinks, window", [(9, 2, 3), (60, 1, 1), (1, 0, 0)])
def test_top_attention_never_takes_padding(budget: int, sinks: int, window: int, heads: int, kv_heads: int) -> None:
    """Rows choose as they would alone; those with fewer entries than others say so."""
    query, keys = random_step(heads, kv_heads)
    padding = 40 - torch.tensor(LENGTHS)
    top = TopAttention((budget,) * 3, sinks, window)
    slow = top_attention(budget, sinks, window)

    padded = top.select(query, Softmax(SCALING), keys, padding)
    for row, kv_head, queries, head_keys in kv_heads_of(query, keys):
        start = int(padding[row])
        expected = sorted(start + position for position in slow(queries, head_keys[start:], SCALING))
        assert positions_of(padded, row, kv_head) == expected
        assert len(expected) == min(budget, LENGTHS[row])
    for indices in padded.indices.flatten(0, 1):
        assert len(set(indices.tolist())) == len(indices)

    unpadded = top.select(query, Softmax(SCALING), keys, None)
    assert unpadded.real is None
    assert unpadded.indices.shape[2] == min(budget, 40)
    for row, kv_head, queries, head_keys in kv_heads_of(query, keys):
        assert positions_of(unpadded, row, kv_head) == sorted(slow(queries, head_keys, SCALING))


def test_weights_that_underflow_come_before_padding() -> None:
    """Equal to the padding's: nothing but the mask tells them apart."""
    query = torch.full((1, 1, 1, 2), 60.0)
    keys = torch.zeros(1, 1, 10, 2)
    keys[:, :, 4] = 60.0
    selection = TopAttention((6,)).select(query, Softmax(SCALING), keys, torch.tensor([3]))
    assert positions_of(selection, 0, 0) == [3, 4, 5, 6, 7, 8]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(
    "make", [lambda: TopAttention((9,) * 3), lambda: TopPages((12,) * 3, 4)], ids=["exact", "pages"]
)
def test_dot_products_beyond_float16(make: Callable[[], Any], dtype: torch.dtype) -> None:
    """What overflows there is ranked as in float32; pages of one key have no better bound than others."""
    query, keys = random_step(4, 2)
    query = 2000 * query.to(dtype)
    keys = 2000 * keys.to(dtype)
    keys[:, :, ::5] *= 4  # several weights and bounds that would be infinite alike
    selection = make().select(query, Softmax(1e-6), keys, None)
    expected = make().select(query.float(), Softmax(1e-6), keys.float(), None)
    for row, kv_head, *_ in kv_heads_of(query, keys):
        assert positions_of(selection, row, kv_head) == positions_of(expected, row, kv_head)


@pytest.mark.parametrize("padding", [0, 1, 7])
def test_ties_go_to_the_first_entries_wherever_padding_ends(padding: int) -> None:
    """Entries with few distinct importances, and pages of equal keys."""
    generator = torch.Generator().manual_seed(1)
    importance = torch.randint(0, 3, (1, 2, 200), generator=generator) / 8
    padded = torch.cat([torch.ones(1, 2, padding), importance], dim=2)
    by_attention = TopAttention((90,)).top(padded, torch.tensor([padding]) if padding else None)
    for head, scores in enumerate(importance[0].tolist()):
        expected = sorted(padding + position for position in ranked(scores)[:90])
        assert positions_of(by_attention, 0, head) == expected

    equal_keys = torch.ones(1, 2, padding + 161, 4)
    by_page = TopPages((32,), 4).select(torch.ones(1, 2, 1, 4), Softmax(1.0), equal_keys, torch.tensor([padding]))
    assert positions_of(by_page, 0, 0) == [*range(padding, padding + 32)]


# The sizes of `tiny_deepseek`.
HEADS = 4
NOPE = 8
ROPE = 4
VALUE = 6
RANK = 16
LAYERS = 3


@pytest.mark.parametrize("name", ["specontext", "specontext of embeddings", "quest with dense layers", "exact"])
def test_rows_and_turns_are_read_as_one_prompt_each(name: str) -> None:
    """Rows of different lengths, one of them shorter than the budget; a turn in one pass over latents."""
    model = tiny_deepseek()
    method = method_of(name, 16, HEADS)
    reader = method.reader(model)
    lengths = (35, 11, 30)
    ids, mask = prompt_ids(*lengths)
    turn = prompt_ids(25, 25, 25, seed=2)[0]
    answer = answer_of(9, 9, 9)

    state = read(method.turn_reader(model), method.start(model, ids, mask), turn)[0]
    with_turn = torch.cat([ids, turn], dim=1)
    one_prompt = method.start(model, with_turn, functional.pad(mask, (0, 25), value=1))
    assert_close(state.logits, one_prompt.logits)

    logits = read(reader, state, answer)[1]
    assert_close(logits, read(reader, one_prompt, answer)[1])
    for row, length in enumerate(lengths):
        alone = method.start(model, with_turn[row : row + 1, -(length + 25) :])
        assert_close(logits[row : row + 1], read(reader, alone, answer[row : row + 1])[1])


def test_bytes_are_those_of_the_latents() -> None:
    model = tiny_deepseek()
    method = method_of("specontext of embeddings", 8, HEADS)
    ids, mask = prompt_ids(30, 20)
    state, _ = read(method.reader(model), method.start(model, ids, mask), answer_of(5, 5))
    tokens = 2 * (30 + 5)
    latents = LAYERS * tokens * (RANK + ROPE) * 4
    retrieval_keys = tokens * HEADS * 8 * 4
    assert sum(layer.nbytes for layer in retrieval_cache(state.cache).selected_layers) == latents
    assert state.kv_bytes == latents + retrieval_keys

    expanded = with_expanded_latents(prefill(model, ids, mask))
    assert cache_bytes(expanded.cache) == LAYERS * 60 * HEADS * (NOPE + ROPE + VALUE) * 4


def test_what_latents_do_not_support_is_refused() -> None:
    model = tiny_deepseek()
    ids = prompt_ids(10)[0]
    with refused("offload", "model"):
        method_of("specontext", 8, HEADS, offload=1).start(model, ids)

    full = prefill(model, ids)
    evicted: list[Any] = []
    for layer in full.entries():
        evicted.append(KeptLayer(layer.keys[:, :, :5], layer.values[:, :, :5], 10))
    state = replace(full, cache=Cache(layers=evicted))
    with refused("budget", "state"):
        method_of("specontext of embeddings", 8, HEADS).compress_state(model, state)

    projection = model.model.layers[0].self_attn.kv_b_proj
    projection.weight = torch.nn.Parameter(projection.weight.to(torch.float8_e4m3fn), requires_grad=False)
    with refused("kv_b_proj", "model"):
        prefill(model, ids)

    with_indexer = tiny_deepseek()  # with an indexer in each layer, as DeepSeek-V3.2 has
    with_indexer.model.layers[0].self_attn.indexer = torch.nn.Identity()
    with refused("model", "model"):
        method_of("specontext", 8, HEADS).start(with_indexer, ids)
