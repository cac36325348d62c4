"""Later turns go on from what was read, with the tokens of a `Conversation`, and nobody else's."""

import gc
import weakref
from typing import Any

import httpx
import pytest
import torch

from keepsight import LAQ, AdaKV, KeyNorm, SnapKV
from keepsight.runtime import static_batch
from keepsight.runtime.conversation import Conversation
from keepsight.runtime.generate import FullCache, Method, generate
from keepsight.runtime.methods import H2O
from keepsight.serving.choices import with_budget
from keepsight.serving.engine import Engine, Job
from keepsight.serving.sessions import _storage_bytes, _tensors_of
from tests.families import family_model
from tests.serving.loopback import serving
from tests.tiny import prompt_ids, tiny_model

GREEDY: dict[str, Any] = {"max_new_tokens": 24, "do_sample": False, "eos_token_id": None}
METHODS: dict[str, Method] = {
    "uniform": SnapKV(40, window=8),
    "ragged": AdaKV(40, window=8),
    "without observers": KeyNorm(40),
    "drafted": LAQ(40),
    "summed attention": H2O(40),
    "full": FullCache(),
}
SESSION_BYTES = 1 << 24


def run(engine: Engine) -> None:
    while engine.step():
        pass


def answered(engine: Engine, *prompts: torch.Tensor, **options: Any) -> list[Job]:
    """The answers to prompts that arrive together."""
    jobs = [Job(ids, **(GREEDY | options)) for ids in prompts]
    for job in jobs:
        engine.submit(job)
    run(engine)
    for job in jobs:
        assert job.error is None, job.error
    return jobs


def said_alone(conversation: Conversation, ids: torch.Tensor, **options: Any) -> list[int]:
    """The answer of a conversation to its next turn."""
    return conversation.say(ids[None], **(GREEDY | options))[0].tolist()


def joined(*parts: torch.Tensor | list[int]) -> torch.Tensor:
    """A chat of prompts and answers."""
    ids = list[int]()
    for part in parts:
        ids += torch.as_tensor(part).tolist()
    return torch.tensor(ids, dtype=torch.long)


def turn(length: int, seed: int) -> torch.Tensor:
    return prompt_ids(length, seed=seed)[0][0]


@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("method", METHODS.values(), ids=METHODS)
def test_turns_that_continue_are_those_of_a_conversation(method, static, monkeypatch):
    """Beside others that come and leave; turns shorter and longer than what observes, and than an answer."""
    monkeypatch.setattr(static_batch, "STRETCH", 7)
    model = tiny_model(max_position_embeddings=1024)
    engine = Engine(
        model, method, rows=4, session_bytes=SESSION_BYTES, continues=True, prefill_tokens=20, static=static
    )
    conversation = Conversation(model, method)
    reads_only_new_tokens = not isinstance(method, H2O)
    chat = joined()
    for number, length in enumerate((90, 5, 60, 1, 30)):
        question = turn(length, number)
        expected = said_alone(conversation, question)
        chat = joined(chat, question)
        job, _ = answered(engine, chat, turn(50 + number, 20 + number))
        assert job.tokens == expected
        if number:
            assert job.cached >= len(chat) - length - 1 - max(32, GREEDY["max_new_tokens"])
            read_again = len(chat) - job.cached
            if method.needs().window <= length and reads_only_new_tokens:
                assert read_again == length + 1, "the answer's last token was never read"
        chat = joined(chat, job.tokens)
    assert engine.totals.cached_tokens > 200


@pytest.mark.parametrize("family", ["Gemma 2", "DeepSeek-V3", "GPT-OSS", "Qwen2.5-VL (text)", "Mistral with a window"])
def test_families_continue_as_conversations(family):
    model = family_model(family)
    method = SnapKV(24, window=8)
    engine = Engine(model, method, rows=2, session_bytes=SESSION_BYTES, continues=True)
    conversation = Conversation(model, method)
    chat = joined()
    for number, length in enumerate((60, 12, 3)):
        question = turn(length, number)
        expected = said_alone(conversation, question, max_new_tokens=6)
        chat = joined(chat, question)
        (job,) = answered(engine, chat, max_new_tokens=6)
        assert job.tokens == expected
        assert (job.cached > 0) == bool(number)
        chat = joined(chat, job.tokens)


@pytest.mark.parametrize("method", METHODS.values(), ids=METHODS)
def test_an_answer_that_is_written_otherwise_is_read_from_where_it_differs(method):
    model = tiny_model(max_position_embeddings=512)
    engine = Engine(model, method, rows=2, session_bytes=SESSION_BYTES, continues=True)
    first = turn(90, 1)
    (job,) = answered(engine, first)
    for cut in (0, 3, 20):
        chat = joined(first, job.tokens[:cut], turn(40, 2 + cut))
        conversation = Conversation(model, method)
        said_alone(conversation, first)
        expected = conversation.say_rendered(chat[None], **GREEDY)[0].tolist()
        (again,) = answered(engine, chat)
        assert again.tokens == expected
        assert again.cached == (90 if isinstance(method, H2O) else 90 + cut)


@pytest.mark.parametrize("method", METHODS.values(), ids=METHODS)
def test_by_default_an_answer_depends_on_its_request_alone(method):
    """Chats within the budget go on, longer ones are read again; the same prompt is answered from what was kept."""
    model = tiny_model(max_position_embeddings=512)
    engine = Engine(model, method, rows=2, session_bytes=SESSION_BYTES)
    chat = turn(20, 1)
    options: dict[str, Any] = GREEDY | {"max_new_tokens": 6}
    cached = []
    for number in range(4):
        (job,) = answered(engine, chat, **options)
        (again,) = answered(engine, chat, **options)
        expected = generate(model, chat[None], method, **options)[0].tolist()
        assert job.tokens == expected
        assert again.tokens == expected
        assert again.cached == len(chat)
        cached.append(job.cached)
        chat = joined(chat, job.tokens, turn(15, 10 + number))
    if isinstance(method, SnapKV):
        assert cached == [0, 25, 25, 25]  # the budget is 40: of the first prompt alone nothing was evicted
    if isinstance(method, FullCache):
        assert cached == [0, 25, 46, 67]


def test_nothing_is_given_to_another_tenant_or_another_budget():
    model = tiny_model()
    engine = Engine(model, SnapKV(40, window=8), session_bytes=SESSION_BYTES, continues=True)
    ids = turn(90, 1)
    options: dict[str, Any] = GREEDY | {"max_new_tokens": 4}
    cached = []
    for tenant, budget in (("a", 40), ("b", 40), ("a", 40), ("", 40), ("a", 30), ("a", 30)):
        method = with_budget(engine.method, budget)
        job = Job(ids, tenant=tenant, method=method, **options)
        engine.submit(job)
        run(engine)
        cached.append(job.cached)
        assert job.tokens == generate(model, ids[None], method, **options)[0].tolist()
    assert cached == [0, 0, 90, 0, 0, 90]


def test_memory_is_bounded_and_freed():
    model = tiny_model()
    method = SnapKV(40, window=8)
    engine = Engine(model, method, session_bytes=SESSION_BYTES, continues=True)
    answered(engine, turn(90, 0), max_new_tokens=8)
    bytes_of_one = engine.sessions.nbytes
    (session,) = engine.sessions._sessions
    tensors = [*_tensors_of(session.state)]
    for answer in session.answers:
        for keys, values in answer.entries:
            tensors += [keys, values]
    bytes_of_entry = session.state.layers[0].keys[0, :, 0].nbytes
    bytes_of_entries = 2 * 40 * model.config.num_hidden_layers * bytes_of_entry
    assert bytes_of_entries <= _storage_bytes(tensors) <= bytes_of_one
    del tensors, keys, values

    engine = Engine(model, method, session_bytes=3 * bytes_of_one + bytes_of_one // 2, continues=True)
    for number in range(6):
        answered(engine, turn(90, number), max_new_tokens=8)
        assert engine.sessions.nbytes <= engine.sessions.max_bytes
    assert len(engine.sessions) == 3
    (latest,) = answered(engine, turn(90, 5), max_new_tokens=8)
    (oldest,) = answered(engine, turn(90, 0), max_new_tokens=8)
    assert latest.cached == 90
    assert oldest.cached == 0

    references = [weakref.ref(session.state.layers[0].keys) for session in engine.sessions._sessions]
    engine.sessions.clear()
    gc.collect()
    assert engine.sessions.nbytes == 0
    assert len(engine.sessions) == 0
    assert all(reference() is None for reference in references)
    with engine:
        pass
    assert Engine(model, method).sessions.max_bytes == 0


def test_a_state_larger_than_all_room_is_not_kept():
    engine = Engine(tiny_model(), SnapKV(40, window=8), session_bytes=1000, continues=True)
    answered(engine, turn(90, 0))
    assert len(engine.sessions) == 0


def test_siblings_leave_answers_to_one_session():
    model = tiny_model()
    engine = Engine(model, SnapKV(40, window=8), session_bytes=SESSION_BYTES, continues=True)
    ids = turn(90, 0)
    sampled: dict[str, Any] = {"max_new_tokens": 12, "do_sample": True, "top_k": 0}
    first = Job(ids, seed=1, **sampled)
    sibling = Job(ids, seed=2, **sampled)
    first.siblings = [sibling]
    engine.submit(first)
    run(engine)
    assert len(engine.sessions) == 1
    assert first.tokens != sibling.tokens
    for job in (first, sibling):
        (later,) = answered(engine, joined(ids, job.tokens, turn(40, 3)))
        assert later.cached == 90 + len(job.tokens) - 1


def test_clients_see_what_was_cached(target):
    """Over HTTP: the usage of a chat's turns, by key and by cache_salt."""
    messages = [{"role": "user", "content": "ships sailed on the sea. " * 12}]
    with serving(target, session_bytes=SESSION_BYTES, continues=True) as (url, _):

        def post(turns: list[dict[str, str]], key: str = "one", **fields: Any) -> httpx.Response:
            body = {"model": "tiny", "messages": turns, "max_tokens": 8, "temperature": 0} | fields
            headers = {"Authorization": f"Bearer {key}"}
            return httpx.post(f"{url}/v1/chat/completions", json=body, headers=headers)

        def cached(turns: list[dict[str, str]], **fields: Any) -> int:
            reply = post(turns, **fields)
            assert reply.status_code == 200, reply.text
            return reply.json()["usage"]["prompt_tokens_details"]["cached_tokens"]

        first = post(messages).json()
        prompt_tokens = first["usage"]["prompt_tokens"]
        assert first["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
        assert cached(messages) == prompt_tokens
        assert cached(messages, key="two") == 0
        assert cached(messages, cache_salt="a") == 0
        content = first["choices"][0]["message"]["content"]
        longer = [*messages, {"role": "assistant", "content": content}, {"role": "user", "content": "And then?"}]
        assert cached(longer) >= prompt_tokens - 8
        assert cached(longer, key="three") == 0
        metrics = httpx.get(f"{url}/metrics").text
        assert "keepsight_cached_tokens_total" in metrics
        assert "keepsight_session_bytes" in metrics
        bad_salt = post(messages, cache_salt=3)
        assert bad_salt.status_code == 400
        assert "cache_salt" in bad_salt.text
