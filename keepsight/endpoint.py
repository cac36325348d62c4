"""Requests to an OpenAI-compatible endpoint: JSON in, JSON out, tried again while that may help."""

import json
import os
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar
from urllib.error import HTTPError
from urllib.request import HTTPRedirectHandler, Request, build_opener

from keepsight.errors import UserError
from keepsight.watched import WatchedHTTP, WatchedHTTPS

FIRST_WAIT = 2.0
"""Seconds before the second try; doubled for each further one."""
LONGEST_WAIT = 60.0
"""Seconds between two tries at most."""
_BUSY = (408, 425, 429)
"""Statuses below 500 after which another try may succeed."""

Reply = TypeVar("Reply")


class EndpointError(Exception):
    """No usable reply.

    Attributes:
        status: The HTTP status of a request that was refused for good; 0 where nobody answered, or only nonsense.
    """

    def __init__(self, reason: str, status: int = 0) -> None:
        super().__init__(reason)
        self.status = status


class _NoRedirects(HTTPRedirectHandler):
    """urllib would send the API key on to whatever host an answer names."""

    def redirect_request(self, *_: object) -> None:
        return None


@dataclass(frozen=True)
class Endpoint:
    """Where requests go.

    Attributes:
        url: Such as http://localhost:8000/v1.
        key: Environment variable that holds the API key; none is sent where it is not set.
        tries: How often a request is sent before it is given up.
        patience: Seconds for one reply.
    """

    url: str
    key: str
    tries: int = 5
    patience: float = 600.0

    def post(
        self,
        path: str,
        body: Mapping[str, Any],
        read: Callable[[Any], Reply],
        stopped: threading.Event | None = None,
    ) -> Reply:
        """What `read` finds in the reply to a request.

        Args:
            path: Appended to the URL.
            body: The request.
            read: Takes the reply's JSON; a reply on which it fails as on one of another form is asked for again.
            stopped: Ends the waiting between tries.

        Raises:
            EndpointError: the request is refused, or no try brings a reply of the right form.
        """
        data, error = json.dumps(body).encode(), EndpointError("not asked")
        for attempt in range(self.tries):
            wait = FIRST_WAIT * 2**attempt
            try:
                request = Request(f"{self.url.rstrip('/')}/{path}", data, self._headers)
                with build_opener(_NoRedirects, WatchedHTTP, WatchedHTTPS).open(
                    request, timeout=self.patience
                ) as response:
                    return read(json.load(response))
            except HTTPError as refusal:
                error = self._refused(refusal)
                if error.status:
                    raise error from None
                wait = max(wait, _seconds(refusal.headers.get("Retry-After")))
            except (OSError, ValueError, KeyError, IndexError, TypeError) as problem:
                error = EndpointError(self._without_key(f"{type(problem).__name__}: {problem}"))
            if attempt + 1 < self.tries and (stopped or threading.Event()).wait(min(wait, LONGEST_WAIT)):
                break
        raise error

    def _refused(self, refusal: HTTPError) -> EndpointError:
        try:
            said = refusal.read(2000).decode(errors="replace")
        except OSError:
            said = ""
        reason = self._without_key(" ".join(f"HTTPError: {refusal} {said}".split())[:300])
        return EndpointError(reason, refusal.code if refusal.code < 500 and refusal.code not in _BUSY else 0)

    def _without_key(self, text: str) -> str:
        """Some servers repeat the key in what they say of it."""
        secret = os.environ.get(self.key)
        return text.replace(secret, "***") if secret else text

    @property
    def _headers(self) -> dict[str, str]:
        secret = os.environ.get(self.key)
        return {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {secret}"} if secret else {})


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
        for name in ("parallel", "tries"):
            if getattr(self, name) < 1:
                raise UserError(f"server.{name}={getattr(self, name)} must be at least 1")


def check_url(key: str, url: str) -> None:
    """Refuse what is no URL of an endpoint.

    Raises:
        UserError: it begins with something else.
    """
    if not url.startswith(("http://", "https://")):
        raise UserError(f"{key}={url} must begin with http:// or https://")


def _seconds(text: str | None) -> float:
    """What a Retry-After header asks for; 0 where it is absent or a date."""
    try:
        return max(0.0, float(text or 0))
    except ValueError:
        return 0.0
