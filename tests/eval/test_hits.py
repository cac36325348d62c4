"""Hits and similarity of queries: what is counted equals loops over dense attention; the bounds are bounds."""

from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cosine_similarity

from keepsight.eval.hits import Answering, Hits, answering, best_shared, compare, entries_kept, entries_read
from keepsight.eval.query_similarity import query_similarity
from keepsight.models.retrieval_head import RetrievalHead
from keepsight.runtime.generate import CacheMethod
from keepsight.runtime.methods import ExactTopK, Quest, SnapKV, SpeContext
from keepsight.runtime.methods.drafts import OwnAnswer
from keepsight.runtime.sparse_read.cache import Selection
from keepsight.runtime.state import prefill
from tests.close import assert_close
from tests.families import family_model
from tests.refused import refused
from tests.tiny import prompt_ids, tiny_model

BUDGET = 8
POSITIONS = ("1", "0.75", "0.5", "0.25", "0")


@pytest.fixture(scope="module")
def model():
    return tiny_model(num_hidden_layers=8)


@pytest.fixture(scope="module")
def answered(model) -> Answering:
    return answering(model, prompt_ids(40)[0], 6, [0], _head(model).layers_of(model))


def _head(model, groups: int = 1) -> RetrievalHead:
    torch.manual_seed(0)
    return RetrievalHead.untrained(model, "previous-step", 512, groups).eval()


def _dense(model, answered: Answering) -> Tensor:
    """[L, H, T, S] from a plain eager pass over prompt and answer."""
    ids = torch.cat([answered.before.tokens, answered.answer], dim=1)
    implementation = model.config._attn_implementation
    model.set_attn_implementation("eager")
    attentions = model(ids, output_attentions=True).attentions
    model.set_attn_implementation(implementation)
    answer_tokens = answered.answer.shape[1]
    return torch.stack([layer[0, :, -answer_tokens:] for layer in attentions])


def _entries(mask: Tensor) -> set[int]:
    """Indices of the entries that a mask [C] has."""
    return set(mask.nonzero()[:, 0].tolist())


def _distinct(masks: list[Tensor]) -> int:
    return len({mask.numpy().tobytes() for mask in masks})


def _hits_of_best(answered: Answering, groups: int = 1) -> Hits:
    hits = compare("best", BUDGET, answered, best_shared(answered, BUDGET, groups))
    assert hits is not None
    return hits


def _hits_of(model, method: CacheMethod, answered: Answering) -> Hits:
    hits = compare("method", BUDGET, answered, entries_read(model, method, answered))
    assert hits is not None
    return hits


def test_weights_are_those_of_dense_attention(model, answered):
    dense = _dense(model, answered)
    kv_heads = answered.weights.shape[1]
    by_kv_head = dense.unflatten(1, (kv_heads, -1))
    for head in range(kv_heads):
        expected = by_kv_head[:, head].mean(dim=1)
        assert_close(answered.weights[:, head], expected)


def test_compare_counts_what_loops_count(model, answered):
    masks_of_steps = list(entries_read(model, ExactTopK(BUDGET), answered))
    measured = compare("exact_topk", BUDGET, answered, iter(masks_of_steps))
    hits: list[float] = []
    masses: list[float] = []
    overlaps: list[float] = []
    previous: dict[tuple[int, int], set[int]] = {}
    for step, masks in enumerate(masks_of_steps):
        length = answered.prompt_length + step
        for layer, mask in enumerate(masks):
            for head in range(mask.shape[0]):
                weights = answered.weights[layer, head, step, :length]
                best = set(weights.argsort(descending=True)[:BUDGET].tolist())
                read = _entries(mask[head])
                hits.append(len(best & read) / BUDGET)
                masses.append(float(weights[list(read)].sum() / weights.sum()))
                if step > 0:
                    overlaps.append(len(previous[layer, head] & read) / len(read))
                previous[layer, head] = read
    assert measured is not None
    assert measured.hit == pytest.approx(sum(hits) / len(hits), abs=1e-5)
    assert measured.mass == pytest.approx(sum(masses) / len(masses), abs=1e-5)
    assert measured.overlap == pytest.approx(sum(overlaps) / len(overlaps), abs=1e-5)
    assert measured.read == BUDGET


@pytest.mark.parametrize("groups", [1, 2])
def test_a_head_chooses_as_it_does_while_it_decodes(model, answered, groups):
    """The choices of the first step depend on the prompt alone, and are those that the method's own reader makes."""
    method = SpeContext(BUDGET, _head(model, groups))
    masks = next(entries_read(model, method, answered))
    state = method.compress_state(model, answered.before)
    announced: list[Tensor] = []

    def record(selection: Selection) -> None:
        announced.append(selection.indices[0])

    layers: list[Any] = list(state.cache.layers)
    for layer in layers:
        layer.prepare = record
    with pytest.raises(Exception, match="reader"):  # nothing was announced to the layers in the end
        method.reader(model)(
            input_ids=answered.answer[:, :1],
            position_ids=torch.tensor([[answered.prompt_length]]),
            past_key_values=state.cache,
        )
    for mask, indices in zip(masks, announced, strict=True):
        expected = torch.zeros_like(mask).scatter_(1, indices, True)
        assert torch.equal(mask, expected)
    assert _distinct(masks) == groups


def test_upper_bounds(model, answered):
    best = _hits_of_best(answered)
    head = _hits_of(model, SpeContext(BUDGET, _head(model)), answered)
    _hits_of(model, ExactTopK(BUDGET), answered)
    assert head.mass <= best.mass + 1e-6, "no set for all layers gets more of the mean attention"
    assert 0 < head.hit < 1


@pytest.mark.parametrize("groups", [2, 4])
def test_what_groups_could_read_at_best(model, answered, groups):
    best = _hits_of_best(answered, groups)
    head = _hits_of(model, SpeContext(BUDGET, _head(model, groups)), answered)
    ungrouped = _hits_of_best(answered)
    assert head.mass <= best.mass + 1e-6
    assert ungrouped.mass < best.mass
    masks = next(best_shared(answered, BUDGET, groups))
    layers_per_group = len(masks) // groups
    for group in range(groups):
        layers = slice(group * layers_per_group, (group + 1) * layers_per_group)
        mean_weights = answered.weights[layers, :, 0, : answered.prompt_length].mean(dim=0)
        for mask in masks[layers]:
            expected = torch.zeros_like(mask).scatter_(1, mean_weights.topk(BUDGET).indices, True)
            assert torch.equal(mask, expected)


def test_quest_reads_all_of_its_dense_layers(model, answered):
    masks = next(entries_read(model, Quest(31, dense_layers=1), answered))
    assert masks[0].all()
    assert not masks[1].all()


def projected(model: Any, ids: Tensor, positions: Tensor, count: int) -> Tensor:
    """Queries before RoPE of the last `count` tokens, [L, count, H, d]."""
    queries: list[Tensor] = []

    def record(module: Any, inputs: Any, output: Tensor) -> None:
        queries.append(output[0, -count:])

    hooks = [layer.self_attn.q_proj.register_forward_hook(record) for layer in model.model.layers]
    with torch.no_grad():
        model(ids, position_ids=positions[None])
    for hook in hooks:
        hook.remove()
    return torch.stack(queries).unflatten(-1, (-1, model.config.head_dim))


def test_the_answers_own_tokens_elsewhere_and_others_in_its_place() -> None:
    model = tiny_model("llama")
    ids, _ = prompt_ids(40)
    similarities = query_similarity(model, ids[0].tolist(), 6)
    assert list(similarities) == list(product(("same", "other"), POSITIONS))
    heads = model.config.num_attention_heads
    after_rope, before_rope = similarities["same", "1"]
    assert after_rope.shape == (model.config.num_hidden_layers, heads)
    assert_close(after_rope, torch.ones_like(after_rope))
    assert_close(before_rope, torch.ones_like(before_rope))
    assert_close(*similarities["other", "1"])  # RoPE turns both sides alike
    answer = OwnAnswer(6)(model, prefill(model, ids))
    answer_ids = answer.ids if answer.mask is None else answer.ids[:, answer.mask[0]]
    count = answer_ids.shape[1]
    ids_with_answer = torch.cat([ids, answer_ids], dim=1)
    in_place = projected(model, ids_with_answer, torch.arange(40 + count), count)
    moved_positions = torch.cat([torch.arange(40), torch.arange(20, 20 + count)])
    moved = projected(model, ids_with_answer, moved_positions, count)
    expected = cosine_similarity(in_place, moved, dim=-1).reshape(len(in_place), -1, heads).mean(dim=1)
    moved_after_rope, moved_before_rope = similarities["same", "0.5"]
    assert_close(moved_before_rope, expected)
    assert moved_after_rope.mean() < after_rope.mean()


def test_a_text_and_drawn_positions_are_compared_too() -> None:
    model = tiny_model("llama")
    prompt = prompt_ids(40)[0][0].tolist()
    drawn = {"first 9": 9, "anywhere": 4000}
    similarities = query_similarity(model, prompt, 6, 3, text=[5, 6], drawn=drawn)
    assert list(similarities) == list(product(("same", "other", "text"), (*POSITIONS, *drawn)))
    without_text = query_similarity(model, prompt, 6, 3, drawn=drawn)
    for position in drawn:
        assert torch.equal(without_text["same", position][0], similarities["same", position][0])
    assert not torch.allclose(similarities["same", "first 9"][0], similarities["same", "1"][0])


def test_sliding_windows_are_refused() -> None:
    with refused("model", "model"):
        query_similarity(family_model("Gemma 3 (text)"), prompt_ids(40)[0][0].tolist(), 4)


@pytest.mark.parametrize("groups", [1, 2])
def test_all_heads_of_a_layer_may_read_the_same(model, answered, groups):
    """The entries with the largest mean of the heads' weights, in each group of layers."""
    head = _head(model, groups)
    by_head = next(entries_read(model, SpeContext(BUDGET, head), answered))
    by_layer = next(entries_read(model, SpeContext(BUDGET, head, heads="same"), answered))
    kv_heads = by_head[0].shape[0]
    for mask in by_layer:
        assert (mask == mask[0]).all()
        assert mask.sum() == BUDGET * kv_heads
    assert _distinct(by_layer) == groups
    assert len(by_head) == len(by_layer)
    assert not torch.equal(torch.stack(by_head), torch.stack(by_layer))


def test_a_method_that_evicts_has_what_it_keeps_and_the_answer(model):
    method = SnapKV(BUDGET, window=4)
    answered = answering(model, prompt_ids(40)[0], 6, [0], (), method.needs())
    masks_of_steps = list(entries_kept(model, method, answered))
    _, kept = method.evict(model, prefill(model, answered.before.tokens, needs=method.needs()))
    assert len(masks_of_steps) == answered.answer.shape[1]
    for step, masks in enumerate(masks_of_steps):
        for mask, kept_of_layer in zip(masks, kept, strict=True):
            assert mask.shape[1] == 40 + step
            assert torch.equal(mask[:, :40], kept_of_layer[0])
            assert mask[:, 40:].all()
