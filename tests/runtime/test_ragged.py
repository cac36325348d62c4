"""Cache layers whose KV heads hold different numbers of entries: bytes, joining, reading, attention."""

from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch
from transformers.cache_utils import Cache, DynamicCache

from keepsight.runtime.allocate import Adaptive, Global, Pyramid, Uniform
from keepsight.runtime.attention import Softmax, grouped_attention, recording
from keepsight.runtime.generate import FullCache, decode, stop_after
from keepsight.runtime.importance import Pool
from keepsight.runtime.join import join
from keepsight.runtime.layer import KeptLayer, RaggedLayer
from keepsight.runtime.methods import SnapKV, StreamingLLM
from keepsight.runtime.state import Needs, State, entries, full_layers, prefill, read
from tests.close import assert_close
from tests.runtime.recording import recorded
from tests.tiny import FAMILIES, prompt_ids, tiny_model

DTYPES = [torch.float32, torch.bfloat16]
RAGGED = SnapKV(12, window=3, pool=Pool(kernel=3), allocate=Adaptive())
METHODS = [RAGGED, SnapKV(12, window=3, allocate=Pyramid(beta=4)), StreamingLLM(9), StreamingLLM(20), FullCache()]


def random_cache(lengths, dtype=torch.float32, layers=2, seen=50):
    """A ragged cache [B, K] of random entries, and the same entries as lists."""
    generator = torch.Generator().manual_seed(0)
    counts, total = np.array(lengths), sum(map(sum, lengths))
    packed = [torch.randn(2, total, 4, generator=generator, dtype=torch.float32).to(dtype) for _ in range(layers)]
    return Cache(layers=[RaggedLayer(keys, values, counts, seen) for keys, values in packed]), packed


def test_entries_are_padded_on_the_left_head_by_head():
    lengths = [[3, 0, 5], [1, 7, 2]]
    cache, packed = random_cache(lengths)
    seen: Any
    new = torch.randn(2, 3, 2, 4)
    for index, (keys, values) in enumerate(packed):
        seen, seen_values = cache.update(new, new + 1, index)
        layer: Any = entries(cache)[index]
        stored: Any = cache.layers[index]
        assert torch.equal(seen, layer.keys)
        assert torch.equal(stored.keys_mask, layer.real)
        assert torch.equal(seen_values, layer.values)
        start = 0
        for row in range(2):
            for head in range(3):
                count = lengths[row][head]
                expected = torch.cat([keys[start : start + count], new[row, head]])
                of_values = torch.cat([values[start : start + count], new[row, head] + 1])
                assert layer.real[row, head].tolist() == [False] * (7 - count) + [True] * (count + 2)
                assert torch.equal(layer.keys[row, head][layer.real[row, head]], expected)
                assert torch.equal(layer.values[row, head][layer.real[row, head]], of_values)
                start += count


def test_keep_is_dense_where_all_heads_keep_the_same_number():
    keys, values = torch.randn(2, 1, 2, 6, 4)
    mask = torch.zeros(1, 2, 6).bool()
    mask[0, 0, [1, 4]] = mask[0, 1, [0, 5]] = True
    dense = KeptLayer(keys, values, 9).keep(mask, mask.sum(dim=-1).numpy())
    assert type(dense) is KeptLayer
    assert torch.equal(dense.keys[0], torch.stack([keys[0, 0, [1, 4]], keys[0, 1, [0, 5]]]))
    mask[0, 1, 2] = True
    ragged = KeptLayer(keys, values, 9).keep(mask, mask.sum(dim=-1).numpy())
    assert type(ragged) is RaggedLayer
    assert ragged.counts.tolist() == [[2, 3]]
    assert torch.equal(ragged.kept_values, torch.cat([values[0, 0, [1, 4]], values[0, 1, [0, 2, 5]]]))
    assert (dense.get_seq_length(), ragged.get_seq_length()) == (9, 9)


def test_joined_states_keep_every_real_entry():
    """A dense cache, a padded one and a ragged one: what a mask of the batch says must reach every head."""
    ragged, _ = random_cache([[3, 1, 2]])
    dense, padded = (
        Cache(layers=[KeptLayer(torch.randn(shape), torch.randn(shape), 50) for _ in range(2)])
        for shape in ((1, 3, 5, 4), (2, 3, 6, 4))
    )
    for layer in full_layers(padded):
        layer.token_mask = torch.tensor([[True] * 6, [False] * 4 + [True] * 2])
    states = [
        State(cache, torch.zeros(rows, 9), torch.zeros(rows, 50, dtype=torch.long), torch.full((rows,), 50))
        for cache, rows in ((dense, 1), (padded, 2), (ragged, 1))
    ]
    for order in (states, states[:2]):
        joined = join(order)
        real: Any = entries(joined.cache)[1].real
        assert joined.tokens_mask is None or joined.attention_mask() is None
        counts = [[5, 5, 5], [6, 6, 6], [2, 2, 2], [3, 1, 2]]
        assert real.sum(-1).tolist() == counts[: len(real)]
        assert torch.equal(entries(joined.cache)[1].keys[0, 2][real[0, 2]], entries(dense)[1].keys[0, 2])
        assert torch.equal(entries(joined.cache)[1].keys[2, 1][real[2, 1]], entries(padded)[1].keys[1, 1, 4:])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("family", FAMILIES)
def test_joined_states_decode_as_they_do_alone(family, dtype):
    """Dense, ragged and whole states of a padded batch, all in one."""
    model = tiny_model(family).to(dtype)
    prefilled = prefill(model, *prompt_ids(30, 13))
    states = [method.compress(model, prefilled) for method in METHODS]
    tokens = prompt_ids(*[4] * 2 * len(states), seed=4)[0]
    joined, logits = read(model, join([state.copy() for state in states]), tokens)
    assert torch.equal(joined.counts(), torch.cat([state.counts() + 4 for state in states], dim=1))
    for index, state in enumerate(states):
        rows = slice(2 * index, 2 * index + 2)
        _, alone = read(model, state.copy(), tokens[rows])
        assert_close(logits[rows], alone, dtype)
    if dtype == torch.float32:
        ids = decode(model, join(states), stop_after(6, None), pad_token=0).ids
        answers = [decode(model, state.copy(), stop_after(6, None), pad_token=0).ids for state in states]
        assert torch.equal(ids, torch.cat(answers))


@pytest.mark.parametrize(
    ("allocate", "chunk"), [(Uniform(), 1), (Pyramid(beta=4), 7), (Adaptive(), 1), (Global(), 7)], ids=str
)
def test_chunked_prefill_then_eviction_equals_the_whole_one(allocate, chunk):
    model = tiny_model()
    method = SnapKV(12, window=3, pool=Pool(kernel=3), allocate=allocate)
    whole, chunked = (method.start(model, *prompt_ids(30, 13), chunk=each) for each in (None, chunk))
    assert torch.equal(whole.counts(), chunked.counts())
    for (keys, values, real), (keys2, values2, real2) in zip(whole.entries(), chunked.entries(), strict=True):
        assert_close(keys, keys2)
        assert_close(values, values2)
        assert (real is None) == (real2 is None)
        if real is not None and real2 is not None:
            assert torch.equal(real, real2)
    assert_close(whole.logits, chunked.logits)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("method", METHODS, ids=["adaptive", "pyramid", "nine", "twenty", "full"])
def test_reading_several_tokens_equals_reading_one_by_one(dtype, method):
    model = tiny_model("qwen3").to(dtype)
    state = method.compress(model, prefill(model, *prompt_ids(30, 13), needs=Needs(3, accumulated=True)))
    tokens = prompt_ids(6, 6, seed=5)[0]
    at_once, logits = read(model, state.copy(), tokens)
    single, one_by_one = state.copy(), []
    for column in tokens.split(1, dim=1):
        single, last = read(model, single, column)
        one_by_one.append(last)
    assert_close(logits, torch.cat(one_by_one, dim=1), dtype)
    assert torch.equal(at_once.counts(), state.counts() + 6)
    assert torch.equal(at_once.tokens, single.tokens)
    assert torch.equal(at_once.lengths, single.lengths)
    for name in ("queries", "accumulated"):
        for pair in zip(recorded(at_once, name), recorded(single, name), strict=True):
            assert_close(*pair, dtype)


def loop_attention(query, key, value, mask, scaling):
    """One query head, row and key at a time, in float64."""
    batch, heads, rows, width = query.shape
    group = heads // key.shape[1]
    result = torch.zeros(batch, rows, heads, width, dtype=torch.float64)
    for b in range(batch):
        for h in range(heads):
            of_head = mask[b, h // group if mask.shape[1] > 1 else 0]
            for i in range(rows):
                logits = key[b, h // group].double() @ query[b, h, i].double() * scaling
                if mask.dtype == torch.bool:
                    logits = logits.masked_fill(~of_head[i], -torch.inf)
                else:
                    logits = logits + of_head[i].double()
                result[b, i, h] = logits.softmax(0) @ value[b, h // group].double()
    return result


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("by_head", "kind", "rows"), [(False, "bool", 1), (False, "float", 3), (True, "bool", 3), (True, "float", 1)]
)
def test_grouped_attention_equals_its_definition(dtype, by_head, kind, rows, scaling=0.5):
    generator = torch.Generator().manual_seed(1)
    query = torch.randn(2, 6, rows, 8, generator=generator).to(dtype)
    key, value = (torch.randn(2, 3, 11, 8, generator=generator).to(dtype) for _ in range(2))
    mask = torch.rand(2, 3 if by_head else 1, rows, 11, generator=generator) > 0.4
    mask[..., 0] = True
    if kind == "float":
        mask = torch.where(mask, torch.randn(mask.shape, generator=generator), torch.finfo(dtype).min).to(dtype)
    got = grouped_attention(query, key, value, mask, Softmax(scaling))
    assert (got.shape, got.dtype) == ((2, rows, 6, 8), dtype)
    expected = loop_attention(query, key, value, mask, scaling)
    assert_close(got.double(), expected, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_the_recording_attention_computes_what_the_model_does(dtype, attention):
    """With a mask and without, in one pass and from a cache; whatever the model was loaded with."""
    model = tiny_model().to(dtype)

    model.set_attn_implementation(attention)
    ids, mask = prompt_ids(20, 13)
    outputs = []
    for guest in (nullcontext(), recording(model)):
        cache = DynamicCache()
        with torch.no_grad(), guest:
            first = model(ids[:, :15], attention_mask=mask[:, :15], past_key_values=cache).logits[:, -1]
            rest = model(ids[:, 15:], attention_mask=mask, past_key_values=cache).logits
            single = model(ids[:1, -13:]).logits
        outputs.append([first, rest, single])
    for before, after in zip(*outputs, strict=True):
        assert_close(before, after, dtype)
