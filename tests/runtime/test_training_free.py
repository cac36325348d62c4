"""Methods that need no training, against written-out definitions: KeyDiff, CurDKV, CriticalKV and R-KV.

The references take a tiny model's own queries, keys and values, and go through them in loops, in float64.
"""

import math
from typing import Any

import pytest
import torch

from keepsight.runtime.attention import recording
from keepsight.runtime.generate import PeriodicEviction, decode, stop_after
from keepsight.runtime.methods import RKV, CriticalAdaKV, CriticalKV, CurDKV, Evict, KeyDiff, KeyNorm, SnapKV
from keepsight.runtime.methods.geometry import output_norms
from keepsight.runtime.methods.rkv import Redundancy
from keepsight.runtime.state import prefill
from tests.close import assert_close
from tests.refused import refused
from tests.runtime.dense import best_of
from tests.runtime.scoring import kept_entries
from tests.runtime.slow import Slow
from tests.tiny import prompt_ids, tiny_model

BUDGET = 16
WINDOW = 4
GROUP = 2
"""Query heads of a KV head."""


def layers_of(model, ids) -> list[Any]:
    """Of each layer: queries [H][N][d], keys and values [K][N][d] as numbers, and W_O [hidden, H, d]."""
    queries_and_keys = []
    with torch.no_grad(), recording(model):
        model(ids, recorder=lambda _, query, key, *__: queries_and_keys.append((query[0].double(), key[0].double())))
    entries = prefill(model, ids).entries()
    layers = []
    for (query, key), layer_entries, layer in zip(queries_and_keys, entries, model.model.layers, strict=True):
        output = layer.self_attn.o_proj.weight.detach().unflatten(1, (-1, 8))
        layers.append((query, key, layer_entries.values[0].double(), output.double()))
    return layers


def dot(left, right):
    return sum(float(x) * float(y) for x, y in zip(left, right, strict=True))


def cosine(left, right):
    norms = math.sqrt(dot(left, left) * dot(right, right))
    return dot(left, right) / norms if norms else 0.0  # the padding token's key is zero in the first layer


def softmax(logits):
    powers = [math.exp(logit - max(logits)) for logit in logits]
    return [power / sum(powers) for power in powers]


def group_of(head):
    """The query heads of a KV head."""
    return range(head * GROUP, head * GROUP + GROUP)


def max_pooled(scores):
    """Max over 7 neighbours."""
    return [max(scores[max(entry - 3, 0) : entry + 4]) for entry in range(len(scores))]


def window_scores(query, key, head):
    """SnapKV's: the mean over a KV head's group and the window, keys of the window in the softmax; pooled."""
    length = len(key[head])
    means = [0.0] * (length - WINDOW)
    for query_head in group_of(head):
        for row in range(length - WINDOW, length):
            logits = [dot(query[query_head][row], key[head][entry]) / math.sqrt(8) for entry in range(row + 1)]
            for entry, weight in enumerate(softmax(logits)[: length - WINDOW]):
                means[entry] += weight / GROUP / WINDOW
    return max_pooled(means)


def keydiff(head, query, key, value, output):
    unit_keys = []
    for vector in key[head]:
        norm = math.sqrt(dot(vector, vector))
        unit_keys.append([float(x) / norm for x in vector])
    anchor = [sum(column) / len(unit_keys) for column in zip(*unit_keys, strict=True)]
    return best_of([-cosine(unit_key, anchor) for unit_key in unit_keys], BUDGET)


def curdkv(head, query, key, value, output):
    length = len(key[head])
    scores = []
    for entry in range(length):
        block_start = entry // 16 * 16
        block = range(block_start, min(block_start + 16, length))
        score = math.inf if entry < 4 else 1.0
        for vectors in (key[head], value[head]):
            of_block = sum(dot(vectors[neighbor], vectors[neighbor]) for neighbor in block)
            score *= dot(vectors[entry], vectors[entry]) / of_block
        scores.append(score)
    return best_of(scores, BUDGET)


def critical(head, query, key, value, output, *, budget=BUDGET):
    length = len(key[head])
    scores = window_scores(query, key, head)
    by_attention = best_of(scores, max(budget // 2 - WINDOW, 0))
    weighted = []
    for entry, score in enumerate(scores):
        norms = 0.0
        for query_head in group_of(head):
            written = [dot(row[query_head], value[head][entry]) for row in output]
            norms += sum(abs(x) for x in written) / GROUP
        weighted.append(math.inf if entry in by_attention else (score + 1e-4) * norms)
    return best_of(weighted, budget - WINDOW) + list(range(length - WINDOW, length))


def rkv_attention(head, query, key):
    """What the last 8 tokens pay to the entries before them: the best logit of the group, the mean over the tokens."""
    length = len(key[head])
    attention = [0.0] * (length - 8)
    for row in range(length - 8, length):
        logits = []
        for entry in range(length - 8):
            group_logits = [dot(query[query_head][row], key[head][entry]) for query_head in group_of(head)]
            logits.append(max(group_logits) / math.sqrt(8))
        for entry, weight in enumerate(softmax(logits)):
            attention[entry] += weight / 8
    return attention


def rkv_similarity(keys):
    """How similar each key is to the others on average; each key's last near duplicate counts for nothing."""
    length = len(keys)
    means = [0.0] * length
    for row in range(length):
        cosines = [0.0 if entry == row else cosine(keys[row], keys[entry]) for entry in range(length)]
        near = [entry for entry in range(length) if cosines[entry] > 0.5]
        if near:
            cosines[near[-1]] = 0.0
        for entry in range(length):
            means[entry] += cosines[entry] / length
    return means


def rkv_scores(head, query, key):
    """Of the entries before the last 8."""
    pooled = max_pooled(rkv_attention(head, query, key))
    redundant = softmax(rkv_similarity(key[head]))
    return [0.1 * score - 0.9 * redundant[entry] for entry, score in enumerate(pooled)]


def rkv(head, query, key, value, output):
    length = len(key[head])
    return best_of(rkv_scores(head, query, key), BUDGET - 8) + list(range(length - 8, length))


CASES = {
    "keydiff": (KeyDiff(BUDGET), keydiff),
    "curdkv": (CurDKV(BUDGET), curdkv),
    "criticalkv": (CriticalKV(BUDGET, window=WINDOW), critical),
    "rkv": (RKV(BUDGET), rkv),
}


@pytest.fixture(scope="module")
def tiny():
    model = tiny_model("qwen3")
    for name, weight in model.named_parameters():
        if "k_norm" in name:  # which else gives all keys one norm
            torch.nn.init.uniform_(weight, 0.5, 1.5)
    return model


@pytest.mark.parametrize("name", CASES)
def test_methods_keep_what_their_definitions_say(name, tiny):
    """Alone, and in a batch with padding, in which the shortest prompt fits the budget."""
    method, reference = CASES[name]
    ids, mask = prompt_ids(53, 38, 9, seed=1)
    batch = kept_entries(method, tiny, ids, mask)
    for row, length in enumerate((53, 38)):
        alone = ids[row : row + 1, 53 - length :]
        (kept,) = kept_entries(method, tiny, alone)
        for layer, states in enumerate(layers_of(tiny, alone)):
            for head in range(2):
                assert kept[layer][head] == sorted(reference(head, *states)), (layer, head)
                assert batch[row][layer][head] == kept[layer][head], (layer, head)
    assert method.start(tiny, ids, mask).counts().sum(dim=(0, 2)).tolist() == [6 * BUDGET, 6 * BUDGET, 6 * 9]


def test_importance_alone_divides_the_budget_of_heads(tiny):
    ids = prompt_ids(53, seed=1)[0]
    method = CriticalAdaKV(BUDGET, window=WINDOW)
    adakv = SnapKV(BUDGET, window=WINDOW, allocate=method.allocate)
    (kept,) = kept_entries(method, tiny, ids)
    (kept_by_adakv,) = kept_entries(adakv, tiny, ids)
    for layer, states in enumerate(layers_of(tiny, ids)):
        for head in range(2):
            count = len(kept_by_adakv[layer][head])
            assert kept[layer][head] == sorted(critical(head, *states, budget=count)), (layer, head)
    assert kept != kept_by_adakv

    attention_alone = CriticalKV(BUDGET, window=WINDOW, first=1)
    snapkv = SnapKV(BUDGET, window=WINDOW)
    assert kept_entries(attention_alone, tiny, ids) == kept_entries(snapkv, tiny, ids)


def test_norms_of_what_entries_add_survive_an_eviction(tiny):
    full = prefill(tiny, prompt_ids(41)[0])
    method = KeyNorm(BUDGET)
    masks = method.select(full, method.importance(tiny, full))
    evicted = method.compress_state(tiny, full)
    for before, after, mask in zip(full.layers, evicted.layers, masks, strict=True):
        expected = output_norms(before, 2)[mask.repeat_interleave(GROUP, dim=1)].view(1, 4, BUDGET)
        assert_close(output_norms(after, 2), expected)


WHILE_DECODING = [RKV(24, every=6), KeyDiff(24, every=6), CriticalKV(24, window=8, every=6)]


@pytest.mark.parametrize("method", WHILE_DECODING, ids=lambda method: type(method).__name__)
def test_eviction_while_decoding_never_exceeds_the_budget(method, tiny):
    state = method.start(tiny, prompt_ids(41)[0])
    assert state.length == 18
    lengths = []

    def compress(state):
        lengths.append(state.length)
        return method.compress_state(tiny, state)

    after = decode(tiny, state, stop_after(30, None), pad_token=0, eviction=PeriodicEviction(6, compress)).state
    assert lengths == [24] * 4
    assert after.length <= 24


class SlowRKV(Slow):
    """R-KV among the entries that are left; the last 8 are left in every head."""

    def importance(self):
        _, queries, keys, _ = self.look()
        importance = []
        for query, key, alive in zip(queries, keys, self.alive, strict=True):
            layer = torch.full(alive.shape, -math.inf, dtype=torch.float64)
            for head in range(2):
                left = alive[head].nonzero()[:, 0]
                scores = rkv_scores(head, query.double()[:, left], key.double()[:, left])
                layer[head, left] = torch.tensor([*scores, *[math.inf] * 8], dtype=torch.float64)
            importance.append(layer)
        return importance


def test_rkv_while_decoding_is_its_definition(tiny):
    SlowRKV(tiny, RKV(24, every=6)).check_decoding(prompt_ids(41)[0], 21)


@pytest.mark.parametrize(
    ("make", "field", "code"),
    [
        (lambda: CriticalKV(64, first=1.5), "first", "range"),
        (lambda: CriticalKV(64, during_prefill=True), "during_prefill", "conflict"),
        (lambda: CriticalKV(64, observer=KeyDiff(9).observer), "observer", "conflict"),
        (lambda: Redundancy(share=2), "share", "range"),
        (lambda: Evict(9, Redundancy()), "window", "range"),
        (lambda: KeyDiff(12, value_norm=True), "value_norm", "conflict"),
    ],
)
def test_bad_values_are_refused(make, field, code):
    with refused(field, code):
        make()
