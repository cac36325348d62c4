"""uvicorn's server for our application: an end without lost answers, and bounds on connections and on slow requests."""

import asyncio
import logging
import socket
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import uvicorn
from starlette.types import ASGIApp
from typing_extensions import override
from uvicorn.protocols.http.h11_impl import H11Protocol

from keepsight.errors import UserError
from keepsight.serving.engine import Engine

_LAST = 10
"""Seconds, after the grace, in which the last events and errors are sent."""
_ACCEPTED = 4
"""Connections accepted at a time. asyncio accepts this many before the first of them is counted."""
_QUEUE = 2048
"""Connections that the operating system keeps until they are accepted."""
_DESCRIPTORS = 24
"""Descriptors left to everything but counted connections."""
_WARN_EVERY = 60.0
_BODY = b'{"error": {"message": "too many connections", "type": "server_error", "param": null, "code": 503}}'
_FULL = (
    b"HTTP/1.1 503 Service Unavailable\r\ncontent-type: application/json\r\nretry-after: 1\r\nconnection: close\r\n"
    b"content-length: %d\r\n\r\n%s" % (len(_BODY), _BODY)
)

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Listening:
    """Options of the server.

    Attributes:
        grace: Seconds in which running answers may end once the server is told to stop.
        keep_alive: Seconds after which a connection without a further request is closed.
        read_timeout: Seconds in which a request must arrive, from the connection or its first byte on.
        connections: Maximum number of connections; at it, the longest idle one is closed for a new one.
        access_log: Whether to log a line for each request.
    """

    grace: int = 30
    keep_alive: int = 75
    read_timeout: int = 60
    connections: int = 1024
    access_log: bool = False


def server_of(app: ASGIApp, engine: Engine, options: Listening) -> uvicorn.Server:
    """The server of an application over an engine.

    Raises:
        UserError: the process may not open enough files for a single connection.
    """
    limit = _within_descriptors(options.connections)
    config = uvicorn.Config(
        app,
        http=partial(Connection, options=options, limit=limit),  # type: ignore[arg-type]  # called like the class
        ws="none",
        lifespan="off",
        backlog=_ACCEPTED,
        timeout_keep_alive=options.keep_alive,
        timeout_graceful_shutdown=options.grace + _LAST,
        log_config=_log_config(options.access_log),
        log_level=None,
        access_log=options.access_log,
    )
    return _Server(config, engine, options.grace)


class _Server(uvicorn.Server):
    """Ends in steps: waiting requests at once, running ones after the grace, connections after their last bytes."""

    def __init__(self, config: uvicorn.Config, engine: Engine, grace: int) -> None:
        super().__init__(config)
        self.engine, self.grace = engine, grace

    @override
    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        for each in sockets or []:
            each.listen(_QUEUE)  # asyncio has one number for this queue and for connections accepted at a time

    @override
    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self.engine.drain()
        ending = asyncio.get_running_loop().call_later(self.grace, self.engine.close)
        try:
            await super().shutdown(sockets)
        finally:
            ending.cancel()


class Connection(H11Protocol):
    """A connection whose requests must arrive in time, and which makes room for others while it has none."""

    _warned = -_WARN_EVERY

    def __init__(self, *args: Any, options: Listening, limit: int, **named: Any) -> None:
        super().__init__(*args, **named)
        self.read_timeout, self.limit, self.idle_since = options.read_timeout, limit, 0.0
        self._reading: asyncio.TimerHandle | None = None

    @property
    def idle(self) -> bool:
        """Whether no request is being answered."""
        return self.cycle is None or self.cycle.response_complete

    @override
    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.idle_since = time.monotonic()
        self._reading = self.loop.call_later(self.read_timeout, self._close_if_idle)
        if len(self.connections) > self.limit:
            self._make_room()

    @override
    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if not self.idle:  # the application has a time-out for the body
            self._stop_reading()
        elif self._reading is None:
            self._reading = self.loop.call_later(self.read_timeout, self._close_if_idle)

    @override
    def on_response_complete(self) -> None:
        self._stop_reading()
        self.idle_since = time.monotonic()
        super().on_response_complete()

    @override
    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_reading()
        super().connection_lost(exc)

    def _stop_reading(self) -> None:
        if self._reading is not None:
            self._reading.cancel()
            self._reading = None

    def _close_if_idle(self) -> None:
        if self.idle:
            self.transport.close()

    def _make_room(self) -> None:
        """Close the connection that has been idle longest; this one if no other is idle."""
        others: list[Any] = [other for other in self.connections if other is not self]
        waiting = [other for other in others if other.idle and not other.transport.is_closing()]
        if waiting:
            min(waiting, key=lambda other: other.idle_since).transport.close()
            return
        if time.monotonic() - Connection._warned > _WARN_EVERY:
            Connection._warned = time.monotonic()
            logger.warning("%d connections, the most allowed, have requests; others get 503", self.limit)
        self.transport.write(_FULL)
        self.transport.close()


def _within_descriptors(connections: int) -> int:
    """The number of connections for which descriptors suffice, once as many as possible are allowed."""
    try:
        import resource
    except ImportError:  # Windows has no such limit
        return connections
    open_now = len([*Path("/dev/fd").iterdir()])
    needed = open_now + _DESCRIPTORS + connections
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < needed:
        soft = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    room = connections if soft == resource.RLIM_INFINITY else soft - open_now - _DESCRIPTORS
    if room < 1:
        raise UserError(f"the process may open {soft} files, {open_now} of which are open; raise `ulimit -n`")
    if room < connections:
        logger.warning("connections=%d: `ulimit -n` of %d allows %d", connections, soft, room)
    return min(room, connections)


def _log_config(access_log: bool) -> dict[str, Any]:
    """Loggers for `logging.config.dictConfig`: a line on standard error for each record, with its time."""
    shown = {"handlers": ["stderr"], "propagate": False}
    return {
        "version": 1,
        "disable_existing_loggers": False,
        "formatters": {"line": {"format": "%(asctime)s %(levelname)s %(name)s: %(message)s"}},
        "handlers": {"stderr": {"class": "logging.StreamHandler", "formatter": "line"}},
        "loggers": {
            "uvicorn": shown | {"level": "WARNING"},
            "uvicorn.access": shown | {"level": "INFO" if access_log else "WARNING"},
            "keepsight": shown | {"level": "INFO", "propagate": True},
        },
    }
