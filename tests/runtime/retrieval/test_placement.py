"""Layers that move to the CPU while an answer grows, by a plan whose vectors were worked out by hand."""

import math
from dataclasses import replace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from keepsight.runtime.retrieval.elastic import ElasticLayer, elastic_layers
from keepsight.runtime.retrieval.memory_plan import MemoryPlan, plan_for
from keepsight.runtime.retrieval.specontext import SpeContext, retrieval_cache
from keepsight.runtime.state import read
from tests.close import assert_close
from tests.models.retrieval_heads import tiny_retrieval_head
from tests.refused import refused
from tests.tiny import prompt_ids, tiny_model

ROWS, PROMPT, BUDGET = 2, 30, 8


def device_bytes(layers: list[Any]) -> int:
    """Bytes that a cache's layers take on the device, room to grow included.

    The retrieval head's keys and the weights come on top of them.
    """
    on_cpu = elastic_layers(layers)
    lists = {id(layer.slots): layer.slots.entries for layer in on_cpu}
    tensors = [*lists.values(), *(layer.rows for layer in on_cpu)]
    tensors += [each for layer in layers if not isinstance(layer, ElasticLayer) for each in (layer.keys, layer.values)]
    return sum(each.untyped_storage().nbytes() for each in tensors)


def _method(budget=BUDGET, **options):
    return SpeContext(budget, tiny_retrieval_head("previous-step", max_position_embeddings=1024), **options)


def _read_on(model, method, state, answer):
    """The logits of an answer, and the states after each token."""
    reader, logits, states = method.reader(model), [], []
    for token in answer.split(1, dim=1):
        state, step = read(reader, state, token)
        logits.append(step)
        states.append(state)
    return torch.cat(logits, dim=1), states


def test_specontext_reads_the_same_wherever_its_layers_lie():
    """Offloaded from the start, in a batch of different lengths; a copy goes on by itself."""
    model, answer = tiny_model(), prompt_ids(60, 60, seed=1)[0]
    ids, mask = prompt_ids(40, 23)
    expected, states = _read_on(model, _method(), _method().start(model, ids, mask), answer)
    for count in (1, 3):
        method = _method(offload=count)
        state = method.start(model, ids, mask)
        _read_on(model, method, state.copy(), answer.flip(1))
        logits, found = _read_on(model, method, state, answer)
        assert_close(logits, expected)
        assert found[0].kv_bytes < states[0].kv_bytes
        assert (found[-1].length, found[-1].counts().tolist()) == (100, states[-1].counts().tolist())
        assert len(elastic_layers(found[-1].cache.layers)) == count


def test_specontext_never_exceeds_its_limit():
    model, steps = tiny_model(max_position_embeddings=1024), 190
    ids, answer = prompt_ids(PROMPT, PROMPT)[0], prompt_ids(steps, steps, seed=1)[0]
    unlimited = _method(memory_limit="1GB")
    plan = retrieval_cache(unlimited.start(model, ids).cache).placement.plan
    assert plan is not None
    assert plan.head == sum(each.nbytes for each in unlimited.head.state_dict().values())
    plan = replace(plan, limit=plan.memory(ROWS * 40, 0))
    method = _method(memory_limit=plan.limit)
    expected, _ = _read_on(model, unlimited, unlimited.start(model, ids), answer)
    state, reader, logits, on_cpu = method.start(model, ids), method.reader(model), [], []
    for length, token in enumerate(answer.split(1, dim=1), start=PROMPT + 1):
        state, step = read(reader, state, token)
        logits.append(step)
        on_cpu.append(len(elastic_layers(state.cache.layers)))
        keys = retrieval_cache(state.cache).selector.keys.untyped_storage().nbytes()
        assert plan.weights_held + device_bytes(state.cache.layers) + keys <= plan.limit
        assert on_cpu[-1] == plan.layers_on_cpu(ROWS * length)
    assert sorted(set(on_cpu)) == [0, 1, 2, 3]
    assert_close(torch.cat(logits, dim=1), expected)


def test_bad_limits_are_refused_before_anything_is_read():
    model = tiny_model()
    plan = retrieval_cache(_method(memory_limit="1GB").start(model, prompt_ids(30)[0]).cache).placement.plan
    assert plan is not None
    with refused("limit", "memory"):
        _method(memory_limit=plan.weights_held + 9000).start(model, prompt_ids(240)[0])
    with refused("limit", "memory"):
        _method(memory_limit=1000).start(model, prompt_ids(30)[0])
    with refused("offload", "range"):
        _method(offload=-1)
    with refused("memory", "type"):
        _method(memory_limit="24 gigs")


@pytest.mark.parametrize("failing", [0, 2])
def test_an_interrupted_step_changes_nothing(failing, monkeypatch):
    """Whichever layer it ends in; the layers on the CPU forget the token as the others do."""
    model, method = tiny_model(), _method(offload=2)
    ids, answer = prompt_ids(40, 23), prompt_ids(12, 12, seed=1)[0]
    expected, _ = _read_on(model, method, method.start(model, *ids), answer)
    state, reader = method.start(model, *ids), method.reader(model)
    for token, wanted in zip(answer.split(1, dim=1), expected.split(1, dim=1), strict=True):
        with monkeypatch.context() as patch:
            patch.setattr(model.model.layers[failing].mlp, "forward", Mock(side_effect=KeyboardInterrupt))
            with pytest.raises(KeyboardInterrupt):
                read(reader, state, (token + 1) % 128)
        state, logits = read(reader, state, token)
        assert_close(logits, wanted)


def test_what_is_held_is_the_sum_of_its_parts():
    """10 tokens in 3 requests, 1 of 2 layers on the CPU."""
    plan = MemoryPlan(10**6, 1000, 100, 2, 3, 4, requests=3, budget=5, head_keys=7, item=4, room=2)
    entry = 2 * 3 * 4 * 4
    resident, slots, indices = (10 + 3 * 2) * entry, 3 * (5 + 1) * entry, 8 * 3 * 3 * 5
    assert plan.memory(10, 1) == 1430 + resident + slots + indices + (10 + 3 * 2) * 7
    assert plan.memory(10, 0) == 1430 + 2 * resident + (10 + 3 * 2) * 7
    assert replace(plan, groups=2).memory(10, 1) == plan.memory(10, 1)
    assert replace(plan, groups=2).memory(10, 2) == plan.memory(10, 2) + indices, "a list of entries for each group"
    assert replace(plan, growth=1 / 4).memory(10, 1) == plan.memory(10, 1) + math.ceil(10 * (entry + 7) / 4)


plans = st.builds(
    MemoryPlan,
    limit=st.integers(10**4, 10**7),
    weights=st.integers(0, 5000),
    head=st.integers(0, 2000),
    layers=st.integers(1, 12),
    kv_heads=st.integers(1, 4),
    head_dim=st.sampled_from([2, 8]),
    requests=st.integers(1, 4),
    budget=st.integers(1, 200),
    head_keys=st.integers(1, 100),
    item=st.sampled_from([2, 4]),
    room=st.sampled_from([0, 64]),
    growth=st.sampled_from([0.0, 1 / 16]),
)


@given(plan=plans, length=st.integers(1, 10**5))
def test_no_more_layers_move_than_have_to(plan, length):
    fits = [on_cpu for on_cpu in range(plan.layers + 1) if plan.memory(length, on_cpu) <= plan.limit]
    if fits:
        assert plan.layers_on_cpu(length) == fits[0]
    else:
        with refused("limit", "memory"):
            plan.layers_on_cpu(length)


def test_the_plan_of_a_model():
    model = tiny_model()
    plan = plan_for(model, limit=10**6, requests=2, budget=16, head=100, head_keys=64)
    weights = sum(tensor.nbytes for tensor in model.state_dict().values())
    assert (plan.weights, plan.head, plan.head_keys) == (weights, 100, 64)
    assert (plan.layers, plan.kv_heads, plan.head_dim, plan.item) == (3, 2, 8, 4)
    with torch.device("meta"):
        empty = tiny_model()
    assert plan_for(empty, limit=10**6, requests=2, budget=16, head=100, head_keys=64) == plan
    model.config.kv_lora_rank = 4
    with refused("limit", "model"):
        plan_for(model, limit=10**6, requests=2, budget=16)
