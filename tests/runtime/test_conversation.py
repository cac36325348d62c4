"""Conversations against full attention over the whole history, and against a model that hides what was evicted."""

from typing import Any

import pytest
import torch
from transformers import LogitsProcessorList

from keepsight.runtime.allocate import Adaptive
from keepsight.runtime.conversation import Conversation as AnyConversation
from keepsight.runtime.generate import FullCache, Method
from keepsight.runtime.importance import NO_POOL, Pool
from keepsight.runtime.methods import DapQ, Kivi, SnapKV, SpeCache, SpeContext, StreamingLLM
from keepsight.runtime.methods.window import PromptWindow
from keepsight.runtime.retrieval.specontext import retrieval_cache
from keepsight.runtime.state import read
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
    history, answers = torch.empty(1, 0, dtype=torch.long), []
    for turn in turns:
        history = torch.cat([history, turn], dim=1)
        ids = model.generate(history, attention_mask=torch.ones_like(history), **options)
        answers.append(ids[:, history.shape[1] :])
        history = ids
    return answers, history


@pytest.mark.parametrize(
    ("method", "family"), [(FullCache(), "qwen3"), (StreamingLLM(64), "llama"), (SnapKV(1.0, window=3), "qwen3")]
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
    first = full_history(model, TURNS, **GREEDY)[0][0]
    options = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": int(first[0, 2])}
    expected, history = full_history(model, TURNS, **options)
    conversation = Conversation(model, FullCache())
    answers = [conversation.say(turn, **options) for turn in TURNS]
    assert answers[0].shape[1] <= 3
    assert [each.tolist() for each in answers] == [each.tolist() for each in expected]
    assert torch.equal(conversation.ids, history)


@pytest.mark.parametrize(("method", "family"), zip(SMALL, [*FAMILIES, *FAMILIES, "llama"], strict=True))
def test_an_evicted_conversation_equals_a_model_that_hides_what_was_evicted(method, family):
    model = tiny_model(family)
    slow, conversation = Slow(model, method), Conversation(model, method)
    unread = torch.empty(1, 0, dtype=torch.long)
    for turn in TURNS:
        slow.read(torch.cat([unread, turn], dim=1))
        slow.evict()
        expected = slow.answer(GREEDY["max_new_tokens"], method.every)
        assert conversation.say(turn, **GREEDY).tolist() == expected.tolist()
        assert_close(conversation.state.logits, slow.logits())
        assert torch.equal(conversation.state.tokens, slow.ids)
        held = conversation.state.counts().double().mean().item()  # the answer comes on top, but for `every`
        assert held == (12 - 1 if method.every else method.budget + 5)
        unread = expected[:, -1:]


def test_a_ratio_counts_the_whole_conversation():
    """Not what is left of it: otherwise each turn would shrink the cache by the ratio again."""
    model, method = tiny_model(), StreamingLLM(0.5)
    conversation = Conversation(model, method)
    for turn in TURNS:
        conversation.say(turn, **GREEDY)
    before_answer = conversation.ids.shape[1] - 6
    assert conversation.state.length == round(0.5 * before_answer) + 5


def test_sampling_penalties_and_streamers_are_those_of_transformers():
    class Streamer:
        def __init__(self):
            self.got = []

        def put(self, ids):
            self.got.extend(ids.flatten().tolist())

        def end(self):
            self.got.append("end")

    model, streamer = tiny_model(), Streamer()
    sampled = {"max_new_tokens": 6, "do_sample": True, "temperature": 1.5, "eos_token_id": None}
    torch.manual_seed(5)
    expected, history = full_history(model, TURNS[:2], repetition_penalty=1.3, **sampled)
    torch.manual_seed(5)
    conversation = Conversation(model, FullCache())
    conversation.say(TURNS[0], repetition_penalty=1.3, **sampled)
    answer = conversation.say(TURNS[1], repetition_penalty=1.3, streamer=streamer, **sampled)
    assert torch.equal(answer, expected[1])
    assert streamer.got == [*history[0].tolist(), "end"]


def test_an_exception_leaves_the_conversation_as_it_was():
    model = tiny_model()
    conversation, undisturbed = Conversation(model, SMALL[1]), Conversation(model, SMALL[1])
    for each in (conversation, undisturbed):
        each.say(TURNS[0], **GREEDY)
    count = 0

    def fail(_, scores):
        nonlocal count
        count += 1
        if count == 3:
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


def passes(model: Any) -> list[int]:
    """The tokens of each forward pass from here on."""
    seen: list[int] = []
    model.base_model.register_forward_pre_hook(
        lambda module, args, options: seen.append(options["input_ids"].shape[1]), with_kwargs=True
    )
    return seen


@pytest.mark.parametrize(
    ("method", "chunk"), [*((each, 128) for each in METHODS.values()), (METHODS["quest"], None), (Kivi(2, 8, 16), None)]
)
def test_a_turn_of_300_tokens_is_few_passes(method: Method, chunk: int | None) -> None:
    model = tiny_model(max_position_embeddings=512)
    options: dict[str, Any] = {"max_new_tokens": 3, "do_sample": False, "eos_token_id": None}
    conversation = Conversation(model, method)
    conversation.say(prompt_ids(40)[0], **options)
    seen = passes(model)
    conversation.say(prompt_ids(300, seed=2)[0], **options, prefill_chunk_size=chunk)
    turn = [301] if chunk is None else [128, 128, 45]
    assert seen[: len(turn)] == turn
    assert max(seen[len(turn) :]) <= 2 and len(seen) <= len(turn) + 3  # the guess of SpeCache takes one more


@pytest.mark.parametrize("name", [name for name in METHODS if "clusterkv" not in name])  # it clusters turns apart
def test_a_prompt_in_two_turns_is_the_same_prompt(name: str, chunk: int = 12) -> None:
    method: Method = METHODS[name]
    model, (ids, _), answer = tiny_model(), prompt_ids(75), prompt_ids(12, seed=1)[0]
    state = method.start(model, ids[:, :50])
    before = state.copy()
    for part in ids[:, 50:].split(chunk, dim=1):
        state = read(method.turn_reader(model), state, part, logits_to_keep=1)[0]
    whole = method.start(model, ids)
    assert_close(state.logits, whole.logits)
    expected = read(method.reader(model), whole, answer)[1]
    assert_close(read(method.reader(model), state, answer)[1], expected)
    assert (state.length, state.kv_bytes) == (whole.length, whole.kv_bytes)
    first = read(method.reader(model), method.start(model, ids[:, :50]), answer)[1]
    assert_close(read(method.reader(model), before, answer)[1], first)


@pytest.mark.parametrize(("turn", "features"), [*zip([1, 100], FEATURES, strict=True)], ids=["answer", "turn"])
def test_a_head_is_extended_while_the_answer_grows(turn: int, features: str) -> None:
    """Made for 64 positions, it is then what it would have been for the whole, and so are its keys."""
    model, (ids, mask), more = tiny_model(), prompt_ids(50, 33), prompt_ids(200, 200, seed=1)[0]
    method = SpeContext(1000, tiny_retrieval_head(features, max_position_embeddings=64))
    reader = method.reader(model) if turn == 1 else method.turn_reader(model)
    state, factors = method.start(model, ids, mask), list[float]()
    early = state.copy()
    for part in more.split(turn, dim=1):
        state = read(reader, state, part)[0]
        factors.append(retrieval_cache(state.cache).selector.head.config.rope_parameters.get("factor", 1.0))
    assert sorted({*factors}) == ([1.0, 2.0, 4.0] if turn == 1 else [4.0])
    whole = method.start(model, torch.cat([ids, more], 1), torch.nn.functional.pad(mask, (0, 200), value=1))
    mine, its = (retrieval_cache(each.cache).selector for each in (state, whole))
    assert mine.head.config == its.head.config
    real = torch.arange(250) >= torch.tensor([0, 17])[:, None]
    assert_close(mine.keys.transpose(1, 2)[real], its.keys.transpose(1, 2)[real])
    assert retrieval_cache(early.cache).selector.head.config.max_position_embeddings == 64


def test_what_a_method_cannot_read_is_refused_as_generate_does() -> None:
    with refused("prompt", "range"):
        AnyConversation(tiny_model(), DapQ(16)).say(prompt_ids(250)[0], max_new_tokens=2)
