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

WIDTH, LAYERS, KV_HEADS = 16, 3, 2
VARIANTS = [True, False]


def _method(topk, **options):
    return replace(SpeCache(1, 8, 16, topk), **options)


def _answer(*lengths):
    return prompt_ids(*lengths, seed=1)[0]


@pytest.mark.parametrize(("speculative", "family"), [*zip(VARIANTS, FAMILIES, strict=True)])
def test_slots_for_all_entries_give_full_attention(family, speculative):
    """Also while the answer's own entries are packed and offloaded."""
    model, method = tiny_model(family, head_dim=WIDTH), _method(1000, speculative=speculative)
    ids = prompt_ids(50, 50)[0]
    expected, _ = score_answer(model, FullCache().start(model, ids), _answer(40, 40))
    nll, _ = score_answer(method.reader(model), method.start(model, ids), _answer(40, 40))
    assert_close(nll, expected)


def test_a_family_whose_configuration_names_no_kv_heads():
    torch.manual_seed(0)
    sizes: dict[str, Any] = {
        "hidden_size": 32,
        "num_attention_heads": 2,
        "num_hidden_layers": 2,
        "intermediate_size": 64,
    }
    model: Any = GPTNeoXForCausalLM(GPTNeoXConfig(vocab_size=128, initializer_range=0.2, **sizes)).eval()
    ids = prompt_ids(50)[0]
    options: dict[str, Any] = {"max_new_tokens": 8, "eos_token_id": None}
    assert torch.equal(generate(model, ids, _method(50), **options), generate(model, ids, **options))


@pytest.mark.parametrize(("bits", "speculative", "heads"), [(1, True, "max"), (2, True, "mean"), (1, False, "mean")])
def test_decoding_equals_a_slow_specache(bits, speculative, heads):
    # A padding token's embedding is zero: guessed, it would look at all entries alike.
    model = tiny_model(head_dim=WIDTH, pad_token_id=None)
    method = _method(6, bits=bits, speculative=speculative, heads=heads)
    ids, answer = prompt_ids(50, 50)[0], _answer(36, 36)
    slow, state = SlowSpeCache(model, method, ids), method.start(model, ids)
    with torch.no_grad():
        for token in answer.split(1, dim=1):
            state, logits = read(method.reader(model), state, token)
            assert_close(logits, slow.read(token))


def test_no_slots_are_kivi():
    model, ids, method = tiny_model(head_dim=WIDTH), prompt_ids(50)[0], _method(0)
    expected, _ = score_answer(model, Kivi(1, 8, 16).start(model, ids), _answer(30))
    state = method.start(model, ids)
    assert_close(score_answer(method.reader(model), state, _answer(30))[0], expected)
    assert _traffic(state).fetched == 0


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_another_default_dtype_changes_nothing(dtype):
    model, ids = tiny_model(head_dim=WIDTH, pad_token_id=None), prompt_ids(50)[0]
    for method in (_method(6), _method(6, speculative=False)):
        found = []
        for default in (torch.float32, dtype):
            torch.set_default_dtype(default)
            try:
                state, logits = read(method.reader(model), method.start(model, ids), _answer(20))
            finally:
                torch.set_default_dtype(torch.float32)
            layers: list[Any] = specache_layers(state.cache)
            found.append((logits, [each.prefetched.fetch.wait().indices for each in layers if each.prefetched]))
        assert torch.equal(found[0][0], found[1][0])
        assert all(torch.equal(*pair) for pair in zip(found[0][1], found[1][1], strict=True))


@pytest.mark.parametrize(("speculative", "dtype"), [(True, torch.bfloat16), (False, torch.float16)])
def test_autocast(speculative, dtype):
    """Values are in half precision, keys after RoPE are not: with slots for all entries it is full attention still."""
    model, ids, method = tiny_model(head_dim=WIDTH), prompt_ids(50)[0], _method(1000, speculative=speculative)
    with torch.autocast("cpu", dtype):
        expected = read(model, FullCache().start(model, ids), _answer(40))[1]
        state = method.start(model, ids)
        logits = read(method.reader(model), state, _answer(40))[1]
        assert_close(logits, expected, dtype)
        few = _method(6, speculative=speculative)
        answers = [generate(model, ids, few, max_new_tokens=20, do_sample=False) for _ in range(2)]
        assert torch.equal(*answers)
        turn = few.resume(model, few.start(model, ids), _answer(20))
    assert turn.logits.isfinite().all()


def test_ties_go_to_the_first_entries():
    """Equal keys are attended to alike; the fetched ones are the first of them."""
    attention = torch.tensor([0.1, 0.2, 0.2, 0.05, 0.2, 0.2, 0.05]).expand(2, KV_HEADS, 2, -1)
    assert most_attended(attention, 3, "max").sort().values.tolist() == [[[1, 2, 4]] * KV_HEADS] * 2


@pytest.mark.parametrize("failing", [0, 2])
def test_an_interrupted_step_changes_nothing(failing, monkeypatch):
    """Whichever layer it ends in, also in the step that packs and offloads a residual."""
    model, ids, method = tiny_model(head_dim=WIDTH), prompt_ids(47)[0], _method(6)
    tokens = _answer(24).split(1, dim=1)
    expected, state = method.start(model, ids), method.start(model, ids)
    for token in tokens:
        expected, wanted = read(method.reader(model), expected, token)
        with monkeypatch.context() as patch:
            patch.setattr(model.model.layers[failing].mlp, "forward", Mock(side_effect=KeyboardInterrupt))
            with pytest.raises(KeyboardInterrupt):
                read(method.reader(model), state, token)
        state, logits = read(method.reader(model), state, token)
        assert_close(logits, wanted)
    assert state.kv_bytes == expected.kv_bytes
    for one, other in zip(specache_layers(state.cache), specache_layers(expected.cache), strict=True):
        everything = [layer.full.fetch(torch.arange(64).expand(1, KV_HEADS, -1)).wait() for layer in (one, other)]
        assert_close(everything[0].keys, everything[1].keys)
        assert_close(everything[0].values, everything[1].values)


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
        assert layer.prefetched is not None
        assert layer.prefetched.fetch is not None
        slots = layer.prefetched.fetch.wait()
        tensors += [*layer.packed.packed_keys, *layer.packed.packed_values, layer.packed.recent_keys]
        tensors += [layer.packed.recent_values, *slots]
    assert state.kv_bytes == sum(each.numel() * each.element_size() for each in tensors)
    # Counted once all are there; the step before the first one fetches as well.
    assert traffic.fetched == (1 + steps) * heads * 6 * entry
    few = SpeCache(1, 8, 16, topk=1000).start(model, prompt_ids(50)[0])
    none = SpeCache(1, 8, 16, topk=0).start(model, prompt_ids(50)[0])
    assert few.kv_bytes - none.kv_bytes == LAYERS * KV_HEADS * 48 * (entry + 8)  # no more slots than packed entries


def _traffic(state):
    return specache_layers(state.cache)[0].full.traffic


def test_bad_options_are_refused():
    with refused("topk", "range"):
        SpeCache(topk=-1)
    with refused("heads", "unknown"):
        SpeCache(heads="sum")


def test_bad_inputs_are_refused(monkeypatch):
    model, method = tiny_model(head_dim=WIDTH), _method(4)
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
        generate(model, prompt_ids(50)[0], _method(51), max_new_tokens=2)
