"""SpeCache against full attention, and against a slow SpeCache on dense attention."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import psutil
import pytest
import torch
from transformers import GPTNeoXConfig, GPTNeoXForCausalLM

from keepsight import generate
from keepsight.runtime.generate import FullCache, decode, stop_after
from keepsight.runtime.join import join
from keepsight.runtime.quantized.kivi import Kivi, PackedState
from keepsight.runtime.quantized.specache import SpeCache, most_attended, specache_layers
from keepsight.runtime.state import read
from tests.close import assert_close
from tests.refused import refused
from tests.runtime.quantized.slow_specache import SlowSpeCache
from tests.runtime.scoring import score_answer
from tests.tiny import FAMILIES, prompt_ids, tiny_model

WIDTH = 16
LAYERS = 3
KV_HEADS = 2
SPECULATIVE = [True, False]


def specache(topk, **options):
    return replace(SpeCache(1, 8, 16, topk), **options)


def answer_ids(*lengths):
    return prompt_ids(*lengths, seed=1)[0]


def traffic_of(state):
    return specache_layers(state.cache)[0].full.traffic


@pytest.mark.parametrize(("speculative", "family"), [*zip(SPECULATIVE, FAMILIES, strict=True)])
def test_slots_for_all_entries_give_full_attention(family, speculative):
    """Also while the answer's own entries are packed and offloaded."""
    model = tiny_model(family, head_dim=WIDTH)
    method = specache(1000, speculative=speculative)
    ids = prompt_ids(50, 50)[0]
    expected, _ = score_answer(model, FullCache().start(model, ids), answer_ids(40, 40))
    nll, _ = score_answer(method.reader(model), method.start(model, ids), answer_ids(40, 40))
    assert_close(nll, expected)


def test_a_family_whose_configuration_names_no_kv_heads():
    torch.manual_seed(0)
    sizes: dict[str, Any] = {
        "hidden_size": 32,
        "num_attention_heads": 2,
        "num_hidden_layers": 2,
        "intermediate_size": 64,
    }
    config = GPTNeoXConfig(vocab_size=128, initializer_range=0.2, **sizes)
    model: Any = GPTNeoXForCausalLM(config).eval()
    ids = prompt_ids(50)[0]
    options: dict[str, Any] = {"max_new_tokens": 8, "eos_token_id": None}
    assert torch.equal(generate(model, ids, specache(50), **options), generate(model, ids, **options))


@pytest.mark.parametrize(("bits", "speculative", "heads"), [(1, True, "max"), (2, True, "mean"), (1, False, "mean")])
def test_decoding_equals_a_slow_specache(bits, speculative, heads):
    # A padding token's embedding is zero: guessed, it would look at all entries alike.
    model = tiny_model(head_dim=WIDTH, pad_token_id=None)
    method = specache(6, bits=bits, speculative=speculative, heads=heads)
    ids = prompt_ids(50, 50)[0]
    slow = SlowSpeCache(model, method, ids)
    state = method.start(model, ids)
    with torch.no_grad():
        for token in answer_ids(36, 36).split(1, dim=1):
            state, logits = read(method.reader(model), state, token)
            assert_close(logits, slow.read(token))


def test_no_slots_are_kivi():
    model = tiny_model(head_dim=WIDTH)
    ids = prompt_ids(50)[0]
    method = specache(0)
    expected, _ = score_answer(model, Kivi(1, 8, 16).start(model, ids), answer_ids(30))
    state = method.start(model, ids)
    nll, _ = score_answer(method.reader(model), state, answer_ids(30))
    assert_close(nll, expected)
    assert traffic_of(state).fetched == 0


def read_under(default, model, method, ids):
    """Logits of an answer under a default dtype, and the entries that each layer has fetched by then."""
    torch.set_default_dtype(default)
    try:
        state, logits = read(method.reader(model), method.start(model, ids), answer_ids(20))
    finally:
        torch.set_default_dtype(torch.float32)
    fetched = []
    layers: list[Any] = specache_layers(state.cache)
    for layer in layers:
        if layer.prefetched:
            fetched.append(layer.prefetched.fetch.wait().indices)
    return logits, fetched


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_another_default_dtype_changes_nothing(dtype):
    model = tiny_model(head_dim=WIDTH, pad_token_id=None)
    ids = prompt_ids(50)[0]
    for method in (specache(6), specache(6, speculative=False)):
        expected_logits, expected_fetched = read_under(torch.float32, model, method, ids)
        logits, fetched = read_under(dtype, model, method, ids)
        assert torch.equal(logits, expected_logits)
        for indices, expected in zip(fetched, expected_fetched, strict=True):
            assert torch.equal(indices, expected)


@pytest.mark.parametrize(("speculative", "dtype"), [(True, torch.bfloat16), (False, torch.float16)])
def test_autocast(speculative, dtype):
    """Values are in half precision, keys after RoPE are not: with slots for all entries it is full attention still."""
    model = tiny_model(head_dim=WIDTH)
    ids = prompt_ids(50)[0]
    all_slots = specache(1000, speculative=speculative)
    few_slots = specache(6, speculative=speculative)
    with torch.autocast("cpu", dtype):
        expected = read(model, FullCache().start(model, ids), answer_ids(40))[1]
        logits = read(all_slots.reader(model), all_slots.start(model, ids), answer_ids(40))[1]
        assert_close(logits, expected, dtype)

        answer = generate(model, ids, few_slots, max_new_tokens=20, do_sample=False)
        repeated = generate(model, ids, few_slots, max_new_tokens=20, do_sample=False)
        assert torch.equal(answer, repeated)
        turn = few_slots.resume(model, few_slots.start(model, ids), answer_ids(20))
    assert turn.logits.isfinite().all()


def test_ties_go_to_the_first_entries():
    """Equal keys are attended to alike; the fetched ones are the first of them."""
    attention = torch.tensor([0.1, 0.2, 0.2, 0.05, 0.2, 0.2, 0.05]).expand(2, KV_HEADS, 2, -1)
    fetched = most_attended(attention, 3, "max").sort().values
    assert fetched.tolist() == [[[1, 2, 4]] * KV_HEADS] * 2


@pytest.mark.parametrize("failing", [0, 2])
def test_an_interrupted_step_changes_nothing(failing, monkeypatch):
    """Whichever layer it ends in, also in the step that packs and offloads a residual."""
    model = tiny_model(head_dim=WIDTH)
    ids = prompt_ids(47)[0]
    method = specache(6)
    uninterrupted = method.start(model, ids)
    state = method.start(model, ids)
    for token in answer_ids(24).split(1, dim=1):
        uninterrupted, expected_logits = read(method.reader(model), uninterrupted, token)
        with monkeypatch.context() as patch:
            patch.setattr(model.model.layers[failing].mlp, "forward", Mock(side_effect=KeyboardInterrupt))
            with pytest.raises(KeyboardInterrupt):
                read(method.reader(model), state, token)
        state, logits = read(method.reader(model), state, token)
        assert_close(logits, expected_logits)

    assert state.kv_bytes == uninterrupted.kv_bytes
    all_indices = torch.arange(64).expand(1, KV_HEADS, -1)
    layers = specache_layers(state.cache)
    expected_layers = specache_layers(uninterrupted.cache)
    for layer, expected_layer in zip(layers, expected_layers, strict=True):
        entries = layer.full.fetch(all_indices).wait()
        expected_entries = expected_layer.full.fetch(all_indices).wait()
        assert_close(entries.keys, expected_entries.keys)
        assert_close(entries.values, expected_entries.values)


def test_bytes_on_the_device_and_bytes_moved():
    model = tiny_model(head_dim=WIDTH)
    method = specache(6)
    steps = 20
    entry_bytes = 2 * WIDTH * 4
    heads = 2 * LAYERS * KV_HEADS  # of two rows
    state = method.start(model, prompt_ids(50, 50)[0])
    assert isinstance(state, PackedState)
    traffic = traffic_of(state)
    assert traffic.offloaded == heads * 48 * entry_bytes

    state = decode(method.reader(model), state, stop_after(steps + 1, None), pad_token=0).state
    # The answer's 14 first tokens fill another 16 with the prompt's 2.
    assert traffic.offloaded == heads * 64 * entry_bytes
    tensors = []
    for layer in specache_layers(state.cache):
        assert layer.prefetched is not None
        assert layer.prefetched.fetch is not None
        slots = layer.prefetched.fetch.wait()
        tensors += [*layer.packed.packed_keys, *layer.packed.packed_values, layer.packed.recent_keys]
        tensors += [layer.packed.recent_values, *slots]
    assert state.kv_bytes == sum(tensor.numel() * tensor.element_size() for tensor in tensors)
    # Counted once all are there; the step before the first one fetches as well.
    assert traffic.fetched == (1 + steps) * heads * 6 * entry_bytes

    # There are no more slots than packed entries.
    all_slots = SpeCache(1, 8, 16, topk=1000).start(model, prompt_ids(50)[0])
    no_slots = SpeCache(1, 8, 16, topk=0).start(model, prompt_ids(50)[0])
    slot_bytes = entry_bytes + 8
    assert all_slots.kv_bytes - no_slots.kv_bytes == LAYERS * KV_HEADS * 48 * slot_bytes


def test_bad_options_are_refused():
    with refused("topk", "range"):
        SpeCache(topk=-1)
    with refused("heads", "unknown"):
        SpeCache(heads="sum")


def test_bad_inputs_are_refused(monkeypatch):
    model = tiny_model(head_dim=WIDTH)
    method = specache(4)
    ids, mask = prompt_ids(40, 30)
    with refused("prompt", "conflict"):
        generate(model, ids, method, attention_mask=mask, max_new_tokens=2)
    state = method.start(model, ids[:1])
    with refused("state", "state"):
        join([state, state])
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=10_000))
    with refused("full", "memory"):
        method.start(model, ids)
    monkeypatch.undo()
    with refused("topk", "range"):
        generate(model, prompt_ids(50)[0], specache(51), max_new_tokens=2)
