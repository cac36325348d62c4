"""A judge: an OpenAI-compatible endpoint on this machine that says what a test wants."""

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@dataclass
class Heard:
    """What the endpoint was asked.

    Attributes:
        url: Where it is.
        bodies: Of its requests, as JSON.
        headers: Of its requests.
    """

    url: str
    bodies: list[dict[str, Any]] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)


@contextmanager
def endpoint(say: Callable[[dict[str, Any]], str | int | tuple[int, str] | dict[str, Any]]) -> Iterator[Heard]:
    """An endpoint that answers a request with the text or choice of `say`, or a status of failure and its reason."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            assert self.path == "/v1/chat/completions"
            heard.bodies.append(body)
            heard.headers.append(dict(self.headers))
            said = say(body)
            status, said = said if isinstance(said, tuple) else (said, "no") if isinstance(said, int) else (200, said)
            choice = said if isinstance(said, dict) else {"message": {"role": "assistant", "content": said}}
            reply = {"choices": [choice]}
            data = json.dumps(reply if status == 200 else {"error": said}).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    heard = Heard(f"http://127.0.0.1:{server.server_port}/v1")
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield heard
    finally:
        server.shutdown()
        server.server_close()
