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
    model = rope_model(kind)
    ids, _ = prompt_ids(length)
    expected = expected_answer(kind, ids)
    for chunk in (None, 17):
        assert torch.equal(generate(model, ids, prefill_chunk_size=chunk, **GREEDY), expected)
    assert torch.equal(generate(model, ids, SnapKV(200, window=8), **GREEDY), expected)


def test_phi3_answers_as_without_a_cache():
    model = rope_model("phi3")
    ids, _ = prompt_ids(60)
    text = ids
    for _ in range(24):
        token = model(text, use_cache=False).logits[:, -1:].argmax(-1)
        text = torch.cat([text, token], dim=1)
    assert torch.equal(generate(model, ids, **GREEDY), text[:, 60:])


@pytest.mark.parametrize("kind", KINDS)
def test_a_batch_answers_as_transformers(kind):
    for lengths in ((30, 60), (50, 80), (20, 40)):
        ids, mask = prompt_ids(*lengths)
        expected = expected_answer(kind, ids, attention_mask=mask)
        for chunk in (None, 16):
            answers = generate(rope_model(kind), ids, attention_mask=mask, prefill_chunk_size=chunk, **GREEDY)
            assert torch.equal(answers, expected)


@pytest.mark.parametrize("kind", KINDS)
def test_the_length_is_that_of_the_whole_prompt_in_every_chunk(kind):
    model = rope_model(kind)
    ids, _ = prompt_ids(80)
    at_once = prefill(model, ids)
    chunked = prefill(model, ids, chunk=16)
    assert_close(chunked.logits, at_once.logits)
    for layer, expected in zip(chunked.entries(), at_once.entries(), strict=True):
        assert_close(layer.keys, expected.keys)


def answered_in_a_batch(model: Any, method: Method, prompts: list[torch.Tensor]) -> list[Job]:
    """The jobs of an engine that has answered all of these prompts [1, N]."""
    engine = Engine(model, method)
    jobs = [Job(ids[0], **GREEDY) for ids in prompts]
    for job in jobs:
        engine.submit(job)
    while engine.step():
        pass
    return jobs


@pytest.mark.parametrize(("kind", "method"), [*itertools.product(KINDS, (FullCache(), SMALL, DapQ(24)))], ids=str)
def test_requests_answer_in_a_batch_as_alone(kind, method):
    model = rope_model(kind)
    prompts = [prompt_ids(length, seed=length)[0] for length in (30, 100, 55, 64)]
    alone = [generate(model, ids, method, **GREEDY)[0].tolist() for ids in prompts]
    jobs = answered_in_a_batch(model, method, prompts)
    assert [job.tokens for job in jobs] == alone


class Once(SnapKV):
    """A method that cannot read everything again."""

    def restart(self, model, state, tokens):
        return Method.restart(self, model, state, tokens)


def test_a_request_that_cannot_be_read_again_fails_alone():
    model = rope_model("phi3")
    method = Once(32, window=8)
    crossing = prompt_ids(60, seed=60)[0]  # its answer crosses the limit
    beyond = prompt_ids(100, seed=100)[0]
    with pytest.raises(UserError, match=rf"more than {LIMIT} tokens .* which Once cannot"):
        generate(model, crossing, method, **GREEDY)
    failed, answered = answered_in_a_batch(model, method, [crossing, beyond])
    assert failed.reason == "failed"
    assert isinstance(failed.error, UserError)
    assert answered.reason == "length"
    assert answered.tokens == generate(model, beyond, method, **GREEDY)[0].tolist()


@pytest.mark.parametrize(("kind", "length"), [*itertools.product(KINDS, (60, 64, 80))])
def test_observers_score_as_when_all_is_read_in_one_pass(kind, length):
    """The prompt is read again with the observing tokens' length, and the entries that are kept stay as they were."""
    model = rope_model(kind)
    ids, _ = prompt_ids(length)
    state = prefill(model, ids)
    observer = DapQ(24).bound_observer
    assert isinstance(observer, DraftObserver)
    scores = observer(model, state, Reduce())
    draft = observer.drafter(model, state).ids
    fresh = rope_model(kind)
    fresh.set_attn_implementation("eager")
    attentions = fresh(torch.cat([ids, draft], dim=1), output_attentions=True, use_cache=False).attentions
    for layer, weights in zip(scores, attentions, strict=True):
        by_query_head = weights[:, :, length:, :length].mean(dim=2)
        by_kv_head = by_query_head.unflatten(1, (layer.shape[1], -1)).mean(dim=2)
        assert_close(layer, by_kv_head)


def test_evicted_entries_have_the_frequencies_of_the_prompt():
    model = rope_model("phi3")
    ids, _ = prompt_ids(60)
    evicted = DapQ(24).start(model, ids)
    full_cache = prefill(model, ids)
    for layer, full_layer in zip(evicted.entries(), full_cache.entries(), strict=True):
        equal_keys = (layer.keys[0, 0][:, None] == full_layer.keys[0, 0]).all(dim=-1)
        assert equal_keys.sum() == layer.keys.shape[2]


def test_phi3_reads_everything_again_at_the_limit_and_evicts_again():
    model = rope_model("phi3")
    ids, _ = prompt_ids(60)
    answer = generate(model, ids, SMALL, **GREEDY)
    beyond_limit = torch.cat([ids, answer[:, :5]], dim=1)
    assert beyond_limit.shape[1] == LIMIT + 1
    options: dict[str, Any] = GREEDY | {"max_new_tokens": 19}
    assert torch.equal(answer[:, 5:], generate(model, beyond_limit, SMALL, **options))


def answer_after_short_answer(kind: str, prompt: torch.Tensor, text: torch.Tensor) -> torch.Tensor:
    """What transformers answers to a text of which the prompt and 3 answered tokens have been read before."""
    model = rope_model(kind)
    short: dict[str, Any] = GREEDY | {"max_new_tokens": 4, "return_dict_in_generate": True}
    past = model.generate(prompt, **short).past_key_values
    mask = torch.ones_like(text)  # also of tokens with the id of padding
    return model.generate(text, past_key_values=past, attention_mask=mask, **GREEDY)[:, text.shape[1] :]


@pytest.mark.parametrize(("kind", "method"), [*itertools.product(KINDS, (FullCache(), SMALL))], ids=str)
def test_turns_beyond_the_limit(kind, method):
    """The second turn crosses it; Phi-3 reads both again, the others read it at the length of both."""
    model = rope_model(kind)
    prompt = prompt_ids(40)[0]
    turn = prompt_ids(50, seed=1)[0]
    for chunk in (None, 16):
        conversation = Conversation(model, method)
        conversation.say(prompt, **GREEDY | {"max_new_tokens": 4})
        text = torch.cat([conversation.ids, turn], dim=1)
        answer = conversation.say(turn, prefill_chunk_size=chunk, **GREEDY)
        if kind == "phi3":
            assert torch.equal(answer, generate(model, text, method, **GREEDY))
        elif isinstance(method, FullCache):
            assert torch.equal(answer, answer_after_short_answer(kind, prompt, text))


def test_saved_states_go_on_beyond_the_limit_or_are_refused(tmp_path):
    model = rope_model("phi3")
    ids, _ = prompt_ids(40)
    turn = prompt_ids(50, seed=1)[0]
    text = torch.cat([ids, turn], dim=1)
    full_cache = load_state(save_state(prefill(model, ids), tmp_path / "full", model=model), model)
    assert torch.equal(generate(model, turn, full_cache, **GREEDY), generate(model, text, **GREEDY))

    evicted = load_state(save_state(SMALL.start(model, ids), tmp_path / "evicted", model=model), model)
    with refused("prompt", "range"):
        generate(model, turn, evicted, **GREEDY)
    conversation = Conversation(model, SMALL, evicted.state)
    assert torch.equal(conversation.say(turn, **GREEDY), generate(model, text, SMALL, **GREEDY))


@pytest.mark.parametrize("kind", KINDS)
def test_an_answer_that_is_read_at_once_is_scored_as_it_was_generated(kind):
    model = rope_model(kind)
    ids, _ = prompt_ids(60)
    state = prefill(model, ids)
    answer = generate(model, ids, **GREEDY)
    by_token = state.copy()
    expected = []
    for token in answer.split(1, dim=1):
        by_token, logits = read(model, by_token, token)
        expected.append(logits)
    at_once, logits = read_one_by_one(model, state.copy(), answer)
    assert_close(logits, torch.cat(expected, dim=1))
    assert_close(at_once.logits, by_token.logits)


@pytest.mark.parametrize("kind", KINDS)
def test_rows_of_a_batch_keep_their_lengths(kind):
    model = rope_model(kind)
    answer = prompt_ids(12, seed=3)[0]
    states = [prefill(model, prompt_ids(length)[0]) for length in (30, 58, 90)]
    joined = join(states)
    logits_alone = [read_one_by_one(model, state.copy(), answer)[1] for state in states]
    for token in answer.split(1, dim=1):
        joined, logits = read(model, joined, token.expand(3, -1))
    for row, expected in enumerate(logits_alone):
        assert_close(logits[row], expected[0, -1:])
    two_rows, _ = read(model, take_rows(joined, [0, 2]), answer[:, :1].expand(2, -1))
    assert two_rows.rope_lengths.tolist() == [43, 103]


@pytest.mark.parametrize("kind", KINDS)
def test_drafts_and_repeated_contexts_beyond_the_limit(kind):
    model = rope_model(kind)
    ids, _ = prompt_ids(60)
    for method in (Oracle(24), KVzip(24, KVzip.observer_of(SmallVocabulary()))):
        assert method.start(model, ids).counts().max() <= 60
    expected = expected_answer(kind, ids)
    drafted = greedy_draft(model, prefill(model, ids), 24).ids
    assert drafted[0].tolist() == expected[0, : drafted.shape[1]].tolist()


@pytest.mark.parametrize("kind", KINDS)
def test_the_model_is_afterwards_as_it_was(kind):
    model = rope_model(kind)
    ids, _ = prompt_ids(80)
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
        answers = list(pool.map(lambda ids: generate(model, ids, SMALL, **GREEDY), prompts * 3))
    for answer, expected in zip(answers, alone * 3, strict=True):
        assert torch.equal(answer, expected)


def test_only_some_models_have_a_limit():
    assert length_limit(tiny_model().config) is None
    for kind in KINDS:
        limit = length_limit(rope_model(kind).config)
        assert limit is not None
        assert limit.tokens == LIMIT
        assert limit.rereads == (kind == "phi3")


@pytest.mark.parametrize("kind", KINDS)
def test_speculative_decoding_gives_the_same_answer(kind):
    model = rope_model(kind)
    ids, _ = prompt_ids(58)
    answer = generate(model, ids, **GREEDY)
    for head in (tiny_head(), OracleHead(answer[0], {9}, prompt=58)):
        speculative = generate(model, ids, Speculative(head, FullCache(), tokens=5), **GREEDY)
        assert torch.equal(speculative, answer)


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
    padded_batch = Batch(ids, alone.answer_ids.expand(2, -1), mask.bool())
    targets, predictions = objective.importances(padded_batch)
    for layer, expected in zip([*targets, *predictions], [*target, *predicted], strict=True):
        assert_close(layer[1:, :, 40:], expected)

    fresh = rope_model(kind)
    fresh.set_attn_implementation("eager")
    soft_tokens = module.tokens.detach()[None]
    embedded = torch.cat([fresh.get_input_embeddings()(alone.prompt_ids), soft_tokens], dim=1)
    padded = torch.cat([embedded, embedded[:, :10]], dim=1)  # as long as prompt, answer and soft tokens
    attentions = fresh(inputs_embeds=padded, output_attentions=True, use_cache=False).attentions
    for layer, weights in zip(predicted, attentions, strict=True):
        assert_close(layer, weights[:, :, 50:58, :50].mean(dim=2))
