"""What goes wrong inside our own server: a status or an event, a line in the log with the cause, and others go on."""

import itertools
import json
import logging
import re
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import httpx
import pytest

from keepsight import SnapKV
from keepsight.serving import requests, server
from keepsight.serving.engine import Engine
from tests.serving.loopback import events_of, metrics_of, serving, wait_until

CHAT = "/v1/chat/completions"
PLAIN = "/v1/completions"
REQUEST: dict[str, Any] = {"model": "tiny", "prompt": "The ship sailed on. " * 20, "max_tokens": 4}


def post(url: str, **fields: Any) -> httpx.Response:
    """The reply to `REQUEST` with other fields."""
    return httpx.post(url + PLAIN, json=REQUEST | fields, timeout=60)


def chat(url: str, messages: list[dict[str, Any]], **fields: Any) -> httpx.Response:
    return httpx.post(url + CHAT, json={"model": "tiny", "messages": messages, **fields}, timeout=60)


def status_of(url: str, path: str) -> int:
    return httpx.get(f"{url}/{path}").status_code


@contextmanager
def held_prefill(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Prompts are read once the event is set."""
    may_read = threading.Event()
    start = SnapKV.start

    def wait_and_start(self, *args, **options):
        assert may_read.wait(60)
        return start(self, *args, **options)

    with monkeypatch.context() as patch:
        patch.setattr(SnapKV, "start", wait_and_start)
        try:
            yield may_read
        finally:
            may_read.set()


# Streams


@pytest.mark.parametrize("path", [PLAIN, CHAT])
def test_a_stream_begins_before_its_prompt_is_read(target, monkeypatch, path):
    monkeypatch.setattr(server, "_PING", 0.05)
    body: dict[str, Any] = dict(REQUEST)
    if path == CHAT:
        body = {"model": "tiny", "messages": [{"role": "user", "content": "Hello"}]}
    body |= {"stream": True, "max_tokens": 4}
    with (
        serving(target) as (url, engine),
        held_prefill(monkeypatch) as may_read,
        httpx.stream("POST", url + path, json=body, timeout=60) as reply,
    ):
        lines = reply.iter_lines()
        lines_before = list(itertools.islice(lines, 4))
        assert lines_before == [""] * 4, "an empty line at once, further ones while there is no text, and no event"
        assert engine.totals.generated_tokens == 0
        may_read.set()
        *_, chunk, end = events_of("\n".join(lines))
    assert end == "[DONE]"
    assert json.loads(chunk)["choices"][0]["finish_reason"] == "length"


# Failures


@pytest.mark.parametrize("stream", [False, True])
def test_a_failure_is_logged_with_its_cause(target, monkeypatch, caplog, stream):
    def fail(self, *args, **options):
        raise OSError(28, "No space left on device")

    with serving(target) as (url, _), caplog.at_level(logging.ERROR):
        with monkeypatch.context() as patch:
            patch.setattr(SnapKV, "start", fail)
            failed = post(url, stream=stream)
        again = post(url)
    (record,) = [record for record in caplog.records if record.name.startswith("keepsight")]
    line = record.getMessage()
    for detail in ("No space left on device", PLAIN, "500"):
        assert detail in line
    assert "\n" not in line
    assert failed.status_code == (200 if stream else 500)
    assert "No space left" not in failed.text
    assert "OSError" in failed.text, "clients learn the kind alone"
    assert again.status_code == 200


def test_a_handler_that_fails_is_logged(target, monkeypatch, caplog):
    def fail(*args):
        raise KeyError("no such field")

    monkeypatch.setattr(server, "prompt_of", fail)
    with serving(target) as (url, _), caplog.at_level(logging.ERROR):
        reply = chat(url, [{"role": "user", "content": "a"}])
    assert reply.status_code == 500
    assert reply.json()["error"]["type"] == "server_error"
    assert any("no such field" in record.getMessage() for record in caplog.records)


def test_a_path_writes_no_lines_into_the_log(target, caplog):
    with serving(target) as (url, engine), caplog.at_level(logging.ERROR):
        engine.drain()
        assert post(url).status_code == 503
        httpx.post(f"{url}{PLAIN}%0AERROR%20forged", json=REQUEST)
    assert all("\n" not in record.getMessage() for record in caplog.records)


def test_an_engine_that_ends_leaves_no_request_waiting(target, monkeypatch, caplog):
    def end(self):
        raise SystemExit("no such device")

    with serving(target, rows=1) as (url, engine), ThreadPoolExecutor(3) as pool:
        assert status_of(url, "ready") == 200
        assert httpx.head(f"{url}/health").status_code == 200
        with held_prefill(monkeypatch) as may_read:
            replies = [pool.submit(post, url) for _ in range(3)]
            wait_until(lambda: engine.load == (1, 2))
            monkeypatch.setattr(Engine, "_decode", end)
            may_read.set()
        assert [reply.result().status_code for reply in replies] == [500] * 3
        wait_until(lambda: status_of(url, "health") == 503)
        assert status_of(url, "ready") == 503
        late = post(url)
        assert late.status_code == 503
        assert "restart" in late.json()["error"]["message"]
    assert any(record.exc_info and "no such device" in str(record.exc_info[1]) for record in caplog.records)


def test_it_is_not_ready_while_the_queue_is_full(target, monkeypatch):
    with serving(target, rows=1, waiting=1) as (url, engine), ThreadPoolExecutor(2) as pool:
        with held_prefill(monkeypatch):
            running = pool.submit(post, url)
            wait_until(lambda: engine.load == (1, 0))
            assert status_of(url, "ready") == 200
            waiting = pool.submit(post, url)
            wait_until(lambda: engine.load == (1, 1))
            assert status_of(url, "ready") == 503
            assert status_of(url, "health") == 200
            refused = post(url)
            assert refused.status_code == 429
            assert refused.headers["retry-after"] == "1"
        assert running.result().status_code == 200
        assert waiting.result().status_code == 200
        assert status_of(url, "ready") == 200


# Prompts that are too long, and bodies that cost much


def assert_too_long(reply: httpx.Response) -> str:
    """The message of the refusal of a prompt that is too long; an AssertionError if it is not refused so."""
    error = reply.json()["error"]
    assert reply.status_code == 400
    assert error["type"] == "invalid_request_error"
    assert error["code"] == "context_length_exceeded"
    assert "maximum context length" in error["message"]
    assert "prompt is too long" in error["message"], "by which LangChain knows it"
    return str(error["message"])


def test_prompts_that_are_too_long(target):
    with serving(target, service={"max_bytes": 1 << 22}) as (url, _):
        assert "4096" in assert_too_long(post(url, prompt=[5] * 4096, max_tokens=1))
        assert_too_long(post(url, prompt=[5] * 500_000, max_tokens=1))
        assert_too_long(post(url, prompt="The ship sailed on. " * 1500, max_tokens=1))
        assert_too_long(chat(url, [{"role": "user", "content": ""}] * 5000))
    with serving(target, max_prompt_tokens=50) as (url, _):
        assert "max_prompt_tokens" in assert_too_long(post(url))


def test_texts_beyond_all_prompts_are_not_tokenized(target, monkeypatch):
    monkeypatch.setattr(server, "encode", None)
    text = "sea " * 200_000
    call = {"id": "a", "type": "function", "function": {"name": "sea", "arguments": {"text": text}}}
    with serving(target, service={"max_bytes": 1 << 22}) as (url, _):
        assert_too_long(post(url, prompt=text))
        assert_too_long(chat(url, [{"role": "user", "content": [{"type": "text", "text": text}]}]))
        reply = chat(url, [{"role": "assistant", "content": None, "tool_calls": [call]}])
        assert reply.status_code == 400


def test_a_long_history_of_tools_is_rendered_twice(target, monkeypatch):
    """Once with the marks of all messages that a template may leave out."""
    rendered = list[int]()
    chat_text = requests.chat_text

    def count_turns(tokenizer, turns):
        rendered.append(len(turns))
        return chat_text(tokenizer, turns)

    monkeypatch.setattr(requests, "chat_text", count_turns)
    messages = [{"role": "user", "content": "a"}, *[{"role": "tool", "content": "b"}] * 30]
    with serving(target) as (url, _):
        assert chat(url, messages, max_tokens=1).status_code == 200
    assert rendered == [31, 31]


def test_nothing_is_tokenized_while_the_queue_is_full(target, monkeypatch):
    with serving(target, rows=1, waiting=1) as (url, engine), ThreadPoolExecutor(2) as pool:
        with held_prefill(monkeypatch), monkeypatch.context() as patch:
            running = pool.submit(post, url)
            wait_until(lambda: engine.load == (1, 0))
            waiting = pool.submit(post, url)
            wait_until(lambda: engine.load == (1, 1))
            patch.setattr(server, "encode", None)
            assert post(url).status_code == 429
        assert running.result().status_code == 200
        assert waiting.result().status_code == 200


def test_long_texts_do_not_hold_up_short_ones(target, monkeypatch):
    """More long ones than threads tokenize; they count as waiting."""
    may_encode = threading.Event()
    encode = server.encode

    def encode_slowly(tokenizer, texts, *, special):
        assert len(texts[0]) < 1000 or may_encode.wait(60)
        return encode(tokenizer, texts, special=special)

    monkeypatch.setattr(server, "encode", encode_slowly)
    text = "sea " * 10_000
    with serving(target, waiting=5, service={"max_bytes": 1 << 20}) as (url, _), ThreadPoolExecutor(5) as pool:
        long = [pool.submit(post, url, prompt=text) for _ in range(4)]
        short = [post(url, prompt="Hi") for _ in range(3)]
        assert {reply.status_code for reply in short} == {200}
        assert not any(reply.done() for reply in long)
        long.append(pool.submit(post, url, prompt=text))
        wait_until(lambda: status_of(url, "ready") == 503)
        assert post(url, prompt="Hi").status_code == 429
        may_encode.set()
        for reply in long:
            assert_too_long(reply.result())
        assert status_of(url, "ready") == 200


# Metrics


def test_metrics_have_a_text_and_a_type_each(target):
    with serving(target) as (url, _):
        post(url, max_tokens=5)
        httpx.post(url + PLAIN, json={})
        reply = httpx.get(f"{url}/metrics")
        values = metrics_of(url)
    assert reply.headers["content-type"].startswith("text/plain; version=")
    texts = set(re.findall(r"^# HELP (\w+) \S", reply.text, re.MULTILINE))
    types = set(re.findall(r"^# TYPE (\w+) \S", reply.text, re.MULTILINE))
    families = set()
    for name_and_labels in values:
        name = name_and_labels.partition("{")[0]
        families.add(name if name in texts else re.sub(r"_(bucket|sum|count)$", "", name))
    assert families <= texts
    assert texts == types
    assert values["keepsight_queue_time_seconds_count"] == 1
    assert values["keepsight_time_to_first_token_seconds_count"] == 1
    assert values["keepsight_time_between_tokens_seconds_count"] == 4
    assert values['keepsight_time_between_tokens_seconds_bucket{le="+Inf"}'] == 4
    assert values["keepsight_time_between_tokens_seconds_sum"] > 0
    assert values['keepsight_refused_total{status="400"}'] == 1
    assert values["keepsight_generated_tokens_total"] == 5
    assert values["process_resident_memory_bytes"] > 1 << 20
    assert values["process_open_fds"] > 3


def test_counters_never_fall(target):
    with serving(target) as (url, _):
        before = metrics_of(url)
        counters = [name for name in before if re.search("_total|_count|_sum|_bucket", name)]
        assert len(counters) > 30
        for tokens in (1, 3, 0):
            post(url, max_tokens=tokens)
            after = metrics_of(url)
            assert all(after[name] >= before[name] for name in counters)
            before = after
