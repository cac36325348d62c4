"""A real server on loopback and real clients: answers are those of `generate`; what is bad is a 4xx with its reason."""

import asyncio
import json
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from pydantic import ValidationError
from tokenizers.processors import TemplateProcessing

from keepsight.errors import UserError
from keepsight.models.targets import Target, load_target
from keepsight.runtime.generate import generate
from keepsight.serving.engine import Engine
from keepsight.serving.requests import ChatRequest, first_fault, prompt_of
from keepsight.serving.server import Service
from tests.serving.loopback import METHOD, events_of, metrics_of, serving, wait_until
from tests.tiny import base_tokenizer, save_tiny_target, tiny_model
from tests.tokenizers import TOOL_TEMPLATE, scripted, tokenizers_of_all_kinds

CHAT = "/v1/chat/completions"
PLAIN = "/v1/completions"
USER = [{"role": "user", "content": "Hello"}]
TEXTS = [f"{number} ships sailed on the sea. " * (3 + number) for number in range(16)]


@pytest.fixture(scope="module")
def served(target):
    with serving(target) as (url, engine):
        yield url, engine


def client(url: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{url}/v1", api_key="any", max_retries=0)


def request(prompt: Any, tokens: int, **fields: Any) -> dict[str, Any]:
    """The body of a completion's request."""
    return {"model": "tiny", "prompt": prompt, "max_tokens": tokens, **fields}


def alone(target, text, tokens, **options):
    """The answer of `generate`."""
    ids = target.tokenizer(text, return_tensors="pt")["input_ids"]
    answer = generate(target.model, ids, METHOD, max_new_tokens=tokens, **options)[0]
    return target.tokenizer.decode(answer, skip_special_tokens=True)


def test_sixteen_clients_at_once_get_their_own_answers(target, served):
    url, _ = served

    def ask(text: str) -> str:
        create = client(url).completions.create
        if len(text) % 2:
            return create(**request(text, 20)).choices[0].text
        chunks = create(**request(text, 20, stream=True))
        return "".join(chunk.choices[0].text for chunk in chunks if chunk.choices)

    with ThreadPoolExecutor(16) as pool:
        answers = [*pool.map(ask, TEXTS)]
    assert answers == [alone(target, text, 20) for text in TEXTS]


def test_a_rendered_chat_as_a_completion_begins_once(target):
    tokenizer = target.tokenizer
    begins_texts = TemplateProcessing(single="<|start|> $A", special_tokens=[("<|start|>", tokenizer.bos_token_id)])
    processor_before = tokenizer.backend_tokenizer.post_processor
    tokenizer.backend_tokenizer.post_processor = begins_texts
    try:
        ids = tokenizer(TEXTS[2])["input_ids"]
        assert ids[0] == tokenizer.bos_token_id
        with serving(target) as (url, _):
            for prompt in (TEXTS[2], "<|start|>" + TEXTS[2]):
                usage = client(url).completions.create(**request(prompt, 2)).usage
                assert usage is not None
                assert usage.prompt_tokens == len(ids)
    finally:
        tokenizer.backend_tokenizer.post_processor = processor_before


def test_a_chat_streamed_and_unstreamed_with_usage(target, served):
    url, _ = served
    messages = [{"role": "user", "content": TEXTS[9]}]
    fields: dict[str, Any] = {"model": "tiny", "messages": messages, "max_tokens": 12}
    completion = client(url).chat.completions.create(**fields)
    answer = completion.choices[0].message.content
    rendered = target.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert answer == alone(target, rendered, 12)
    assert completion.choices[0].finish_reason == "length"
    prompt_tokens = len(target.tokenizer(rendered)["input_ids"])
    usage = completion.usage.model_dump()
    assert usage["prompt_tokens"] == prompt_tokens
    assert usage["completion_tokens"] == 12
    assert usage["total_tokens"] == prompt_tokens + 12
    assert usage["prompt_tokens_details"]["kept_entries"] == 40

    stream = client(url).chat.completions.create(**fields, stream=True, stream_options={"include_usage": True})
    chunks: list[Any] = [*stream]
    streamed = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert streamed == answer
    assert chunks[-1].usage.model_dump() == usage
    assert [model.id for model in client(url).models.list()] == ["tiny"]


def test_stops_are_not_part_of_an_answer(target, served):
    url, _ = served
    text = alone(target, TEXTS[5], 24)
    stop = text[7:10]
    fields = request(TEXTS[5], 24, stop=[stop, "never said"])
    choice = client(url).completions.create(**fields).choices[0]
    assert choice.text == text[: text.index(stop)]
    assert choice.finish_reason == "stop"
    chunks = client(url).completions.create(**fields, stream=True)
    assert "".join(chunk.choices[0].text for chunk in chunks) == choice.text


@contextmanager
def speaking(tokenizer: Any, answer: list[int]) -> Iterator[str]:
    """A server whose model, of a tokenizer, answers with given tokens and then ends."""
    model = tiny_model(vocab_size=len(tokenizer) + 8, max_position_embeddings=4096, pad_token_id=0)
    target = Target(model, tokenizer, "tiny", "1")
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    with serving(target) as (url, _):
        scripted(model).say([*answer, tokenizer.eos_token_id])
        yield url


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("answer", "stop", "text"),
    [
        ("def f(): x.", {"stop": "\ndef"}, "def f(): x."),
        ("a b\n\nc", {"stop": ["\n\n"]}, "a b"),
        ("a b<|user|>\nc", {"stop": ["never", "<|user|>\n"]}, "a b"),
        ("a b<|user|>c", {"stop": "user"}, "a bc"),
        ("a b<|user|>c", {"stop_token_ids": [4]}, "a b"),
        ("a b c", {"stop": [], "stop_token_ids": []}, "a b c"),
        ("a b c", {"stop": None, "stop_token_ids": None}, "a b c"),
    ],
)
def test_stops_of_every_form(answer, stop, text, stream):
    tokenizer = tokenizers_of_all_kinds()["byte level"]
    with speaking(tokenizer, tokenizer(answer)["input_ids"]) as url:
        assert completion(url, request("Q\n", 30, **stop), stream) == (text, "stop")


def completion(url: str, body: dict[str, Any], stream: bool) -> tuple[str, str]:
    """Text and reason of an answer, streamed or not."""
    if not stream:
        (choice,) = httpx.post(url + PLAIN, json=body).raise_for_status().json()["choices"]
        return choice["text"], choice["finish_reason"]
    reply = httpx.post(url + PLAIN, json=body | {"stream": True}).raise_for_status()
    events = events_of(reply.text)
    assert events.pop() == "[DONE]"
    choices = [json.loads(event)["choices"][0] for event in events]
    text = "".join(choice["text"] for choice in choices)
    return text, choices[-1]["finish_reason"]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("kind", tokenizers_of_all_kinds())
def test_tokenizers_of_all_kinds(kind, stream):
    tokenizer = tokenizers_of_all_kinds()[kind]
    text = "Hi \N{SLIGHTLY SMILING FACE}"
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    without_token = len(tokenizer) + 7  # models have rows that no token uses
    with speaking(tokenizer, [*ids, without_token]) as url:
        assert completion(url, request("x " * 30, 30), stream) == (text, "stop")
        messages = [{"role": "user", "content": "Hi"}]
        reply = httpx.post(url + CHAT, json={"model": "tiny", "messages": messages, "max_tokens": 1})
        rendered = tokenizer.apply_chat_template(messages, add_generation_prompt=True)
        assert reply.json()["usage"]["prompt_tokens"] == len(rendered["input_ids"])


@pytest.mark.parametrize("stream", [False, True])
def test_broken_bytes_become_replacement_characters(stream):
    tokenizer = tokenizers_of_all_kinds()["byte fallback"]
    ids = tokenizer.convert_tokens_to_ids(["Hi", "<0x0A>", "<0xF0>", "x", "."])
    with speaking(tokenizer, ids) as url:
        text, reason = completion(url, request("x " * 30, 30), stream)
    assert text == "Hi\n\N{REPLACEMENT CHARACTER}x."
    assert reason == "stop"


def test_a_seed_gives_the_same_samples(served):
    url, _ = served

    def sampled(seed: int) -> str:
        fields = request(TEXTS[2], 16, temperature=1.5, top_p=0.9, seed=seed)
        return client(url).completions.create(**fields).choices[0].text

    first = sampled(7)
    assert sampled(7) == first
    assert sampled(8) != first


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_is_answered_no_further(served, stream):
    url, engine = served
    cancelled_before = engine.totals.ended["cancelled"]
    body = request(TEXTS[1], 2000, stream=stream)
    if stream:
        with httpx.stream("POST", url + PLAIN, json=body) as reply:
            next(reply.iter_lines())
    else:
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(url + PLAIN, json=body, timeout=0.3)
    wait_until(lambda: engine.load == (0, 0), seconds=10)
    assert engine.totals.ended["cancelled"] == cancelled_before + 1


def test_a_client_that_leaves_before_the_first_event(target):
    engine = Engine(target.model, METHOD, rows=4)
    service = Service(engine, target, name="tiny", key=None, answer_tokens=2000, max_bytes=2**16)
    body = json.dumps(request(TEXTS[1], 2000, stream=True)).encode()
    messages = iter([{"type": "http.request", "body": body, "more_body": False}])

    async def receive() -> Any:
        return next(messages, {"type": "http.disconnect"})

    async def send(message: Any) -> None:
        await asyncio.Event().wait()  # nobody reads

    scope = {
        "type": "http",
        "method": "POST",
        "path": PLAIN,
        "headers": [(b"content-type", b"application/json")],
        "query_string": b"",
        "asgi": {"spec_version": "2.3"},
    }

    async def visit() -> None:
        await service.app()(scope, receive, send)
        end = time.monotonic() + 20
        while engine.load != (0, 0) and time.monotonic() < end:
            await asyncio.sleep(0.02)

    with engine:
        asyncio.run(visit())
    assert engine.totals.ended["cancelled"] == 1
    assert engine.totals.generated_tokens < 1000


def test_many_clients_leave_in_the_middle_of_their_answers(target):
    with serving(target, rows=8, waiting=200) as (url, engine):

        def leave(number: int) -> None:
            body = request(f"{number} {TEXTS[1]}", 2000, stream=True, ignore_eos=True)
            with httpx.stream("POST", url + PLAIN, json=body, timeout=120) as reply:
                assert any(line.startswith("data: ") for line in reply.iter_lines())

        with ThreadPoolExecutor(16) as pool:
            list(pool.map(leave, range(130)))
        wait_until(lambda: engine.load == (0, 0))
        assert engine.totals.ended["cancelled"] == 130
        assert engine.kv_bytes == 0
        text, _ = completion(url, request(TEXTS[5], 8), stream=False)
        assert text == alone(target, TEXTS[5], 8)


def test_an_answer_beyond_the_servers_names_the_option_that_allows_it(served):
    url, _ = served
    reply = httpx.post(url + PLAIN, json=request("a", 2001))
    assert reply.status_code == 400
    assert "at most 2000, which its option max_new_tokens= raises" in reply.text


BAD = [
    (PLAIN, {"model": "tiny", "prompt": "a", "max_tokens": 0}, 400, "max_tokens"),
    (PLAIN, {"model": "tiny", "prompt": "a", "max_tokens": 2001}, 400, "max_tokens"),
    (PLAIN, {"model": "tiny", "prompt": ""}, 400, "prompt"),
    (PLAIN, {"model": "tiny", "prompt": [1, 99999]}, 400, "prompt"),
    (PLAIN, {"model": "tiny", "prompt": "a", "echo": True}, 400, "echo"),
    (PLAIN, {"model": "tiny", "prompt": "a", "temperature": -1}, 400, "temperature"),
    (PLAIN, {"model": "tiny", "prompt": "a", "presence_penalty": 2.5}, 400, "presence_penalty"),
    (PLAIN, {"model": "other", "prompt": "a"}, 404, None),
    (PLAIN, {"model": "tiny", "prompt": "a" * 70000}, 413, None),
    (CHAT, {"model": "tiny", "messages": []}, 400, "messages"),
    (CHAT, {"model": "tiny", "messages": USER, "tools": [{"type": "function"}]}, 400, "tools.0.function"),
    (CHAT, {"model": "tiny", "messages": USER, "response_format": {"type": "json_schema"}}, 400, "response_format"),
    (PLAIN, {"model": "tiny", "prompt": [[]]}, 400, "prompt"),
    (PLAIN, {"model": "tiny", "prompt": ["a", 7]}, 400, "prompt"),
    (PLAIN, {"model": "tiny", "prompt": ["a", ""]}, 400, "prompt"),
    (PLAIN, {"model": "tiny", "prompt": [5, "a"]}, 400, "prompt"),
    (PLAIN, {"model": "tiny", "prompt": [True]}, 400, "prompt"),
    (PLAIN, {"model": "tiny", "prompt": 7}, 400, "prompt"),
    (PLAIN, {"model": "tiny"}, 400, "prompt"),
    (PLAIN, {"model": "tiny", "prompt": [[99999]]}, 400, "prompt"),
    (PLAIN, {"model": "tiny", "prompt": "a", "stop": ""}, 400, "stop"),
    (PLAIN, {"model": "tiny", "prompt": "a", "stop": [7]}, 400, "stop.0"),
    (PLAIN, {"model": "tiny", "prompt": "a", "stop_token_ids": ["<|end|>"]}, 400, "stop_token_ids.0"),
    (CHAT, {"model": "tiny", "messages": [{"role": "user", "content": None}]}, 400, "messages.0.content"),
    (CHAT, {"messages": USER}, 400, "model"),
    ("/v1/responses", {}, 404, None),
]


@pytest.mark.parametrize(("path", "body", "status", "param"), BAD)
def test_a_bad_request_says_why(served, path, body, status, param):
    url, _ = served
    reply = httpx.post(url + path, json=body)
    error = reply.json()["error"]
    assert reply.status_code == status, error
    assert error["code"] == status
    assert error["param"] == param, error
    assert "\n" not in error["message"]


CALL: dict[str, Any] = {
    "id": "call00001",
    "type": "function",
    "function": {"name": "weather", "arguments": '{"city": "Ulm"}'},
}
ASKS = {"role": "assistant", "content": "", "tool_calls": [CALL, CALL]}
HISTORY: list[dict[str, Any]] = [*USER, ASKS, {"role": "tool", "tool_call_id": "call00001", "content": "9 degrees"}]
DEFAULT = str(tokenizers_of_all_kinds()["byte level"].chat_template)


def with_template(template: str) -> Any:
    tokenizer = tokenizers_of_all_kinds()["byte level"]
    tokenizer.chat_template = template
    return tokenizer


@pytest.mark.parametrize(
    ("content", "text"),
    [("", ""), (None, ""), ("I look.", "I look."), ([{"type": "text", "text": "I look."}], "I look.")],
)
def test_tool_history_is_rendered_by_the_template(content, text):
    tokenizer = with_template(TOOL_TEMPLATE)
    call = {"function": {"name": "weather", "arguments": {"city": "Ulm"}}}
    user, asks, result = HISTORY
    turns = [user, asks | {"content": text, "tool_calls": [call] * 2}, result]
    rendered = tokenizer.apply_chat_template(turns, add_generation_prompt=True)
    body = {"model": "tiny", "messages": [user, asks | {"content": content}, result], "max_tokens": 1}
    with speaking(tokenizer, []) as url:
        usage = httpx.post(url + CHAT, json=body).raise_for_status().json()["usage"]
    assert usage["prompt_tokens"] == len(rendered["input_ids"])


FIRST_CALL_ALONE = TOOL_TEMPLATE.replace("message['tool_calls'] or []", "(message['tool_calls'] or [])[:1]")
BAD_HISTORY = [
    (DEFAULT, [USER[0], ASKS], "messages.1"),
    (DEFAULT, [USER[0], ASKS | {"content": None}], "messages.1"),
    (DEFAULT, [{"role": "user", "content": "weather"}, ASKS], "messages.1"),
    (TOOL_TEMPLATE.replace("message['content']", "message['content'] if message.role != 'tool' else ''"), HISTORY,
     "messages.2"),
    (FIRST_CALL_ALONE, [USER[0], ASKS], "messages.1"),
    (TOOL_TEMPLATE, [USER[0], {"role": "assistant", "content": None}], "messages.1.content"),
    (TOOL_TEMPLATE, [USER[0], {"role": "assistant"}], "messages.1.content"),
    (TOOL_TEMPLATE, [USER[0], ASKS | {"tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}], "messages"),
    (TOOL_TEMPLATE, [USER[0], ASKS | {"tool_calls": [{"id": "x"}]}], "messages.1.tool_calls.0.function"),
    (TOOL_TEMPLATE, [USER[0], {"role": "assistant", "content": "", "function_call": {"name": "f"}}],
     "messages.1.function_call"),
]  # fmt: skip


@pytest.mark.parametrize(("template", "messages", "field"), BAD_HISTORY)
def test_tool_history_that_would_be_lost_is_refused(template, messages, field):
    tokenizer = with_template(template)
    with pytest.raises((UserError, ValidationError)) as refused:
        prompt_of(ChatRequest(model="tiny", messages=messages).messages, tokenizer)
    error: Any = refused.value
    if isinstance(error, ValidationError):
        error = first_fault(error)
    assert error.field == field


def test_the_model_by_its_name(served):
    url, _ = served
    assert client(url).models.retrieve("tiny").id == "tiny"
    reply = httpx.get(f"{url}/v1/models/other/name")
    assert reply.status_code == 404
    assert "'other/name' does not exist" in reply.json()["error"]["message"]


def test_a_prompt_of_ids_alone_or_in_a_list(target, served):
    url, _ = served
    expected = alone(target, TEXTS[3], 8)
    ids = target.tokenizer(TEXTS[3])["input_ids"]
    for prompt in (ids, [ids], [TEXTS[3]]):
        text, _ = completion(url, request(prompt, 8), stream=False)
        assert text == expected


@pytest.mark.parametrize("body", [b"", b"{", b"[" * 50000, b"[]", b'{"model": "\xff"}', b'{"model": "\\ud800"}'])
def test_a_body_that_is_no_request(served, body):
    url, _ = served
    reply = httpx.post(url + CHAT, content=body, headers={"content-type": "application/json"})
    assert reply.status_code == 400
    assert reply.json()["error"]["type"] == "invalid_request_error"


def test_an_answer_without_a_length_is_as_long_as_the_server_allows(target):
    with serving(target, answer_tokens=5) as (url, _):
        completion = httpx.post(url + PLAIN, json={"model": "tiny", "prompt": "a"})
        assert completion.json()["usage"]["completion_tokens"] == 5
        chat = httpx.post(url + CHAT, json={"model": "tiny", "messages": USER})
        assert chat.json()["usage"]["completion_tokens"] == 5


def test_a_key_and_a_full_queue(target):
    headers = {"authorization": "Bearer secret"}
    with serving(target, key="secret", waiting=1) as (url, _):
        assert httpx.get(f"{url}/v1/models").status_code == 401
        assert httpx.post(url + PLAIN, json={}).status_code == 401
        assert httpx.get(f"{url}/health").status_code == 200
        assert httpx.get(f"{url}/v1/models", headers=headers).status_code == 200

        def ask(_: int) -> httpx.Response:
            return httpx.post(url + PLAIN, headers=headers, json=request("a", 300), timeout=60)

        with ThreadPoolExecutor(24) as pool:
            replies = [*pool.map(ask, range(24))]
        assert {reply.status_code for reply in replies} == {200, 429}
        answers = [json.dumps(reply.json()["choices"]) for reply in replies if reply.is_success]
        assert len({*answers}) == 1
        metrics = metrics_of(url, **headers)
        assert metrics['keepsight_requests_total{reason="length"}'] == len(answers)
        assert metrics['keepsight_refused_total{status="429"}'] == 24 - len(answers)
        assert metrics["keepsight_time_to_first_token_seconds_count"] == len(answers)
        assert metrics["keepsight_running"] == 0
        assert metrics["keepsight_kv_bytes"] == 0


def test_a_model_without_a_chat_template_completes_texts_and_says_why_it_does_not_chat(tmp_path: Path) -> None:
    base = load_target(str(save_tiny_target(tmp_path, tokenizer=base_tokenizer())), device="cpu")
    why = r"has no chat template; set one by model\.chat_template=FILE"
    with serving(base) as (url, _):
        completion = client(url).completions.create(model="tiny", prompt=TEXTS[9], max_tokens=8)
        with pytest.raises(openai.BadRequestError, match=why):
            client(url).chat.completions.create(model="tiny", messages=[{"role": "user", "content": "Hello"}])
    assert completion.choices[0].text == alone(base, TEXTS[9], 8)
    ids = base.tokenizer(TEXTS[9])["input_ids"]
    assert ids[0] == base.tokenizer.bos_token_id
    assert completion.usage is not None
    assert completion.usage.prompt_tokens == len(ids)
