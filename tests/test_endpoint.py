"""Requests to a server that takes long, moves, fails, or replies with anything but JSON."""

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import pytest

from keepsight import endpoint
from keepsight.endpoint import Endpoint, EndpointError, check_url
from tests.refused import refused

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nConnection: close\r\n"
REPLY = HEAD + b"Content-Length: 2\r\n\r\n{}"


@pytest.fixture(autouse=True)
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endpoint, "FIRST_WAIT", 0.0)
    monkeypatch.setattr("openai._base_client.INITIAL_RETRY_DELAY", 0.0)


@contextmanager
def serving(*parts: bytes, pause: float = 0.0, requests: list[bytes] | None = None) -> Iterator[int]:
    """A port whose server replies to every request, which must be {}, with some parts, each after a pause."""
    done = threading.Event()
    listener = socket.create_server(("127.0.0.1", 0))

    def reply(connection: socket.socket) -> None:
        with connection, suppress(OSError):
            request = b""
            while not request.endswith(b"\r\n\r\n{}"):
                received = connection.recv(65536)
                if not received:
                    return
                request += received
            if requests is not None:
                requests.append(request)
            for part in parts:
                done.wait(pause)
                connection.sendall(part)

    def serve() -> None:
        with suppress(OSError):
            while True:
                threading.Thread(target=reply, args=(listener.accept()[0],), daemon=True).start()

    threading.Thread(target=serve, daemon=True).start()
    try:
        yield int(listener.getsockname()[1])
    finally:
        done.set()
        listener.close()


def ask(port: int, tries: int = 1, key: str = "NO_KEY", timeout: float = 30.0) -> object:
    server = Endpoint(f"http://127.0.0.1:{port}", key, tries)
    server.client.timeout = timeout
    return server.post("x", {}, lambda reply: reply)


def test_a_server_that_takes_long_is_waited_for_until_the_time_limit() -> None:
    with serving(REPLY, pause=0.6) as port:
        assert ask(port) == {}
    began = time.monotonic()
    with serving(REPLY, pause=30) as port, pytest.raises(EndpointError) as caught:
        ask(port, timeout=0.3)
    assert caught.value.status == 0
    assert 0.3 <= time.monotonic() - began < 20


def test_retry_after_is_waited_for() -> None:
    requests: list[bytes] = []
    busy = b"HTTP/1.1 429 Busy\r\nRetry-After: 0.4\r\nContent-Length: 2\r\n\r\n{}"
    began = time.monotonic()
    with serving(busy, requests=requests) as port, pytest.raises(EndpointError) as caught:
        ask(port, tries=3)
    assert caught.value.status == 0
    assert "429" in caught.value.body
    assert len(requests) == 3
    assert time.monotonic() - began >= 0.8


@pytest.mark.parametrize("reply", [b"HTTP/1.1 503 Busy\r\nContent-Length: 0\r\n\r\n", REPLY], ids=["busy", "malformed"])
def test_no_request_is_sent_once_it_is_stopped(reply: bytes) -> None:
    stopped = threading.Event()

    class Stops(list[bytes]):
        def append(self, request: bytes) -> None:
            super().append(request)
            stopped.set()

    requests = Stops()
    with serving(reply, requests=requests) as port, pytest.raises(EndpointError):
        Endpoint(f"http://127.0.0.1:{port}", "NO_KEY", 5, stopped).post("x", {}, lambda reply: reply["choices"])
    assert len(requests) == 1


def test_a_proxy_that_cannot_be_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HTTP_PROXY", "gopher://127.0.0.1:9")
    with pytest.raises(EndpointError, match="gopher"):
        Endpoint("http://127.0.0.1:9", "NO_KEY").post("x", {}, lambda reply: reply)


@pytest.mark.parametrize(
    "reply",
    [
        HEAD + b"Content-Length: 1000\r\n\r\n{}",  # IncompleteRead
        b"HTTP/1.1 abc\r\n\r\n",
        b"not http at all\r\n\r\n",
        HEAD + b"X-Long: " + b"a" * 200_000 + b"\r\n\r\n{}",
        HEAD + b"\r\n" + b"[" * 100_000,
        HEAD + b"\r\n\xff\xfe",
        HEAD + b"\r\n<html>",
        b"HTTP/1.1 503 Busy\r\nRetry-After: tomorrow\r\nContent-Length: 99\r\n\r\nshort",
    ],
    ids=["cut", "status", "no http", "long header", "deep", "bytes", "html", "busy"],
)
def test_malformed_replies_are_retried_and_end_in_one_line(reply: bytes) -> None:
    requests: list[bytes] = []
    with serving(reply, requests=requests) as port, pytest.raises(EndpointError) as caught:
        ask(port, tries=3)
    assert len(requests) == 3
    assert caught.value.status == 0
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 400


def test_a_reply_has_a_largest_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endpoint, "_LARGEST", 1000)
    with (
        serving(HEAD + b"Content-Length: 2000\r\n\r\n" + b" " * 2000) as port,
        pytest.raises(EndpointError, match="too large"),
    ):
        ask(port)


@pytest.mark.parametrize("key", ["s3cret-key", "s3cret?+(-<k/y", "s3cret-key\n"])
@pytest.mark.parametrize("filling", [0, 285])
def test_a_key_is_sent_and_never_shown(key: str, filling: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Servers repeat it; the message's end may cut it."""
    monkeypatch.setenv("MY_KEY", key)
    requests: list[bytes] = []
    body = "x" * filling + ' {"error": "no key like ' + key.strip() + '"}'
    reply = f"HTTP/1.1 401 No\r\nContent-Length: {len(body)}\r\n\r\n{body}".encode()
    with serving(reply, requests=requests) as port, pytest.raises(EndpointError) as refused:
        ask(port, key="MY_KEY", tries=3)
    (request,) = requests
    assert f"authorization: bearer {key.strip()}\r\n".encode() in request.lower()
    assert "s3c" not in refused.value.body
    assert refused.value.status == 401


@pytest.mark.parametrize("status", [302, 307, 308])
def test_a_redirect_is_refused(status: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither the key nor the prompt goes to another host."""
    monkeypatch.setenv("MY_KEY", "s3cret")
    requests: list[bytes] = []
    with serving(REPLY, requests=requests) as other:
        moved = f"HTTP/1.1 {status} Moved\r\nLocation: http://localhost:{other}/x\r\nContent-Length: 0\r\n\r\n"
        with serving(moved.encode()) as port, pytest.raises(EndpointError) as caught:
            ask(port, key="MY_KEY")
    assert not requests
    assert caught.value.status == status


def test_a_key_with_control_characters_is_not_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_KEY", "a\nb")
    with pytest.raises(EndpointError) as caught:
        ask(9, key="MY_KEY")
    assert caught.value.status == 400
    assert "MY_KEY" in str(caught.value)


@pytest.mark.parametrize(
    "url", ["localhost:8000", "http://a:eight", "http://a:99999", "http://a:0", "http://", "http://[::1", "http://a b"]
)
def test_malformed_urls(url: str) -> None:
    with refused("server.url", "type"):
        check_url("server.url", url)


@pytest.mark.parametrize("url", ["http://a/v1?api-key=s3cret", "https://user:s3cret@a", "s3cret@a", "http://a/#s3cret"])
def test_a_url_holds_no_key(url: str) -> None:
    """It would be stored with an evaluation's settings, and shown in its report."""
    with refused("judge.url", "type") as caught:
        check_url("judge.url", url)
    assert "s3cret" not in str(caught.value)
