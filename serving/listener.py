"""uvicorn's server for our application: an end without lost answers, and bounds on connections and on slow requests."""

import asyncio
import logging
import socket
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import uvicorn
from starlette.types import ASGIApp
from typing_extensions import override
from uvicorn.protocols.http.h11_impl import H11Protocol

from keepsight.errors import UserError
from keepsight.serving.engine import Engine

_LAST_EVENTS_SECONDS = 10
"""Seconds, after the grace, in which the last events and errors are sent."""
_ACCEPTED_AT_A_TIME = 4
"""asyncio accepts this many connections before the first of them is counted."""
_BACKLOG = 2048
"""Connections that the operating system keeps until they are accepted."""
_OTHER_DESCRIPTORS = 24
"""Descriptors left to everything but counted connections."""
_SECONDS_BETWEEN_WARNINGS = 60.0
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

    class LimitedConnection(Connection):  # uvicorn calls it with arguments of its own
        read_timeout = options.read_timeout
        most_connections = limit

    config = uvicorn.Config(
        app,
        http=LimitedConnection,
        ws="none",
        lifespan="off",
        backlog=_ACCEPTED_AT_A_TIME,
        timeout_keep_alive=options.keep_alive,
        timeout_graceful_shutdown=options.grace + _LAST_EVENTS_SECONDS,
        log_config=_log_config(options.access_log),
        log_level=None,
        access_log=options.access_log,
    )
    return _Server(config, engine, options.grace)


class _Server(uvicorn.Server):
    """Ends in steps: waiting requests at once, running ones after the grace, connections after their last bytes."""

    def __init__(self, config: uvicorn.Config, engine: Engine, grace: int) -> None:
        super().__init__(config)
        self.engine = engine
        self.grace = grace

    @override
    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        for listening_socket in sockets or []:
            # asyncio has one number for this queue and for connections accepted at a time.
            listening_socket.listen(_BACKLOG)

    @override
    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self.engine.drain()
        ending = asyncio.get_running_loop().call_later(self.grace, self.engine.close)
        try:
            await super().shutdown(sockets)
        finally:
            ending.cancel()


class Connection(H11Protocol):
    """A connection whose requests must arrive in time, and which makes room for others while it has none.

    Attributes:
        read_timeout: Seconds in which a request must arrive.
        most_connections: Number of connections that are allowed.
        idle_since: When the latest request was answered, as `time.monotonic` tells it.
    """

    read_timeout: float
    most_connections: int
    _latest_warning = -_SECONDS_BETWEEN_WARNINGS

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.idle_since = 0.0
        self._read_timer: asyncio.TimerHandle | None = None

    @property
    def idle(self) -> bool:
        """Whether no request is being answered."""
        return self.cycle is None or self.cycle.response_complete

    @override
    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.idle_since = time.monotonic()
        self._read_timer = self.loop.call_later(self.read_timeout, self._close_if_idle)
        if len(self.connections) > self.most_connections:
            self._make_room()

    @override
    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if not self.idle:  # the application has a time-out for the body
            self._stop_timer()
        elif self._read_timer is None:
            self._read_timer = self.loop.call_later(self.read_timeout, self._close_if_idle)

    @override
    def on_response_complete(self) -> None:
        self._stop_timer()
        self.idle_since = time.monotonic()
        super().on_response_complete()

    @override
    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        super().connection_lost(exc)

    def _stop_timer(self) -> None:
        if self._read_timer is not None:
            self._read_timer.cancel()
            self._read_timer = None

    def _close_if_idle(self) -> None:
        if self.idle:
            self.transport.close()

    def _make_room(self) -> None:
        """Close the connection that has been idle longest; this one if no other is idle."""
        longest_idle: Any = None
        connections: Any = self.connections
        for other in connections:
            if other is self or not other.idle or other.transport.is_closing():
                continue
            if longest_idle is None or other.idle_since < longest_idle.idle_since:
                longest_idle = other
        if longest_idle is not None:
            longest_idle.transport.close()
            return

        now = time.monotonic()
        if now - Connection._latest_warning > _SECONDS_BETWEEN_WARNINGS:
            Connection._latest_warning = now
            logger.warning("%d connections, the most allowed, have requests; others get 503", self.most_connections)
        self.transport.write(_FULL)
        self.transport.close()


def _within_descriptors(connections: int) -> int:
    """The number of connections for which descriptors suffice, once as many as possible are allowed."""
    try:
        import resource
    except ImportError:  # Windows has no such limit
        return connections
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return connections

    open_now = len([*Path("/dev/fd").iterdir()])
    needed = open_now + _OTHER_DESCRIPTORS + connections
    if soft < needed:
        soft = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    room = soft - open_now - _OTHER_DESCRIPTORS
    if room < 1:
        raise UserError(
            f"the process may open {soft} files, {open_now} of which are open; raise `ulimit -n`",
            field="ulimit",
            code="range",
        )
    if room < connections:
        logger.warning("connections=%d: `ulimit -n` of %d allows %d", connections, soft, room)
    return min(room, connections)


def _log_config(access_log: bool) -> dict[str, Any]:
    """Loggers for `logging.config.dictConfig`: a line on standard error for each record, with its time."""
    access_level = "INFO" if access_log else "WARNING"
    return {
        "version": 1,
        "disable_existing_loggers": False,
        "formatters": {"line": {"format": "%(asctime)s %(levelname)s %(name)s: %(message)s"}},
        "handlers": {"stderr": {"class": "logging.StreamHandler", "formatter": "line"}},
        "loggers": {
            "uvicorn": {"handlers": ["stderr"], "propagate": False, "level": "WARNING"},
            "uvicorn.access": {"handlers": ["stderr"], "propagate": False, "level": access_level},
            "keepsight": {"handlers": ["stderr"], "propagate": True, "level": "INFO"},
        },
    }
