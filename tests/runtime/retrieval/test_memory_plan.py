"""The memory plan: vectors worked out by hand, and what holds for any plan."""

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from keepsight.errors import UserError
from keepsight.runtime.retrieval.memory_plan import MemoryPlan, plan_for
from tests.tiny import tiny_model


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
        with pytest.raises(UserError, match=f"{length} tokens in {plan.requests} requests do not fit into"):
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
    with pytest.raises(UserError, match="llama, whose attention is latent; give no limit"):
        plan_for(model, limit=10**6, requests=2, budget=16)
