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

LAYERS, KV_HEADS, LENGTH = 3, 2, 70
METHODS = {"snapkv": SnapKV(40), "dapq": DapQ(40), "oracle": Oracle(40), "laq": LAQ(40)}
METHODS |= {"laq++": LAQPlus(40), "dapq, window": DapQ(40, DraftObserver(PromptEnds(), window=6))}


@pytest.mark.parametrize(
    ("name", "padded"), [("snapkv", False), ("laq", True), ("oracle", True), ("lookaheadkv", False)]
)
def test_scores_by_query_head_are_those_of_one_layer(
    name: str, padded: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A layer's [B, H, N] are gone, but for the last one's, when the next layer's are reduced."""
    adapter = save(random_module(), tmp_path) if name == "lookaheadkv" else None
    method: Evict = LookaheadKV.from_pretrained(adapter, 40) if adapter else METHODS[name]
    model, (ids, mask) = tiny_model(), prompt_ids(LENGTH, LENGTH - 9 if padded else LENGTH)
    state = prefill(model, ids, mask if padded else None, needs=method.needs())
    seen: list[weakref.ref[Tensor]] = []

    def noting(scores: Tensor, kv_heads: int, heads: str) -> Tensor:
        assert scores.shape == (2, 2 * KV_HEADS, LENGTH)
        assert sum(each() is not None for each in seen) <= 1
        seen.append(weakref.ref(scores))
        return importance.reduce_group(scores, kv_heads, heads)

    for module in (observe, laq):
        monkeypatch.setattr(module, "reduce_group", noting)
    with torch.no_grad():
        scores = method.bound_observer(model, state, method.reduce)
    assert len(seen) >= LAYERS
    assert [each.shape for each in scores] == [(2, KV_HEADS, LENGTH)] * LAYERS


@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_a_layers_output_is_what_enters_the_next_and_the_one_past_the_last_is_normed(family):
    model = tiny_model(family)
    ids, _ = prompt_ids(9)
    with RecordFeatures(model, (3, 0, 1)) as recorded:
        states = model(ids, output_hidden_states=True).hidden_states
    normed, first, second = recorded.outputs()
    assert torch.equal(first, states[1])
    assert torch.equal(second, states[2])
    assert torch.equal(normed, model.model(ids).last_hidden_state)
    assert not torch.allclose(normed, states[2])


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


def said(model, state: State, gates: list[Tensor], tokens: Tensor) -> Tensor:
    """Logits after each of the tokens [B, T], behind gates [B, K, N] for each layer with full attention."""
    held = zip(state.entries(), gates, strict=True)
    cache = as_observed(state.cache, [GatedLayer(each.keys, each.values, gate) for each, gate in held])
    positions = (state.lengths + state.rope_offset)[:, None] + torch.arange(tokens.shape[1])
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
        evicted = read(model, method.keep(model, state, selected), tokens, logits_to_keep=5)[1]
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


SNAPKV = SnapKV(12, window=4, pool=NO_POOL)


def importances(method: Evict, model: Any, lengths: tuple[int, ...]) -> tuple[State, list[Tensor], list[Tensor]]:
    """A prompt's state, and its importance without and with the norms."""
    state = prefill(model, *prompt_ids(*lengths), needs=method.needs())
    plain, weighed = (replace(method, value_norm=each).importance(model, state) for each in (False, True))
    return state, plain, weighed


@pytest.mark.parametrize("lengths", [(40,), (40, 21)], ids=["alone", "padded"])
def test_each_entry_counts_by_the_length_of_its_value(lengths: tuple[int, ...]) -> None:
    state, plain, weighed = importances(SNAPKV, tiny_model(), lengths)
    for held, before, after in zip(state.entries(), plain, weighed, strict=True):
        lengths_of_values = held.values.double().pow(2).sum(dim=-1).sqrt().float()
        free = torch.isfinite(before)
        assert free.any()
        assert torch.equal(after[~free], before[~free])  # protected entries and padding
        assert_close(after[free], (before * lengths_of_values)[free])


def test_of_latents_it_is_the_mean_length_of_the_values_of_all_heads() -> None:
    model = family_model("DeepSeek-V3")
    state, plain, weighed = importances(SNAPKV, model, (40,))
    assert all(layer.expansion for layer in state.layers)
    for layer, held, before, after in zip(model.model.layers, state.entries(), plain, weighed, strict=True):
        attention = layer.self_attn
        by_head = attention.kv_b_proj(held.keys[:, 0]).unflatten(-1, (attention.num_heads, -1))
        of_all = by_head[..., attention.qk_nope_head_dim :].norm(dim=-1).mean(dim=-1)
        free = torch.isfinite(before)
        assert_close(after[free], (before * of_all[:, None])[free])


def test_a_module_says_whether_its_importance_is_weighed(tmp_path: Any) -> None:
    shape = replace(SHAPE, value_norm=True)
    folder = save(random_on(tiny_model(), shape), tmp_path / "adapter")
    assert LookaheadAdapter.load(folder).settings.value_norm
    assert LookaheadKV.from_pretrained(folder, 12).value_norm
    assert not LookaheadKV.from_pretrained(folder, 12, value_norm=False).value_norm


@torch.no_grad()
def test_a_window_beside_the_soft_tokens_counts_by_its_rows(tmp_path: Path) -> None:
    """LookaheadKV's appendix E.2: five soft tokens and the last six of the prompt."""
    alone = LookaheadKV.from_pretrained(save(random_module(), tmp_path), 40)
    assert isinstance(alone.observer, SoftTokens)
    model, (ids, _) = tiny_model(), prompt_ids(LENGTH)
    state = prefill(model, ids, needs=Needs(window=6))
    both = replace(alone.observer, window=6)
    assert both.needs().window == 6
    observed = (each(model, state, Reduce()) for each in (alone.observer, PromptWindow(6), both))
    for soft, window, together in zip(*observed, strict=True):
        assert_close(together, (5 * soft + 6 * window) / 11)
