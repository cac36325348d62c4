"""Requests to a server that stops listening, or takes long, before it replies."""

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from keepsight import watched
from keepsight.endpoint import Endpoint, EndpointError

REPLY = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 2\r\nConnection: close\r\n\r\n{}"


@pytest.fixture(autouse=True)
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("keepsight.endpoint.FIRST_WAIT", 0.0)
    monkeypatch.setattr(watched, "LOOK", 0.1)


@contextmanager
def holding(listens: bool, reply_after: float) -> Iterator[int]:
    """A port whose server takes one request, may stop listening, and replies later."""
    done = threading.Event()
    listener = socket.create_server(("127.0.0.1", 0))
    port = int(listener.getsockname()[1])

    def serve() -> None:
        connection, _ = listener.accept()
        connection.recv(65536)
        if not listens:
            listener.close()
        done.wait(reply_after)
        connection.sendall(REPLY)
        connection.close()

    threading.Thread(target=serve, daemon=True).start()
    try:
        yield port
    finally:
        done.set()
        listener.close()


def ask(port: int, patience: float = 30.0) -> object:
    return Endpoint(f"http://127.0.0.1:{port}", "NO_KEY", tries=1, patience=patience).post("x", {}, lambda reply: reply)


def test_a_server_that_keeps_a_request_and_stops_listening() -> None:
    """As vLLM's on SIGTERM: its engine is gone, it waits for its connections to close, and no reply comes."""
    began = time.monotonic()
    with holding(listens=False, reply_after=30) as port, pytest.raises(EndpointError, match="Connection refused"):
        ask(port)
    assert time.monotonic() - began < 10


def test_a_server_that_takes_long_is_waited_for() -> None:
    with holding(listens=True, reply_after=0.6) as port:
        assert ask(port) == {}


def test_patience_ends() -> None:
    with holding(listens=True, reply_after=30) as port, pytest.raises(EndpointError, match="timed out"):
        ask(port, patience=0.3)
