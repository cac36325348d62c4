"""Conversations against full attention over the whole history, and against a model that hides what was evicted."""

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LogitsProcessorList

from keepsight.runtime.allocate import Adaptive
from keepsight.runtime.conversation import Conversation as AnyConversation
from keepsight.runtime.generate import FullCache, Method
from keepsight.runtime.importance import NO_POOL, Pool
from keepsight.runtime.methods import DapQ, Kivi, SnapKV, SpeCache, SpeContext, StreamingLLM
from keepsight.runtime.methods.window import PromptWindow
from keepsight.runtime.retrieval.specontext import retrieval_cache
from keepsight.runtime.state import State, read
from tests.close import assert_close
from tests.models.retrieval_heads import tiny_retrieval_head
from tests.refused import refused
from tests.runtime.retrieval.test_reader import FEATURES, NAMES, method_of
from tests.runtime.slow import Slow
from tests.tiny import FAMILIES, prompt_ids, tiny_model

Conversation: Any = AnyConversation  # its state is None before the first turn, and never here
GREEDY = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": None}
TURNS = [prompt_ids(20, seed=1)[0], prompt_ids(7, seed=2)[0], prompt_ids(1, seed=3)[0]]
SMALL = [
    StreamingLLM(9, sinks=2),
    SnapKV(10, window=3, pool=Pool(kernel=3)),
    SnapKV(10, window=3, pool=Pool(kernel=3), allocate=Adaptive()),
    SnapKV(10, PromptWindow(6), window=0, pool=NO_POOL),
    SnapKV(12, window=3, pool=Pool(kernel=3), every=2),
]


def full_history(model, turns, **options):
    """Answers of transformers' own generate, each over everything said before."""
    history = torch.empty(1, 0, dtype=torch.long)
    answers = []
    for turn in turns:
        prompt = torch.cat([history, turn], dim=1)
        history = model.generate(prompt, attention_mask=torch.ones_like(prompt), **options)
        answers.append(history[:, prompt.shape[1] :])
    return answers, history


@pytest.mark.parametrize(
    ("method", "family"),
    [(FullCache(), "qwen3"), (StreamingLLM(64), "llama"), (SnapKV(1.0, window=3), "qwen3")],
)
def test_a_cache_that_holds_all_answers_like_the_whole_history(method, family):
    model = tiny_model(family)
    expected, history = full_history(model, TURNS, **GREEDY)
    conversation = Conversation(model, method)
    for turn, answer in zip(TURNS, expected, strict=True):
        assert torch.equal(conversation.say(turn, **GREEDY), answer)
    assert torch.equal(conversation.ids, history)
    assert torch.equal(conversation.state.tokens, history[:, :-1])
    assert conversation.state.counts().unique().tolist() == [history.shape[1] - 1]


def test_an_answer_that_ends_keeps_its_end_token():
    """The answer's last token has not been read when the next turn comes, whether it is an end token or not."""
    model = tiny_model()
    endless_answers, _ = full_history(model, TURNS, **GREEDY)
    end_token = int(endless_answers[0][0, 2])
    options = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": end_token}
    expected, history = full_history(model, TURNS, **options)
    conversation = Conversation(model, FullCache())
    answers = [conversation.say(turn, **options) for turn in TURNS]
    assert answers[0].shape[1] <= 3
    for answer, expected_answer in zip(answers, expected, strict=True):
        assert answer.tolist() == expected_answer.tolist()
    assert torch.equal(conversation.ids, history)


@pytest.mark.parametrize(("method", "family"), [*zip(SMALL, [*FAMILIES, *FAMILIES, "llama"], strict=True)])
def test_an_evicted_conversation_equals_a_model_that_hides_what_was_evicted(method, family):
    model = tiny_model(family)
    slow = Slow(model, method)
    conversation = Conversation(model, method)
    unread = torch.empty(1, 0, dtype=torch.long)
    for turn in TURNS:
        slow.read(torch.cat([unread, turn], dim=1))
        slow.evict()
        expected = slow.answer(GREEDY["max_new_tokens"], method.every)
        assert conversation.say(turn, **GREEDY).tolist() == expected.tolist()
        assert_close(conversation.state.logits, slow.logits())
        assert torch.equal(conversation.state.tokens, slow.ids)
        mean_count = conversation.state.counts().double().mean().item()
        if method.every:
            assert mean_count == 12 - 1
        else:
            assert mean_count == method.budget + 5, "the answer's entries come on top of the budget"
        unread = expected[:, -1:]


def test_a_ratio_counts_the_whole_conversation():
    """Not what was kept of it: otherwise each turn would shrink the cache by the ratio again."""
    conversation = Conversation(tiny_model(), StreamingLLM(0.5))
    for turn in TURNS:
        conversation.say(turn, **GREEDY)
    before_answer = conversation.ids.shape[1] - 6
    assert conversation.state.length == round(0.5 * before_answer) + 5


def test_sampling_penalties_and_streamers_are_those_of_transformers():
    class Streamer:
        def __init__(self):
            self.received = []

        def put(self, ids):
            self.received.extend(ids.flatten().tolist())

        def end(self):
            self.received.append("end")

    model = tiny_model()
    streamer = Streamer()
    sampled = {"max_new_tokens": 6, "do_sample": True, "temperature": 1.5, "eos_token_id": None}
    torch.manual_seed(5)
    expected, history = full_history(model, TURNS[:2], repetition_penalty=1.3, **sampled)
    torch.manual_seed(5)
    conversation = Conversation(model, FullCache())
    conversation.say(TURNS[0], repetition_penalty=1.3, **sampled)
    answer = conversation.say(TURNS[1], repetition_penalty=1.3, streamer=streamer, **sampled)
    assert torch.equal(answer, expected[1])
    assert streamer.received == [*history[0].tolist(), "end"]


def test_an_exception_leaves_the_conversation_as_it_was():
    model = tiny_model()
    conversation = Conversation(model, SMALL[1])
    undisturbed = Conversation(model, SMALL[1])
    conversation.say(TURNS[0], **GREEDY)
    undisturbed.say(TURNS[0], **GREEDY)
    calls = itertools.count(1)

    def fail(_, scores):
        if next(calls) == 3:
            raise RuntimeError("power cut")
        return scores

    with pytest.raises(RuntimeError, match="power cut"):
        conversation.say(TURNS[1], logits_processor=LogitsProcessorList([fail]), **GREEDY)
    assert torch.equal(conversation.ids, undisturbed.ids)
    assert torch.equal(conversation.say(TURNS[1], **GREEDY), undisturbed.say(TURNS[1], **GREEDY))


@pytest.mark.parametrize(
    ("ids", "options", "field", "code"),
    [
        (torch.zeros(2, 3, dtype=torch.long), {}, "ids", "type"),
        (torch.zeros(1, 0, dtype=torch.long), {}, "ids", "range"),
        ({"input_ids": TURNS[0], "attention_mask": torch.arange(20)[None] > 2}, {}, "attention_mask", "data"),
        (TURNS[0], {"num_return_sequences": 2, "do_sample": True}, "ids", "type"),
    ],
)
def test_bad_turns_are_named(ids, options, field, code):
    with refused(field, code):
        Conversation(tiny_model(), FullCache()).say(ids, **(GREEDY | options))


METHODS: dict[str, Any] = {name: method_of(name, 12) for name in NAMES} | {
    "specontext on the CPU": method_of("specontext", 12, offload=2),
    "specache": SpeCache(1, 8, 16, 6),
    "specache without a guess": SpeCache(1, 8, 16, 6, speculative=False),
    "specache without slots": SpeCache(1, 8, 16, 0),
}


def record_pass_lengths(model: Any) -> list[int]:
    """A list that gets the number of tokens of each forward pass from here on."""
    lengths: list[int] = []

    def record(module: Any, args: Any, options: dict[str, Any]) -> None:
        lengths.append(options["input_ids"].shape[1])

    model.base_model.register_forward_pre_hook(record, with_kwargs=True)
    return lengths


@pytest.mark.parametrize(
    ("method", "chunk"),
    [*((method, 128) for method in METHODS.values()), (METHODS["quest"], None), (Kivi(2, 8, 16), None)],
)
def test_a_turn_of_300_tokens_is_few_passes(method: Method, chunk: int | None) -> None:
    model = tiny_model(max_position_embeddings=512)
    options: dict[str, Any] = {"max_new_tokens": 3, "do_sample": False, "eos_token_id": None}
    conversation = Conversation(model, method)
    conversation.say(prompt_ids(40)[0], **options)
    lengths = record_pass_lengths(model)
    conversation.say(prompt_ids(300, seed=2)[0], **options, prefill_chunk_size=chunk)
    expected = [301] if chunk is None else [128, 128, 45]
    turn_lengths = lengths[: len(expected)]
    answer_lengths = lengths[len(expected) :]
    assert turn_lengths == expected
    assert max(answer_lengths) <= 2
    assert len(answer_lengths) <= 3  # the guess of SpeCache takes one more


SPLITTABLE = [name for name in METHODS if "clusterkv" not in name]  # it clusters turns apart


@pytest.mark.parametrize("name", SPLITTABLE)
def test_a_prompt_in_two_turns_is_the_same_prompt(name: str, chunk: int = 12) -> None:
    method: Method = METHODS[name]
    model = tiny_model()
    ids, _ = prompt_ids(75)
    answer, _ = prompt_ids(12, seed=1)

    def answer_logits(state: State) -> Tensor:
        return read(method.reader(model), state, answer)[1]

    state = method.start(model, ids[:, :50])
    first_turn = state.copy()
    for part in ids[:, 50:].split(chunk, dim=1):
        state, _ = read(method.turn_reader(model), state, part, logits_to_keep=1)
    unsplit = method.start(model, ids)
    assert_close(state.logits, unsplit.logits)
    expected = answer_logits(unsplit)
    assert_close(answer_logits(state), expected)
    assert state.length == unsplit.length
    assert state.kv_bytes == unsplit.kv_bytes
    expected = answer_logits(method.start(model, ids[:, :50]))
    assert_close(answer_logits(first_turn), expected)


def selector_of(state: State) -> Any:
    return retrieval_cache(state.cache).selector


@pytest.mark.parametrize(("turn", "features"), [*zip([1, 100], FEATURES, strict=True)], ids=["answer", "turn"])
def test_a_head_is_extended_while_the_answer_grows(turn: int, features: str) -> None:
    """Made for 64 positions, it becomes the head that the unsplit text would have had, and so do its keys."""
    model = tiny_model()
    ids, mask = prompt_ids(50, 33)
    later_ids, _ = prompt_ids(200, 200, seed=1)
    method = SpeContext(1000, tiny_retrieval_head(features, max_position_embeddings=64))
    reader = method.reader(model) if turn == 1 else method.turn_reader(model)
    state = method.start(model, ids, mask)
    early = state.copy()
    factors = set[float]()
    for part in later_ids.split(turn, dim=1):
        state, _ = read(reader, state, part)
        factors.add(selector_of(state).head.config.rope_parameters.get("factor", 1.0))
    assert sorted(factors) == ([1.0, 2.0, 4.0] if turn == 1 else [4.0])
    all_ids = torch.cat([ids, later_ids], dim=1)
    all_mask = torch.nn.functional.pad(mask, (0, 200), value=1)
    unsplit = method.start(model, all_ids, all_mask)
    selector = selector_of(state)
    expected = selector_of(unsplit)
    assert selector.head.config == expected.head.config
    real = torch.arange(250) >= torch.tensor([0, 17])[:, None]
    assert_close(selector.keys.transpose(1, 2)[real], expected.keys.transpose(1, 2)[real])
    assert selector_of(early).head.config.max_position_embeddings == 64


def test_what_a_method_cannot_read_is_refused_as_generate_does() -> None:
    with refused("prompt", "range"):
        AnyConversation(tiny_model(), DapQ(16)).say(prompt_ids(250)[0], max_new_tokens=2)
