"""In vLLM's server: long prompts become prefixes, which a `Worker` beside it reads and keeps."""

import asyncio
import json
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

from keepsight.errors import UserError


class Metrics:
    """Metrics of long prompts, which vLLM's `/metrics` shows beside its own."""

    def __init__(self) -> None:
        from prometheus_client import Counter, Histogram  # a part of vLLM

        self.prompts = Counter("keepsight_prompts", "Long prompts answered from a prefix, read or known", ["of"])
        self.tokens = Counter("keepsight_prompt_tokens", "Tokens of the prompts that were read")
        self.entries = Counter("keepsight_kept_entries", "Entries that each KV head keeps of them, on average")
        self.refused = Counter("keepsight_refused", "Long prompts that were refused", ["status"])
        buckets = 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120
        seconds = "Seconds that a prompt waited and was read in"
        self.seconds = Histogram("keepsight_read_seconds", seconds, buckets=buckets)


class Refused(UserError):
    """A request that is answered with an HTTP status of its own.

    Args:
        status: HTTP status.
        message: One line.
        code: OpenAI's code of the error; None for the status.
    """

    def __init__(self, status: int, message: str, code: str | None = None) -> None:
        super().__init__(message)
        self.status, self.code = status, code


class Reader:
    """Lets the worker at a socket read prompts of at least `least` tokens."""

    def __init__(self, socket: str, least: int) -> None:
        self.socket, self.least = socket, least
        self._metrics = Metrics()

    @asynccontextmanager
    async def prefix(self, ids: list[int], salt: str = "") -> AsyncIterator[tuple[str, int]]:
        """The digest and the entries of a prompt's prefix, whose file stays at least as long as this is open.

        Requests share the prefix of a prompt unless their `salt` differs.

        Raises:
            Refused: the worker refuses it, or does not answer.
        """
        start = time.perf_counter()
        async with AsyncExitStack() as open_connection:
            try:
                reader, writer = await asyncio.open_unix_connection(self.socket)
                open_connection.callback(writer.close)
                writer.write(json.dumps({"ids": ids, "salt": salt}).encode() + b"\n")
                await writer.drain()
                reply = json.loads(await reader.readline())
            except (OSError, ValueError):
                reply = {"status": 503, "error": "keepsight: the prefix worker does not answer; try again later"}
            if "error" in reply:
                self._metrics.refused.labels(str(reply["status"])).inc()
                raise Refused(reply["status"], reply["error"], reply.get("code"))
            self._count(reply, len(ids), time.perf_counter() - start)
            yield reply["id"], reply["entries"]

    def _count(self, reply: dict[str, Any], tokens: int, seconds: float) -> None:
        self._metrics.prompts.labels("known" if reply["known"] else "read").inc()
        if not reply["known"]:
            self._metrics.seconds.observe(seconds)
            self._metrics.tokens.inc(tokens)
            self._metrics.entries.inc(reply["entries"])
