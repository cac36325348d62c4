"""Which entries are chosen, against loops; methods that read a few on a tiny DeepSeek-V3, whose heads share latents."""

from dataclasses import replace
from typing import Any

import pytest
import torch
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
from tests.runtime.sparse_read.slow_selection import top_attention
from tests.tiny import prompt_ids

LENGTHS = [40, 7, 23]
SCALING = 0.5


def random_step(heads: int, kv_heads: int, rows: int = 3, length: int = 41) -> tuple[torch.Tensor, torch.Tensor]:
    """A query [B, H, 1, 6] and keys [B, K, 41, 6], the token's own last."""
    generator = torch.Generator().manual_seed(heads + kv_heads)
    query = torch.randn(rows, heads, 1, 6, generator=generator)
    return query, torch.randn(rows, kv_heads, length, 6, generator=generator)


def places_of(chosen: Selection, row: int, kv_head: int) -> list[int]:
    """Those that are real, ascending."""
    indices = chosen.indices[row, kv_head]
    return sorted((indices if chosen.real is None else indices[chosen.real[row, kv_head]]).tolist())


def each_head(query: torch.Tensor, keys: torch.Tensor) -> Any:
    group = query.shape[1] // keys.shape[1]
    for row in range(len(query)):
        for kv_head in range(keys.shape[1]):
            yield row, kv_head, query[row, kv_head * group : (kv_head + 1) * group, 0], keys[row, kv_head]


@pytest.mark.parametrize("heads, kv_heads", [(4, 4), (4, 2), (4, 1)])
@pytest.mark.parametrize("budget, sinks, window", [(9, 2, 3), (60, 1, 1), (1, 0, 0)])
def test_top_attention_never_takes_padding(budget: int, sinks: int, window: int, heads: int, kv_heads: int) -> None:
    """Rows choose as they would alone; those with fewer entries than others say so."""
    query, keys = random_step(heads, kv_heads)
    padding = 40 - torch.tensor(LENGTHS)
    chosen = TopAttention((budget,) * 3, sinks, window).select(query, Softmax(SCALING), keys, padding)
    slow = top_attention(budget, sinks, window)
    for row, kv_head, own, entries in each_head(query, keys):
        start = int(padding[row])
        expected = sorted(start + place for place in slow(own, entries[start:], SCALING))
        assert places_of(chosen, row, kv_head) == expected and len(expected) == min(budget, LENGTHS[row])
    assert all(len(set(head.tolist())) == len(head) for head in chosen.indices.flatten(0, 1))
    chosen = TopAttention((budget,) * 3, sinks, window).select(query, Softmax(SCALING), keys, None)
    assert chosen.real is None and chosen.indices.shape[2] == min(budget, 40)
    for row, kv_head, own, entries in each_head(query, keys):
        assert places_of(chosen, row, kv_head) == sorted(slow(own, entries, SCALING))


def test_weights_that_underflow_come_before_padding() -> None:
    """Equal to the padding's: nothing but the mask tells them apart."""
    query, keys = torch.full((1, 1, 1, 2), 60.0), torch.zeros(1, 1, 10, 2)
    keys[:, :, 4] = 60.0
    chosen = TopAttention((6,)).select(query, Softmax(SCALING), keys, torch.tensor([3]))
    assert places_of(chosen, 0, 0) == [3, 4, 5, 6, 7, 8]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(
    "make", [lambda: TopAttention((9,) * 3), lambda: TopPages((12,) * 3, 4)], ids=["exact", "pages"]
)
def test_dot_products_beyond_float16(make: Any, dtype: torch.dtype) -> None:
    """What overflows there is ranked as in float32; pages of one key have no better bound than others."""
    query, keys = (each.to(dtype) for each in random_step(4, 2))
    query, keys = 2000 * query, 2000 * keys
    keys[:, :, ::5] *= 4  # several weights and bounds that would be infinite alike
    found, expected = (
        make().select(each, Softmax(1e-6), of, None) for each, of in ((query, keys), (query.float(), keys.float()))
    )
    for row, kv_head, *_ in each_head(query, keys):
        assert places_of(found, row, kv_head) == places_of(expected, row, kv_head)


@pytest.mark.parametrize("padding", [0, 1, 7])
def test_ties_go_to_the_first_entries_wherever_padding_ends(padding: int) -> None:
    """Entries of few different importances, and pages of equal keys."""
    generator = torch.Generator().manual_seed(1)
    worth = torch.randint(0, 3, (1, 2, 200), generator=generator) / 8
    best = [sorted(range(200), key=lambda place: -each[place])[:90] for each in worth[0].tolist()]
    padded = torch.cat([torch.ones(1, 2, padding), worth], dim=2)
    chosen = TopAttention((90,)).top(padded, torch.tensor([padding]) if padding else None)
    assert [places_of(chosen, 0, head) for head in (0, 1)] == [sorted(padding + each for each in of) for of in best]
    keys = torch.ones(1, 2, padding + 161, 4)
    chosen = TopPages((32,), 4).select(torch.ones(1, 2, 1, 4), Softmax(1.0), keys, torch.tensor([padding]))
    assert places_of(chosen, 0, 0) == [*range(padding, padding + 32)]


HEADS, NOPE, ROPE, VALUE, RANK, LAYERS = 4, 8, 4, 6, 16, 3


@pytest.mark.parametrize("name", ["specontext", "specontext of embeddings", "quest with dense layers", "exact"])
def test_rows_and_turns_are_read_as_one_prompt_each(name: str) -> None:
    """Rows of different lengths, one of them shorter than the budget; a turn in one pass over latents."""
    model, method, lengths = tiny_deepseek(), method_of(name, 16, HEADS), (35, 11, 30)
    (ids, mask), reader = prompt_ids(*lengths), method.reader(model)
    turn, answer = prompt_ids(25, 25, 25, seed=2)[0], answer_of(9, 9, 9)
    state = read(method.turn_reader(model), method.start(model, ids, mask), turn)[0]
    whole = method.start(model, torch.cat([ids, turn], 1), functional.pad(mask, (0, 25), value=1))
    assert_close(state.logits, whole.logits)
    together = read(reader, state, answer)[1]
    assert_close(together, read(reader, whole, answer)[1])
    for row, length in enumerate(lengths):
        alone = method.start(model, torch.cat([ids[row : row + 1, -length:], turn[row : row + 1]], 1))
        assert_close(together[row : row + 1], read(reader, alone, answer[row : row + 1])[1])


def test_bytes_are_those_of_the_latents() -> None:
    model, method = tiny_deepseek(), method_of("specontext of embeddings", 8, HEADS)
    ids, mask = prompt_ids(30, 20)
    state, _ = read(method.reader(model), method.start(model, ids, mask), answer_of(5, 5))
    tokens = 2 * (30 + 5)
    latents = LAYERS * tokens * (RANK + ROPE) * 4
    assert sum(layer.nbytes for layer in retrieval_cache(state.cache).selected_layers) == latents
    assert state.kv_bytes == latents + tokens * HEADS * 8 * 4  # and the retrieval head's keys
    whole = with_expanded_latents(prefill(model, ids, mask))
    assert cache_bytes(whole.cache) == LAYERS * 60 * HEADS * (NOPE + ROPE + VALUE) * 4


def test_what_cannot_be_is_refused() -> None:
    model, ids = tiny_deepseek(), prompt_ids(10)[0]
    with refused("offload", "model"):
        method_of("specontext", 8, HEADS, offload=1).start(model, ids)
    whole = prefill(model, ids)
    shorter: list[Any] = [KeptLayer(each.keys[:, :, :5], each.values[:, :, :5], 10) for each in whole.entries()]
    with refused("budget", "state"):
        method_of("specontext of embeddings", 8, HEADS).compress_state(
            model, replace(whole, cache=Cache(layers=shorter))
        )
    projection = model.model.layers[0].self_attn.kv_b_proj
    projection.weight = torch.nn.Parameter(projection.weight.to(torch.float8_e4m3fn), requires_grad=False)
    with refused("kv_b_proj", "model"):
        prefill(model, ids)
    model = tiny_deepseek()  # with an indexer in each layer, as DeepSeek-V3.2 has
    model.model.layers[0].self_attn.indexer = torch.nn.Identity()
    with refused("model", "model"):
        method_of("specontext", 8, HEADS).start(model, ids)
