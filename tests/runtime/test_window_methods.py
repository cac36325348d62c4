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

BUDGET = 16
WINDOW = 4
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


def attention_of(model, ids):
    """Of each layer: the whole attention matrix [H, N, N] float32, and the keys [K, N, d]."""
    recorded = []
    with torch.no_grad(), recording(model):
        model(ids, recorder=lambda _, query, key, softmax, *__: recorded.append((query[0], key[0], softmax.scaling)))
    layers = []
    for query, key, scaling in recorded:
        query = query.float()
        key = key.float()
        heads, length, _ = query.shape
        group = heads // len(key)
        weights = torch.zeros(heads, length, length)
        for head in range(heads):
            head_keys = key[head // group]
            for row in range(length):
                logits = (query[head, row : row + 1] @ head_keys[: row + 1].T).float() * scaling
                weights[head, row, : row + 1] = logits.softmax(-1)
        layers.append((weights, key))
    return layers


def scale_queries_and_keys(model, factor=300):
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "q_proj" in name or "k_proj" in name:
                weight.mul_(factor)


def of_group(weights, kv_head):
    """The attention [G, N, N] of a KV head's query heads."""
    group = len(weights) // 2
    return weights[kv_head * group : (kv_head + 1) * group]


def window_of(length):
    return list(range(length - WINDOW, length))


def h2o(weights, keys, head, layer):
    length = weights.shape[1]
    group = of_group(weights, head)
    received = []
    for entry in range(length - WINDOW):
        total = 0.0
        for member in range(2):
            for row in range(length):
                total += float(group[member, row, entry])
        received.append(total / 2)
    return best_of(received, BUDGET - WINDOW) + window_of(length)


def tova(weights, keys, head, layer):
    length = weights.shape[1]
    received = []
    for entry in range(length - 1):
        received.append(sum(float(matrix[length - 1, entry]) for matrix in weights) / 4)
    return [*best_of(received, BUDGET - 1), length - 1]


def window_scores(weights, head):
    """The window's attention to the entries before it: the mean over its tokens and the group, then max-pooled."""
    length = weights.shape[1]
    from_window = of_group(weights, head)[:, length - WINDOW :]
    means = [float(from_window[:, :, entry].mean()) for entry in range(length - WINDOW)]
    return [max(means[max(entry - 3, 0) : entry + 4]) for entry in range(length - WINDOW)]


def best_before_window(weights, head, count):
    """So many entries by their window scores, and the window."""
    return best_of(window_scores(weights, head), count) + window_of(weights.shape[1])


def snapkv(weights, keys, head, layer):
    return best_before_window(weights, head, BUDGET - WINDOW)


def key_norm(weights, keys, head, layer):
    norms = [sum(float(x) ** 2 for x in key) ** 0.5 for key in keys[head]]
    return best_of([-norm for norm in norms], BUDGET)


def streamingllm(weights, keys, head, layer):
    length = weights.shape[1]
    return [0, 1, 2, 3, *range(length - BUDGET + 4, length)]


def lacache(weights, keys, head, layer):
    """3 layers and a span of 1: ladders of 3 entries, of which each layer keeps its own one."""
    return compacted(weights.shape[1], BUDGET, layer, 3, 3, 1)


def compacted(length, budget, layer, layers, ladder, rungs):
    """Entries left when ladders are compacted one after the other, with 4 sinks, until the budget is met."""
    entries = list(range(length))
    cursor = 4
    lowest = layer % (ladder - rungs + 1)
    while len(entries) > budget:
        if cursor + ladder > len(entries) - layers or ladder == rungs:  # as many recent ones as layers are spared
            if cursor == 4:
                entries.pop(4)
            cursor = 4
            continue
        steps = entries[cursor : cursor + ladder]
        for dropped in steps[:lowest] + steps[lowest + rungs :]:
            if len(entries) > budget:
                entries.remove(dropped)
        cursor += rungs
    return entries


def pyramidkv(weights, keys, head, layer):
    """B = 12 and beta = 4: layers get 21, 12 and 3 entries beside the window."""
    return best_before_window(weights, head, [21, 12, 3][layer])


def best_by_head(weights):
    """How many of the layer's best 24 entries lie in head 0, and in head 1."""
    candidates = weights.shape[1] - WINDOW
    best = best_of(window_scores(weights, 0) + window_scores(weights, 1), 2 * (BUDGET - WINDOW))
    in_head_0 = sum(index < candidates for index in best)
    return [in_head_0, len(best) - in_head_0]


def adakv(weights, keys, head, layer):
    """B = 12 and alpha = .2, so a floor of 2 (and an ideal of 2.4): what rounding misses goes to the further one."""
    shares = [count * 0.8 for count in best_by_head(weights)]
    counts = [round(share + 2) for share in shares]
    while sum(counts) != 24:
        step = 1 if sum(counts) < 24 else -1
        gaps = [round((share + 2.4 - count) * step, 6) for share, count in zip(shares, counts, strict=True)]
        counts[gaps.index(max(gaps))] += step
    return best_before_window(weights, head, counts[head])


def adakv_of_kvpress(weights, keys, head, layer):
    """At least int(16 * .5) entries, the window of 4 among them."""
    count = best_by_head(weights)[head]
    return best_before_window(weights, head, min(max(count, 4), 20))


REFERENCES = {
    "h2o": h2o,
    "tova": tova,
    "snapkv": snapkv,
    "key_norm": key_norm,
    "streamingllm": streamingllm,
    "lacache": lacache,
    "pyramidkv": pyramidkv,
    "adakv": adakv,
    "adakv of kvpress": adakv_of_kvpress,
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
    model = tiny_model(family)
    ids = prompt_ids(61, seed=2)[0]  # a prompt without scores 1e-7 apart
    if large:
        scale_queries_and_keys(model)
    model.to(dtype)
    for name, weight in model.named_parameters():
        if "k_norm" in name:  # which else gives all keys one norm
            torch.nn.init.uniform_(weight, 0.5, 1.5)
    attention = attention_of(model, ids)
    for name, reference in REFERENCES.items():
        (kept,) = kept_entries(METHODS[name], model, ids)
        for layer, (weights, keys) in enumerate(attention):
            for head in range(2):
                assert kept[layer][head] == sorted(reference(weights, keys, head, layer)), (name, layer, head)


@pytest.mark.parametrize(
    ("name", "dtype"),
    [*zip(["laq", "laq++", "dapq", "oracle", "kivi", "lookaheadkv"], [torch.float16, torch.bfloat16] * 3, strict=True)],
)
def test_methods_that_read_on_take_products_above_the_range_of_float16(name, dtype, tmp_path):
    model = tiny_model(eos_token_id=None)
    ids = prompt_ids(61, seed=2)[0]
    scale_queries_and_keys(model)
    model.to(dtype)
    adapter = save(random_module(), tmp_path / "adapter")
    method = LookaheadKV.from_pretrained(adapter, BUDGET) if name == "lookaheadkv" else method_of(name, "", tmp_path)
    state = method.start(model, ids)
    assert state.logits.isfinite().all()
    if name != "kivi":
        assert state.counts().unique().tolist() == [BUDGET]
    decoded = decode(model, state, stop_after(8, None), pad_token=0)
    assert decoded.state.logits.isfinite().all()


@pytest.mark.parametrize("name", METHODS)
def test_budget_and_bytes_are_exact(name):
    """Layers x KV heads x budget entries, and those x head dim x 2 x item size bytes; bytes have no padding."""
    model = tiny_model().to(torch.bfloat16)
    ids, mask = prompt_ids(50, 33, 9)
    method = METHODS[name]
    state = method.compress_state(model, prefill(model, ids, mask, needs=method.needs()))
    assert state.counts().sum(dim=(0, 2)).tolist() == [6 * BUDGET, 6 * BUDGET, 6 * 9]
    assert state.kv_bytes == 6 * (BUDGET + BUDGET + 9) * 8 * 2 * 2


def test_random_entries_depend_on_seed_position_layer_and_head_alone():
    model = tiny_model()
    state = prefill(model, prompt_ids(50)[0])
    other_prompt = prefill(model, prompt_ids(50, seed=1)[0])
    longer_prompt = prefill(model, prompt_ids(60)[0])

    def scores_of(state, seed=0):
        """[L, K, N]"""
        return torch.stack(RandomScores(seed)(model, state, Reduce()))[:, 0]

    scores = scores_of(state)
    assert torch.equal(scores_of(other_prompt), scores)
    assert torch.equal(scores_of(longer_prompt)[:, :, :50], scores)
    assert not torch.equal(scores_of(state, seed=1), scores)
    assert len({tuple(head.tolist()) for head in scores.flatten(0, 1)}) == 6

    torch.manual_seed(5)
    before = torch.rand(1)
    torch.manual_seed(5)
    RandomScores()(model, state, Reduce())
    assert torch.equal(torch.rand(1), before)


@pytest.mark.parametrize("observer", [Ladder(1), Ladder(3, 1), Ladder(9)], ids=repr)
def test_ladders_stop_at_any_budget(observer):
    ladder, rungs = observer.shape(6)
    for length in (5, 11, 30, 47):
        for layer in range(6):
            ranks = observer.scores_by_position(length, layer, 6).tolist()
            for budget in range(4, length):
                expected = compacted(length, budget, layer, 6, ladder, rungs)
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
def test_bad_values_are_refused(make, field, code):
    with refused(field, code):
        make()
