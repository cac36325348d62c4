"""Our own server on loopback, over a tiny model."""

import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import uvicorn

from keepsight import SnapKV
from keepsight.serving.engine import Engine
from keepsight.serving.listener import Listening, server_of
from keepsight.serving.server import Service

METHOD = SnapKV(40, window=8)
LISTENING = Listening(grace=5)


@contextmanager
def running(app: Any, engine: Engine, options: Listening = LISTENING) -> Iterator[tuple[str, uvicorn.Server]]:
    """The URL of an application in a thread, and its server."""
    listening = socket.create_server(("127.0.0.1", 0))
    url = f"http://127.0.0.1:{listening.getsockname()[1]}"
    server = server_of(app, engine, options)
    thread = threading.Thread(target=server.run, args=([listening],))
    thread.start()
    try:
        yield url, server
    finally:
        server.should_exit = True
        thread.join()


@contextmanager
def serving(
    target: Any,
    *,
    key: str | None = None,
    answer_tokens: int = 2000,
    listening: Listening = LISTENING,
    service: dict[str, Any] | None = None,
    **options: Any,
) -> Iterator[tuple[str, Engine]]:
    """The URL of a server of the model `tiny`, and its engine, of at most four answers at a time."""
    options = {"rows": 4} | options
    with Engine(target.model, METHOD, **options) as engine:
        limits: dict[str, Any] = {"answer_tokens": answer_tokens, "max_bytes": 1 << 16} | (service or {})
        app = Service(engine, target, name="tiny", key=key, **limits).app()
        with running(app, engine, listening) as (url, _):
            yield url, engine


def wait_until(condition: Callable[[], bool], seconds: float = 20.0) -> None:
    """Wait until a condition holds; an AssertionError if it never does."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "the condition never held"
        time.sleep(0.01)


def events_of(text: str) -> list[str]:
    """The data of a stream's events."""
    return [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: ")]


def assert_field_refused(reply: httpx.Response, field: str) -> None:
    """Fail unless a request was refused with 400 and an error that names a field."""
    assert reply.status_code == 400, reply.text
    assert reply.json()["error"]["param"] == field, reply.text


def metrics_of(url: str, **headers: str) -> dict[str, float]:
    """The metrics of a server, by their names with their labels."""
    values = {}
    for line in httpx.get(f"{url}/metrics", headers=headers).text.splitlines():
        if not line.startswith("#"):
            name, value = line.rsplit(" ", 1)
            values[name] = float(value)
    return values
