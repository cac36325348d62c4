"""Servers of completions on the loopback: one played by a test, with keepsight's client of it, and a real one."""

import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.error import URLError
from urllib.request import urlopen

import torch

from keepsight.data_gen.backends import Decoding, Rendered, Server, ServerSettings, answer
from keepsight.models.targets import Target

Reply = tuple[int, dict[str, Any]] | None
Say = Callable[[dict[str, Any]], Reply]


def prompts(*lengths: int) -> list[Rendered]:
    generator = torch.Generator().manual_seed(0)
    return [
        Rendered(index, "test", torch.randint(6, 300, (length,), generator=generator).tolist(), None)
        for index, length in enumerate(lengths)
    ]


@dataclass
class Heard:
    """What a server was asked, and how many requests it had at once at most."""

    url: str
    bodies: list[dict[str, Any]] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    at_once: int = 0
    most_at_once: int = 0
    lock: Any = field(default_factory=threading.Lock)


@contextmanager
def server(say: Say, port: int = 0, path: str = "/v1/completions") -> Iterator[Heard]:
    """A server whose replies at a path `say` gives, as a status and a body; None breaks the connection."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            with heard.lock:
                heard.bodies.append(body)
                heard.headers.append({name.lower(): value for name, value in self.headers.items()})
                heard.at_once += 1
                heard.most_at_once = max(heard.most_at_once, heard.at_once)
            reply = say(body) if self.path == path else (404, {"error": "no such path"})
            with heard.lock:
                heard.at_once -= 1
            if reply is None:
                self.connection.close()
                return
            status, content = reply
            data = json.dumps(content).encode()
            self.send_response(status)
            if 300 <= status < 400:
                self.send_header("Location", f"{heard.url}/elsewhere")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, format: str, *args: object) -> None:
            pass

        def handle(self) -> None:
            with suppress(OSError, ValueError):  # the client was killed, or the connection was broken on purpose
                super().handle()

    http_server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
    http_server.daemon_threads = True
    heard = Heard(f"http://127.0.0.1:{http_server.server_port}/v1")
    threading.Thread(target=http_server.serve_forever, args=(0.01,), daemon=True).start()
    try:
        yield heard
    finally:
        http_server.shutdown()
        http_server.server_close()


def speaks(target: Target, takes: str = "ids and back") -> Say:
    """The target itself behind a server that takes prompts as ids, and returns ids, or text only."""
    lock = threading.Lock()

    def say(body: dict[str, Any]) -> Reply:
        prompt = body["prompt"]
        if "return_token_ids" in body and takes != "ids and back":
            return 422, {"error": "unknown field return_token_ids"}
        if takes == "text" and not isinstance(prompt, str):
            return 400, {"detail": "prompt must be a string."}
        assert body["temperature"] == 0.0
        assert body["model"] == "served"
        prompt_ids = target.tokenizer(prompt)["input_ids"] if isinstance(prompt, str) else prompt
        with lock:
            (answer_ids,) = answer(target, [Rendered(0, "", prompt_ids, None)], Decoding(body["max_tokens"]))
        ended = answer_ids[-1] in target.end_tokens
        choice: dict[str, Any] = {
            "text": target.tokenizer.decode(answer_ids, skip_special_tokens=True),
            "finish_reason": "stop" if ended else "length",
        }
        if takes == "ids and back":
            choice["token_ids"] = answer_ids
        return 200, {"choices": [choice], "usage": {"prompt_tokens": len(prompt_ids)}}

    return say


def client(target: Target, heard: Heard, **changes: Any) -> Server:
    settings: dict[str, Any] = {"url": heard.url, "model": "served", "tries": 3, **changes}
    return Server(target, ServerSettings(**settings))


def answers_of(backend: Server, asked: list[Rendered], longest: int = 12) -> dict[int, list[int]]:
    """The answers by the prompts' indices; none is missing, skipped or given twice."""
    answers: dict[int, list[int]] = {}
    for ready in backend(asked, Decoding(longest)):
        for prompt, ids in ready:
            assert isinstance(ids, list)
            assert prompt.index not in answers
            answers[prompt.index] = ids
    assert len(answers) == len(asked)
    return answers


@contextmanager
def serving(model: Path, port: int, folder: Path | None = None) -> Iterator["subprocess.Popen[bytes]"]:
    """`transformers serve` of a model's folder, which is named as from a working directory."""
    command = [sys.executable, "-m", "transformers.cli.transformers", "serve", str(model), "--device", "cpu"]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen([*command, "--dtype", "float32", "--port", str(port)], env=environment, cwd=folder)
    try:
        deadline = time.monotonic() + 180
        while process.poll() is None and time.monotonic() < deadline:
            try:
                urlopen(f"http://127.0.0.1:{port}/health", timeout=2).close()
                break
            except (URLError, OSError):
                time.sleep(0.3)
        yield process
    finally:
        process.kill()
        process.wait()


def free_port() -> int:
    """A port of the loopback that nobody listens at."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
