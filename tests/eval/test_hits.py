"""Hits and similarity of queries: what is counted equals loops over dense attention; the bounds are bounds."""

from itertools import product
from typing import Any

import pytest
import torch
from torch.nn.functional import cosine_similarity

from keepsight.eval.hits import Answering, answering, best_shared, compare, entries_kept, entries_read
from keepsight.eval.query_similarity import query_similarity
from keepsight.models.retrieval_head import RetrievalHead
from keepsight.runtime.methods import ExactTopK, Quest, SnapKV, SpeContext
from keepsight.runtime.methods.drafts import OwnAnswer
from keepsight.runtime.state import prefill
from tests.close import assert_close
from tests.families import family_model
from tests.refused import refused
from tests.tiny import prompt_ids, tiny_model

BUDGET = 8


@pytest.fixture(scope="module")
def model():
    return tiny_model(num_hidden_layers=8)


@pytest.fixture(scope="module")
def seen(model) -> Answering:
    return answering(model, prompt_ids(40)[0], 6, [0], _head(model).layers_of(model))


def _head(model, groups: int = 1) -> RetrievalHead:
    torch.manual_seed(0)
    return RetrievalHead.untrained(model, "previous-step", 512, groups).eval()


def _dense(model, seen: Answering):
    """[L, H, T, S] from a plain eager pass over prompt and answer."""
    ids = torch.cat([seen.before.tokens, seen.answer], dim=1)
    implementation = model.config._attn_implementation
    model.set_attn_implementation("eager")
    attentions = model(ids, output_attentions=True).attentions
    model.set_attn_implementation(implementation)
    return torch.stack([layer[0, :, -seen.answer.shape[1] :] for layer in attentions])


def test_weights_are_those_of_dense_attention(model, seen):
    dense = _dense(model, seen)
    kv_heads = seen.weights.shape[1]
    group = dense.shape[1] // kv_heads
    for head in range(kv_heads):
        expected = dense[:, head * group : (head + 1) * group].mean(dim=1)
        assert_close(seen.weights[:, head], expected)


def test_compare_counts_what_loops_count(model, seen):
    chosen = list(entries_read(model, ExactTopK(BUDGET), seen))
    found = compare("exact_topk", BUDGET, seen, iter(chosen))
    hits, masses, overlaps, previous = [], [], [], None
    for step, of_layers in enumerate(chosen):
        length = seen.prompt_length + step
        now = {}
        for layer, mask in enumerate(of_layers):
            for head in range(mask.shape[0]):
                weights = seen.weights[layer, head, step, :length]
                best = set(weights.argsort(descending=True)[:BUDGET].tolist())
                read = now[layer, head] = set(mask[head].nonzero()[:, 0].tolist())
                hits.append(len(best & read) / BUDGET)
                masses.append(float(weights[list(read)].sum() / weights.sum()))
                if previous:
                    overlaps.append(len(previous[layer, head] & read) / len(read))
        previous = now
    assert found is not None
    assert found.hit == pytest.approx(sum(hits) / len(hits), abs=1e-5)
    assert found.mass == pytest.approx(sum(masses) / len(masses), abs=1e-5)
    assert found.overlap == pytest.approx(sum(overlaps) / len(overlaps), abs=1e-5)
    assert found.read == BUDGET


@pytest.mark.parametrize("groups", [1, 2])
def test_a_head_chooses_as_it_does_while_it_decodes(model, seen, groups):
    """The choices of the first step depend on the prompt alone, and are those that the method's own reader makes."""
    method = SpeContext(BUDGET, _head(model, groups))
    first = next(entries_read(model, method, seen))
    state = method.compress_state(model, seen.before)
    announced: list[torch.Tensor] = []
    layers: list[Any] = list(state.cache.layers)
    for layer in layers:
        layer.prepare = lambda chosen, keep=announced: keep.append(chosen.indices[0])
    with pytest.raises(Exception, match="reader"):  # nothing was announced to the layers in the end
        method.reader(model)(
            input_ids=seen.answer[:, :1],
            position_ids=torch.tensor([[seen.prompt_length]]),
            past_key_values=state.cache,
        )
    expected = [torch.zeros_like(first[0]).scatter_(1, each, True) for each in announced]
    assert all(torch.equal(*each) for each in zip(first, expected, strict=True))
    assert len({mask.numpy().tobytes() for mask in first}) == groups


def test_upper_bounds(model, seen):
    shared = compare("best", BUDGET, seen, best_shared(seen, BUDGET))
    head = compare("head", BUDGET, seen, entries_read(model, SpeContext(BUDGET, _head(model)), seen))
    exact = compare("exact", BUDGET, seen, entries_read(model, ExactTopK(BUDGET), seen))
    assert shared is not None and head is not None and exact is not None
    assert head.mass <= shared.mass + 1e-6, "no set for all layers gets more of the mean attention"
    assert 0 < head.hit < 1


@pytest.mark.parametrize("groups", [2, 4])
def test_what_groups_could_read_at_best(model, seen, groups):
    best = compare("best", BUDGET, seen, best_shared(seen, BUDGET, groups))
    head = compare("head", BUDGET, seen, entries_read(model, SpeContext(BUDGET, _head(model, groups)), seen))
    whole = compare("best", BUDGET, seen, best_shared(seen, BUDGET))
    assert best is not None and head is not None and whole is not None
    assert head.mass <= best.mass + 1e-6
    assert whole.mass < best.mass
    step = next(best_shared(seen, BUDGET, groups))
    each = len(step) // groups
    for group in range(groups):
        mean = seen.weights[group * each : (group + 1) * each, :, 0, : seen.prompt_length].mean(dim=0)
        expected = torch.zeros_like(step[0]).scatter_(1, mean.topk(BUDGET).indices, True)
        assert all(torch.equal(mask, expected) for mask in step[group * each : (group + 1) * each])


def test_quest_reads_its_dense_layers_whole(model, seen):
    of_layers = next(entries_read(model, Quest(31, dense_layers=1), seen))
    assert of_layers[0].all()
    assert not of_layers[1].all()


def projected(model: Any, ids: torch.Tensor, positions: torch.Tensor, count: int) -> torch.Tensor:
    """Queries before RoPE of the last `count` tokens, [L, count, H, d]."""
    found = []
    hooks = [
        layer.self_attn.q_proj.register_forward_hook(lambda _, __, output: found.append(output[0, -count:]))
        for layer in model.model.layers
    ]
    with torch.no_grad():
        model(ids, position_ids=positions[None])
    for hook in hooks:
        hook.remove()
    return torch.stack(found).unflatten(-1, (-1, model.config.head_dim))


def test_the_answers_own_tokens_elsewhere_and_others_in_its_place() -> None:
    model, (ids, _) = tiny_model("llama"), prompt_ids(40)
    found = query_similarity(model, ids[0].tolist(), 6)
    assert [*found] == [*product(("same", "other"), ("1", "0.75", "0.5", "0.25", "0"))]
    heads = model.config.num_attention_heads
    assert found["same", "1"][0].shape == (model.config.num_hidden_layers, heads)
    for similarity in found["same", "1"]:
        assert_close(similarity, torch.ones_like(similarity))
    assert_close(*found["other", "1"])  # the same turn on both sides
    answer = OwnAnswer(6)(model, prefill(model, ids))
    answer_ids = answer.ids if answer.mask is None else answer.ids[:, answer.mask[0]]
    both, count = torch.cat([ids, answer_ids], dim=1), answer_ids.shape[1]
    own = projected(model, both, torch.arange(40 + count), count)
    moved = projected(model, both, torch.cat([torch.arange(40), torch.arange(20, 20 + count)]), count)
    expected = cosine_similarity(own, moved, dim=-1).reshape(len(own), -1, heads).mean(dim=1)
    assert_close(found["same", "0.5"][1], expected)
    assert found["same", "0.5"][0].mean() < found["same", "1"][0].mean()


def test_a_text_and_drawn_places_are_compared_too() -> None:
    model, (ids, _) = tiny_model("llama"), prompt_ids(40)
    found = query_similarity(model, ids[0].tolist(), 6, 3, text=[5, 6], drawn={"first 9": 9, "anywhere": 4000})
    contents, places = ("same", "other", "text"), ("1", "0.75", "0.5", "0.25", "0", "first 9", "anywhere")
    assert [*found] == [*product(contents, places)]
    drawn = {place: found["same", place][0] for place in ("first 9", "anywhere")}
    again = query_similarity(model, ids[0].tolist(), 6, 3, drawn={"first 9": 9, "anywhere": 4000})
    assert all(torch.equal(again["same", place][0], value) for place, value in drawn.items())
    assert not torch.allclose(drawn["first 9"], found["same", "1"][0])


def test_sliding_windows_are_refused() -> None:
    with refused("model", "model"):
        query_similarity(family_model("Gemma 3 (text)"), prompt_ids(40)[0][0].tolist(), 4)


@pytest.mark.parametrize("groups", [1, 2])
def test_all_heads_of_a_layer_may_read_the_same(model, seen, groups):
    """The entries with the largest mean of the heads' weights, in each group of layers."""
    head = _head(model, groups)
    each = next(entries_read(model, SpeContext(BUDGET, head), seen))
    same = next(entries_read(model, SpeContext(BUDGET, head, heads="same"), seen))
    assert all(bool((mask == mask[0]).all()) for mask in same)
    assert {int(mask.sum()) for mask in same} == {BUDGET * each[0].shape[0]}
    assert len({mask.numpy().tobytes() for mask in same}) == groups
    assert any(not torch.equal(*pair) for pair in zip(each, same, strict=True))


def test_a_method_that_evicts_has_what_it_keeps_and_the_answer(model):
    method = SnapKV(BUDGET, window=4)
    seen = answering(model, prompt_ids(40)[0], 6, [0], (), method.needs())
    steps = list(entries_kept(model, method, seen))
    _, kept = method.evict(model, prefill(model, seen.before.tokens, needs=method.needs()))
    assert len(steps) == seen.answer.shape[1]
    for step, masks in enumerate(steps):
        for mask, expected in zip(masks, kept, strict=True):
            assert torch.equal(mask[:, :40], expected[0]) and bool(mask[:, 40:].all()) and mask.shape[1] == 40 + step
