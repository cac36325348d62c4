"""Requests to OpenAI-compatible servers with the openai client; a reply of the wrong form is asked for again."""

import json
import os
import re
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeVar

import pydantic_core

from keepsight.errors import UserError, require_whole

if TYPE_CHECKING:  # importing it takes a second
    from openai import OpenAI

FIRST_WAIT = 2.0
"""Seconds before a reply of the wrong form is asked for again; doubled for each further one, up to a minute."""
_LARGEST = 64 << 20
"""Bytes of a reply at most."""

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

    `status` is the HTTP status of a refusal that no further try changes, and 0 for all other failures.
    """

    def __init__(self, reason: str, status: int = 0) -> None:
        super().__init__(reason[:300])
        self.status = status
        self.body = reason

    @property
    def is_filter(self) -> bool:
        """Whether a content filter refuses the request, or the answer to it, for what it says."""
        return bool(self.status and _FILTER.search(self.body))


def refuse_filtered(choice: Mapping[str, Any]) -> None:
    """EndpointError if a content filter stopped one of a reply's `choices`, as `is_filter` tells."""
    if _FILTERED.search(str(choice.get("finish_reason"))):
        raise EndpointError("the server's content filter refuses it", 200)


@dataclass(frozen=True)
class Endpoint:
    """A server's URL, such as http://localhost:8000/v1, and how often a request is tried.

    `key` is the environment variable that holds the API key; none is sent where it is not set. Once `stopped` is set,
    no request is sent.
    """

    url: str
    key: str
    tries: int = 5
    stopped: threading.Event = field(default_factory=threading.Event)

    @cached_property
    def client(self) -> "OpenAI":
        """The client; it follows no redirect. EndpointError for a key that is not valid in a header."""
        from openai import DefaultHttpxClient, OpenAI, OpenAIError

        def refuse_stopped(_: object) -> None:
            if self.stopped.is_set():
                raise OpenAIError("stopped")

        def refuse_large(response: Any) -> None:
            if int(response.headers.get("Content-Length", 0)) > _LARGEST:
                raise OpenAIError("the reply is too large")

        if not (self._secret.isprintable() and self._secret.isascii()):
            raise EndpointError(f"the key in {self.key} has control characters or non-ASCII ones", 400)
        hooks: Any = {"request": [refuse_stopped], "response": [refuse_large]}
        return OpenAI(
            base_url=self.url,
            api_key=self._secret or "none",
            max_retries=self.tries - 1,
            http_client=DefaultHttpxClient(follow_redirects=False, event_hooks=hooks),
        )

    def post(self, path: str, body: Mapping[str, Any], read: Callable[[Any], Reply]) -> Reply:
        """Send a request to `path` below the URL, and read its reply.

        `read` takes the reply's JSON and returns what is needed; where it raises, the request is sent again.
        EndpointError: refused, or no try brings a reply of the right form.
        """
        from openai import Omit, OpenAIError

        options: Any = {} if self._secret else {"headers": {"Authorization": Omit()}}
        error = EndpointError("not asked")
        for attempt in range(self.tries):
            if attempt and self.stopped.wait(min(FIRST_WAIT * 2 ** (attempt - 1), 60)):
                break
            try:
                reply = self.client.post(path, cast_to=str, body=body, options=options)
            except (OpenAIError, ImportError, OSError, ValueError) as problem:  # the last three: of proxies and hosts
                raise self._refused(problem) from None
            try:
                return read(self._json(reply))
            except (ValueError, LookupError, TypeError, AttributeError) as problem:
                error = EndpointError(self._without_key(f"{type(problem).__name__}: {problem}"))
        raise error

    def _json(self, reply: str) -> Any:
        """The JSON of a reply; some servers report an error with status 200."""
        value = pydantic_core.from_json(reply)
        if isinstance(value, dict) and value.get("error") and not value.get("choices"):
            reason = self._without_key(json.dumps(value["error"], ensure_ascii=False))
            if _FILTER.search(reason):
                raise EndpointError(reason, 200)
            raise ValueError(reason)
        return value

    def _refused(self, problem: Exception) -> EndpointError:
        """The EndpointError for an error of the client, which has already retried if that may help."""
        from openai import APIStatusError

        if not isinstance(problem, APIStatusError):
            return EndpointError(self._without_key(f"{type(problem).__name__}: {problem} {problem.__cause__ or ''}"))
        status = problem.status_code
        reason = f"HTTP status {status}: {self._without_key(problem.response.text)}"
        if status >= 500 or status in (408, 409, 429):  # a further try may bring a reply
            return EndpointError(reason)
        return EndpointError(reason, status)

    def _without_key(self, text: str) -> str:
        """The text on one line; *** stands for the key, which some servers repeat."""
        if self._secret:
            text = text.replace(self._secret, "***")
        return " ".join(text.split())

    @property
    def _secret(self) -> str:
        return os.environ.get(self.key, "").strip()


@dataclass
class ServerSettings:
    """A server that answers in place of the base model; its fields are the command's keys `server.KEY`.

    Attributes:
        url: Base URL of the server's API, such as http://localhost:8000/v1; /completions is appended.
        model: Name of the base model in the API; model.id by default.
        parallel: Number of concurrent requests.
        key: Environment variable with the API key; without it no key is sent.
        tries: Maximum number of tries for a request, with pauses that double from half a second to 8 seconds.
    """

    url: str | None = None
    model: str | None = None
    parallel: int = 16
    key: str = "OPENAI_API_KEY"
    tries: int = 8

    def check(self) -> None:
        """UserError if a value is missing or out of range."""
        if self.url is None:
            raise UserError(
                "backend=server needs server.url=, such as http://localhost:8000/v1", field="server.url", code="missing"
            )
        check_url("server.url", self.url)
        require_whole("server", 1, parallel=self.parallel, tries=self.tries)


def check_url(key: str, url: str) -> None:
    """UserError for a text that is not the URL of an endpoint, or that has a query or a password."""
    if _is_endpoint_url(url):
        return
    shown = " ".join(re.sub(r"[^/@]*@|[?#][\s\S]*", "", url).split())
    form = "must be a URL such as http://localhost:8000/v1, with no query, password or space"
    raise UserError(
        f"{key}={shown} {form}; an API key is read from {key.removesuffix('url')}key=VARIABLE", field=key, code="type"
    )


def _is_endpoint_url(url: str) -> bool:
    if not url.startswith(("http://", "https://")) or re.search(r"[?#\s]", url) or not url.isprintable():
        return False
    try:
        address = pydantic_core.Url(url)
    except ValueError:
        return False
    return bool(address.port) and not address.username and not address.password
