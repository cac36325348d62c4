"""Requests to an OpenAI-compatible endpoint: JSON in, JSON out, sent again while that may help."""

import base64
import html
import json
import os
import re
import socket
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, wait
from contextlib import suppress
from dataclasses import dataclass
from http.client import HTTPException
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
"""Seconds between checks that the server of a pending request still listens: vLLM's, when it ends, keeps open
connections and never replies."""
_BUSY = (408, 425, 429)
"""Statuses below 500 after which another try may succeed."""
_LARGEST, _LARGEST_REFUSAL = 64 << 20, 64 << 10
"""Bytes of a reply and of a refusal that are read at most."""

_FILTERED = re.compile(r"filter|safety|guardrail|sensitive|prohibited|recitation|refus|block|moderat", re.IGNORECASE)
"""`finish_reason` of answers that a content filter stopped."""
_FILTER = re.compile(
    r"content.?(filter|policy|management)|responsible.?ai|guardrail|safety.?(system|filter|polic)|data.?inspection"
    r"|inappropriate content|content exists risk|(prompt|input|output) was (flagged|blocked)|敏感|\\u654f\\u611f",
    re.IGNORECASE,
)
"""What refusals for a prompt's content say: OpenAI's, Azure's, Bedrock's, DeepSeek's, OpenRouter's, Alibaba's."""

Reply = TypeVar("Reply")


class EndpointError(Exception):
    """No usable reply: `body` is the refusal on one line, without the API key; the message has its beginning.

    `status` is the HTTP status of a reply after which the request is not sent again; 0 where there was no reply, or a
    malformed one. `wait` are the seconds that the server asks to wait before the next try.
    """

    def __init__(self, reason: str, status: int = 0, wait: float = 0.0) -> None:
        super().__init__(reason[:300])
        self.status, self.body, self.wait = status, reason, wait

    @property
    def is_filter(self) -> bool:
        """Whether a content filter refuses the request, or the answer to it, for what it says."""
        return bool(self.status and _FILTER.search(self.body))


def refuse_filtered(choice: Mapping[str, Any]) -> None:
    """EndpointError if a content filter stopped one of a reply's `choices`, as `is_filter` tells."""
    if _FILTERED.search(str(choice.get("finish_reason"))):
        raise EndpointError("the server's content filter refuses it", 200)


class _NoRedirects(HTTPRedirectHandler):
    """urllib would send the API key on to whatever host a redirect names."""

    def redirect_request(self, *_: object) -> None:
        return None


@dataclass(frozen=True)
class Endpoint:
    """A server's URL, such as http://localhost:8000/v1, how often a request is tried, and seconds for one whole reply.

    `key` is the environment variable that holds the API key; none is sent where it is not set.
    """

    url: str
    key: str
    tries: int = 5
    patience: float = 600.0

    def post(
        self, path: str, body: Mapping[str, Any], read: Callable[[Any], Reply], stopped: threading.Event | None = None
    ) -> Reply:
        """Send a request to `path` below the URL, and read its reply.

        `read` takes the reply's JSON and returns what is needed; where it raises, the request is sent again. `stopped`
        ends the waiting between tries. EndpointError: refused, or no try brings a reply of the right form.
        """
        data, error = json.dumps(body).encode(), EndpointError("not asked")
        for attempt in range(self.tries):
            try:
                return read(self._read(self._reply(path, data)))
            except EndpointError as refused:
                error = refused
                if error.status:
                    raise
            except (OSError, HTTPException, ValueError, LookupError, TypeError, AttributeError) as problem:
                error = EndpointError(self._without_key(f"{type(problem).__name__}: {problem}"))
            pause = min(max(FIRST_WAIT * 2**attempt, error.wait), LONGEST_WAIT)
            if attempt + 1 < self.tries and (stopped or threading.Event()).wait(pause):
                break
        raise error

    def _reply(self, path: str, data: bytes) -> bytes:
        """One reply, within `patience` and while the server listens."""
        reply, deadline = Future[bytes](), time.monotonic() + self.patience

        def send() -> None:
            try:
                reply.set_result(self._sent(path, data))
            except Exception as error:
                reply.set_exception(error)

        threading.Thread(target=send, daemon=True).start()
        while not wait([reply], min(LOOK, self.patience)).done:
            if time.monotonic() > deadline:
                raise TimeoutError("timed out")
            self._check_listens()
        return reply.result()

    def _sent(self, path: str, data: bytes) -> bytes:
        request = Request(f"{self.url.rstrip('/')}/{path}", data, self._headers)
        try:
            with build_opener(_NoRedirects).open(request, timeout=self.patience) as response:
                reply = bytes(response.read(_LARGEST + 1))
                if len(reply) > _LARGEST or response.length:
                    raise ValueError(f"the reply is {'too large' if len(reply) > _LARGEST else 'cut off'}")
                return reply
        except HTTPError as refusal:
            raise self._refused(refusal) from None

    def _read(self, reply: bytes) -> Any:
        """The JSON of a reply; some servers report an error with status 200."""
        value = pydantic_core.from_json(reply)
        if isinstance(value, dict) and value.get("error") and not value.get("choices"):
            said = self._without_key(json.dumps(value["error"], ensure_ascii=False))
            raise EndpointError(said, 200 if _FILTER.search(said) else 0)
        return value

    def _check_listens(self) -> None:
        host = urlsplit(self.url)
        if host.scheme in getproxies() and not proxy_bypass(host.hostname or ""):
            return
        port = host.port or {"http": 80, "https": 443}[host.scheme]
        with suppress(TimeoutError):  # it is busy
            socket.create_connection((host.hostname, port), timeout=LOOK).close()

    def _refused(self, refusal: HTTPError) -> EndpointError:
        said, asked = b"", 0.0
        with suppress(OSError, HTTPException):
            said = refusal.read(_LARGEST_REFUSAL)
        with suppress(ValueError):  # a date
            asked = float(refusal.headers.get("Retry-After") or 0)
        text = self._without_key(f"HTTPError: {refusal} {said.decode(errors='replace')}")
        if len(said) == _LARGEST_REFUSAL:
            text = text[: -6 * len(self._secret) or None]  # which may be the first half of the key
        passing = refusal.code >= 500 or refusal.code in _BUSY
        return EndpointError(text, 0 if passing else refusal.code, asked)

    def _without_key(self, text: str) -> str:
        """The text on one line, without the key, which some servers repeat, also escaped."""
        forms = (
            rf"{re.escape(each)}|{re.escape(html.escape(each))}|(u00|x|%(25){{,9}}){code:02x}|&#x?0*({code}|{code:x});"
            for each, code in ((each, ord(each)) for each in self._secret)
        )
        if pattern := "".join(rf"(\\|%(25){{,9}}5c){{,9}}({form})" for form in forms):
            text = re.sub("|".join([pattern, *self._in_base64]), "***", text, flags=re.IGNORECASE)
        return " ".join(text.split())

    @property
    def _in_base64(self) -> list[str]:
        """Patterns of a word in base64, of either alphabet, that holds the key after 0, 1 or 2 bytes, modulo 3."""
        secret, forms = self._secret.encode(), list[str]()
        for skipped in range(3):
            digits = base64.b64encode(bytes(skipped) + secret).decode()
            own = digits[-(-skipped * 4 // 3) : (skipped + len(secret)) * 8 // 6]  # the others hold neighbours' bits
            if len(own) >= 4:
                own = re.sub(r"\+|/", r"([+/_-]|\\\\/|%2b|%2f)", own)
                forms.append(rf"(?<![\w+/\\%-])[\w+/\\%-]*{own}[\w+/\\%-]*=*")
        return forms

    @property
    def _secret(self) -> str:
        return os.environ.get(self.key, "").strip()

    @property
    def _headers(self) -> dict[str, str]:
        if not (self._secret.isprintable() and self._secret.isascii()):
            raise EndpointError(f"the key in {self.key} has control characters, or others than ASCII's", 400)
        authorization = {"Authorization": f"Bearer {self._secret}"} if self._secret else {}
        return {"Content-Type": "application/json"} | authorization


@dataclass
class ServerSettings:
    """A server that answers in place of the base model; its fields are the command's keys `server.KEY`.

    Attributes:
        url: Base URL of the server's API, such as http://localhost:8000/v1; /completions is appended.
        model: Name of the base model in the API; model.id by default.
        parallel: Number of concurrent requests.
        key: Environment variable with the API key; without it no key is sent.
        tries: Maximum number of tries for a request, with pauses that double from 2 seconds to a minute.
    """

    url: str | None = None
    model: str | None = None
    parallel: int = 16
    key: str = "OPENAI_API_KEY"
    tries: int = 8

    def check(self) -> None:
        """UserError if a value is missing or out of range."""
        if self.url is None:
            raise UserError("backend=server needs server.url=, such as http://localhost:8000/v1")
        check_url("server.url", self.url)
        require_whole("server", 1, parallel=self.parallel, tries=self.tries)


def check_url(key: str, url: str) -> None:
    """UserError for a text that is no URL of an endpoint, or that holds a query or a password."""
    shown = f"{key}=" + " ".join(re.sub(r"[^/@]*@|[?#][\s\S]*", "", url).split())
    if not url.startswith(("http://", "https://")):
        raise UserError(f"{shown} must begin with http:// or https://")
    try:
        host = urlsplit(url)
        port = host.port
    except ValueError as error:
        raise UserError(f"{shown}: {error}") from None
    if port == 0 or not host.hostname:
        raise UserError(f"{shown} must name a host, and a port above 0 if any")
    if host.query or host.fragment or "@" in host.netloc or not url.isprintable() or " " in url:
        variable = f"{key.removesuffix('url')}key"
        raise UserError(f"{shown}: a URL has no query, password or space; an API key is read from {variable}=VARIABLE")
