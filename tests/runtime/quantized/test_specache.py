"""SpeCache against full attention, and against a slow SpeCache on dense attention."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch

from keepsight import generate
from keepsight.errors import UserError
from keepsight.runtime.generate import FullCache, decode, stop_after
from keepsight.runtime.join import join
from keepsight.runtime.offload import FullEntries, Traffic
from keepsight.runtime.quantized.kivi import Kivi, PackedState
from keepsight.runtime.quantized.specache import PairReader, SpeCache, specache_layers
from keepsight.runtime.state import prefill, read
from tests.close import assert_close
from tests.runtime.quantized.slow_specache import SlowSpeCache
from tests.runtime.scoring import score_answer
from tests.tiny import FAMILIES, prompt_ids, tiny_model

WIDTH, LAYERS, KV_HEADS = 16, 3, 2
VARIANTS = [True, False]


def _method(topk, **options):
    return replace(SpeCache(1, 8, 16, topk), **options)


def _answer(*lengths):
    return prompt_ids(*lengths, seed=1)[0]


@pytest.mark.parametrize("speculative", VARIANTS)
@pytest.mark.parametrize("family", FAMILIES)
def test_slots_for_all_entries_give_full_attention(family, speculative):
    """Also while the answer's own entries are packed and offloaded."""
    model, method = tiny_model(family, head_dim=WIDTH), _method(1000, speculative=speculative)
    ids = prompt_ids(50, 50)[0]
    expected, _ = score_answer(model, FullCache().start(model, ids), _answer(40, 40))
    nll, _ = score_answer(method.reader(model), method.start(model, ids), _answer(40, 40))
    assert_close(nll, expected)


@pytest.mark.parametrize("heads", ["max", "mean"])
@pytest.mark.parametrize("speculative", VARIANTS)
@pytest.mark.parametrize("bits", [1, 2])
def test_decoding_equals_a_slow_specache(bits, speculative, heads):
    # A padding token's embedding is zero: guessed, it would look at all entries alike.
    model = tiny_model(head_dim=WIDTH, pad_token_id=None)
    method = _method(6, bits=bits, speculative=speculative, heads=heads)
    ids, answer = prompt_ids(50)[0], _answer(36)
    slow, state = SlowSpeCache(model, method, ids), method.start(model, ids)
    with torch.no_grad():
        for token in answer.split(1, dim=1):
            state, logits = read(method.reader(model), state, token)
            assert_close(logits, slow.read(token))


def test_no_slots_are_kivi():
    model, ids = tiny_model(head_dim=WIDTH), prompt_ids(50)[0]
    expected, _ = score_answer(model, Kivi(1, 8, 16).start(model, ids), _answer(30))
    for speculative in VARIANTS:
        method = _method(0, speculative=speculative)
        state = method.start(model, ids)
        nll, _ = score_answer(method.reader(model), state, _answer(30))
        assert_close(nll, expected)
        assert _traffic(state).fetched == 0


@pytest.mark.parametrize("speculative", VARIANTS)
@pytest.mark.parametrize("sample", [False, True])
def test_greedy_and_sampled_answers(speculative, sample):
    """With all entries fetched those of the full cache; with few through `generate` too."""
    model, ids = tiny_model(head_dim=WIDTH), prompt_ids(40, 40)[0]
    method = _method(1000, speculative=speculative)
    answers = []
    for each in (FullCache(), method):
        torch.manual_seed(0)
        state = each.start(model, ids)
        answers.append(decode(each.reader(model), state, stop_after(20, None), pad_token=0, do_sample=sample).ids)
    assert torch.equal(*answers)
    few = generate(model, ids, _method(4, speculative=speculative), max_new_tokens=20, do_sample=sample)
    assert few.shape[0] == 2


@pytest.mark.parametrize("speculative", VARIANTS)
def test_batch_equals_single(speculative):
    model, ids = tiny_model(head_dim=WIDTH), prompt_ids(45, 45, 45)[0]
    method = _method(6, speculative=speculative)
    options: dict[str, Any] = {"max_new_tokens": 24, "do_sample": False, "eos_token_id": None}
    together = generate(model, ids, method, **options)
    for row, expected in zip(ids, together, strict=True):
        assert torch.equal(generate(model, row[None], method, **options)[0], expected)


def test_prefill_layer_by_layer_gives_the_state_of_a_full_prefill():
    model, ids, method = tiny_model(head_dim=WIDTH), prompt_ids(50)[0], _method(6)
    whole = method.compress(model, prefill(model, ids))
    expected, _ = score_answer(method.reader(model), whole, _answer(20))
    for chunk in (None, 13):
        state = method.start(model, ids, chunk=chunk)
        assert state.kv_bytes == whole.copy().kv_bytes - _grown_bytes()
        nll, _ = score_answer(method.reader(model), state, _answer(20))
        assert_close(nll, expected)


def _grown_bytes():
    """What 19 tokens after 50 add: 16 more packed keys and 19 more packed values, one recent key more."""
    codes_and_numbers = (16 + 19) * (WIDTH // 8 + WIDTH // 8 * 2 * 4)
    return LAYERS * KV_HEADS * (codes_and_numbers + 3 * WIDTH * 4)


@pytest.mark.parametrize("failing", [0, 1, 2])
def test_an_interrupted_step_changes_nothing(failing, monkeypatch):
    """Whichever layer it ends in, also in the step that packs and offloads a residual."""
    model, ids, method = tiny_model(head_dim=WIDTH), prompt_ids(47)[0], _method(6)
    tokens = _answer(24).split(1, dim=1)
    expected, state = method.start(model, ids), method.start(model, ids)
    for token in tokens:
        expected, wanted = read(method.reader(model), expected, token)
        with monkeypatch.context() as patch:
            patch.setattr(model.model.layers[failing].mlp, "forward", _interrupt)
            with pytest.raises(KeyboardInterrupt):
                read(method.reader(model), state, token)
        state, logits = read(method.reader(model), state, token)
        assert_close(logits, wanted)
    assert state.kv_bytes == expected.kv_bytes
    for one, other in zip(specache_layers(state.cache), specache_layers(expected.cache), strict=True):
        everything = [layer.full.fetch(torch.arange(64).expand(1, KV_HEADS, -1)).wait() for layer in (one, other)]
        assert_close(everything[0].keys, everything[1].keys)
        assert_close(everything[0].values, everything[1].values)


def _interrupt(*args, **kwargs):
    raise KeyboardInterrupt


def test_copies_go_their_own_ways():
    """They share the CPU's buffer until both have appended to it."""
    model, method = tiny_model(head_dim=WIDTH), _method(6)
    start = method.start(model, prompt_ids(47)[0])
    answers = [prompt_ids(30, seed=seed)[0] for seed in (1, 2)]
    expected = [score_answer(method.reader(model), method.start(model, prompt_ids(47)[0]), each)[0] for each in answers]
    one, other = start.copy(), start.copy()
    logits = [[state.logits[:, None]] for state in (one, other)]
    for tokens in zip(*(each[:, :-1].split(1, dim=1) for each in answers), strict=True):
        one, first = read(method.reader(model), one, tokens[0])
        other, second = read(method.reader(model), other, tokens[1])
        logits[0].append(first)
        logits[1].append(second)
    for each, answer, nll in zip(logits, answers, expected, strict=True):
        found = torch.nn.functional.cross_entropy(torch.cat(each, 1).transpose(1, 2), answer, reduction="none")
        assert_close(found, nll)


def test_bytes_on_the_device_and_bytes_moved():
    model, method, steps = tiny_model(head_dim=WIDTH), _method(6), 20
    state = method.start(model, prompt_ids(50, 50)[0])
    assert isinstance(state, PackedState)
    traffic = _traffic(state)
    entry = 2 * WIDTH * 4
    heads = 2 * LAYERS * KV_HEADS  # of two rows
    assert traffic.offloaded == heads * 48 * entry
    state = decode(method.reader(model), state, stop_after(steps + 1, None), pad_token=0).state
    assert traffic.offloaded == heads * 64 * entry  # the answer's 14 first tokens fill another 16 with the prompt's 2
    tensors = []
    for layer in specache_layers(state.cache):
        assert layer.ahead is not None
        assert layer.ahead.fetch is not None
        slots = layer.ahead.fetch.wait()
        tensors += [*layer.held.packed_keys, *layer.held.packed_values, layer.held.recent_keys]
        tensors += [layer.held.recent_values, *slots]
    assert state.kv_bytes == sum(each.numel() * each.element_size() for each in tensors)
    # Counted once all are there; the step before the first one fetches as well.
    assert traffic.fetched == (1 + steps) * heads * 6 * entry
    few = SpeCache(1, 8, 16, topk=1000).start(model, prompt_ids(50)[0])
    none = SpeCache(1, 8, 16, topk=0).start(model, prompt_ids(50)[0])
    assert few.kv_bytes - none.kv_bytes == LAYERS * KV_HEADS * 48 * (entry + 8)  # no more slots than packed entries


def _traffic(state):
    return specache_layers(state.cache)[0].full.traffic


def test_full_entries_come_back_as_they_left():
    states = torch.randn(2, 3, 700, 4, generator=torch.Generator().manual_seed(0))
    full = FullEntries.offload(states[:, :, :10], -states[:, :, :10], Traffic())
    for start in range(10, 700, 30):
        full = full.append(states[:, :, start : start + 30], -states[:, :, start : start + 30])
    indices = torch.stack([torch.randperm(700, generator=torch.Generator().manual_seed(seed)) for seed in range(6)])
    slots = full.fetch(indices.view(2, 3, 700)[:, :, :50]).wait()
    for row in range(2):
        for head in range(3):
            assert torch.equal(slots.keys[row, head], states[row, head, slots.indices[row, head]])
            assert torch.equal(slots.values[row, head], -slots.keys[row, head])


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"topk": -1}, "topk -1 must be a whole number"),
        ({"topk": 0.5}, "topk 0.5"),
        ({"heads": "sum"}, "heads 'sum' is unknown; choose one of mean, max"),
        ({"residual": 32, "group": 64}, "residual 32 must be a multiple of the group of 64"),
        ({"bits": 8}, "bits 8 is not offered"),
    ],
)
def test_bad_options_are_refused(options, words):
    with pytest.raises(UserError, match=words):
        SpeCache(**options)


def test_bad_inputs_are_refused(monkeypatch):
    model, method = tiny_model(head_dim=WIDTH), _method(4)
    ids, mask = prompt_ids(40, 30)
    with pytest.raises(UserError, match="different lengths"):
        generate(model, ids, method, attention_mask=mask, max_new_tokens=2)
    state = method.start(model, ids[:1])
    with pytest.raises(UserError, match="cannot be joined"):
        join([state, state])
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=10_000))
    arithmetic = r"2 rows x 40 tokens x 3 layers x 2 KV heads x 16 dimensions x 2 \(keys, values\) x 4 bytes = 0.0 GB"
    with pytest.raises(UserError, match=arithmetic):
        method.start(model, ids)


def test_a_plain_model_reads_without_guessing():
    """A state is the same for both variants; who reads it makes the difference."""
    model, ids = tiny_model(head_dim=WIDTH), prompt_ids(50)[0]
    with_guess, without = _method(6), _method(6, speculative=False)
    assert isinstance(with_guess.reader(model), PairReader)
    assert without.reader(model) is model
    one, _ = score_answer(model, with_guess.start(model, ids), _answer(20))
    other, _ = score_answer(model, without.start(model, ids), _answer(20))
    assert_close(one, other)


def test_more_entries_than_the_cache_has_are_refused():
    model = tiny_model(head_dim=WIDTH)
    with pytest.raises(UserError, match="topk 51 is above the 50 entries of the cache"):
        generate(model, prompt_ids(50)[0], _method(51), max_new_tokens=2)
