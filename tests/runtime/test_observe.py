"""What is recorded and scored of a layer: features, scores by KV head, gates, norms of values."""

import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from keepsight.models.lookahead import LookaheadAdapter
from keepsight.runtime import importance, observe
from keepsight.runtime.attention import run
from keepsight.runtime.drafting.observer import DraftObserver
from keepsight.runtime.evict import Evict
from keepsight.runtime.features import RecordFeatures
from keepsight.runtime.importance import NO_POOL, Reduce
from keepsight.runtime.methods import LAQ, DapQ, LAQPlus, Oracle, SnapKV, laq
from keepsight.runtime.methods.drafts import PromptEnds
from keepsight.runtime.methods.lookaheadkv import LookaheadKV, SoftTokens
from keepsight.runtime.methods.positions import RandomScores
from keepsight.runtime.methods.window import PromptWindow
from keepsight.runtime.observe import as_observed
from keepsight.runtime.state import Needs, State, prefill, read
from keepsight.train.eviction import GatedLayer
from tests.close import assert_close
from tests.families import family_model
from tests.models.modules import SHAPE, random_module, random_on, save
from tests.refused import refused
from tests.tiny import FAMILIES, prompt_ids, tiny_model

LAYERS = 3
KV_HEADS = 2
LENGTH = 70
METHODS = {
    "snapkv": SnapKV(40),
    "dapq": DapQ(40),
    "oracle": Oracle(40),
    "laq": LAQ(40),
    "laq++": LAQPlus(40),
    "dapq, window": DapQ(40, DraftObserver(PromptEnds(), window=6)),
}


@pytest.mark.parametrize(
    ("name", "padded"), [("snapkv", False), ("laq", True), ("oracle", True), ("lookaheadkv", False)]
)
def test_scores_by_query_head_are_those_of_one_layer(
    name: str, padded: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A layer's [B, H, N] are gone, but for the last one's, when the next layer's are reduced."""
    method: Evict
    if name == "lookaheadkv":
        method = LookaheadKV.from_pretrained(save(random_module(), tmp_path), 40)
    else:
        method = METHODS[name]
    model = tiny_model()
    ids, mask = prompt_ids(LENGTH, LENGTH - 9 if padded else LENGTH)
    state = prefill(model, ids, mask if padded else None, needs=method.needs())
    by_query_head: list[weakref.ref[Tensor]] = []

    def checked_reduce_group(scores: Tensor, kv_heads: int, heads: str) -> Tensor:
        assert scores.shape == (2, 2 * KV_HEADS, LENGTH)
        assert sum(reference() is not None for reference in by_query_head) <= 1
        by_query_head.append(weakref.ref(scores))
        return importance.reduce_group(scores, kv_heads, heads)

    for module in (observe, laq):
        monkeypatch.setattr(module, "reduce_group", checked_reduce_group)
    with torch.no_grad():
        scores = method.bound_observer(model, state, method.reduce)
    assert len(by_query_head) >= LAYERS
    assert [layer.shape for layer in scores] == [(2, KV_HEADS, LENGTH)] * LAYERS


@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_a_layers_output_is_what_enters_the_next_and_the_one_past_the_last_is_normed(family):
    model = tiny_model(family)
    ids, _ = prompt_ids(9)
    with RecordFeatures(model, (3, 0, 1)) as recorded:
        hidden_states = model(ids, output_hidden_states=True).hidden_states
    past_last, of_layer_0, of_layer_1 = recorded.outputs()
    assert torch.equal(of_layer_0, hidden_states[1])
    assert torch.equal(of_layer_1, hidden_states[2])
    assert torch.equal(past_last, model.model(ids).last_hidden_state)
    assert not torch.allclose(past_last, hidden_states[2])


@torch.no_grad()
def test_a_chunked_prefill_keeps_the_normed_output_of_every_token():
    model = tiny_model()
    ids, _ = prompt_ids(9)
    state = prefill(model, ids, chunk=4, needs=Needs(features=(1, 3)))
    assert_close(state.features_of((3,)), model.model(ids).last_hidden_state)


@pytest.mark.parametrize("layer", [-1, 4])
def test_a_layer_that_is_not_there_is_refused(layer):
    with refused("features", "range"):
        RecordFeatures(tiny_model(), (layer,))


CLOSED = torch.finfo(torch.float32).min


def logits_behind(model, state: State, gates: list[Tensor], tokens: Tensor) -> Tensor:
    """Logits after each of the tokens [B, T], behind gates [B, K, N] for each layer with full attention."""
    gated = []
    for layer, gate in zip(state.entries(), gates, strict=True):
        gated.append(GatedLayer(layer.keys, layer.values, gate))
    cache = as_observed(state.cache, gated)
    positions = (state.lengths + state.rope_offset)[:, None] + torch.arange(tokens.shape[1])
    return run(model, cache, input_ids=tokens, position_ids=positions).logits


@pytest.mark.parametrize("family", ["Llama 3", "Qwen3", "Gemma 2", "GPT-OSS", "Qwen3-Next"])
def test_closed_gates_are_evicted_entries_and_open_ones_are_kept(family):
    """With windows, softcap, sinks, recurrent states too; other entries in every head."""
    model = family_model(family)
    ids = prompt_ids(40)[0]
    tokens = prompt_ids(5, seed=4)[0]
    method = Evict(12, RandomScores(seed=3))
    with torch.no_grad():
        state = prefill(model, ids, needs=method.needs())
        selected = method.select(state, method.importance(model, state))
        gates = [torch.zeros(mask.shape).masked_fill_(~mask, CLOSED) for mask in selected]
        open_gates = [torch.zeros_like(gate) for gate in gates]
        behind_gates = logits_behind(model, state, gates, tokens)
        behind_open_gates = logits_behind(model, state, open_gates, tokens)
        after_eviction = read(model, method.keep(model, state, selected), tokens, logits_to_keep=5)[1]
        of_full_cache = read(model, state, tokens, logits_to_keep=5)[1]
    assert_close(behind_gates, after_eviction)
    assert_close(behind_open_gates, of_full_cache)
    assert (after_eviction - of_full_cache).abs().max() > 1e-2


def test_gradients_reach_the_gates_and_a_closed_one_of_no_weight_has_none():
    model = tiny_model()
    state = prefill(model, prompt_ids(40)[0])
    gates = [torch.zeros(1, 2, 40, requires_grad=True) for _ in range(3)]
    partly_closed = [gate.masked_fill(torch.arange(40) < 3, CLOSED) for gate in gates]
    logits = logits_behind(model, state, partly_closed, prompt_ids(5, seed=4)[0])
    logits.logsumexp(-1).sum().backward()
    for gate in gates:
        assert gate.grad is not None
        assert torch.isfinite(gate.grad).all()
        assert not gate.grad[..., :3].any()
        assert gate.grad[..., 3:].all()


SNAPKV = SnapKV(12, window=4, pool=NO_POOL)


def importances(method: Evict, model: Any, lengths: tuple[int, ...]) -> tuple[State, list[Tensor], list[Tensor]]:
    """A prompt's state, and its importance without and with the norms."""
    state = prefill(model, *prompt_ids(*lengths), needs=method.needs())
    plain = replace(method, value_norm=False).importance(model, state)
    weighed = replace(method, value_norm=True).importance(model, state)
    return state, plain, weighed


@pytest.mark.parametrize("lengths", [(40,), (40, 21)], ids=["alone", "padded"])
def test_each_entry_counts_by_the_length_of_its_value(lengths: tuple[int, ...]) -> None:
    state, plain, weighed = importances(SNAPKV, tiny_model(), lengths)
    for layer, before, after in zip(state.entries(), plain, weighed, strict=True):
        norms = layer.values.double().pow(2).sum(dim=-1).sqrt().float()
        finite = torch.isfinite(before)
        assert finite.any()
        assert torch.equal(after[~finite], before[~finite])  # protected entries and padding
        assert_close(after[finite], (before * norms)[finite])


def test_of_latents_it_is_the_mean_length_of_the_values_of_all_heads() -> None:
    model = family_model("DeepSeek-V3")
    state, plain, weighed = importances(SNAPKV, model, (40,))
    assert all(layer.expansion for layer in state.layers)
    for layer, entries, before, after in zip(model.model.layers, state.entries(), plain, weighed, strict=True):
        attention = layer.self_attn
        by_head = attention.kv_b_proj(entries.keys[:, 0]).unflatten(-1, (attention.num_heads, -1))
        mean_norms = by_head[..., attention.qk_nope_head_dim :].norm(dim=-1).mean(dim=-1)
        finite = torch.isfinite(before)
        assert_close(after[finite], (before * mean_norms[:, None])[finite])


def test_a_module_says_whether_its_importance_is_weighed(tmp_path: Any) -> None:
    settings = replace(SHAPE, value_norm=True)
    folder = save(random_on(tiny_model(), settings), tmp_path / "adapter")
    assert LookaheadAdapter.load(folder).settings.value_norm
    assert LookaheadKV.from_pretrained(folder, 12).value_norm
    assert not LookaheadKV.from_pretrained(folder, 12, value_norm=False).value_norm


@torch.no_grad()
def test_a_window_beside_the_soft_tokens_counts_by_its_rows(tmp_path: Path) -> None:
    """LookaheadKV's appendix E.2: five soft tokens and the last six of the prompt."""
    soft_tokens = LookaheadKV.from_pretrained(save(random_module(), tmp_path), 40).observer
    assert isinstance(soft_tokens, SoftTokens)
    with_window = replace(soft_tokens, window=6)
    assert with_window.needs().window == 6

    model = tiny_model()
    ids, _ = prompt_ids(LENGTH)
    state = prefill(model, ids, needs=Needs(window=6))
    by_soft_tokens = soft_tokens(model, state, Reduce())
    by_window = PromptWindow(6)(model, state, Reduce())
    by_both = with_window(model, state, Reduce())
    for of_soft_tokens, of_window, scores in zip(by_soft_tokens, by_window, by_both, strict=True):
        assert_close(scores, (5 * of_soft_tokens + 6 * of_window) / 11)
