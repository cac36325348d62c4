"""Prefill, eviction and decoding on tiny random models, against full attention and against one another."""

from dataclasses import dataclass

import pytest
import torch
from transformers import LogitsProcessorList

from keepsight import generate
from keepsight.errors import UserError
from keepsight.runtime.drafting.observer import DraftObserver
from keepsight.runtime.evict import Evict, call
from keepsight.runtime.generate import decode, stop_after
from keepsight.runtime.methods import Oracle, SnapKV, StreamingLLM
from keepsight.runtime.methods.drafts import OwnAnswer
from keepsight.runtime.observe import Observer
from keepsight.runtime.state import Needs, entries, prefill
from tests.close import assert_close
from tests.runtime.recording import recorded
from tests.tiny import FAMILIES, prompt_ids, tiny_model

SMALL = [StreamingLLM(12), SnapKV(12, window=4), Oracle(12, DraftObserver(OwnAnswer(8)))]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("chunk", [1, 7, 64])
def test_chunked_prefill_equals_whole(family, chunk):
    model = tiny_model(family)
    ids, mask = prompt_ids(40, 23)
    whole, chunked = (prefill(model, ids, mask, chunk=each, needs=Needs(8, accumulated=True)) for each in (None, chunk))
    assert_close(whole.logits, chunked.logits)
    for pair in zip(recorded(whole, "queries"), recorded(chunked, "queries"), strict=True):
        assert_close(*pair)
    for pair in zip(recorded(whole, "accumulated"), recorded(chunked, "accumulated"), strict=True):
        assert_close(*pair)
    real = mask.bool()[:, None, :, None]
    for (keys, values, _), (keys2, values2, _) in zip(entries(whole.cache), entries(chunked.cache), strict=True):
        assert_close(keys * real, keys2 * real)
        assert_close(values * real, values2 * real)


@pytest.mark.parametrize("family", FAMILIES)
def test_full_cache_decodes_as_transformers_does(family):
    model = tiny_model(family)
    ids, mask = prompt_ids(30, 11)
    expected = model.generate(ids, attention_mask=mask, max_new_tokens=9, do_sample=False)
    assert torch.equal(generate(model, ids, attention_mask=mask, max_new_tokens=9, do_sample=False), expected[:, 30:])


def test_positions_go_on_after_the_prompt():
    model = tiny_model()
    kept = StreamingLLM(12).compress(model, prefill(model, prompt_ids(40)[0]))
    assert (kept.cache.get_seq_length(), kept.length, kept.lengths.tolist()) == (40, 12, [40])
    after = decode(model, kept, stop_after(5, None), pad_token=0).state
    assert (after.cache.get_seq_length(), after.length, after.lengths.tolist()) == (44, 16, [44])
    assert after.tokens.shape == (1, 44)


def test_observing_leaves_the_prompt_untouched():
    model = tiny_model()
    prefilled = prefill(model, prompt_ids(40)[0])
    before = [tensor.clone() for each in entries(prefilled.cache) for tensor in each[:2]]
    for method in SMALL:
        decode(model, method.compress(model, prefilled), stop_after(4, None), pad_token=0)
    after = [tensor for each in entries(prefilled.cache) for tensor in each[:2]]
    assert all(torch.equal(*pair) for pair in zip(before, after, strict=True))


def test_custom_generate_samples_and_processes_logits():
    model, ids = tiny_model(), prompt_ids(40)[0]
    torch.manual_seed(3)
    sampled = model.generate(ids, custom_generate=SMALL[1], max_new_tokens=20, do_sample=True, temperature=2.0)
    greedy = model.generate(ids, custom_generate=SMALL[1], max_new_tokens=20, do_sample=False)
    assert torch.equal(greedy[:, :40], ids)
    assert not torch.equal(sampled, greedy)
    only = LogitsProcessorList([lambda _, scores: scores.masked_fill(torch.arange(128) != 77, -torch.inf)])
    forced = model.generate(ids, custom_generate=SMALL[1], max_new_tokens=4, do_sample=False, logits_processor=only)
    assert forced[0, 40:].tolist() == [77] * 4


@pytest.mark.parametrize("method", [StreamingLLM(0.1), SnapKV(0.5)], ids=repr)
def test_a_ratio_below_the_protected_entries_is_refused(method):
    """Raising it without a word would give methods different totals at the same budget."""
    model, ids = tiny_model(), prompt_ids(40)[0]
    with pytest.raises(UserError, match=r"leaves \d+ entries, which must be above the \d+ protected ones"):
        generate(model, ids, method, max_new_tokens=2)
    with pytest.raises(UserError, match="protected ones"):
        method.compress(model, prefill(model, ids))


@dataclass(frozen=True)
class _Ones(Observer):
    """Scores of any shape, for any number of layers."""

    shape: tuple[int, ...]
    layers: int = 3

    def __call__(self, model, state, reduce):
        return [torch.ones(self.shape)] * self.layers


@pytest.mark.parametrize(
    ("observer", "said"),
    [
        (_Ones((1, 2, 5)), r"scores of shape \[1, 2, 5\] for a layer; expected \[1, 2, 40\] by KV head, or a"),
        (_Ones((1, 3, 40)), r"scores of shape \[1, 3, 40\] for a layer"),
        (_Ones((2, 40)), r"scores of shape \[2, 40\] for a layer"),
        (_Ones((1, 2, 40), layers=2), "scores for 2 layers; there are 3"),
    ],
)
def test_scores_of_other_shapes_than_the_cache_are_refused(observer, said):
    """By `compress`, and where a sweep shares the scores: fewer scores would keep fewer entries without a word."""
    model, method = tiny_model(), Evict(12, observer)
    state = prefill(model, prompt_ids(40)[0])
    with pytest.raises(UserError, match=f"^_Ones returned {said}"):
        method.compress(model, state)
    with pytest.raises(UserError, match=f"^_Ones returned {said}"):
        method.importance(model, state, call)


@pytest.mark.parametrize("heads", [2, 4])
def test_scores_are_by_kv_head_or_by_query_head(heads):
    model = tiny_model()
    kept = Evict(12, _Ones((1, heads, 40))).compress(model, prefill(model, prompt_ids(40)[0]))
    assert kept.counts().unique().tolist() == [12]


def test_an_observer_without_queries_says_so():
    model = tiny_model()
    with pytest.raises(UserError, match="no query is left of the 4"):
        SMALL[1].compress(model, prefill(model, prompt_ids(40)[0], needs=Needs()))
