"""Prefill, eviction and decoding on tiny random models, against full attention and against one another."""

from dataclasses import dataclass

import pytest
import torch
from transformers import LogitsProcessorList
from transformers.generation.streamers import BaseStreamer

from keepsight import generate
from keepsight.errors import UserError
from keepsight.runtime.attention import recording
from keepsight.runtime.drafting.observer import DraftObserver
from keepsight.runtime.evict import Evict, call
from keepsight.runtime.generate import FullCache, decode, stop_after
from keepsight.runtime.importance import Pool, Reduce
from keepsight.runtime.join import join
from keepsight.runtime.methods import Oracle, SnapKV, StreamingLLM, make_method
from keepsight.runtime.methods.drafts import OwnAnswer
from keepsight.runtime.methods.window import PromptWindow
from keepsight.runtime.observe import Observer
from keepsight.runtime.state import Needs, cache_bytes, entries, prefill
from tests.close import assert_close
from tests.runtime.recording import recorded
from tests.runtime.scoring import score_answer
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


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("method", SMALL, ids=lambda method: type(method).__name__)
def test_evicted_decoding_equals_masked_full_attention(family, method):
    """Same answer likelihoods as full attention in which the evicted entries are masked, head by head."""
    model = tiny_model(family)
    ids, _ = prompt_ids(40)
    answer = torch.randint(3, 128, (1, 6), generator=torch.Generator().manual_seed(1))
    prefilled = prefill(model, ids)
    selected = method.select(prefilled, method.importance(model, prefilled))
    nll, _ = score_answer(model, method.compress(model, prefilled), answer)
    logits = _masked_attention(model, torch.cat([ids, answer], 1), 40, selected)[:, 39:-1]
    expected = torch.nn.functional.cross_entropy(logits.transpose(1, 2), answer, reduction="none")
    assert_close(nll, expected)


def _masked_attention(model, ids, prompt_length, selected):
    """Full attention where rows after the prompt see only the selected prompt entries of their KV head."""
    from transformers import AttentionInterface
    from transformers.integrations.sdpa_attention import repeat_kv

    def masked(module, query, key, value, attention_mask, scaling=None, **_):
        group, length = module.num_key_value_groups, query.shape[2]
        visible = torch.ones(length, length).tril().bool().expand(1, key.shape[1], -1, -1).clone()
        visible[:, :, prompt_length:, :prompt_length] &= selected[module.layer_idx][:, :, None]
        visible = visible.repeat_interleave(group, dim=1)
        weights = (query @ repeat_kv(key, group).transpose(2, 3) * scaling).masked_fill(~visible, -torch.inf)
        return (weights.softmax(-1) @ repeat_kv(value, group)).transpose(1, 2).contiguous(), None

    AttentionInterface.register("test_masked", masked)
    before = model.config._attn_implementation
    model.set_attn_implementation("test_masked")
    with torch.no_grad():
        logits = model(ids, use_cache=False).logits
    model.set_attn_implementation(before)
    return logits


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("method", SMALL, ids=lambda method: type(method).__name__)
def test_padded_batches_equal_single_prompts(family, method):
    """Rows of 40, 26 and 9 tokens at budget 12: the last one is shorter than the budget and loses nothing."""
    model = tiny_model(family)
    ids, mask = prompt_ids(40, 26, 9)
    answer = torch.randint(3, 128, (3, 5), generator=torch.Generator().manual_seed(1))
    batch_nll, _ = score_answer(model, method.compress(model, prefill(model, ids, mask)), answer)
    batch_ids = generate(model, ids, method, attention_mask=mask, max_new_tokens=6, do_sample=False)
    for row, length in enumerate([40, 26, 9]):
        single = ids[row : row + 1, -length:]
        nll, _ = score_answer(model, method.compress(model, prefill(model, single)), answer[row : row + 1])
        assert_close(batch_nll[row : row + 1], nll)
        alone = generate(model, single, method, max_new_tokens=6, do_sample=False)[0]
        assert batch_ids[row, : len(alone)].tolist() == alone.tolist()


def test_the_shorter_prompt_loses_nothing():
    model, method = tiny_model(), SMALL[1]
    ids, _ = prompt_ids(9)
    full = generate(model, ids, max_new_tokens=6, do_sample=False)
    assert torch.equal(generate(model, ids, method, max_new_tokens=6, do_sample=False), full)
    assert method.compress(model, prefill(model, ids)).length == 9


@pytest.mark.parametrize("method", SMALL, ids=lambda method: type(method).__name__)
def test_budget_and_bytes_are_exact(method):
    model = tiny_model()
    kept = method.compress(model, prefill(model, prompt_ids(40)[0]))
    assert [keys.shape for keys, _, _ in entries(kept.cache)] == [(1, 2, 12, 8)] * 3
    assert cache_bytes(kept.cache) == 3 * 2 * 12 * 8 * 2 * 4


def test_positions_go_on_after_the_prompt():
    model = tiny_model()
    kept = StreamingLLM(12).compress(model, prefill(model, prompt_ids(40)[0]))
    assert (kept.cache.get_seq_length(), kept.length, kept.lengths.tolist()) == (40, 12, [40])
    after = decode(model, kept, stop_after(5, None), pad_token=0).state
    assert (after.cache.get_seq_length(), after.length, after.lengths.tolist()) == (44, 16, [44])
    assert after.tokens.shape == (1, 44)


def test_streamingllm_keeps_sinks_and_recent_entries():
    model = tiny_model()
    prefilled = prefill(model, *prompt_ids(40, 30))
    method = StreamingLLM(10)
    selected = method.select(prefilled, method.importance(model, prefilled))[0]
    assert selected[0, 0].nonzero()[:, 0].tolist() == [0, 1, 2, 3, *range(34, 40)]
    assert selected[1, 1].nonzero()[:, 0].tolist() == [10, 11, 12, 13, *range(34, 40)]


def test_snapkv_keeps_its_window_and_pools_the_rest():
    model = tiny_model()
    prefilled = prefill(model, prompt_ids(40)[0])
    method = SnapKV(8, window=4, pool=Pool(kernel=3))
    importance = method.importance(model, prefilled)[1][0]
    layer = prefilled.layers[1]
    raw = PromptWindow(4).score(layer, "mean")[0].view(2, 2, 40).mean(1)
    assert_close(PromptWindow(4)(model, prefilled, Reduce())[1][0], raw)
    for entry in range(36):
        expected = raw[:, max(entry - 1, 0) : min(entry + 2, 36)].amax(1)
        assert_close(importance[:, entry], expected)
    assert torch.isinf(importance[:, 36:]).all()


def test_a_method_is_stateless():
    model, method = tiny_model(), SMALL[2]
    first, second = prompt_ids(40, seed=1)[0], prompt_ids(33, seed=2)[0]
    before = generate(model, first, method, max_new_tokens=5, do_sample=False)
    generate(model, second, method, max_new_tokens=5, do_sample=False)
    assert torch.equal(generate(model, first, method, max_new_tokens=5, do_sample=False), before)


def test_observing_leaves_the_prompt_untouched():
    model = tiny_model()
    prefilled = prefill(model, prompt_ids(40)[0])
    before = [tensor.clone() for each in entries(prefilled.cache) for tensor in each[:2]]
    for method in SMALL:
        decode(model, method.compress(model, prefilled), stop_after(4, None), pad_token=0)
    after = [tensor for each in entries(prefilled.cache) for tensor in each[:2]]
    assert all(torch.equal(*pair) for pair in zip(before, after, strict=True))


def test_joined_variants_decode_as_they_do_alone():
    model = tiny_model()
    prefilled = prefill(model, prompt_ids(40)[0])
    states = [method.compress(model, prefilled) for method in [*SMALL, StreamingLLM(20), FullCache()]]
    alone = [decode(model, state.copy(), stop_after(6, None), pad_token=0).ids for state in states]
    assert torch.equal(decode(model, join(states), stop_after(6, None), pad_token=0).ids, torch.cat(alone))


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


def test_ratio_budget_rounds():
    model = tiny_model()
    prefilled = prefill(model, prompt_ids(41)[0])
    assert StreamingLLM(0.9).budget_for(prefilled.tokens.shape[1]) == 37
    assert SnapKV(0.5, window=4).budget_for(prefilled.tokens.shape[1]) == 20


@pytest.mark.parametrize("method", [StreamingLLM(0.1), SnapKV(0.1, window=4), SnapKV(0.5)], ids=repr)
def test_a_ratio_below_the_protected_entries_is_refused(method):
    """Raising it without a word would give methods different totals at the same budget."""
    model, ids = tiny_model(), prompt_ids(40)[0]
    with pytest.raises(UserError, match=r"leaves \d+ entries, which must be above the \d+ protected ones"):
        generate(model, ids, method, max_new_tokens=2)
    with pytest.raises(UserError, match="protected ones"):
        method.compress(model, prefill(model, ids))


def test_recording_keeps_the_outputs():
    model = tiny_model()
    ids, mask = prompt_ids(20, 13)
    with torch.no_grad():
        before = model(ids, attention_mask=mask).logits
        with recording(model):
            after = model(ids, attention_mask=mask).logits
    torch.testing.assert_close(before, after, atol=0, rtol=0)


@pytest.mark.parametrize(
    ("name", "budget", "options", "said"),
    [
        ("snapkvv", 64, {}, "did you mean 'snapkv'"),
        ("snapkv", 0, {}, "budget 0 is below 1"),
        ("snapkv", 32, {}, "must be above the 32 protected"),
        ("streamingllm", 4, {}, "must be above the 4 protected"),
        ("snapkv", 64, {"pool": {"kernel": 4}}, "kernel 4 must be odd"),
        ("snapkv", 64, {"windows": 8}, "no option 'windows'"),
        ("snapkv", 1.5, {}, "not a ratio"),
        ("snapkv", None, {}, "needs a budget"),
        ("lookaheadkv", 64, {}, "needs adapter="),
    ],
)
def test_bad_values_are_named(name, budget, options, said):
    with pytest.raises(UserError, match=said):
        make_method(name, budget, **options)


class _Noted(BaseStreamer):
    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.ended = False

    def put(self, value: torch.Tensor) -> None:
        self.tokens += value.flatten().tolist()

    def end(self) -> None:
        self.ended = True


def test_streamers_get_prompt_and_answer():
    model, ids, noted = tiny_model(), prompt_ids(40)[0], _Noted()
    answer = generate(model, ids, SMALL[1], max_new_tokens=6, do_sample=False, streamer=noted)
    assert noted.tokens == ids[0].tolist() + answer[0].tolist()
    assert noted.ended


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
        (_Ones((1, 2, 41)), r"scores of shape \[1, 2, 41\] for a layer"),
        (_Ones((1, 3, 40)), r"scores of shape \[1, 3, 40\] for a layer"),
        (_Ones((1, 0, 40)), r"scores of shape \[1, 0, 40\] for a layer"),
        (_Ones((2, 2, 40)), r"scores of shape \[2, 2, 40\] for a layer"),
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
