"""Servers that reply with anything: the answer is the first right reply's, or one line says why there is none."""

import json
import os
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from random import Random
from typing import Any
from unittest.mock import patch

from keepsight import endpoint
from keepsight.data_gen.backends import Decoding, Rendered, Server
from keepsight.endpoint import ServerSettings
from keepsight.errors import BadRow, UserError
from keepsight.models.targets import Target, load_target
from tests.faults.texts import Verdict, hostile, judged
from tests.faults.world import World

_KEY = "KEEPSIGHT_FAULTS_KEY"
_TRIES = 4
_IDS = [30, 31, 32]
_WRONG: dict[str, list[Any]] = {
    "text": [None, 7, ["a"], {}],
    "token_ids": [[7.9], [True], "789", [-1], [2**40], [None], {}],
    "finish_reason": ["abort", "error", 7, []],
}
_NO_COMPLETION: tuple[Any, ...] = (
    *(None, 7, [], "text", {}, {"choices": None}, {"choices": []}, {"choices": [None]}, {"choices": {}}),
    *({"choices": [{"text": "a", "token_ids": [7]} | {key: wrong}]} for key, each in _WRONG.items() for wrong in each),
    *({"choices": [{"text": "a", "token_ids": [7]}], "usage": usage} for usage in ("n/a", 7, {"prompt_tokens": "9"})),
)
_NO_JSON = (b"", b"{", b"[" * 90_000, b"\xff\xfe", b"<html>", b"NaN", b'{"choices": 1e999}')
_NO_HTTP = (b"", b"\r\n\r\n", b"HTTP/9 x y\r\n\r\n", b"SSH-2.0\r\n", b"\x00" * 99)
_AGAIN = [f"Retry-After: {after}\r\n" for after in ("0", "-1", "nan", "x")]


def servers(world: World, rng: Random, count: int) -> Iterator[Verdict]:
    """Each prompt meets a few replies drawn at random, one a request."""
    target = load_target(str(world.folder / "tiny"), device="cpu")
    with patch.object(endpoint, "FIRST_WAIT", 0.0), patch("openai._base_client.INITIAL_RETRY_DELAY", 0.0):
        for _ in range(count):
            names = [rng.choice([*_REPLIES]) for _ in range(_TRIES)]
            number = rng.getrandbits(64)
            seed = rng.random()
            key = rng.choice(("", f"sk-{number}", f"k-{number}\n"))
            yield judged((names, key), partial(_ask, target, names, key, Random(seed)))


def _ask(target: Target, names: list[str], key: str, rng: Random) -> str:
    secret = key.strip()
    replies = [_REPLIES[name](rng, secret) for name in names]
    last_reply = next((name for name in names if name in ("right", *_FINAL)), "")
    with _serving(replies) as url, patch.dict(os.environ, {_KEY: key}):
        server = Server(target, ServerSettings(url, "tiny", key=_KEY, tries=_TRIES))
        try:
            ((_, answer),) = next(server([Rendered(0, "x", [5, 6, 7], None)], Decoding(8)))
            message = str(answer) if isinstance(answer, BadRow) else ""
        except UserError as error:
            answer = None
            message = str(error)
    assert not secret or secret not in message, f"the key is shown: {message}"
    assert len(message.splitlines()) <= 1, f"not one line: {message}"
    assert len(message) < 2000, f"a long line: {message}"
    if last_reply == "right":
        assert answer == _IDS, f"{answer} instead of {_IDS}; {message}"
        return "right"
    assert answer is None or isinstance(answer, BadRow), f"{answer} of no right reply"
    return "one line"


@contextmanager
def _serving(replies: list[bytes]) -> Iterator[str]:
    """A server that gives each request the next reply, dripping, and the last one to all further requests."""
    listener = socket.create_server(("127.0.0.1", 0))
    remaining = [*replies]
    lock = threading.Lock()

    def reply(connection: socket.socket) -> None:
        with connection, suppress(OSError):
            if not _is_request(connection):
                return
            with lock:
                data = remaining.pop(0) if len(remaining) > 1 else remaining[0]
            step = max(99, len(data) // 3)
            for start in range(0, len(data), step):
                connection.sendall(data[start : start + step])
                threading.Event().wait(0.002)

    def serve() -> None:
        with suppress(OSError):
            while True:
                threading.Thread(target=reply, args=(listener.accept()[0],), daemon=True).start()

    threading.Thread(target=serve, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}/v1"
    finally:
        listener.close()


def _is_request(connection: socket.socket) -> bool:
    """Whether a complete request comes; a connection that is closed before may lose the reply."""
    request = b""
    while received := connection.recv(65536):
        request += received
        head, end_of_head, body = request.partition(b"\r\n\r\n")
        if end_of_head:
            _, _, after_name = head.lower().partition(b"content-length:")
            if len(body) >= int(after_name.split()[0]):
                return True
    return False


def _http(body: Any, status: str = "200 OK", extra: str = "") -> bytes:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    return f"HTTP/1.1 {status}\r\nConnection: close\r\nContent-Length: {len(data)}\r\n{extra}\r\n".encode() + data


def _right(rng: Random, key: str) -> bytes:
    reason = rng.choice(("stop", "eos_token", "length", "", None))
    choice = {"text": hostile(rng), "token_ids": _IDS, "finish_reason": reason}
    usage = rng.choice((None, {}, {"prompt_tokens": 3}, {"prompt_tokens": 3, "completion_tokens": 8, "x": [1]}))
    return _http({"id": hostile(rng), "choices": [choice], "usage": usage, "other": {"deep": [[[]]]}})


_REPLIES: dict[str, Callable[[Random, str], bytes]] = {
    "right": _right,
    "no completion": lambda rng, key: _http(rng.choice(_NO_COMPLETION)),
    "no JSON": lambda rng, key: _http(rng.choice(_NO_JSON)),
    "no HTTP": lambda rng, key: rng.choice(_NO_HTTP),
    "cut": lambda rng, key: _right(rng, key)[:-40],
    "large head": lambda rng, key: _http({}, extra=f"X: {'a' * 70_000}\r\n"),
    "many heads": lambda rng, key: _http({}, extra="X: a\r\n" * 200),
    "bad chunks": lambda rng, key: b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n{}",
    "busy": lambda rng, key: _http({}, "429 Busy", rng.choice(_AGAIN)),
    "broken": lambda rng, key: _http({"error": f"bad key {key} " * rng.randint(1, 60)}, "503 Unavailable"),
    "unauthorized": lambda rng, key: _http({"error": f"bad key {key} " * rng.randint(1, 60)}, "401 Unauthorized"),
    "redirect": lambda rng, key: _http(b"", "302 Found", "Location: http://127.0.0.1:9/v1/completions\r\n"),
}
_FINAL = ("unauthorized", "redirect")
"""What is not asked again."""
