"""The end of a server, and bounds on its connections: no answer is lost without a word, and nobody shuts others out."""

import json
import resource
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from typing import Any

import httpx
import pytest

from keepsight.serving import listener
from keepsight.serving.engine import Engine
from keepsight.serving.listener import Listening
from keepsight.serving.server import Service
from tests.refused import refused
from tests.serving.loopback import METHOD, events_of, running, wait_until

PLAIN = "/v1/completions"
REQUEST: dict[str, Any] = {"model": "tiny", "prompt": "The ship sailed on. " * 20, "max_tokens": 3500}


@pytest.fixture(autouse=True)
def endless(target, monkeypatch):
    """The model never ends its answers."""
    monkeypatch.setattr(target.model.generation_config, "eos_token_id", None)


@contextmanager
def stoppable(target, options: Listening, read_timeout: float = 60) -> Iterator[tuple[str, Engine, Any]]:
    """The URL of a server that decodes one answer at a time, its engine, and uvicorn's server."""
    with Engine(target.model, METHOD, rows=1) as engine:
        service = Service(
            engine,
            target,
            name="tiny",
            key=None,
            answer_tokens=3500,
            max_bytes=1 << 16,
            read_timeout=read_timeout,
        )
        with running(service.app(), engine, options) as (url, server):
            yield url, engine, server


def streamed(url: str, **fields: Any) -> list[str]:
    """The data of the events of a streamed answer."""
    reply = httpx.post(url + PLAIN, json=REQUEST | {"stream": True} | fields, timeout=60)
    assert reply.status_code == 200
    return events_of(reply.text)


def post(url: str) -> httpx.Response:
    return httpx.post(url + PLAIN, json=REQUEST, timeout=60)


def test_waiting_requests_get_503_at_once_and_running_ones_finish(target, monkeypatch):
    may_decode = threading.Event()
    decode = Engine._decode

    def wait_and_decode(self):
        assert may_decode.wait(60)
        decode(self)

    monkeypatch.setattr(Engine, "_decode", wait_and_decode)
    may_decode.set()
    with stoppable(target, Listening(grace=60)) as (url, engine, server), ThreadPoolExecutor(3) as pool:
        decoded = pool.submit(streamed, url, max_tokens=40)
        wait_until(lambda: engine.totals.generated_tokens > 0)
        may_decode.clear()
        waiting = pool.submit(post, url)
        waiting_stream = pool.submit(streamed, url)
        wait_until(lambda: engine.load == (1, 2))
        server.should_exit = True

        reply = waiting.result()
        *_, error, end = waiting_stream.result()
        assert not decoded.done(), "it is still decoded"
        may_decode.set()
        assert reply.status_code == 503
        assert "shutting down" in reply.json()["error"]["message"]
        assert reply.headers["retry-after"] == "1"
        assert json.loads(error)["error"]["code"] == 503
        assert end == "[DONE]"

        *_, chunk, end = decoded.result()
        assert json.loads(chunk)["choices"][0]["finish_reason"] == "length"
        assert end == "[DONE]"
    assert engine.totals.generated_tokens == 40


def test_answers_that_outlast_the_grace_end_with_an_error(target):
    with stoppable(target, Listening(grace=1)) as (url, engine, server), ThreadPoolExecutor(1) as pool:
        stream = pool.submit(streamed, url)
        wait_until(lambda: engine.totals.generated_tokens > 0)
        start = time.monotonic()
        server.should_exit = True
        *texts, error, end = stream.result()
        assert time.monotonic() - start < 10
        assert texts
        assert json.loads(error)["error"]["code"] == 503
        assert end == "[DONE]"
        assert engine.totals.generated_tokens < 3500


def test_an_unstreamed_answer_that_outlasts_the_grace_is_a_503(target):
    with stoppable(target, Listening(grace=0)) as (url, engine, server), ThreadPoolExecutor(1) as pool:
        answer = pool.submit(post, url)
        wait_until(lambda: engine.totals.generated_tokens > 0)
        server.should_exit = True
        assert answer.result().status_code == 503


# Connections


def connected(url: str, request: bytes = b"") -> socket.socket:
    """A connection on which some bytes were sent."""
    host, _, port = url.removeprefix("http://").partition(":")
    connection = socket.create_connection((host, int(port)), timeout=20)
    connection.sendall(request)
    return connection


def received(connection: socket.socket) -> bytes:
    """All that comes until the server closes the connection."""
    reply = b""
    while part := connection.recv(4096):
        reply += part
    return reply


def head(length: int) -> bytes:
    lines = [f"POST {PLAIN} HTTP/1.1", "Host: localhost", "Content-Type: application/json", f"Content-Length: {length}"]
    return "\r\n".join([*lines, "", ""]).encode()


@pytest.mark.parametrize(
    ("request_bytes", "reply"),
    [
        (b"", b""),
        (b"GET /health HTTP/1.1\r\nHost: loc", b""),
        (b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n", b"HTTP/1.1 200"),
        (b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\nGET", b"HTTP/1.1 200"),
    ],
    ids=["nothing", "half of its head", "one request", "one and a half"],
)
def test_idle_connections_and_half_requests_are_closed(target, request_bytes, reply):
    options = Listening(grace=5, keep_alive=1, read_timeout=1)
    with stoppable(target, options) as (url, _, _), connected(url, request_bytes) as connection:
        start = time.monotonic()
        assert received(connection).startswith(reply)
        assert 0.5 < time.monotonic() - start < 10


def test_half_a_body_is_refused_and_a_slow_one_is_not_kept(target):
    options = Listening(grace=5, keep_alive=1, read_timeout=1)
    half = head(100) + b'{"model"'
    with stoppable(target, options, read_timeout=1) as (url, _, _), connected(url, half) as connection:
        start = time.monotonic()
        reply = received(connection)
        assert time.monotonic() - start < 10
        assert b"408" in reply.split(b"\r\n")[0]
        assert b"read_timeout" in reply


def test_bytes_after_a_refusal_do_not_keep_a_connection(target):
    """The body of a refused request, sent byte by byte."""
    options = Listening(grace=5, keep_alive=30, read_timeout=1)
    refused = b"POST / HTTP/1.1\r\nHost: evil.example\r\nContent-Length: 1000\r\n\r\n"
    with stoppable(target, options) as (url, _, _), connected(url, refused) as connection:
        assert connection.recv(4096).startswith(b"HTTP/1.1 403")
        start = time.monotonic()
        with pytest.raises(OSError):
            while time.monotonic() - start < 20:
                connection.sendall(b"x")
                time.sleep(0.1)


def test_idle_connections_make_room(target):
    with stoppable(target, Listening(grace=5, connections=4)) as (url, _, _), ExitStack() as held:
        connections = [held.enter_context(connected(url)) for _ in range(12)]
        wait_until(lambda: httpx.get(f"{url}/health", timeout=5).status_code == 200)
        assert connections[0].recv(1) == b"", "the one that has been idle longest"


def test_connections_beyond_the_limit_are_told_so(target):
    with stoppable(target, Listening(grace=1, connections=2)) as (url, engine, _), ExitStack() as held:
        for _ in range(2):
            held.enter_context(httpx.stream("POST", url + PLAIN, json=REQUEST | {"stream": True}, timeout=60))
        with connected(url) as connection:
            lines, _, body = received(connection).partition(b"\r\n\r\n")
        assert lines.startswith(b"HTTP/1.1 503")
        assert json.loads(body)["error"]["code"] == 503
        assert engine.load[0] == 1


def test_connections_stay_below_the_descriptors(monkeypatch):
    limits = [64, 1024]

    def set_limits(_, soft_and_hard):
        limits[:] = soft_and_hard

    monkeypatch.setattr(resource, "getrlimit", lambda _: tuple(limits))
    monkeypatch.setattr(resource, "setrlimit", set_limits)
    assert listener._within_descriptors(200) == 200
    assert 224 < limits[0] < 1024, "raised as far as needed"
    limits[:] = [64, 512]
    assert 300 < listener._within_descriptors(10_000) < 512 - 24
    assert limits == [512, 512]
    limits[:] = [8, 8]
    with refused("ulimit", "range"):
        listener._within_descriptors(10)
