"""Entries seen through gates: what a model says behind open and closed gates is what it says of all or few entries."""

import pytest
import torch
from torch import Tensor

from keepsight.runtime.attention import run
from keepsight.runtime.observe import as_observed
from keepsight.runtime.state import entries
from keepsight.runtime.evict import Evict
from keepsight.runtime.observe import GatedLayer
from keepsight.runtime.methods.positions import RandomScores
from keepsight.runtime.state import prefill, read
from keepsight.runtime.state import State
from tests.close import assert_close
from tests.families import family_model
from tests.tiny import prompt_ids, tiny_model

CLOSED = torch.finfo(torch.float32).min


def said(model, state: State, gates: list[Tensor], tokens: Tensor) -> Tensor:
    """Logits after each of the tokens [B, T], behind gates [B, K, N] for each layer with full attention."""
    held = zip(entries(state.cache), gates, strict=True)
    cache = as_observed(state.cache, [GatedLayer(each.keys, each.values, gate) for each, gate in held])
    positions = state.next_position[:, None] + torch.arange(tokens.shape[1])
    return run(model, cache, input_ids=tokens, position_ids=positions).logits


@pytest.mark.parametrize("family", ["Llama 3", "Qwen3", "Gemma 2", "GPT-OSS", "Qwen3-Next"])
def test_closed_gates_are_evicted_entries_and_open_ones_are_kept(family):
    """With windows, softcap, sinks, recurrent states too; other entries in every head."""
    model = family_model(family)
    ids, tokens = prompt_ids(40)[0], prompt_ids(5, seed=4)[0]
    method = Evict(12, RandomScores(seed=3))
    with torch.no_grad():
        state = prefill(model, ids, needs=method.needs())
        selected = method.select(state, method.importance(model, state))
        gates = [torch.zeros_like(each, dtype=torch.float32).masked_fill_(~each, CLOSED) for each in selected]
        behind = said(model, state, gates, tokens)
        whole = said(model, state, [torch.zeros_like(each) for each in gates], tokens)
        evicted = read(model, method.gather(state, selected), tokens, logits_to_keep=5)[1]
        full = read(model, state, tokens, logits_to_keep=5)[1]
    assert_close(behind, evicted)
    assert_close(whole, full)
    assert (evicted - full).abs().max() > 1e-2


def test_gradients_reach_the_gates_and_a_closed_one_of_no_weight_has_none():
    model = tiny_model()
    state = prefill(model, prompt_ids(40)[0])
    gates = [torch.zeros(1, 2, 40, requires_grad=True) for _ in range(3)]
    closed = [each.masked_fill(torch.arange(40) < 3, CLOSED) for each in gates]
    said(model, state, closed, prompt_ids(5, seed=4)[0]).logsumexp(-1).sum().backward()
    for each in gates:
        assert each.grad is not None and torch.isfinite(each.grad).all()
        assert not each.grad[..., :3].any() and each.grad[..., 3:].all()
