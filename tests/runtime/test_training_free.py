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

BUDGET, WINDOW, GROUP = 16, 4, 2


def layers_of(model, ids) -> list[Any]:
    """Of each layer: queries [H][N][d], keys and values [K][N][d] as numbers, and W_O [hidden, H, d]."""
    seen = []
    with torch.no_grad(), recording(model):
        model(ids, recorder=lambda _, query, key, *__: seen.append((query[0], key[0])))
    values = [each.values[0] for each in prefill(model, ids).entries()]
    outputs = [layer.self_attn.o_proj.weight.detach().unflatten(1, (-1, 8)) for layer in model.model.layers]
    plain = zip(seen, values, outputs, strict=True)
    return [(query.double(), key.double(), value.double(), output.double()) for (query, key), value, output in plain]


def dot(one, other):
    return sum(float(x) * float(y) for x, y in zip(one, other, strict=True))


def cosine(one, other):
    norms = math.sqrt(dot(one, one) * dot(other, other))
    return dot(one, other) / norms if norms else 0.0  # the padding token's key is zero in the first layer


def softmax(logits):
    whole = [math.exp(each - max(logits)) for each in logits]
    return [each / sum(whole) for each in whole]


def window_scores(query, key, head):
    """SnapKV's, before pooling: the mean over a KV head's group and the window, keys of the window in the softmax."""
    length = len(key[head])
    total = [0.0] * (length - WINDOW)
    for each in range(head * GROUP, head * GROUP + GROUP):
        for row in range(length - WINDOW, length):
            logits = [dot(query[each][row], key[head][entry]) / math.sqrt(8) for entry in range(row + 1)]
            for entry, weight in enumerate(softmax(logits)[: length - WINDOW]):
                total[entry] += weight / GROUP / WINDOW
    return [max(total[max(entry - 3, 0) : entry + 4]) for entry in range(len(total))]


def keydiff(head, query, key, value, output):
    unit = [[float(x) / math.sqrt(dot(each, each)) for x in each] for each in key[head]]
    anchor = [sum(column) / len(unit) for column in zip(*unit, strict=True)]
    return best_of([-cosine(each, anchor) for each in unit], BUDGET)


def curdkv(head, query, key, value, output):
    length = len(key[head])
    scores = []
    for entry in range(length):
        block = range(entry // 16 * 16, min(entry // 16 * 16 + 16, length))
        score = math.inf if entry < 4 else 1.0
        for of in (key[head], value[head]):
            score *= dot(of[entry], of[entry]) / sum(dot(of[each], of[each]) for each in block)
        scores.append(score)
    return best_of(scores, BUDGET)


def critical(head, query, key, value, output, *, budget=BUDGET):
    length, scores = len(key[head]), window_scores(query, key, head)
    own = list(range(length - WINDOW, length))
    chosen = best_of(scores, max(budget // 2 - WINDOW, 0))
    weighted = []
    for entry, score in enumerate(scores):
        norms = 0.0
        for each in range(head * GROUP, head * GROUP + GROUP):
            written = [dot(row[each], value[head][entry]) for row in output]
            norms += sum(abs(x) for x in written) / GROUP
        weighted.append(math.inf if entry in chosen else (score + 1e-4) * norms)
    return best_of(weighted, budget - WINDOW) + own


def rkv_scores(head, query, key):
    """Of the entries before the last 8."""
    length = len(key[head])
    older = length - 8
    attention = [0.0] * older
    for row in range(older, length):
        logits = [
            max(dot(query[each][row], key[head][entry]) for each in range(head * GROUP, head * GROUP + GROUP))
            for entry in range(older)
        ]
        for entry, weight in enumerate(softmax([each / math.sqrt(8) for each in logits])):
            attention[entry] += weight / 8
    pooled = [max(attention[max(entry - 3, 0) : entry + 4]) for entry in range(older)]
    mean = [0.0] * length
    for row in range(length):
        alike = [0.0 if entry == row else cosine(key[head][row], key[head][entry]) for entry in range(length)]
        near = [entry for entry in range(length) if alike[entry] > 0.5]
        if near:
            alike[near[-1]] = 0.0
        mean = [before + each / length for before, each in zip(mean, alike, strict=True)]
    redundant = softmax(mean)
    return [0.1 * pooled[entry] - 0.9 * redundant[entry] for entry in range(older)]


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
        kept = kept_entries(method, tiny, alone)
        for layer, of_layer in enumerate(layers_of(tiny, alone)):
            for head in range(2):
                assert kept[0][layer][head] == sorted(reference(head, *of_layer)), (layer, head)
                assert batch[row][layer][head] == kept[0][layer][head], (layer, head)
    assert method.start(tiny, ids, mask).counts().sum(dim=(0, 2)).tolist() == [6 * BUDGET, 6 * BUDGET, 6 * 9]


def test_importance_alone_divides_the_budget_of_heads(tiny):
    ids = prompt_ids(53, seed=1)[0]
    method = CriticalAdaKV(BUDGET, window=WINDOW)
    adakv = SnapKV(BUDGET, window=WINDOW, allocate=method.allocate)
    kept, plain = (kept_entries(each, tiny, ids) for each in (method, adakv))
    for layer, of_layer in enumerate(layers_of(tiny, ids)):
        for head in range(2):
            count = len(plain[0][layer][head])
            assert kept[0][layer][head] == sorted(critical(head, *of_layer, budget=count)), (layer, head)
    assert kept != plain and kept_entries(CriticalKV(BUDGET, window=WINDOW, first=1), tiny, ids) == kept_entries(
        SnapKV(BUDGET, window=WINDOW), tiny, ids
    )


def test_norms_of_what_entries_add_survive_an_eviction(tiny):
    whole = prefill(tiny, prompt_ids(41)[0])
    method = KeyNorm(BUDGET)
    masks = method.select(whole, method.importance(tiny, whole))
    for before, after, mask in zip(whole.layers, method.compress_state(tiny, whole).layers, masks, strict=True):
        expected = output_norms(before, 2)[mask.repeat_interleave(GROUP, dim=1)].view(1, 4, BUDGET)
        assert_close(output_norms(after, 2), expected)


WHILE_DECODING = [RKV(24, every=6), KeyDiff(24, every=6), CriticalKV(24, window=8, every=6)]


@pytest.mark.parametrize("method", WHILE_DECODING, ids=lambda each: type(each).__name__)
def test_eviction_while_decoding_never_exceeds_the_budget(method, tiny):
    state, seen = method.start(tiny, prompt_ids(41)[0]), []

    def compress(each):
        seen.append(each.length)
        return method.compress_state(tiny, each)

    assert state.length == 18
    after = decode(tiny, state, stop_after(30, None), pad_token=0, eviction=PeriodicEviction(6, compress)).state
    assert seen == [24] * 4 and after.length <= 24


class SlowRKV(Slow):
    """R-KV among the entries that are left; the last 8 are left in every head."""

    def importance(self):
        _, queries, keys, _ = self.look()
        found = [torch.full(alive.shape, -math.inf, dtype=torch.float64) for alive in self.alive]
        for query, key, alive, of in zip(queries, keys, self.alive, found, strict=True):
            for head in range(2):
                left = alive[head].nonzero()[:, 0]
                scores = rkv_scores(head, query.double()[:, left], key.double()[:, left])
                of[head, left] = torch.tensor([*scores, *[math.inf] * 8], dtype=torch.float64)
        return found


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
def test_bad_values_are_named(make, field, code):
    with refused(field, code):
        make()
