"""Who may ask a server, our own or vLLM's: the checks of a request's headers, before anything else reads it.

A web page that somebody opens can send requests to a server on the same machine. It is refused by its `Origin`; a page
whose own host name was made to point here (DNS rebinding) by `Host`; forms, which send no `Origin` in some browsers, by
`Content-Type`.
"""

import hmac
from collections.abc import Awaitable, Callable, Sequence

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from keepsight.errors import printable
from keepsight.serving.hosts import ANY, is_local, name_in

PROBES = ("/health", "/ready")
"""Paths that need no key."""


class Guard:
    """ASGI middleware that refuses requests with 401, 403 or 415.

    A subclass may have another `check_key`.

    Args:
        app: The application.
        refuse: Makes the reply of an error.
        key: The key that requests must send as `Authorization: Bearer KEY`; None where none is needed.
        open_paths: Paths that need no key. All others need it, whether they exist or not.
        hosts: Names by which clients may call the server, beside `localhost` and addresses in numbers; `*` for any.
        origins: Origins of web pages that may send requests, beside those of the name that they call; `*` for any.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        refuse: Callable[[Request, HTTPException], Awaitable[Response]],
        key: str | None = None,
        open_paths: Sequence[str] = (),
        hosts: Sequence[str],
        origins: Sequence[str],
    ) -> None:
        self.app = app
        self.refuse = refuse
        self.key = key
        self.open_paths = open_paths
        self.hosts = [host.lower() for host in hosts]
        self.origins = [origin.lower() for origin in origins]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle a request, as ASGI applications do."""
        if scope["type"] != "http":
            raise RuntimeError(f"this server takes HTTP alone, not {scope['type']}")
        request = Request(scope, receive)
        try:
            self._check_host(request)
            self._check_origin(request)
            self.check_key(request)
            self._check_content_type(request)
        except HTTPException as error:
            response = await self.refuse(request, error)
            await response(scope, receive, send)
        else:
            await self.app(scope, receive, send)

    def _check_host(self, request: Request) -> None:
        host = request.headers.get("host")
        if host is None or ANY in self.hosts:  # every browser sends one
            return
        name = name_in(host)
        if not (is_local(name) or name in self.hosts):
            raise HTTPException(403, f"this server does not go by the name {_shown(host)}; add it to hosts=")

    def _check_origin(self, request: Request) -> None:
        origin = request.headers.get("origin", "").lower()
        if not origin or ANY in self.origins or origin in self.origins:
            return
        if origin.partition("://")[2] != request.headers.get("host", "").lower():
            raise HTTPException(403, f"pages of {_shown(origin)} may not use this server; add it to origins=")

    def check_key(self, request: Request) -> None:
        """Refuse a request that needs a key and lacks it, by an `HTTPException`."""
        if self.key is None or request.scope["path"] in self.open_paths:
            return
        scheme, _, sent = request.headers.get("authorization", "").partition(" ")
        if scheme.lower() != "bearer" or not hmac.compare_digest(sent.encode("latin-1"), self.key.encode()):
            raise HTTPException(401, "a key is needed: send Authorization: Bearer KEY")

    def _check_content_type(self, request: Request) -> None:
        if request.method not in ("POST", "PUT", "PATCH"):
            return
        kind = request.headers.get("content-type", "")
        if kind.partition(";")[0].strip().lower() != "application/json":
            raise HTTPException(415, f"the body is {_shown(kind)}; send it with Content-Type: application/json")


def _shown(header: str) -> str:
    return repr(printable(header[:100]))
