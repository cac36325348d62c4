"""Expected Attention and TriAttention against written-out definitions: queries and keys before RoPE, in float64."""

import cmath
import math
from typing import Any

import pytest
import torch

from keepsight.runtime.generate import PeriodicEviction, decode, stop_after
from keepsight.runtime.methods import ExpectedAdaKV, ExpectedAttention, TriAttention
from keepsight.runtime.methods.expected import ExpectedQueries, Trigonometric
from keepsight.runtime.rotary import Rotary
from keepsight.runtime.saved import load_state, save_state
from keepsight.runtime.state import Needs, prefill
from tests.close import assert_close
from tests.families import FAMILIES, family_model
from tests.refused import refused
from tests.runtime.dense import best_of
from tests.runtime.scoring import kept_entries
from tests.runtime.slow import Slow
from tests.tiny import prompt_ids, tiny_model

BUDGET, SINKS, WIDTH, GROUP, AHEAD = 16, 4, 8, 2, 512


@pytest.fixture(scope="module")
def tiny():
    return tiny_model("qwen3")


def read(model, ids):
    """Of each layer: queries and keys before RoPE and values, [heads][tokens][d] float64."""
    found: list[Any] = []
    hooks = []
    for layer in model.model.layers:
        parts: list[Any] = []
        attention = layer.self_attn
        for module in (attention.q_norm, attention.k_norm, attention.v_proj):
            hooks.append(module.register_forward_hook(lambda *args, into=parts: into.append(args[2])))
        found.append(parts)
    with torch.no_grad():
        model(ids)
    for hook in hooks:
        hook.remove()
    return [[part[0].view(ids.shape[1], -1, WIDTH).transpose(0, 1).double() for part in parts] for parts in found]


def frequencies(model):
    base = model.config.rope_parameters["rope_theta"]
    return [base ** (-2 * each / WIDTH) for each in range(WIDTH // 2)]


def rotation(model, position):
    """The matrix by which RoPE turns a vector at a position."""
    matrix, half = torch.zeros(WIDTH, WIDTH, dtype=torch.float64), WIDTH // 2
    for place, each in enumerate(frequencies(model)):
        cosine, sine = math.cos(position * each), math.sin(position * each)
        matrix[place, place] = matrix[place + half, place + half] = cosine
        matrix[place, place + half], matrix[place + half, place] = -sine, sine
    return matrix


def expected(model, ids, epsilon=0.0):
    """Scores of each layer and KV head."""
    length, scores = ids.shape[1], []
    ahead = torch.stack([rotation(model, length + each) for each in range(AHEAD)]).mean(dim=0)
    for query, key, value in read(model, ids):
        of_layer = []
        for head in range(2):
            shares = [0.0] * length
            for each in range(head * GROUP, head * GROUP + GROUP):
                used = query[each, SINKS:]
                mean = used.mean(dim=0)
                spread = torch.stack([torch.outer(row - mean, row - mean) for row in used]).mean(dim=0)
                mean, spread = ahead @ mean, ahead @ spread @ ahead.T
                powers = []
                for entry in range(SINKS, length):
                    turned = rotation(model, entry) @ key[head, entry]
                    logit = float(mean @ turned) / math.sqrt(WIDTH)
                    powers.append(math.exp(logit + float(turned @ spread @ turned) / WIDTH / 2))
                for entry, power in enumerate(powers):
                    shares[SINKS + entry] += power / sum(powers) / GROUP
            norms = value[head].norm(dim=-1).tolist()
            of_head = [(share + epsilon) * norm for share, norm in zip(shares, norms, strict=True)]
            of_layer.append([math.inf] * SINKS + of_head[SINKS:])
        scores.append(of_layer)
    return scores


def trigonometric(model, ids):
    """Scores of each KV head, the mean over layers, in each layer."""
    length = ids.shape[1]
    return [trigonometric_scores(model, read(model, ids), [range(length)] * 2, length)] * 3


def trigonometric_scores(model, layers, left, length):
    """For each KV head, of its entries that are `left` of `length` tokens; queries and keys are those before RoPE."""
    scores, half = [[0.0] * len(each) for each in left], WIDTH // 2
    for query, key, _ in layers:
        for head, entries in enumerate(left):
            best = [-math.inf] * len(entries)
            for each in range(head * GROUP, head * GROUP + GROUP):
                pairs = [[complex(row[f], row[f + half]) for f in range(half)] for row in query[each, SINKS:].tolist()]
                mean = [sum(column) / len(pairs) for column in zip(*pairs, strict=True)]
                norm = [sum(map(abs, column)) / len(pairs) for column in zip(*pairs, strict=True)]
                found = []
                for entry in entries:
                    row, score = key[head, entry].tolist(), 0.0
                    for f, speed in enumerate(frequencies(model)):
                        own = complex(row[f], row[f + half])
                        phase = cmath.phase(mean[f] * own.conjugate())
                        near = [math.cos(speed * (length - entry + 2**power) + phase) for power in range(17)]
                        score += abs(mean[f]) * abs(own) * sum(near) / 17 + (norm[f] - abs(mean[f])) * abs(own)
                    found.append(score)
                centre = sum(found) / len(found)
                spread = math.sqrt(sum((score - centre) ** 2 for score in found) / len(found))
                best = [max(old, (score - centre) / spread) for old, score in zip(best, found, strict=True)]
            scores[head] = [old + new / 3 for old, new in zip(scores[head], best, strict=True)]
    return scores


def adaptive(layer):
    """AdaKV without a blend: each head its best 3 (a fifth of 16), then the layer's best."""
    first = [best_of(scores, 3) for scores in layer]
    rest = [(-score, head, e) for head, of in enumerate(layer) for e, score in enumerate(of) if e not in first[head]]
    more = sorted(rest)[: 2 * BUDGET - 6]
    return [sorted(first[head] + [e for _, of, e in more if of == head]) for head in range(2)]


CASES = {
    "expected_attention": (
        ExpectedAttention(BUDGET),
        lambda *given: [[sorted(best_of(head, BUDGET)) for head in layer] for layer in expected(*given)],
    ),
    "expected_adakv": (
        ExpectedAdaKV(BUDGET),
        lambda model, ids: [adaptive(layer) for layer in expected(model, ids, 0.01)],
    ),
    "triattention": (
        TriAttention(BUDGET),
        lambda *given: [[sorted(best_of(head, BUDGET)) for head in layer] for layer in trigonometric(*given)],
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_methods_keep_what_their_definitions_say(name, tiny):
    """Alone, in chunks, and in a batch with padding, in which the shortest prompt fits the budget."""
    method, reference = CASES[name]
    ids, mask = prompt_ids(53, 38, 9, seed=1)
    batch = kept_entries(method, tiny, ids, mask)
    for row, length in enumerate((53, 38)):
        alone = ids[row : row + 1, 53 - length :]
        keeps = reference(tiny, alone)
        assert kept_entries(method, tiny, alone)[0] == keeps
        assert kept_entries(method, tiny, alone, chunk=10)[0] == keeps
        assert batch[row] == keeps
    assert method.start(tiny, ids, mask).counts().sum(dim=(0, 2)).tolist() == [96, 96, 54]


ALIKE = [name for name in FAMILIES if name not in ("GPT-OSS", "Qwen3-Next", "Granite 4 (Mamba-2)")]
"""Families in which all places of a prompt of equal tokens have equal hidden states."""


@pytest.mark.parametrize("family", [*ALIKE, "YaRN"])
def test_queries_of_equal_tokens_differ_by_rope_alone(family):
    """So that turned back to one position they are one query, whatever a family turns, and how."""
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "rope_theta": 10000.0}
    model = tiny_model(rope_parameters=yarn) if family == "YaRN" else family_model(family)
    state = prefill(model, torch.full((1, 30), 7), needs=Needs(window=30, statistics=True), chunk=11)
    for layer in state.layers:
        recorded: Any = layer.recorded
        assert layer.origin is not None
        statistics, queries = recorded.statistics, recorded.queries
        assert int(statistics.queries) == 26
        mean = statistics.mean
        assert_close(statistics.squares / 26, mean[..., None] * mean[..., None, :])
        at_20 = Rotary(*layer.origin, latent=True).turned(mean[:, :, None], torch.tensor([[20]]))
        assert_close(at_20[:, :, 0], queries[:, :, 20])
        turns = not family.startswith("Llama 4") and not (family == "SmolLM3" and layer is state.layers[-1])
        assert bool((queries.var(dim=2) > 1e-3).any()) == turns


@pytest.mark.parametrize("method", [ExpectedAttention(24, every=6), TriAttention(24, every=6)], ids=["ea", "tri"])
def test_eviction_while_decoding_and_saved_states(method, tiny, tmp_path):
    state = method.start(tiny, prompt_ids(41)[0])
    save_state(state, tmp_path / "state.safetensors", model=tiny)
    loaded = load_state(tmp_path / "state.safetensors", tiny).state
    answers = []
    for each in (state, loaded):
        seen: list[int] = []

        def compress(of, seen=seen):
            seen.append(of.length)
            return method.compress_state(tiny, of)

        after = decode(tiny, each, stop_after(30, None), pad_token=0, eviction=PeriodicEviction(6, compress))
        assert seen == [24] * 4
        answers.append(after.ids.tolist())
    assert answers[0] == answers[1]


class SlowTriAttention(Slow):
    """TriAttention among the entries that are left; the queries of evicted tokens count too."""

    def importance(self):
        _, queries, keys, _ = self.look()
        length = self.ids.shape[1]
        back = torch.stack([rotation(self.model, place).T for place in range(length)])
        turned = [
            [(back @ each.double()[..., None])[..., 0] for each in pair] for pair in zip(queries, keys, strict=True)
        ]
        left = [self.alive[0][head].nonzero()[:, 0].tolist() for head in range(2)]
        scores = trigonometric_scores(self.model, [(*pair, None) for pair in turned], left, length)
        found = torch.full((2, length), -math.inf, dtype=torch.float64)
        for head in range(2):
            found[head, left[head]] = torch.tensor(scores[head], dtype=torch.float64)
        return [found] * 3


def test_triattention_while_decoding_is_its_definition(tiny):
    slow = SlowTriAttention(tiny, TriAttention(24, every=6))
    slow.check_decoding(prompt_ids(41)[0], 21)
    assert all(torch.equal(each, slow.alive[0]) for each in slow.alive)


def test_values_are_checked(tiny):
    ids = prompt_ids(41)[0]
    with refused("epsilon", "range"):
        ExpectedQueries(epsilon=2)
    with refused("needs", "state"):
        ExpectedAttention(16).compress_state(tiny, prefill(tiny, ids))
    with refused("value_norm", "conflict"):
        TriAttention(16, value_norm=True)
    own = TriAttention(16, Trigonometric(per_layer=True))
    assert kept_entries(own, tiny, ids) != kept_entries(TriAttention(16), tiny, ids)
