"""HTTP requests that end when their server does.

Some servers, such as vLLM's, stop listening when they are told to end and keep the connections that are open; the
replies never come.
"""

import select
import socket
import time
from contextlib import suppress
from http.client import HTTPConnection, HTTPResponse, HTTPSConnection
from urllib.request import HTTPHandler, HTTPSHandler, Request

LOOK = 10.0
"""Seconds after which a reply that has not come is asked for whether the server still listens."""


class _Watched(HTTPConnection):
    """Looks whether the server listens while its reply is waited for.

    Raises:
        ConnectionRefusedError: it listens no more.
        TimeoutError: the reply has not come in time.
    """

    def getresponse(self) -> HTTPResponse:
        began, patience = time.monotonic(), self.timeout
        while self.sock is not None and not select.select([self.sock], [], [], LOOK)[0]:
            if patience is not None and time.monotonic() - began > patience:
                raise TimeoutError("timed out")
            with suppress(TimeoutError):  # it is busy
                socket.create_connection((self.host, self.port), timeout=LOOK).close()
        return super().getresponse()


class _WatchedSecurely(_Watched, HTTPSConnection):
    """The same with TLS."""


class WatchedHTTP(HTTPHandler):
    """urllib's handler of http://, with watched connections."""

    def http_open(self, req: Request) -> HTTPResponse:
        """See `HTTPHandler`."""
        return self.do_open(_Watched, req)


class WatchedHTTPS(HTTPSHandler):
    """urllib's handler of https://, with watched connections."""

    def https_open(self, req: Request) -> HTTPResponse:
        """See `HTTPSHandler`."""
        return self.do_open(_WatchedSecurely, req)
