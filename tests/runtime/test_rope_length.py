"""RoPE whose frequencies depend on the length of the text: as transformers, or refused with the limit."""

import itertools
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from keepsight import Conversation, DapQ, KVzip, Oracle, SnapKV, generate, load_state, save_state
from keepsight.errors import UserError
from keepsight.models.lookahead import Lookahead
from keepsight.models.lookahead_settings import LookaheadSettings
from keepsight.runtime.drafting.observer import DraftObserver, greedy_draft
from keepsight.runtime.drafting.speculative import Speculative
from keepsight.runtime.generate import FullCache, Method
from keepsight.runtime.importance import Reduce
from keepsight.runtime.join import join, take_rows
from keepsight.runtime.rope_length import length_limit
from keepsight.runtime.state import prefill, read, read_one_by_one
from keepsight.serving.engine import Engine, Job
from keepsight.serving.export import rotations_of
from keepsight.train.dataset import Batch
from keepsight.train.importance import ImportanceObjective
from tests.close import assert_close
from tests.refused import refused
from tests.rope_models import KINDS, LIMIT, rope_model
from tests.runtime.retrieval.heads import Oracle as OracleHead
from tests.runtime.retrieval.heads import tiny_head
from tests.tiny import SmallVocabulary, prompt_ids, tiny_model

GREEDY: dict[str, Any] = {"max_new_tokens": 24, "do_sample": False, "eos_token_id": None}
SMALL = SnapKV(32, window=8)


def expected_answer(kind: str, ids: torch.Tensor, **options: Any) -> torch.Tensor:
    """The answers of transformers, from a model that has read nothing: dynamic frequencies outlast a pass there."""
    return rope_model(kind).generate(ids, **GREEDY, **options)[:, ids.shape[1] :]


@pytest.mark.parametrize(("kind", "length"), [*itertools.product(KINDS, (40, 60, 64, 65, 80))])
def test_the_full_cache_answers_as_transformers(kind, length):
    model, (ids, _) = rope_model(kind), prompt_ids(length)
    expected = expected_answer(kind, ids)
    for chunk in (None, 17):
        assert torch.equal(generate(model, ids, prefill_chunk_size=chunk, **GREEDY), expected)
    assert torch.equal(generate(model, ids, SnapKV(200, window=8), **GREEDY), expected)


def test_phi3_answers_as_without_a_cache():
    model, (ids, _) = rope_model("phi3"), prompt_ids(60)
    whole = ids
    for _ in range(24):
        whole = torch.cat([whole, model(whole, use_cache=False).logits[:, -1:].argmax(-1)], dim=1)
    assert torch.equal(generate(model, ids, **GREEDY), whole[:, 60:])


@pytest.mark.parametrize("kind", KINDS)
def test_a_batch_answers_as_transformers(kind):
    for lengths in ((30, 60), (50, 80), (20, 40)):
        ids, mask = prompt_ids(*lengths)
        expected = expected_answer(kind, ids, attention_mask=mask)
        for chunk in (None, 16):
            found = generate(rope_model(kind), ids, attention_mask=mask, prefill_chunk_size=chunk, **GREEDY)
            assert torch.equal(found, expected)


@pytest.mark.parametrize("kind", KINDS)
def test_the_length_is_that_of_the_whole_prompt_in_every_chunk(kind):
    model, (ids, _) = rope_model(kind), prompt_ids(80)
    state, chunked = prefill(model, ids), prefill(model, ids, chunk=16)
    assert_close(chunked.logits, state.logits)
    for layer, other in zip(state.entries(), chunked.entries(), strict=True):
        assert_close(other.keys, layer.keys)


@pytest.mark.parametrize(("kind", "method"), [*itertools.product(KINDS, (FullCache(), SMALL, DapQ(24)))], ids=str)
def test_requests_answer_in_a_batch_as_alone(kind, method):
    model = rope_model(kind)
    prompts = [prompt_ids(length, seed=length)[0] for length in (30, 100, 55, 64)]
    alone = [generate(model, ids, method, **GREEDY)[0].tolist() for ids in prompts]
    engine = Engine(model, method)
    jobs = [Job(ids[0], **GREEDY) for ids in prompts]
    for job in jobs:
        engine.submit(job)
    while engine.step():
        pass
    assert [job.tokens for job in jobs] == alone


class Once(SnapKV):
    """Cannot read everything again."""

    def restart(self, model, state, tokens):
        return Method.restart(self, model, state, tokens)


def test_a_request_that_cannot_be_read_again_fails_alone():
    model, method = rope_model("phi3"), Once(32, window=8)
    prompts = [prompt_ids(length, seed=length)[0] for length in (60, 100)]
    with pytest.raises(UserError, match=rf"more than {LIMIT} tokens .* which Once cannot"):
        generate(model, prompts[0], method, **GREEDY)
    engine = Engine(model, method)
    jobs = [Job(ids[0], **GREEDY) for ids in prompts]
    for job in jobs:
        engine.submit(job)
    while engine.step():
        pass
    assert [job.reason for job in jobs] == ["failed", "length"] and isinstance(jobs[0].error, UserError)
    assert jobs[1].tokens == generate(model, prompts[1], method, **GREEDY)[0].tolist()


@pytest.mark.parametrize(("kind", "length"), [*itertools.product(KINDS, (60, 64, 80))])
def test_observers_score_as_when_all_is_read_in_one_pass(kind, length):
    """The prompt is read again with the observing tokens' length, and the entries that are kept stay as they were."""
    model, (ids, _) = rope_model(kind), prompt_ids(length)
    state, observer = prefill(model, ids), DapQ(24).bound_observer
    assert isinstance(observer, DraftObserver)
    scores = observer(model, state, Reduce())
    draft = observer.drafter(model, state).ids
    fresh = rope_model(kind)
    fresh.set_attn_implementation("eager")
    attentions = fresh(torch.cat([ids, draft], dim=1), output_attentions=True, use_cache=False).attentions
    for found, weights in zip(scores, attentions, strict=True):
        by_head = weights[:, :, length:, :length].mean(dim=2)
        assert_close(found, by_head.unflatten(1, (found.shape[1], -1)).mean(dim=2))


def test_evicted_entries_have_the_frequencies_of_the_prompt():
    model, (ids, _) = rope_model("phi3"), prompt_ids(60)
    kept, whole = DapQ(24).start(model, ids), prefill(model, ids)
    for evicted, layer in zip(kept.entries(), whole.entries(), strict=True):
        rows = evicted.keys[0, 0][:, None] == layer.keys[0, 0]
        assert rows.all(dim=-1).sum() == evicted.keys.shape[2]


def test_phi3_reads_everything_again_at_the_limit_and_evicts_again():
    model, (ids, _) = rope_model("phi3"), prompt_ids(60)
    answer = generate(model, ids, SMALL, **GREEDY)
    whole = torch.cat([ids, answer[:, :5]], dim=1)
    assert whole.shape[1] == LIMIT + 1
    options: dict[str, Any] = GREEDY | {"max_new_tokens": 19}
    after = generate(model, whole, SMALL, **options)
    assert torch.equal(answer[:, 5:], after)


@pytest.mark.parametrize(("kind", "method"), [*itertools.product(KINDS, (FullCache(), SMALL))], ids=str)
def test_turns_beyond_the_limit(kind, method):
    """The second turn crosses it; Phi-3 reads both again, the others read it at the length of both."""
    model, first, turn = rope_model(kind), prompt_ids(40)[0], prompt_ids(50, seed=1)[0]
    for chunk in (None, 16):
        talk = Conversation(model, method)
        talk.say(first, **GREEDY | {"max_new_tokens": 4})
        whole = torch.cat([talk.ids, turn], dim=1)
        answer = talk.say(turn, prefill_chunk_size=chunk, **GREEDY)
        if kind == "phi3":
            assert torch.equal(answer, generate(model, whole, method, **GREEDY))
        elif isinstance(method, FullCache):
            fresh = rope_model(kind)
            past = fresh.generate(first, **GREEDY | {"max_new_tokens": 4}, return_dict_in_generate=True).past_key_values
            seen = torch.ones_like(whole)  # also of tokens with the id of padding
            expected = fresh.generate(whole, past_key_values=past, attention_mask=seen, **GREEDY)[:, whole.shape[1] :]
            assert torch.equal(answer, expected)


def test_saved_states_go_on_beyond_the_limit_or_are_refused(tmp_path):
    model, (ids, _), turn = rope_model("phi3"), prompt_ids(40), prompt_ids(50, seed=1)[0]
    saved = load_state(save_state(prefill(model, ids), tmp_path / "full", model=model), model)
    expected = generate(model, torch.cat([ids, turn], dim=1), **GREEDY)
    assert torch.equal(generate(model, turn, saved, **GREEDY), expected)
    evicted = load_state(save_state(SMALL.start(model, ids), tmp_path / "evicted", model=model), model)
    with refused("prompt", "range"):
        generate(model, turn, evicted, **GREEDY)
    talk = Conversation(model, SMALL, evicted.state)
    assert torch.equal(talk.say(turn, **GREEDY), generate(model, torch.cat([ids, turn], dim=1), SMALL, **GREEDY))


@pytest.mark.parametrize("kind", KINDS)
def test_an_answer_that_is_read_at_once_is_scored_as_it_was_generated(kind):
    model, (ids, _) = rope_model(kind), prompt_ids(60)
    state, logits = prefill(model, ids), []
    answer = generate(model, ids, **GREEDY)
    alone = state.copy()
    for token in answer.split(1, dim=1):
        alone, one = read(model, alone, token)
        logits.append(one)
    after, at_once = read_one_by_one(model, state.copy(), answer)
    assert_close(at_once, torch.cat(logits, dim=1))
    assert_close(after.logits, alone.logits)


@pytest.mark.parametrize("kind", KINDS)
def test_rows_of_a_batch_keep_their_lengths(kind):
    model, answer = rope_model(kind), prompt_ids(12, seed=3)[0]
    states = [prefill(model, prompt_ids(length)[0]) for length in (30, 58, 90)]
    both = join(states)
    expected = []
    for state in states:
        expected.append(read_one_by_one(model, state.copy(), answer)[1])
    after = both
    for token in answer.split(1, dim=1):
        after, logits = read(model, after, token.expand(3, -1))
    for row, logits_alone in enumerate(expected):
        assert_close(logits[row], logits_alone[0, -1:])
    again, _ = read(model, take_rows(after, [0, 2]), answer[:, :1].expand(2, -1))
    assert again.rope_lengths.tolist() == [43, 103]


@pytest.mark.parametrize("kind", KINDS)
def test_drafts_and_repeated_contexts_beyond_the_limit(kind):
    model, (ids, _) = rope_model(kind), prompt_ids(60)
    for method in (Oracle(24), KVzip(24, KVzip.observer_of(SmallVocabulary()))):
        assert method.start(model, ids).counts().max() <= 60
    expected = expected_answer(kind, ids)
    drafted = greedy_draft(model, prefill(model, ids), 24).ids
    assert drafted[0].tolist() == expected[0, : drafted.shape[1]].tolist()


@pytest.mark.parametrize("kind", KINDS)
def test_the_model_is_afterwards_as_it_was(kind):
    model, (ids, _) = rope_model(kind), prompt_ids(80)
    before = {name: value.clone() for name, value in model.named_buffers()}
    generate(model, ids, SMALL, **GREEDY)
    rotary = model.model.rotary_emb
    assert "forward" not in vars(rotary)
    for name, value in model.named_buffers():
        assert torch.equal(value, before[name])
    assert torch.equal(model.generate(ids, **GREEDY)[:, 80:], expected_answer(kind, ids))


def test_threads_do_not_disturb_each_other():
    model = rope_model("phi3")
    prompts = [prompt_ids(length, seed=length)[0] for length in (30, 60, 90, 64)]
    alone = [generate(model, ids, SMALL, **GREEDY) for ids in prompts]
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda ids: generate(model, ids, SMALL, **GREEDY), prompts * 3))
    assert all(torch.equal(one, other) for one, other in zip(found, alone * 3, strict=True))


def test_only_some_models_have_a_limit():
    assert length_limit(tiny_model().config) is None
    for kind in KINDS:
        limit = length_limit(rope_model(kind).config)
        assert limit is not None
        assert (limit.tokens, limit.rereads) == (LIMIT, kind == "phi3")


@pytest.mark.parametrize("kind", KINDS)
def test_speculative_decoding_gives_the_same_answer(kind):
    model, (ids, _) = rope_model(kind), prompt_ids(58)
    answer = generate(model, ids, **GREEDY)
    for head in (tiny_head(), OracleHead(answer[0], {9}, prompt=58)):
        assert torch.equal(generate(model, ids, Speculative(head, FullCache(), tokens=5), **GREEDY), answer)


@pytest.mark.parametrize("kind", KINDS)
def test_prefixes_of_other_engines_are_refused(kind):
    with refused("model", "model"):
        rotations_of(rope_model(kind))


@pytest.mark.parametrize("kind", KINDS)
def test_training_reads_both_passes_as_one_text(kind):
    """Both have the frequencies of prompt, answer and soft tokens, whatever else is in the batch."""
    model = rope_model(kind)
    module = Lookahead(model, LookaheadSettings(tokens=8, rank=0))
    objective = ImportanceObjective(module)
    alone = Batch(prompt_ids(50)[0], prompt_ids(10, seed=1)[0])
    target, predicted = objective.importances(alone)
    ids, mask = prompt_ids(90, 50)
    ids[1, 40:] = alone.prompt_ids[0]
    both = Batch(ids, alone.answer_ids.expand(2, -1), mask.bool())
    targets, predictions = objective.importances(both)
    for one, of_both in zip([*target, *predicted], [*targets, *predictions], strict=True):
        assert_close(of_both[1:, :, 40:], one)
    fresh = rope_model(kind)
    fresh.set_attn_implementation("eager")
    soft = module.tokens.detach()[None]
    text = torch.cat([fresh.get_input_embeddings()(alone.prompt_ids), soft], dim=1)
    padded = torch.cat([text, text[:, :10]], dim=1)  # as long as prompt, answer and soft tokens
    attentions = fresh(inputs_embeds=padded, output_attentions=True, use_cache=False).attentions
    for found, weights in zip(predicted, attentions, strict=True):
        assert_close(found, weights[:, :, 50:58, :50].mean(dim=2))
