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

BUDGET = 16
SINKS = 4
WIDTH = 8
GROUP = 2
AHEAD = 512


@pytest.fixture(scope="module")
def tiny():
    return tiny_model("qwen3")


def read(model, ids):
    """Of each layer: queries and keys before RoPE and values, [heads, tokens, d] float64."""
    outputs_by_layer: list[Any] = []
    hooks = []
    for layer in model.model.layers:
        outputs: list[Any] = []
        attention = layer.self_attn
        for module in (attention.q_norm, attention.k_norm, attention.v_proj):
            hooks.append(module.register_forward_hook(lambda *args, outputs=outputs: outputs.append(args[2])))
        outputs_by_layer.append(outputs)
    with torch.no_grad():
        model(ids)
    for hook in hooks:
        hook.remove()

    def by_head(output):
        return output[0].view(ids.shape[1], -1, WIDTH).transpose(0, 1).double()

    return [[by_head(output) for output in outputs] for outputs in outputs_by_layer]


def frequencies(model):
    base = model.config.rope_parameters["rope_theta"]
    return [base ** (-2 * pair / WIDTH) for pair in range(WIDTH // 2)]


def rotation(model, position):
    """The matrix by which RoPE turns a vector at a position."""
    matrix = torch.zeros(WIDTH, WIDTH, dtype=torch.float64)
    for first, frequency in enumerate(frequencies(model)):
        second = first + WIDTH // 2
        angle = position * frequency
        matrix[first, first] = math.cos(angle)
        matrix[second, second] = math.cos(angle)
        matrix[first, second] = -math.sin(angle)
        matrix[second, first] = math.sin(angle)
    return matrix


def expected_scores(model, ids, epsilon=0.0):
    """[L][K][N]: expected attention times the norms of values; sinks are infinite."""
    length = ids.shape[1]
    mean_rotation = torch.stack([rotation(model, length + step) for step in range(AHEAD)]).mean(dim=0)
    scores = []
    for query, key, value in read(model, ids):
        layer_scores = []
        for head in range(2):
            attention = [0.0] * length
            keys = [rotation(model, entry) @ key[head, entry] for entry in range(SINKS, length)]
            for query_head in range(head * GROUP, head * GROUP + GROUP):
                powers = expected_powers(query[query_head, SINKS:], keys, mean_rotation)
                for entry, power in enumerate(powers, start=SINKS):
                    attention[entry] += power / sum(powers) / GROUP
            norms = value[head].norm(dim=-1).tolist()
            head_scores = [(share + epsilon) * norm for share, norm in zip(attention, norms, strict=True)]
            head_scores[:SINKS] = [math.inf] * SINKS
            layer_scores.append(head_scores)
        scores.append(layer_scores)
    return scores


def expected_powers(queries, keys, mean_rotation):
    """For each key the expected exp(logit) of queries that are normally distributed as these before RoPE, [n, d]."""
    mean = queries.mean(dim=0)
    covariance = torch.stack([torch.outer(row - mean, row - mean) for row in queries]).mean(dim=0)
    mean = mean_rotation @ mean
    covariance = mean_rotation @ covariance @ mean_rotation.T
    powers = []
    for key in keys:
        logit = float(mean @ key) / math.sqrt(WIDTH)
        variance = float(key @ covariance @ key) / WIDTH
        powers.append(math.exp(logit + variance / 2))
    return powers


def trigonometric_scores(model, ids):
    """Scores of each KV head, the mean over layers, in each layer."""
    length = ids.shape[1]
    all_entries = [range(length)] * 2
    return [mean_trigonometric_scores(model, read(model, ids), all_entries, length)] * 3


def complex_pairs(vectors):
    """Vectors [n][d] as complex numbers [n][d / 2], whose angles RoPE turns."""
    half = WIDTH // 2
    return [[complex(vector[pair], vector[pair + half]) for pair in range(half)] for vector in vectors.tolist()]


def mean_trigonometric_scores(model, layers, alive, length):
    """For each KV head, of its entries that are `alive` of `length` tokens; queries and keys are those before RoPE."""
    mean_scores = [[0.0] * len(entries) for entries in alive]
    for query, key, _ in layers:
        for head, entries in enumerate(alive):
            keys = complex_pairs(key[head])
            best = [-math.inf] * len(entries)
            for query_head in range(head * GROUP, head * GROUP + GROUP):
                queries = complex_pairs(query[query_head, SINKS:])
                scores = [trigonometric_score(model, queries, keys[entry], length - entry) for entry in entries]
                mean = sum(scores) / len(scores)
                deviation = math.sqrt(sum((score - mean) ** 2 for score in scores) / len(scores))
                standardised = [(score - mean) / deviation for score in scores]
                best = list(map(max, best, standardised))
            for index, score in enumerate(best):
                mean_scores[head][index] += score / 3
    return mean_scores


def trigonometric_score(model, queries, key, distance):
    """Of a key [d / 2] for queries [n][d / 2].

    The mean query's logit, averaged over distances that grow by powers of two, and what the norms have beyond its own.
    """
    score = 0.0
    for pair, frequency in enumerate(frequencies(model)):
        column = [query[pair] for query in queries]
        mean = sum(column) / len(column)
        mean_norm = sum(map(abs, column)) / len(column)
        phase = cmath.phase(mean * key[pair].conjugate())
        cosines = [math.cos(frequency * (distance + 2**power) + phase) for power in range(17)]
        score += abs(mean) * abs(key[pair]) * sum(cosines) / 17
        score += (mean_norm - abs(mean)) * abs(key[pair])
    return score


def best_of_heads(layers):
    """[L][K]: the entries with the best scores of each head, [L][K][N]."""
    return [[sorted(best_of(head_scores, BUDGET)) for head_scores in layer] for layer in layers]


def best_of_layer(layer):
    """AdaKV without a blend: each head its best 3 (a fifth of 16), then the layer's best."""
    kept = [best_of(head_scores, 3) for head_scores in layer]
    candidates = []
    for head, head_scores in enumerate(layer):
        for entry, score in enumerate(head_scores):
            if entry not in kept[head]:
                candidates.append((-score, head, entry))
    for _, head, entry in sorted(candidates)[: 2 * BUDGET - 6]:
        kept[head].append(entry)
    return [sorted(entries) for entries in kept]


CASES = {
    "expected_attention": (
        ExpectedAttention(BUDGET),
        lambda model, ids: best_of_heads(expected_scores(model, ids)),
    ),
    "expected_adakv": (
        ExpectedAdaKV(BUDGET),
        lambda model, ids: [best_of_layer(layer) for layer in expected_scores(model, ids, 0.01)],
    ),
    "triattention": (
        TriAttention(BUDGET),
        lambda model, ids: best_of_heads(trigonometric_scores(model, ids)),
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
        expected = reference(tiny, alone)
        assert kept_entries(method, tiny, alone)[0] == expected
        assert kept_entries(method, tiny, alone, chunk=10)[0] == expected
        assert batch[row] == expected
    assert method.start(tiny, ids, mask).counts().sum(dim=(0, 2)).tolist() == [96, 96, 54]


ALIKE = [name for name in FAMILIES if name not in ("GPT-OSS", "Qwen3-Next", "Granite 4 (Mamba-2)")]
"""Families in which all positions of a prompt of equal tokens have equal hidden states."""


@pytest.mark.parametrize("family", [*ALIKE, "YaRN"])
def test_queries_of_equal_tokens_differ_by_rope_alone(family):
    """Turned to one position they are one query, whatever a family turns, and how."""
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "rope_theta": 10000.0}
    model = tiny_model(rope_parameters=yarn) if family == "YaRN" else family_model(family)
    state = prefill(model, torch.full((1, 30), 7), needs=Needs(window=30, statistics=True), chunk=11)
    for layer in state.layers:
        recorded: Any = layer.recorded
        assert layer.origin is not None
        statistics = recorded.statistics
        queries = recorded.queries
        assert int(statistics.queries) == 26
        mean = statistics.mean
        assert_close(statistics.squares / 26, mean[..., None] * mean[..., None, :])
        at_20 = Rotary(*layer.origin, latent=True).turned(mean[:, :, None], torch.tensor([[20]]))
        assert_close(at_20[:, :, 0], queries[:, :, 20])
        without_rope = family.startswith("Llama 4") or (family == "SmolLM3" and layer is state.layers[-1])
        queries_differ = bool((queries.var(dim=2) > 1e-3).any())
        assert queries_differ != without_rope


@pytest.mark.parametrize("method", [ExpectedAttention(24, every=6), TriAttention(24, every=6)], ids=["ea", "tri"])
def test_eviction_while_decoding_and_saved_states(method, tiny, tmp_path):
    state = method.start(tiny, prompt_ids(41)[0])
    save_state(state, tmp_path / "state.safetensors", model=tiny)
    loaded = load_state(tmp_path / "state.safetensors", tiny).state
    answers = []
    for start_state in (state, loaded):
        evicted_lengths: list[int] = []

        def compress(before, evicted_lengths=evicted_lengths):
            evicted_lengths.append(before.length)
            return method.compress_state(tiny, before)

        eviction = PeriodicEviction(6, compress)
        decoded = decode(tiny, start_state, stop_after(30, None), pad_token=0, eviction=eviction)
        assert evicted_lengths == [24] * 4
        answers.append(decoded.ids.tolist())
    assert answers[0] == answers[1]


class SlowTriAttention(Slow):
    """TriAttention among the entries that are alive; the queries of evicted tokens count too."""

    def importance(self):
        _, queries, keys, _ = self.look()
        length = self.ids.shape[1]
        inverse_rotations = torch.stack([rotation(self.model, position).T for position in range(length)])

        def before_rope(vectors):
            return (inverse_rotations @ vectors.double()[..., None])[..., 0]

        layers = [(before_rope(query), before_rope(key), None) for query, key in zip(queries, keys, strict=True)]
        alive = [head_alive.nonzero()[:, 0].tolist() for head_alive in self.alive[0]]
        scores = mean_trigonometric_scores(self.model, layers, alive, length)
        importance = torch.full((2, length), -math.inf, dtype=torch.float64)
        for head in range(2):
            importance[head, alive[head]] = torch.tensor(scores[head], dtype=torch.float64)
        return [importance] * 3


def test_triattention_while_decoding_is_its_definition(tiny):
    slow = SlowTriAttention(tiny, TriAttention(24, every=6))
    slow.check_decoding(prompt_ids(41)[0], 21)
    for alive in slow.alive:
        assert torch.equal(alive, slow.alive[0])


def test_values_are_checked(tiny):
    ids = prompt_ids(41)[0]
    with refused("epsilon", "range"):
        ExpectedQueries(epsilon=2)
    with refused("needs", "state"):
        ExpectedAttention(16).compress_state(tiny, prefill(tiny, ids))
    with refused("value_norm", "conflict"):
        TriAttention(16, value_norm=True)
    per_layer = TriAttention(16, Trigonometric(per_layer=True))
    assert kept_entries(per_layer, tiny, ids) != kept_entries(TriAttention(16), tiny, ids)
