"""Prefill, eviction and decoding on tiny random models, against full attention and against one another."""

import re
from dataclasses import dataclass, replace

import pytest
import torch

from keepsight import generate
from keepsight.runtime.conversation import Conversation
from keepsight.runtime.drafting.observer import DraftObserver
from keepsight.runtime.drafting.speckv import ModelDrafter
from keepsight.runtime.evict import Evict
from keepsight.runtime.generate import decode, stop_after
from keepsight.runtime.methods import H2O, LAQ, Oracle, SnapKV, StreamingLLM
from keepsight.runtime.methods.drafts import OwnAnswer
from keepsight.runtime.methods.laq import QueryCache
from keepsight.runtime.methods.positions import LaCache, Ladder
from keepsight.runtime.methods.window import PromptWindow
from keepsight.runtime.observe import Observer
from keepsight.runtime.quantized.kivi import Kivi
from keepsight.runtime.quantized.specache import SpeCache
from keepsight.runtime.saved import save_state
from keepsight.runtime.state import Needs, full_layers, prefill
from tests.close import assert_close
from tests.refused import refused
from tests.runtime.prompt_compression.prompts import small_cascade, small_specpc, tiny_draft
from tests.runtime.scoring import recorded
from tests.runtime.test_ragged import random_cache
from tests.tiny import FAMILIES, prompt_ids, tiny_model

SMALL_SNAPKV = SnapKV(12, window=4)
SMALL = [StreamingLLM(12), SMALL_SNAPKV, Oracle(12, DraftObserver(OwnAnswer(8)))]


@pytest.mark.parametrize(("family", "chunk"), [("qwen3", 1), ("llama", 7), ("qwen3", 64)])
def test_chunked_prefill_equals_one_pass(family, chunk):
    model = tiny_model(family)
    ids, mask = prompt_ids(40, 23)
    needs = Needs(8, accumulated=True)
    one_pass = prefill(model, ids, mask, needs=needs)
    chunked = prefill(model, ids, mask, chunk=chunk, needs=needs)
    assert_close(one_pass.logits, chunked.logits)
    for name in ("queries", "accumulated"):
        assert_close(recorded(one_pass, name), recorded(chunked, name))
    real = mask.bool()[:, None, :, None]
    for expected, layer in zip(one_pass.entries(), chunked.entries(), strict=True):
        assert_close(expected.keys * real, layer.keys * real)
        assert_close(expected.values * real, layer.values * real)


@pytest.mark.parametrize("family", FAMILIES)
def test_full_cache_decodes_as_transformers_does(family):
    model = tiny_model(family)
    ids, mask = prompt_ids(30, 11)
    expected = model.generate(ids, attention_mask=mask, max_new_tokens=9, do_sample=False)
    answer = generate(model, ids, attention_mask=mask, max_new_tokens=9, do_sample=False)
    assert torch.equal(answer, expected[:, 30:])


def test_observing_leaves_the_prompt_untouched():
    model = tiny_model()
    prefilled = prefill(model, prompt_ids(40)[0])
    before = [(layer.keys.clone(), layer.values.clone()) for layer in prefilled.entries()]
    for method in (*SMALL, SnapKV(99, window=4)):  # the last one keeps all
        decode(model, method.compress_state(model, prefilled), stop_after(4, None), pad_token=0)
    for (keys, values), layer in zip(before, prefilled.entries(), strict=True):
        assert torch.equal(layer.keys, keys)
        assert torch.equal(layer.values, values)


@dataclass(frozen=True)
class _Ones(Observer):
    """Scores of any shape, for any number of layers."""

    shape: tuple[int, ...]
    layers: int = 3

    def __call__(self, model, state, reduce):
        return [torch.ones(self.shape)] * self.layers


@pytest.mark.parametrize(
    ("observer", "message"),
    [
        (_Ones((1, 2, 5)), r"scores of shape \[1, 2, 5\] for a layer; expected \[1, 2, 40\] by KV head, or a"),
        (_Ones((1, 3, 40)), r"scores of shape \[1, 3, 40\] for a layer"),
        (_Ones((2, 40)), r"scores of shape \[2, 40\] for a layer"),
        (_Ones((1, 2, 40), layers=2), "scores for 2 layers; there are 3"),
    ],
)
def test_scores_of_other_shapes_than_the_cache_are_refused(observer, message):
    """By `compress`, and where a sweep shares the scores: fewer scores would keep fewer entries without a word."""
    model = tiny_model()
    method = Evict(12, observer)
    state = prefill(model, prompt_ids(40)[0])
    with refused("scores", "data") as error:
        method.compress_state(model, state)
    assert re.search(message, str(error.value))
    with refused("scores", "data") as error:
        method.importance(model, state, observer(model, state, method.reduce))
    assert re.search(message, str(error.value))


@pytest.mark.parametrize("heads", [2, 4])
def test_scores_are_by_kv_head_or_by_query_head(heads):
    model = tiny_model()
    evicted = Evict(12, _Ones((1, heads, 40))).compress_state(model, prefill(model, prompt_ids(40)[0]))
    assert evicted.counts().unique().tolist() == [12]


def test_an_observer_without_queries_says_so():
    model = tiny_model()
    with refused("window", "state"):
        SMALL_SNAPKV.compress_state(model, prefill(model, prompt_ids(40)[0], needs=Needs()))


PACKED = [Kivi(2, 8, 8), SpeCache(2, 8, 8, topk=4), SpeCache(2, 8, 8, topk=4, speculative=False)]


def test_h2o_refuses_a_state_that_another_method_has_read():
    model = tiny_model()
    ids = prompt_ids(60)[0]
    conversation = Conversation(model, H2O(40), SnapKV(40).start(model, ids))
    with refused("needs", "state"):
        conversation.say(ids[:, :20], max_new_tokens=3)


@pytest.mark.parametrize("method", [small_specpc(lookahead=5), small_cascade()], ids=["specpc", "speckvpc"])
def test_a_draft_that_does_not_fit_the_context_is_refused(method):
    method.check(95, 100)
    with refused("lookahead", "range"):
        method.check(96, 100)


def test_a_draft_model_of_a_short_context_is_refused():
    model = tiny_model()
    draft = tiny_draft(max_position_embeddings=64)
    drafter = ModelDrafter(draft, 5)
    specpc = small_specpc(draft=draft, lookahead=5)
    for read_by_draft in (
        lambda ids: drafter.write(model, ids),
        lambda ids: specpc.draft_scores(model, ids[0]),
    ):
        read_by_draft(prompt_ids(59)[0])
        with refused("lookahead", "range"):
            read_by_draft(prompt_ids(60)[0])


@pytest.mark.parametrize("method", PACKED, ids=repr)
def test_a_packed_state_is_neither_saved_nor_continued_from(method, tmp_path):
    model = tiny_model()
    state = method.start(model, prompt_ids(40)[0])
    with refused("state", "state"):
        save_state(state, tmp_path, model=model)
    assert not list(tmp_path.iterdir())
    with refused("state", "state"):
        Conversation(model, method, state)


def test_a_replaced_field_reaches_what_the_observer_leaves_open():
    assert replace(LAQ(64), budget=100) == LAQ(100)
    assert replace(LAQ(64), budget=100).bound_observer == QueryCache(budget=100)
    assert replace(LaCache(64), sinks=2).bound_observer == Ladder(sinks=2)
    assert replace(SnapKV(64), window=8).bound_observer == PromptWindow(8)


def test_ragged_layers_are_cropped_to_their_last_eviction_at_most():
    cache, _ = random_cache([[3, 1]])
    new = torch.ones(1, 2, 2, 4)
    for index in range(2):
        cache.update(new, new, index)
    with refused("crop", "state"):
        cache.crop(-3)
    assert cache.get_seq_length() == 52
    cache.crop(-2)
    assert cache.get_seq_length() == 50
    layers = full_layers(cache)
    assert len(layers) == 2
    for layer in layers:
        real = layer.entries().real
        assert real is not None
        assert real.sum(dim=-1).tolist() == [[3, 1]]
