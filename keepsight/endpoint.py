"""Requests to an OpenAI-compatible endpoint: JSON in, JSON out, retried while that may help."""

import json
import os
import socket
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from http.client import HTTPException
from queue import Empty, SimpleQueue
from typing import Any, TypeVar
from urllib.error import HTTPError
from urllib.parse import urlsplit
from urllib.request import HTTPRedirectHandler, Request, build_opener, getproxies, proxy_bypass

import pydantic_core

from keepsight.errors import UserError, require_whole

FIRST_WAIT = 2.0
"""Seconds before the second try; doubled for each further one."""
LONGEST_WAIT = 60.0
"""Seconds between two tries at most."""
LOOK = 10.0
"""Seconds after which a pending request checks that the server still listens: vLLM's, when it ends, keeps open
connections and never replies."""
_BUSY = (408, 425, 429)
"""Statuses below 500 after which another try may succeed."""
_LARGEST = 64 << 20
"""Bytes of a reply at most."""

Reply = TypeVar("Reply")


class EndpointError(Exception):
    """No usable reply.

    Attributes:
        status: HTTP status of a request that was refused for good; 0 where there was no reply, or a malformed one.
        wait: Seconds that the server asks to wait before the next try.
    """

    def __init__(self, reason: str, status: int = 0, wait: float = 0.0) -> None:
        super().__init__(reason)
        self.status, self.wait = status, wait


class _NoRedirects(HTTPRedirectHandler):
    """urllib would send the API key on to whatever host a redirect names."""

    def redirect_request(self, *_: object) -> None:
        return None


@dataclass(frozen=True)
class Endpoint:
    """Where requests go.

    Attributes:
        url: Such as http://localhost:8000/v1.
        key: Environment variable that holds the API key; none is sent where it is not set.
        tries: How often a request is sent before it is given up.
        patience: Seconds for one whole reply.
    """

    url: str
    key: str
    tries: int = 5
    patience: float = 600.0

    def post(
        self, path: str, body: Mapping[str, Any], read: Callable[[Any], Reply], stopped: threading.Event | None = None
    ) -> Reply:
        """Send a request and read its reply.

        Args:
            path: Appended to the URL.
            body: The request.
            read: Takes the reply's JSON and returns what is needed of it; a reply on which it fails is asked for again.
            stopped: Ends the waiting between tries.

        Raises:
            EndpointError: the request is refused, or no try brings a reply of the right form.
        """
        data, error = json.dumps(body).encode(), EndpointError("not asked")
        for attempt in range(self.tries):
            try:
                return read(pydantic_core.from_json(self._reply(path, data)))
            except EndpointError as refused:
                error = refused
                if error.status:
                    raise
            except (OSError, HTTPException, ValueError, LookupError, TypeError, AttributeError) as problem:
                error = EndpointError(self._shown(f"{type(problem).__name__}: {problem}"))
            wait = min(max(FIRST_WAIT * 2**attempt, error.wait), LONGEST_WAIT)
            if attempt + 1 < self.tries and (stopped or threading.Event()).wait(wait):
                break
        raise error

    def _reply(self, path: str, data: bytes) -> bytes:
        """One reply, within `patience` and while the server listens."""
        box = SimpleQueue[bytes | Exception]()
        threading.Thread(target=lambda: box.put(self._sent(path, data)), daemon=True).start()
        deadline = time.monotonic() + self.patience
        while True:
            try:
                reply = box.get(timeout=LOOK)
            except Empty:
                if time.monotonic() > deadline:
                    raise TimeoutError("timed out") from None
                self._check_listens()
                continue
            if isinstance(reply, Exception):
                raise reply
            return reply

    def _sent(self, path: str, data: bytes) -> bytes | Exception:
        try:
            request = Request(f"{self.url.rstrip('/')}/{path}", data, self._headers)
            with build_opener(_NoRedirects).open(request, timeout=self.patience) as response:
                reply = bytes(response.read(_LARGEST + 1))
                if len(reply) <= _LARGEST and response.length:
                    return ValueError("the reply is cut off")
                return reply if len(reply) <= _LARGEST else ValueError("the reply is too large")
        except HTTPError as refusal:
            return self._refused(refusal)
        except Exception as error:  # raised where the reply is waited for
            return error

    def _check_listens(self) -> None:
        host = urlsplit(self.url)
        if host.scheme in getproxies() and not proxy_bypass(host.hostname or ""):
            return
        port = host.port or {"http": 80, "https": 443}[host.scheme]
        with suppress(TimeoutError):  # it is busy
            socket.create_connection((host.hostname, port), timeout=LOOK).close()

    def _refused(self, refusal: HTTPError) -> EndpointError:
        said = ""
        with suppress(OSError, HTTPException):
            said = refusal.read(2000).decode(errors="replace")
        wait = 0.0
        with suppress(ValueError):  # a date
            wait = float(refusal.headers.get("Retry-After") or 0)
        passing = refusal.code >= 500 or refusal.code in _BUSY
        return EndpointError(self._shown(f"HTTPError: {refusal} {said}"), 0 if passing else refusal.code, wait)

    def _shown(self, text: str) -> str:
        """At most 300 characters on one line, without the key, which some servers repeat."""
        secret = self._secret
        for written in filter(None, (secret, json.dumps(secret)[1:-1])):
            text = text.replace(written, "***")
        return " ".join(text.split())[:300]

    @property
    def _secret(self) -> str:
        return os.environ.get(self.key, "").strip()

    @property
    def _headers(self) -> dict[str, str]:
        if not self._secret.isprintable():
            raise EndpointError(f"the key in {self.key} has control characters", 400)
        authorization = {"Authorization": f"Bearer {self._secret}"} if self._secret else {}
        return {"Content-Type": "application/json"} | authorization


@dataclass
class ServerSettings:
    """A server that answers in place of the base model; its fields are the command's keys `server.KEY`.

    Attributes:
        url: Such as http://localhost:8000/v1; /completions is appended.
        model: The base model's name there; model.id by default.
        parallel: Prompts that are asked at once.
        key: Environment variable that holds the server's API key; none is sent where it is not set.
        tries: How often a prompt is sent before the command ends; the pauses double from 2 seconds to a minute.
    """

    url: str | None = None
    model: str | None = None
    parallel: int = 16
    key: str = "OPENAI_API_KEY"
    tries: int = 8

    def check(self) -> None:
        """Check the values.

        Raises:
            UserError: a value is missing or out of range.
        """
        if self.url is None:
            raise UserError("backend=server needs server.url=, such as http://localhost:8000/v1")
        check_url("server.url", self.url)
        require_whole("server", 1, parallel=self.parallel, tries=self.tries)


def check_url(key: str, url: str) -> None:
    """Refuse a text that is no URL of an endpoint.

    Raises:
        UserError: it begins with something else, or its port is no number.
    """
    if not url.startswith(("http://", "https://")):
        raise UserError(f"{key}={url} must begin with http:// or https://")
    try:
        port = urlsplit(url).port
    except ValueError as error:
        raise UserError(f"{key}={url}: {error}") from None
    if port == 0 or not urlsplit(url).hostname:
        raise UserError(f"{key}={url} must name a host, and a port above 0 if any")
