"""Draft heads: speculative decoding is plain decoding token for token; their drafts observe for SpecKV and SpecPC."""

from typing import Any
from unittest.mock import Mock

import pytest
import torch
from transformers.generation import (
    LogitsProcessorList,
    RepetitionPenaltyLogitsProcessor,
    StoppingCriteria,
    StoppingCriteriaList,
)

from keepsight import Kivi, PyramidKV, SnapKV, SpecKV, SpecPC, Truncation, generate
from keepsight.models.draft_sources import DraftHeadSource
from keepsight.runtime.drafting.observer import DraftIds, DraftObserver, FixedDraft
from keepsight.runtime.drafting.speckv import ModelDrafter, SparsePrefill
from keepsight.runtime.drafting.speculative import (
    Round,
    Speculative,
    acceptance_length,
    decode_speculatively,
)
from keepsight.runtime.generate import FullCache, decode, stop_after
from keepsight.runtime.methods import Resources, make_method
from keepsight.runtime.state import Needs, prefill
from tests.close import assert_close
from tests.families import WINDOW, family_model
from tests.refused import refused
from tests.runtime.retrieval.heads import LAYERS, Oracle, slow_chain, tiny_head
from tests.tiny import prompt_ids, tiny_model

METHODS = {"full": FullCache(), "snapkv": SnapKV(20, window=8), "pyramidkv": PyramidKV(20, window=8)}


def decode_both_ways(model, head, ids, method=None, *, tokens=5, length=28, end=None, mask=None, **options):
    """The answer of plain decoding and of speculative decoding from the same state."""
    method = method or FullCache()
    needs = method.needs() | Needs(features=LAYERS)
    state = method.compress_state(model, prefill(model, ids, mask, needs=needs))
    plain = decode(model, state.unrecorded(), stop_after(length, end), pad_token=0, **options)
    speculative = decode_speculatively(model, state.copy(), head, stop_after(length, end), tokens=tokens, **options)
    return plain, speculative


def answer_of(model, ids, method=None, length=28):
    """What plain decoding answers, [T], end tokens not heeded."""
    state = (method or FullCache()).start(model, ids)
    return decode(model, state.unrecorded(), stop_after(length, None), pad_token=0).ids[0]


def require_same(plain, speculative):
    """Two answers are the same, and so are the states after them."""
    assert torch.equal(speculative.ids, plain.ids)
    assert torch.equal(speculative.state.tokens, plain.state.tokens)
    assert torch.equal(speculative.state.lengths, plain.state.lengths)
    assert_close(speculative.state.logits, plain.state.logits)
    for layer, expected in zip(speculative.state.entries(), plain.state.entries(), strict=True):
        assert_close(layer.keys, expected.keys)
        if layer.real is None or expected.real is None:
            assert layer.real is expected.real
        else:
            assert torch.equal(layer.real, expected.real)
    emitted = sum(one_round.emitted for one_round in speculative.rounds)
    assert emitted == speculative.ids.shape[1] - 1


@pytest.mark.parametrize(
    ("name", "tokens", "wrong"),
    [
        ("full", 5, None),
        ("snapkv", 5, None),
        ("pyramidkv", 5, set()),
        ("full", 1, {2, 9, 10}),
        ("snapkv", 2, {*range(1, 28, 3)}),
        ("full", 7, {0, 12, 13}),
    ],
)
def test_answers_are_those_of_plain_decoding(name, tokens, wrong):
    """With a random head, and with one that knows the answer but for some positions."""
    model = tiny_model()
    ids = prompt_ids(50)[0]
    method = METHODS[name]
    head = tiny_head() if wrong is None else Oracle(answer_of(model, ids, method), wrong)
    plain, speculative = decode_both_ways(model, head, ids, method, tokens=tokens)
    require_same(plain, speculative)
    if wrong is None:
        assert acceptance_length(speculative.rounds) < 1.5
        return
    if not wrong:  # 27 tokens after the first: four rounds of 5 + 1, and 2 drafted and accepted before the last token
        assert speculative.rounds == (Round(5, 5, 6),) * 4 + (Round(2, 2, 3),)
        return
    position = 1
    for one_round in speculative.rounds:
        right = 0
        while right < one_round.judged and position + right not in wrong:
            right += 1
        assert (one_round.accepted, one_round.emitted) == (right, right + 1)
        position += one_round.emitted


@pytest.mark.parametrize("stop", [0, 3, 6])
def test_an_end_anywhere_in_an_accepted_draft(stop):
    model = tiny_model()
    ids = prompt_ids(50)[0]
    method = METHODS["snapkv"]
    answer = answer_of(model, ids, method)
    end = int(answer[stop])
    plain, speculative = decode_both_ways(model, Oracle(answer), ids, method, end=end)
    require_same(plain, speculative)
    assert speculative.ids.shape[1] == answer.tolist().index(end) + 1
    require_same(*decode_both_ways(model, Oracle(answer), ids, method, length=stop + 1))


class After(StoppingCriteria):
    """Ends an answer after so many tokens, and tells nobody before."""

    def __init__(self, tokens: int) -> None:
        self.tokens = tokens

    def __call__(self, input_ids, scores, **options):
        return torch.full((len(input_ids),), input_ids.shape[1] >= self.tokens)


@pytest.mark.parametrize(("length", "after"), [(13, 0), (17, 3)])
def test_no_draft_is_read_beyond_the_targets_context(length, after):
    """A context of 64 has room for 14 tokens; what plain decoding reads beyond it is read one by one."""
    model = tiny_model(max_position_embeddings=64)
    ids = prompt_ids(50)[0]
    criteria = StoppingCriteriaList([After(length)])
    needs = Needs(features=LAYERS)
    plain = decode(model, prefill(model, ids, needs=needs), criteria, pad_token=0)
    state = prefill(model, ids, needs=needs)
    oracle = Oracle(answer_of(model, ids, length=20))
    positions = []

    def record_positions(module, inputs, options):
        positions.append(options["position_ids"][0].tolist())

    model.model.rotary_emb.register_forward_pre_hook(record_positions, with_kwargs=True)
    speculative = decode_speculatively(model, state, oracle, criteria)
    require_same(plain, speculative)
    assert positions[:2] == [[50, 51, 52, 53, 54, 55], [56, 57, 58, 59, 60, 61]]
    assert positions[2:] == [[62, 63], [64], [65]][:after]


def test_from_a_state_in_the_middle_of_an_answer_and_with_a_padded_prompt():
    model = tiny_model()
    head = tiny_head()
    ids, mask = prompt_ids(50, 37)
    plain, padded = decode_both_ways(model, head, ids[1:], mask=mask[1:])
    require_same(plain, padded)
    _, unpadded = decode_both_ways(model, head, ids[1:, 13:])
    assert torch.equal(padded.ids, unpadded.ids)
    assert padded.rounds == unpadded.rounds

    state = prefill(model, ids[:1], needs=Needs(features=LAYERS))
    start = decode(model, state, stop_after(4, None), pad_token=0)
    continuation = decode_speculatively(model, start.state, head, stop_after(10, None))
    answer = torch.cat([start.ids[:, :-1], continuation.ids], dim=1)
    assert torch.equal(answer, answer_of(model, ids[:1], length=13)[None])


def test_logits_processors_and_streamers_see_what_they_see_in_plain_decoding():
    model = tiny_model()
    ids = prompt_ids(50)[0]
    penalty: Any = LogitsProcessorList([RepetitionPenaltyLogitsProcessor(4.0)])
    options: Any = {"logits_processor": penalty, "prompt_ids": ids, "length": 68}
    plain, speculative = decode_both_ways(model, tiny_head(), ids, **options)
    assert not torch.equal(plain.ids[:, 50:], answer_of(model, ids, length=18)[None])
    assert torch.equal(speculative.ids, plain.ids)

    streamer = Mock()
    answer = generate(model, ids, FullCache(), max_new_tokens=12, do_sample=False)
    generate(model, ids, Speculative(Oracle(answer[0])), max_new_tokens=12, do_sample=False, streamer=streamer)
    streamed = [int(call.args[0]) for call in streamer.put.call_args_list[1:]]
    assert streamed == answer[0].tolist()
    streamer.end.assert_called_once_with()


def test_generate_with_a_head_on_top_of_a_method():
    model = tiny_model(eos_token_id=None)
    ids = prompt_ids(50)[0]
    method = METHODS["pyramidkv"]
    options: Any = {"max_new_tokens": 20, "do_sample": False, "prefill_chunk_size": 16}
    plain = generate(model, ids, method, **options)
    for head in (tiny_head(), Oracle(plain[0], {3, 4, 17})):
        answer = generate(model, ids, Speculative(head, method, tokens=4), **options)
        assert torch.equal(answer, plain)


@pytest.mark.parametrize("family", ["Gemma 2", "Llama 4 (text)"])
@pytest.mark.parametrize("length", [WINDOW - 4, 50])
def test_windows_that_slide_forget_rejected_drafts(family, length):
    model = family_model(family)
    ids = prompt_ids(length)[0]
    options: Any = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": None}
    plain = generate(model, ids, **options)
    for head in (Oracle(plain[0], {3, 4, 9}, length), Oracle(plain[0], prompt=length)):
        answer = generate(model, ids, Speculative(head), **options)
        assert torch.equal(answer, plain)


def test_what_speculative_decoding_refuses():
    model = tiny_model()
    head = tiny_head()
    ids, mask = prompt_ids(50, 37)
    greedy: Any = {"max_new_tokens": 4, "do_sample": False}
    with refused("input_ids", "range"):
        generate(model, ids, Speculative(head), attention_mask=mask, **greedy)
    with refused("do_sample", "conflict"):
        generate(model, ids[:1], Speculative(head), max_new_tokens=4, do_sample=True)
    with refused("state", "state"):
        generate(model, ids[:1], Speculative(head, Kivi(2, 8, 8)), **greedy)
    with refused("every", "conflict"):
        Speculative(head, SnapKV(20, window=4, every=8))
    with refused("state", "state"):
        generate(family_model("Qwen3-Next"), ids[:1], Speculative(Oracle(ids[0])), **greedy)
    inner: Any = Truncation(20)
    with refused("method", "model"):
        Speculative(head, inner)

    state = prefill(model, ids[:1])
    with refused("features", "missing"):
        decode_speculatively(model, state, head, stop_after(4, None))


HEAD = DraftHeadSource("head", LAYERS, tiny_head())


def four_layer_model(**changes):
    """The head reads layers before the last: transformers shows those outputs, and the last one only normed."""
    return tiny_model(num_hidden_layers=4, **changes)


@pytest.mark.parametrize("rows", [7, 1024])
def test_the_draft_begins_with_the_models_token_and_goes_on_with_the_heads(rows, monkeypatch):
    """However many rows the head reads at once."""
    monkeypatch.setattr("keepsight.runtime.drafting.speculative._ROWS_AT_ONCE", rows)
    model = four_layer_model(eos_token_id=None)
    ids, mask = prompt_ids(40, 23)
    state = prefill(model, ids, mask, needs=ModelDrafter(HEAD).needs())
    draft = ModelDrafter(HEAD, 6)(model, state)
    assert draft.mask is None
    for row in range(2):
        model_token = state.logits[row].argmax()
        chain, _ = slow_chain(HEAD.head, model, ids[row : row + 1, mask[row] > 0], model_token, 5)
        assert draft.ids[row].tolist() == [int(model_token), *chain]

    (single_token,) = ModelDrafter(HEAD, 1)(model, state).ids.T
    assert torch.equal(single_token, state.logits.argmax(dim=-1))

    tokens = draft.ids[0].tolist()
    end = tokens[2]
    model.generation_config.eos_token_id = end
    draft_mask = ModelDrafter(HEAD, 6)(model, state).mask
    assert draft_mask is not None
    assert draft_mask[0].tolist() == [index <= tokens.index(end) for index in range(6)]


def test_speckv_keeps_what_the_heads_draft_observes():
    model = four_layer_model()
    ids, mask = prompt_ids(60, 60)
    method = SpecKV.with_draft(HEAD, 20, 5, window=8)
    entries = method.start(model, ids).entries()

    draft = ModelDrafter(HEAD, 5)(model, prefill(model, ids, needs=method.needs()))
    with_known_draft = SpecKV(20, DraftObserver(FixedDraft(draft), window=None), window=8)
    for layer, expected in zip(entries, with_known_draft.start(model, ids).entries(), strict=True):
        assert_close(layer.keys, expected.keys)  # the known draft is read in one pass with the prompt
    reversed_draft = DraftIds(draft.ids.flip(1))
    with_reversed_draft = SpecKV(20, DraftObserver(FixedDraft(reversed_draft), window=None), window=8)
    assert not torch.equal(entries[0].keys, with_reversed_draft.start(model, ids).entries()[0].keys)

    by_name = make_method("speckv", 20, Resources(draft=HEAD), window=8, observer={"drafter": {"lookahead": 5}})
    assert by_name == method
    options: Any = {"max_new_tokens": 5, "do_sample": False, "attention_mask": mask}
    assert torch.equal(generate(model, ids, by_name, **options), generate(model, ids, with_known_draft, **options))


def slow_scores(model, ids, window, drafted, reduction):
    """Scores [N] of a prompt from the head's attention, row by row: row t is for token t + 1."""
    length = ids.shape[1]
    read = len(drafted) - 1
    _, (queries, keys) = slow_chain(HEAD.head, model, ids, torch.tensor(drafted[0]), max(read, 1))
    rows = length - 1 + read
    scores = torch.zeros(length)
    for index, row in enumerate(range(rows - read - window, rows)):
        weight = index / (window - 1) if index < window else 1.0
        for head in range(4):
            logits = keys[head // 2, : row + 1] @ queries[head, row] / 8**0.5
            attention = logits.softmax(0)[: length - 1]
            row_scores = torch.zeros(length)
            row_scores[1 : len(attention) + 1] = weight * attention
            row_scores[0] = row_scores[1]
            scores = torch.maximum(scores, row_scores) if reduction == "max" else scores + row_scores
    return scores


@torch.no_grad()
@pytest.mark.parametrize(("reduction", "lookahead"), [("max", 1), ("sum", 5)])
def test_specpc_scores_are_the_heads_attention(reduction, lookahead):
    model = four_layer_model(eos_token_id=None)
    ids = prompt_ids(50)[0]
    method = SpecPC(20, 4, draft=HEAD, lookahead=lookahead, reduction=reduction, kernel=4)
    scores, generated = method.draft_scores(model, ids[0])
    state = prefill(model, ids, needs=Needs(features=LAYERS))
    assert generated.tolist() == ModelDrafter(HEAD, lookahead)(model, state).ids[0].tolist()
    assert_close(scores, slow_scores(model, ids, 4, generated.tolist(), reduction))
    if lookahead == 5:  # an end token cuts the draft, and with it what observes
        end = int(generated[2])
        model.generation_config.eos_token_id = end
        cut_draft = generated[: generated.tolist().index(end) + 1]
        scores, generated = method.draft_scores(model, ids[0])
        assert torch.equal(generated, cut_draft)
        assert_close(scores, slow_scores(model, ids, 4, cut_draft.tolist(), reduction))


def test_what_a_head_cannot_draft_is_refused():
    with refused("sparse", "model"):
        SpecKV.with_draft(HEAD, 20, 5, window=8, sparse=SparsePrefill(16, 64))
    with refused("draft", "model"):
        ModelDrafter(HEAD).write(tiny_model(), prompt_ids(20)[0])
    with refused("first_layer", "conflict"):
        SpecPC(20, 4, draft=HEAD, first_layer=0).draft_scores(tiny_model(), prompt_ids(50)[0][0])
    with refused("features", "missing"):
        ModelDrafter(HEAD)(tiny_model(), prefill(tiny_model(), prompt_ids(20)[0]))
