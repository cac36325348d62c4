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

ROWS = 2
PROMPT = 30
BUDGET = 8


def device_bytes(layers: list[Any]) -> int:
    """Bytes that a cache's layers take on the device, room to grow included.

    The retrieval head's keys and the weights come on top of them.
    """
    on_cpu = elastic_layers(layers)
    slot_entries = {id(layer.slots): layer.slots.entries for layer in on_cpu}
    tensors = [*slot_entries.values()]
    for layer in layers:
        if isinstance(layer, ElasticLayer):
            tensors.append(layer.rows)
        else:
            tensors += [layer.keys, layer.values]
    return sum(tensor.untyped_storage().nbytes() for tensor in tensors)


def specontext(budget=BUDGET, **options):
    head = tiny_retrieval_head("previous-step", max_position_embeddings=1024)
    return SpeContext(budget, head, **options)


def plan_of(state):
    """The plan of memory that a state's layers move by."""
    plan = retrieval_cache(state.cache).placement.plan
    assert plan is not None
    return plan


def read_answer(model, method, state, answer):
    """The logits of an answer, and the states after each token."""
    reader = method.reader(model)
    logits = []
    states = []
    for token in answer.split(1, dim=1):
        state, step = read(reader, state, token)
        logits.append(step)
        states.append(state)
    return torch.cat(logits, dim=1), states


def test_specontext_reads_the_same_wherever_its_layers_lie():
    """Offloaded from the start, in a batch of different lengths; a copy goes on by itself."""
    model = tiny_model()
    answer = prompt_ids(60, 60, seed=1)[0]
    ids, mask = prompt_ids(40, 23)
    resident = specontext()
    expected, resident_states = read_answer(model, resident, resident.start(model, ids, mask), answer)
    for count in (1, 3):
        method = specontext(offload=count)
        state = method.start(model, ids, mask)
        read_answer(model, method, state.copy(), answer.flip(1))
        logits, states = read_answer(model, method, state, answer)
        assert_close(logits, expected)
        assert states[0].kv_bytes < resident_states[0].kv_bytes
        assert states[-1].length == 100
        assert states[-1].counts().tolist() == resident_states[-1].counts().tolist()
        assert len(elastic_layers(states[-1].cache.layers)) == count


def test_specontext_never_exceeds_its_limit():
    model = tiny_model(max_position_embeddings=1024)
    steps = 190
    ids = prompt_ids(PROMPT, PROMPT)[0]
    answer = prompt_ids(steps, steps, seed=1)[0]
    unlimited = specontext(memory_limit="1GB")
    plan = plan_of(unlimited.start(model, ids))
    assert plan.head == sum(tensor.nbytes for tensor in unlimited.head.state_dict().values())
    plan = replace(plan, limit=plan.memory(ROWS * 40, 0))
    limited = specontext(memory_limit=plan.limit)
    expected, _ = read_answer(model, unlimited, unlimited.start(model, ids), answer)

    state = limited.start(model, ids)
    reader = limited.reader(model)
    logits = []
    layers_on_cpu = []
    for length, token in enumerate(answer.split(1, dim=1), start=PROMPT + 1):
        state, step = read(reader, state, token)
        logits.append(step)
        on_cpu = len(elastic_layers(state.cache.layers))
        layers_on_cpu.append(on_cpu)
        head_keys = retrieval_cache(state.cache).selector.keys.untyped_storage().nbytes()
        assert plan.weights_held + device_bytes(state.cache.layers) + head_keys <= plan.limit
        assert on_cpu == plan.layers_on_cpu(ROWS * length)
    assert sorted(set(layers_on_cpu)) == [0, 1, 2, 3]
    assert_close(torch.cat(logits, dim=1), expected)


def test_bad_limits_are_refused_before_anything_is_read():
    model = tiny_model()
    plan = plan_of(specontext(memory_limit="1GB").start(model, prompt_ids(30)[0]))
    with refused("limit", "memory"):
        specontext(memory_limit=plan.weights_held + 9000).start(model, prompt_ids(240)[0])
    with refused("limit", "memory"):
        specontext(memory_limit=1000).start(model, prompt_ids(30)[0])
    with refused("offload", "range"):
        specontext(offload=-1)
    with refused("memory", "type"):
        specontext(memory_limit="24 gigs")


@pytest.mark.parametrize("failing", [0, 2])
def test_an_interrupted_step_changes_nothing(failing, monkeypatch):
    """Whichever layer it ends in; the layers on the CPU forget the token as the others do."""
    model = tiny_model()
    method = specontext(offload=2)
    reader = method.reader(model)
    ids, mask = prompt_ids(40, 23)
    answer = prompt_ids(12, 12, seed=1)[0]
    uninterrupted, _ = read_answer(model, method, method.start(model, ids, mask), answer)
    state = method.start(model, ids, mask)
    for token, expected in zip(answer.split(1, dim=1), uninterrupted.split(1, dim=1), strict=True):
        with monkeypatch.context() as patch:
            patch.setattr(model.model.layers[failing].mlp, "forward", Mock(side_effect=KeyboardInterrupt))
            with pytest.raises(KeyboardInterrupt):
                read(reader, state, (token + 1) % 128)
        state, logits = read(reader, state, token)
        assert_close(logits, expected)


def test_what_is_held_is_the_sum_of_its_parts():
    """10 tokens in 3 requests, 1 of 2 layers on the CPU."""
    plan = MemoryPlan(10**6, 1000, 100, 2, 3, 4, requests=3, budget=5, head_keys=7, item=4, room=2)
    entry = 2 * 3 * 4 * 4
    resident = (10 + 3 * 2) * entry
    slots = 3 * (5 + 1) * entry
    indices = 8 * 3 * 3 * 5
    head_keys = (10 + 3 * 2) * 7
    assert plan.memory(10, 1) == 1430 + resident + slots + indices + head_keys
    assert plan.memory(10, 0) == 1430 + 2 * resident + head_keys

    in_groups = replace(plan, groups=2)
    assert in_groups.memory(10, 1) == plan.memory(10, 1)
    assert in_groups.memory(10, 2) == plan.memory(10, 2) + indices, "a list of entries for each group"
    growing = replace(plan, growth=1 / 4)
    assert growing.memory(10, 1) == plan.memory(10, 1) + math.ceil(10 * (entry + 7) / 4)


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
