"""Methods that read a few entries a step on a tiny DeepSeek-V3: latents against keys and values of every head."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.nn import functional
from transformers.cache_utils import Cache

from keepsight.errors import UserError
from keepsight.runtime.generate import FullCache
from keepsight.runtime.layer import KeptLayer
from keepsight.runtime.retrieval.specontext import SpeContext, retrieval_cache
from keepsight.runtime.sparse_read.cache import (
    expanded,
)
from keepsight.runtime.sparse_read.selection import ExactTopK, Quest
from keepsight.runtime.state import cache_bytes, prefill, read
from tests.close import assert_close
from tests.models.retrieval_heads import tiny_deepseek, tiny_retrieval_head
from tests.runtime.sparse_read.slow_selection import SlowReader, everything, top_attention, top_pages
from tests.tiny import prompt_ids

HEADS, NOPE, ROPE, VALUE, RANK, LAYERS = 4, 8, 4, 6, 16, 3
NAMES = ["specontext", "specontext of embeddings", "quest", "exact"]

each_method = pytest.mark.parametrize("name", NAMES)


def method_of(name: str, budget: int | float, **options: Any) -> Any:
    if name.startswith("specontext"):
        features = "none" if "embeddings" in name else "previous-step"
        return SpeContext(
            budget, tiny_retrieval_head(features, kv_heads=HEADS, max_position_embeddings=1024), **options
        )
    return Quest(budget, page=4, dense_layers=1) if name == "quest" else ExactTopK(budget)


def start(model: Any, method: Any, ids: torch.Tensor, mask: torch.Tensor | None = None, **options: Any) -> Any:
    """The state to answer from, and what reads it."""
    return method.start(model, ids, mask, **options), method.reader(model)


def answer_of(*lengths: int) -> torch.Tensor:
    return prompt_ids(*lengths, seed=1)[0]


def slow_of(model: Any, ids: torch.Tensor, method: Any) -> SlowReader:
    """Reads with transformers' own cache, which expands everything for every head."""
    if isinstance(method, Quest):
        pages = top_pages(method.budget_for(30), method.page)
        return SlowReader(model, ids, [everything, *[pages] * (LAYERS - 1)])
    return SlowReader(model, ids, [top_attention(method.budget)] * LAYERS, getattr(method, "head", None))


@each_method
def test_a_budget_for_all_entries_gives_full_attention(name: str, lengths: tuple[int, ...] = (50, 33, 41)) -> None:
    model, method = tiny_deepseek(), method_of(name, 1000)
    ids, mask = prompt_ids(*lengths)
    answer = answer_of(*[12] * len(lengths))
    expected = read(model, FullCache().start(model, ids, mask), answer)[1]
    state, reader = start(model, method, ids, mask, chunk=16)
    assert_close(read(reader, state, answer)[1], expected)


@each_method
def test_few_entries_equal_slow_loops_over_expanded_entries(name: str) -> None:
    """Each head reads its own: over entries of the prompt and of the answer."""
    model, method = tiny_deepseek(), method_of(name, 12)
    ids, answer = prompt_ids(30)[0], answer_of(12)
    slow, (state, reader) = slow_of(model, ids, method), start(model, method, ids)
    plain, differs = FullCache().start(model, ids), False
    for token in answer.split(1, dim=1):
        state, logits = read(reader, state, token)
        plain, dense = read(model, plain, token)
        assert_close(logits, slow.read(token))
        assert len({tuple(places) for places in slow.read_last[-1]}) == HEADS
        differs |= not torch.allclose(logits, dense, atol=1e-3)
    assert differs


@each_method
def test_batch_equals_single(name: str) -> None:
    """Rows of different lengths, one of them shorter than the budget."""
    model, method, lengths = tiny_deepseek(), method_of(name, 16), (35, 11, 30)
    ids, mask = prompt_ids(*lengths)
    answer = answer_of(12, 12, 12)
    state, reader = start(model, method, ids, mask)
    together = read(reader, state, answer)[1]
    for row, length in enumerate(lengths):
        state, reader = start(model, method, ids[row : row + 1, -length:])
        alone = read(reader, state, answer[row : row + 1])[1]
        assert_close(together[row : row + 1], alone)


def test_bytes_are_those_of_the_latents() -> None:
    model, method = tiny_deepseek(), method_of("specontext of embeddings", 8)
    ids, mask = prompt_ids(30, 20)
    state = method.start(model, ids, mask)
    state, _ = read(method.reader(model), state, answer_of(5, 5))
    tokens = 2 * (30 + 5)
    latents = LAYERS * tokens * (RANK + ROPE) * 4
    assert sum(layer.bytes for layer in retrieval_cache(state.cache).selected_layers) == latents
    assert state.kv_bytes == latents + tokens * HEADS * 8 * 4  # and the retrieval head's keys
    whole = prefill(model, ids, mask)
    assert cache_bytes(expanded(model, whole).cache) == LAYERS * 60 * HEADS * (NOPE + ROPE + VALUE) * 4
    half = method_of("specontext of embeddings", 8).start(tiny_deepseek().to(torch.bfloat16), ids, mask)
    assert sum(layer.bytes for layer in half.cache.layers) == LAYERS * 60 * (RANK + ROPE) * 2


def test_what_cannot_be_is_refused() -> None:
    model, ids = tiny_deepseek(), prompt_ids(10)[0]
    with pytest.raises(UserError, match="offload 1 does not apply to deepseek_v3: all heads share its latents"):
        method_of("specontext", 8, offload=1).start(model, ids)
    whole = prefill(model, ids)
    shorter: list[Any] = [KeptLayer(each.keys[:, :, :5], each.values[:, :, :5], 10) for each in whole.entries()]
    with pytest.raises(UserError, match="the cache holds 5 of them"):
        method_of("specontext of embeddings", 8).compress(model, replace(whole, cache=Cache(layers=shorter)))
    projection = model.model.layers[0].self_attn.kv_b_proj
    projection.weight = torch.nn.Parameter(projection.weight.to(torch.float8_e4m3fn), requires_grad=False)
    with pytest.raises(UserError, match=r"kv_b_proj of layer 0 is a Linear of torch.float8_e4m3fn"):
        prefill(model, ids)


def test_models_that_choose_by_themselves_are_refused() -> None:
    """As DeepSeek-V3.2 does, with an indexer in each layer."""
    model, ids = tiny_deepseek(), prompt_ids(10)[0]
    model.model.layers[0].self_attn.indexer = torch.nn.Identity()
    with pytest.raises(UserError, match="deepseek_v3 selects itself what its latent attention reads"):
        method_of("specontext", 8).start(model, ids)


@each_method
def test_a_turn_is_read_like_a_prompt(name: str, lengths: tuple[int, ...] = (50, 33, 41)) -> None:
    """In one pass, over latents that all heads share."""
    model, method = tiny_deepseek(), method_of(name, 12)
    (ids, mask), rows = prompt_ids(*lengths), len(lengths)
    turn, answer = prompt_ids(*[25] * rows, seed=2)[0], answer_of(*[9] * rows)
    state, reader = start(model, method, ids, mask)
    state = read(method.turn_reader(model), state, turn)[0]
    whole, _ = start(model, method, torch.cat([ids, turn], 1), functional.pad(mask, (0, 25), value=1))
    assert_close(state.logits, whole.logits)
    assert_close(read(reader, state, answer)[1], read(reader, whole, answer)[1])
