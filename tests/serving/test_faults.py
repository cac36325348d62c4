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
from tests.serving.loopback import serving, wait_until

CHAT, PLAIN = "/v1/chat/completions", "/v1/completions"
ASKED: dict[str, Any] = {"model": "tiny", "prompt": "The ship sailed on. " * 20, "max_tokens": 4}


@contextmanager
def held_prefill(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Prompts are read once the event is set."""
    may_read, start = threading.Event(), SnapKV.start

    def held(self, *given, **options):
        assert may_read.wait(60)
        return start(self, *given, **options)

    with monkeypatch.context() as patch:
        patch.setattr(SnapKV, "start", held)
        try:
            yield may_read
        finally:
            may_read.set()


def metrics_of(url: str) -> dict[str, float]:
    lines = httpx.get(f"{url}/metrics").text.splitlines()
    return {name: float(value) for name, value in (line.rsplit(" ", 1) for line in lines if line[0] != "#")}


# Streams


@pytest.mark.parametrize("path", [PLAIN, CHAT])
def test_a_stream_begins_before_its_prompt_is_read(target, monkeypatch, path):
    monkeypatch.setattr(server, "_PING", 0.05)
    chat = {"model": "tiny", "messages": [{"role": "user", "content": "Hello"}]}
    asked = chat if path == CHAT else dict(ASKED)
    asked |= {"stream": True, "max_tokens": 4}
    with (
        serving(target) as (url, engine),
        held_prefill(monkeypatch) as may_read,
        httpx.stream("POST", url + path, json=asked, timeout=60) as reply,
    ):
        lines = reply.iter_lines()
        first = list(itertools.islice(lines, 4))
        assert first == [""] * 4, "an empty line at once, further ones while there is no text, and no event"
        assert engine.totals.generated_tokens == 0
        may_read.set()
        rest = [line.removeprefix("data: ") for line in lines if line.startswith("data: ")]
    assert rest[-1] == "[DONE]" and json.loads(rest[-2])["choices"][0]["finish_reason"] == "length"


# Failures


@pytest.mark.parametrize("stream", [False, True])
def test_a_failure_is_logged_with_its_cause(target, monkeypatch, caplog, stream):
    def fail(self, *given, **options):
        raise OSError(28, "No space left on device")

    with serving(target) as (url, _), caplog.at_level(logging.ERROR):
        with monkeypatch.context() as patch:
            patch.setattr(SnapKV, "start", fail)
            reply = httpx.post(url + PLAIN, json=ASKED | {"stream": stream}, timeout=60)
        again = httpx.post(url + PLAIN, json=ASKED, timeout=60)
    (record,) = [record for record in caplog.records if record.name.startswith("keepsight")]
    line = record.getMessage()
    assert "No space left on device" in line and PLAIN in line and "500" in line and "\n" not in line
    assert reply.status_code == (200 if stream else 500) and again.status_code == 200
    assert "No space left" not in reply.text and "OSError" in reply.text, "clients learn the kind alone"


def test_a_handler_that_fails_is_logged(target, monkeypatch, caplog):
    def fail(*given):
        raise KeyError("no such field")

    monkeypatch.setattr(server, "prompt_of", fail)
    asked = {"model": "tiny", "messages": [{"role": "user", "content": "a"}]}
    with serving(target) as (url, _), caplog.at_level(logging.ERROR):
        reply = httpx.post(url + CHAT, json=asked)
    assert reply.status_code == 500 and reply.json()["error"]["type"] == "server_error"
    assert any("no such field" in record.getMessage() for record in caplog.records)


def test_a_path_writes_no_lines_into_the_log(target, caplog):
    with serving(target) as (url, engine), caplog.at_level(logging.ERROR):
        engine.drain()
        assert httpx.post(f"{url}{PLAIN}", json=ASKED).status_code == 503
        httpx.post(f"{url}{PLAIN}%0AERROR%20forged", json=ASKED)
    assert all("\n" not in record.getMessage() for record in caplog.records)


def test_an_engine_that_ends_leaves_no_request_waiting(target, monkeypatch, caplog):
    with serving(target, rows=1) as (url, engine), ThreadPoolExecutor(3) as pool:
        assert httpx.get(f"{url}/ready").status_code == 200 == httpx.head(f"{url}/health").status_code
        with held_prefill(monkeypatch) as may_read:
            replies = [pool.submit(httpx.post, url + PLAIN, json=ASKED, timeout=60) for _ in range(3)]
            wait_until(lambda: engine.load == (1, 2))

            def end(self):
                raise SystemExit("no such device")

            monkeypatch.setattr(Engine, "_decode", end)
            may_read.set()
        assert [reply.result().status_code for reply in replies] == [500] * 3
        wait_until(lambda: httpx.get(f"{url}/health").status_code == 503)
        assert httpx.get(f"{url}/ready").status_code == 503
        late = httpx.post(url + PLAIN, json=ASKED, timeout=60)
        assert late.status_code == 503 and "restart" in late.json()["error"]["message"]
    assert any(record.exc_info and "no such device" in str(record.exc_info[1]) for record in caplog.records)


def test_it_is_not_ready_while_the_queue_is_full(target, monkeypatch):
    with serving(target, rows=1, waiting=1) as (url, engine), ThreadPoolExecutor(2) as pool:
        with held_prefill(monkeypatch):
            replies = [pool.submit(httpx.post, url + PLAIN, json=ASKED, timeout=60)]
            wait_until(lambda: engine.load == (1, 0))
            assert httpx.get(f"{url}/ready").status_code == 200
            replies.append(pool.submit(httpx.post, url + PLAIN, json=ASKED, timeout=60))
            wait_until(lambda: engine.load == (1, 1))
            assert httpx.get(f"{url}/ready").status_code == 503
            assert httpx.get(f"{url}/health").status_code == 200
            refused = httpx.post(url + PLAIN, json=ASKED)
            assert refused.status_code == 429 and refused.headers["retry-after"] == "1"
        assert [reply.result().status_code for reply in replies] == [200, 200]
        assert httpx.get(f"{url}/ready").status_code == 200


# Prompts that are too long, and bodies that cost much


def refused_as_too_long(reply: httpx.Response) -> str:
    error = reply.json()["error"]
    assert reply.status_code == 400 and error["type"] == "invalid_request_error"
    assert error["code"] == "context_length_exceeded" and "maximum context length" in error["message"]
    assert "prompt is too long" in error["message"], "by which LangChain knows it"
    return str(error["message"])


def test_prompts_that_are_too_long(target):
    with serving(target, service={"max_bytes": 1 << 22}) as (url, _):
        ids = {"model": "tiny", "prompt": [5] * 4096, "max_tokens": 1}
        assert "4096" in refused_as_too_long(httpx.post(url + PLAIN, json=ids))
        refused_as_too_long(httpx.post(url + PLAIN, json=ids | {"prompt": [5] * 500_000}))
        refused_as_too_long(httpx.post(url + PLAIN, json=ids | {"prompt": "The ship sailed on. " * 1500}))
        many = [{"role": "user", "content": ""}] * 5000
        refused_as_too_long(httpx.post(url + CHAT, json={"model": "tiny", "messages": many}))
    with serving(target, max_prompt_tokens=50) as (url, _):
        assert "max_prompt_tokens" in refused_as_too_long(httpx.post(url + PLAIN, json=ASKED))


def test_texts_beyond_all_prompts_are_not_tokenized(target, monkeypatch):
    monkeypatch.setattr(server, "encode", None)
    text = "sea " * 200_000
    with serving(target, service={"max_bytes": 1 << 22}) as (url, _):
        refused_as_too_long(httpx.post(url + PLAIN, json=ASKED | {"prompt": text}))
        messages: list[dict[str, Any]] = [{"role": "user", "content": [{"type": "text", "text": text}]}]
        refused_as_too_long(httpx.post(url + CHAT, json={"model": "tiny", "messages": messages}))
        calls = [{"id": "a", "type": "function", "function": {"name": "sea", "arguments": {"text": text}}}]
        messages = [{"role": "assistant", "content": None, "tool_calls": calls}]
        assert httpx.post(url + CHAT, json={"model": "tiny", "messages": messages}).status_code == 400


def test_a_long_history_of_tools_is_rendered_twice(target, monkeypatch):
    """Once with the marks of all messages that a template may leave out."""
    rendered, chat_text = list[int](), requests.chat_text

    def counted(tokenizer, turns):
        rendered.append(len(turns))
        return chat_text(tokenizer, turns)

    monkeypatch.setattr(requests, "chat_text", counted)
    messages = [{"role": "user", "content": "a"}, *[{"role": "tool", "content": "b"}] * 30]
    asked = {"model": "tiny", "messages": messages, "max_tokens": 1}
    with serving(target) as (url, _):
        assert httpx.post(url + CHAT, json=asked, timeout=60).status_code == 200
    assert rendered == [31, 31]


def test_nothing_is_tokenized_while_the_queue_is_full(target, monkeypatch):
    with serving(target, rows=1, waiting=1) as (url, engine), ThreadPoolExecutor(2) as pool:
        with held_prefill(monkeypatch), monkeypatch.context() as patch:
            replies = [pool.submit(httpx.post, url + PLAIN, json=ASKED, timeout=60)]
            wait_until(lambda: engine.load == (1, 0))
            replies.append(pool.submit(httpx.post, url + PLAIN, json=ASKED, timeout=60))
            wait_until(lambda: engine.load == (1, 1))
            patch.setattr(server, "encode", None)
            assert httpx.post(url + PLAIN, json=ASKED).status_code == 429
        assert [reply.result().status_code for reply in replies] == [200, 200]


def test_long_texts_do_not_hold_up_short_ones(target, monkeypatch):
    """More long ones than threads tokenize; they count as waiting."""
    may_encode, encode = threading.Event(), server.encode

    def slow(tokenizer, texts, *, special):
        assert len(texts[0]) < 1000 or may_encode.wait(60)
        return encode(tokenizer, texts, special=special)

    monkeypatch.setattr(server, "encode", slow)
    asked = ASKED | {"prompt": "sea " * 10_000}
    with serving(target, waiting=5, service={"max_bytes": 1 << 20}) as (url, _), ThreadPoolExecutor(5) as pool:
        replies = [pool.submit(httpx.post, url + PLAIN, json=asked, timeout=60) for _ in range(4)]
        short = [httpx.post(url + PLAIN, json=ASKED | {"prompt": "Hi"}, timeout=60) for _ in range(3)]
        assert {reply.status_code for reply in short} == {200} and not any(reply.done() for reply in replies)
        replies.append(pool.submit(httpx.post, url + PLAIN, json=asked, timeout=60))
        wait_until(lambda: httpx.get(f"{url}/ready").status_code == 503)
        assert httpx.post(url + PLAIN, json=ASKED | {"prompt": "Hi"}).status_code == 429
        may_encode.set()
        for reply in replies:
            refused_as_too_long(reply.result())
        assert httpx.get(f"{url}/ready").status_code == 200


# Metrics


def test_metrics_have_a_text_and_a_type_each(target):
    with serving(target) as (url, _):
        httpx.post(url + PLAIN, json=ASKED | {"max_tokens": 5})
        httpx.post(url + PLAIN, json={})
        reply = httpx.get(f"{url}/metrics")
        values = metrics_of(url)
    assert reply.headers["content-type"].startswith("text/plain; version=")
    names = {re.split(r"[{ ]", line)[0] for line in reply.text.splitlines() if line[0] != "#"}
    texts, types = (set(re.findall(rf"^# {kind} (\w+) \S", reply.text, re.MULTILINE)) for kind in ("HELP", "TYPE"))
    families = {re.sub(r"_(bucket|sum|count)$", "", name) if name not in texts else name for name in names}
    assert families <= texts == types
    assert values["keepsight_queue_time_seconds_count"] == values["keepsight_time_to_first_token_seconds_count"] == 1
    assert values["keepsight_time_between_tokens_seconds_count"] == 4
    assert values['keepsight_time_between_tokens_seconds_bucket{le="+Inf"}'] == 4
    assert values["keepsight_time_between_tokens_seconds_sum"] > 0
    assert values['keepsight_refused_total{status="400"}'] == 1 and values["keepsight_generated_tokens_total"] == 5
    assert values["process_resident_memory_bytes"] > 1 << 20 and values["process_open_fds"] > 3


def test_counters_never_fall(target):
    with serving(target) as (url, _):
        before = metrics_of(url)
        for tokens in (1, 3, 0):
            httpx.post(url + PLAIN, json=ASKED | {"max_tokens": tokens})
            after = metrics_of(url)
            counters = [name for name in before if re.search("_total|_count|_sum|_bucket", name)]
            assert all(after[name] >= before[name] for name in counters) and len(counters) > 30
            before = after
