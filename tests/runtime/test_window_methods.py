"""Methods that look at positions, at keys, or from the prompt's own tokens, against written-out definitions.

The references take a tiny model's own queries and keys, make the whole attention matrix, and go through it in loops.
"""

import pytest
import torch

from keepsight.runtime.allocate import Adaptive, Pyramid
from keepsight.runtime.attention import recording
from keepsight.runtime.generate import decode, stop_after
from keepsight.runtime.importance import Reduce
from keepsight.runtime.methods.lookaheadkv import LookaheadKV
from keepsight.runtime.methods.positions import (
    Earliness,
    KeyNorm,
    LaCache,
    Ladder,
    RandomEntries,
    RandomScores,
    StreamingLLM,
)
from keepsight.runtime.methods.window import H2O, TOVA, AdaKV, PyramidKV, SnapKV
from keepsight.runtime.state import prefill
from tests.models.modules import random_module, save
from tests.refused import refused
from tests.runtime.dense import best_of
from tests.runtime.family_methods import method_of
from tests.runtime.scoring import kept_entries
from tests.tiny import prompt_ids, tiny_model

BUDGET, WINDOW = 16, 4
LADDER = Ladder(span=1)
METHODS = {
    "h2o": H2O(BUDGET, window=WINDOW),
    "tova": TOVA(BUDGET),
    "snapkv": SnapKV(BUDGET, window=WINDOW),
    "key_norm": KeyNorm(BUDGET),
    "random": RandomEntries(BUDGET),
    "streamingllm": StreamingLLM(BUDGET),
    "streamingllm of KVCache-Factory": StreamingLLM(BUDGET, observer=Earliness(), window=WINDOW),
    "lacache": LaCache(BUDGET, observer=LADDER),
    "pyramidkv": PyramidKV(BUDGET, window=WINDOW, allocate=Pyramid(beta=4)),
    "adakv": AdaKV(BUDGET, window=WINDOW),
    "adakv of kvpress": AdaKV(BUDGET, window=WINDOW, allocate=Adaptive(blend=False, floor=0.5)),
}


def _attention(model, ids):
    """Of each layer: the whole attention matrix [H, N, N] float32, and the keys [K, N, d]."""
    seen = []
    with torch.no_grad(), recording(model):
        model(ids, recorder=lambda _, query, key, softmax, *__: seen.append((query[0], key[0], softmax.scaling)))
    result = []
    for query, key, scaling in seen:
        query, key = query.float(), key.float()
        heads, length, _ = query.shape
        weights = torch.zeros(heads, length, length)
        for head in range(heads):
            of_group = key[head // (heads // len(key))]
            for row in range(length):
                logits = (query[head, row : row + 1] @ of_group[: row + 1].T).float() * scaling
                weights[head, row, : row + 1] = logits.softmax(-1)
        result.append((weights, key))
    return result


def _scale_queries_and_keys(model, factor=300):
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "q_proj" in name or "k_proj" in name:
                weight.mul_(factor)


def _of_group(weights, kv_head):
    group = len(weights) // 2
    return weights[kv_head * group : (kv_head + 1) * group]


def _h2o(weights, keys, head, layer):
    length = weights.shape[1]
    received = [
        sum(float(_of_group(weights, head)[each, row, entry]) for each in range(2) for row in range(length)) / 2
        for entry in range(length - WINDOW)
    ]
    return best_of(received, BUDGET - WINDOW) + list(range(length - WINDOW, length))


def _tova(weights, keys, head, layer):
    length = weights.shape[1]
    looked_at = [sum(float(each[length - 1, entry]) for each in weights) / 4 for entry in range(length - 1)]
    return [*best_of(looked_at, BUDGET - 1), length - 1]


def _window_scores(weights, head):
    length = weights.shape[1]
    seen = [float(_of_group(weights, head)[:, length - WINDOW :, entry].mean()) for entry in range(length - WINDOW)]
    return [max(seen[max(entry - 3, 0) : entry + 4]) for entry in range(length - WINDOW)]


def _snapkv(weights, keys, head, layer):
    length = weights.shape[1]
    return best_of(_window_scores(weights, head), BUDGET - WINDOW) + list(range(length - WINDOW, length))


def _key_norm(weights, keys, head, layer):
    return best_of([-(sum(float(x) ** 2 for x in key) ** 0.5) for key in keys[head]], BUDGET)


def _streamingllm(weights, keys, head, layer):
    length = weights.shape[1]
    return [0, 1, 2, 3, *range(length - BUDGET + 4, length)]


def _lacache(weights, keys, head, layer):
    """3 layers and a span of 1: ladders of 3 entries, of which each layer keeps its own one."""
    return _compacted(weights.shape[1], BUDGET, layer, 3, 3, 1)


def _compacted(length, budget, layer, layers, ladder, kept):
    """Entries left when ladders are compacted one after the other, with 4 sinks, until the budget is met."""
    entries, cursor = list(range(length)), 4
    own = range(layer % (ladder - kept + 1), layer % (ladder - kept + 1) + kept)
    while len(entries) > budget:
        if cursor + ladder > len(entries) - layers or ladder == kept:  # as many recent ones as layers are spared
            if cursor == 4:
                entries.pop(4)
            cursor = 4
            continue
        for dropped in [each for place, each in enumerate(entries[cursor : cursor + ladder]) if place not in own]:
            if len(entries) > budget:
                entries.remove(dropped)
        cursor += kept
    return entries


def _pyramidkv(weights, keys, head, layer):
    """B = 12 and beta = 4: layers get 21, 12 and 3 entries beside the window."""
    length = weights.shape[1]
    return best_of(_window_scores(weights, head), [21, 12, 3][layer]) + list(range(length - WINDOW, length))


def _shared(weights):
    """How many of the layer's best 24 entries lie in head 0, and in head 1."""
    length = weights.shape[1]
    both = [score for head in range(2) for score in _window_scores(weights, head)]
    best = best_of(both, 2 * (BUDGET - WINDOW))
    return [sum(index // (length - WINDOW) == head for index in best) for head in range(2)]


def _adakv(weights, keys, head, layer):
    """B = 12 and alpha = .2, so a floor of 2 (and an ideal of 2.4): what rounding misses goes to the further one."""
    length, shared = weights.shape[1], _shared(weights)
    counts = [round(count * 0.8 + 2) for count in shared]
    while sum(counts) != 24:
        step = 1 if sum(counts) < 24 else -1
        gaps = [round((count * 0.8 + 2.4 - got) * step, 6) for count, got in zip(shared, counts, strict=True)]
        counts[gaps.index(max(gaps))] += step
    return best_of(_window_scores(weights, head), counts[head]) + list(range(length - WINDOW, length))


def _adakv_kvpress(weights, keys, head, layer):
    """At least int(16 * .5) entries, the window of 4 among them."""
    length, shared = weights.shape[1], _shared(weights)
    counts = [min(max(count, 4), 20) for count in shared]
    return best_of(_window_scores(weights, head), counts[head]) + list(range(length - WINDOW, length))


REFERENCES = {
    "h2o": _h2o,
    "tova": _tova,
    "snapkv": _snapkv,
    "key_norm": _key_norm,
    "streamingllm": _streamingllm,
    "lacache": _lacache,
    "pyramidkv": _pyramidkv,
    "adakv": _adakv,
    "adakv of kvpress": _adakv_kvpress,
}


@pytest.mark.parametrize(
    ("family", "dtype", "large"),
    [
        ("llama", torch.float32, False),
        ("qwen3", torch.bfloat16, False),
        ("llama", torch.float16, True),
        ("llama", torch.bfloat16, True),
    ],
    ids=str,
)
def test_methods_keep_what_their_definitions_say(family, dtype, large):
    """Also of queries and keys whose products are above the range of float16, which sdpa computes well."""
    model, ids = tiny_model(family), prompt_ids(61, seed=2)[0]  # a prompt without scores 1e-7 apart
    if large:
        _scale_queries_and_keys(model)
    model.to(dtype)
    for name, weight in model.named_parameters():
        if "k_norm" in name:  # which else gives all keys one norm
            torch.nn.init.uniform_(weight, 0.5, 1.5)
    attention = _attention(model, ids)
    for name, reference in REFERENCES.items():
        kept = kept_entries(METHODS[name], model, ids)
        for layer, (weights, keys) in enumerate(attention):
            for head in range(2):
                assert kept[0][layer][head] == sorted(reference(weights, keys, head, layer)), (name, layer, head)


@pytest.mark.parametrize(
    ("name", "dtype"),
    zip(["laq", "laq++", "dapq", "oracle", "kivi", "lookaheadkv"], [torch.float16, torch.bfloat16] * 3, strict=True),
)
def test_methods_that_read_on_take_products_above_the_range_of_float16(name, dtype, tmp_path):
    model, ids = tiny_model(eos_token_id=None), prompt_ids(61, seed=2)[0]
    _scale_queries_and_keys(model)
    model.to(dtype)
    adapter = save(random_module(), tmp_path / "adapter")
    method = LookaheadKV.from_pretrained(adapter, BUDGET) if name == "lookaheadkv" else method_of(name, "", tmp_path)
    state = method.start(model, ids)
    assert state.logits.isfinite().all() and (name == "kivi" or state.counts().unique().tolist() == [BUDGET])
    written = decode(model, state, stop_after(8, None), pad_token=0)
    assert written.state.logits.isfinite().all()


@pytest.mark.parametrize("name", METHODS)
def test_budget_and_bytes_are_exact(name):
    """Layers x KV heads x budget entries, and those x head dim x 2 x item size bytes; bytes have no padding."""
    model, (ids, mask) = tiny_model().to(torch.bfloat16), prompt_ids(50, 33, 9)
    kept = METHODS[name].compress_state(model, prefill(model, ids, mask, needs=METHODS[name].needs()))
    assert kept.counts().sum(dim=(0, 2)).tolist() == [6 * BUDGET, 6 * BUDGET, 6 * 9]
    assert kept.kv_bytes == 6 * (BUDGET + BUDGET + 9) * 8 * 2 * 2


def test_random_entries_depend_on_seed_place_layer_and_head_alone():
    model = tiny_model()
    state, other = (prefill(model, prompt_ids(50, seed=seed)[0]) for seed in (0, 1))
    scores = torch.stack(RandomScores()(model, state, Reduce()))[:, 0]
    assert torch.equal(torch.stack(RandomScores()(model, other, Reduce()))[:, 0], scores)
    longer = prefill(model, prompt_ids(60)[0])
    assert torch.equal(torch.stack(RandomScores()(model, longer, Reduce()))[:, 0, :, :50], scores)
    assert not torch.equal(torch.stack(RandomScores(1)(model, state, Reduce()))[:, 0], scores)
    assert len({tuple(each.tolist()) for each in scores.flatten(0, 1)}) == 6
    torch.manual_seed(5)
    before = torch.rand(1)
    torch.manual_seed(5)
    RandomScores()(model, state, Reduce())
    assert torch.equal(torch.rand(1), before)


@pytest.mark.parametrize("observer", [Ladder(1), Ladder(3, 1), Ladder(9)], ids=repr)
def test_ladders_stop_at_any_budget(observer):
    ladder, kept = observer.shape(6)
    for length in (5, 11, 30, 47):
        for layer in range(6):
            ranks = observer.scores_by_position(length, layer, 6).tolist()
            for budget in range(4, length):
                expected = _compacted(length, budget, layer, 6, ladder, kept)
                assert sorted(best_of(ranks, budget)) == expected, (length, layer, budget)


@pytest.mark.parametrize(
    ("make", "field", "code"),
    [
        (lambda: Ladder(0), "span", "range"),
        (lambda: Ladder(4, 4), "overlap", "range"),
        (lambda: RandomScores(-1), "seed", "range"),
        (lambda: TOVA(1), "budget", "range"),
        (lambda: KeyNorm(19, allocate=Pyramid()), "budget", "range"),
    ],
)
def test_bad_values_are_named(make, field, code):
    with refused(field, code):
        make()
