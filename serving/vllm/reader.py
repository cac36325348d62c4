"""In vLLM's server: long prompts become prefixes. A `Worker` reads them; old prefixes are removed here."""

import asyncio
import hashlib
import json
import time
from array import array
from collections import Counter as Uses
from collections import OrderedDict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from keepsight.errors import UserError
from keepsight.serving.prefix import file_of

KEPT = 1024
"""Prefixes that are kept in case their prompts come again."""


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
    """

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class Reader:
    """Lets the worker at a socket read prompts of at least `least` tokens; requests of the same prompt share a prefix.

    Unused prefixes in the folder `root` are removed where there are more than `KEPT`.
    """

    def __init__(self, socket: str, root: Path, least: int) -> None:
        self.socket, self.root, self.least = socket, root, least
        self._made: OrderedDict[str, asyncio.Task[tuple[str, int]]] = OrderedDict()
        self._uses: Uses[str] = Uses()
        self._metrics = Metrics()

    @asynccontextmanager
    async def prefix(self, ids: list[int]) -> AsyncIterator[tuple[str, int]]:
        """The digest and the entries of a prompt's prefix, whose file stays at least as long as this is open.

        Raises:
            Refused: the worker refuses it, or does not answer.
        """
        key = hashlib.sha256(array("q", ids).tobytes()).hexdigest()
        if not (known := key in self._made):
            self._made[key] = asyncio.ensure_future(self._ask(ids))
        task = self._made[key]
        self._made.move_to_end(key)
        self._uses[key] += 1
        try:
            made = await asyncio.shield(task)
            self._metrics.prompts.labels("known" if known else "read").inc()
            yield made
        finally:
            self._leave(key, task)

    def _leave(self, key: str, task: "asyncio.Task[tuple[str, int]]") -> None:
        self._uses -= Uses([key])  # and forgets it at zero
        useless = not task.done() or task.cancelled() or task.exception() is not None
        if key not in self._uses and useless:
            task.cancel()  # nobody waits for it any more
            self._made.pop(key, None)
        unused = [each for each in self._made if each not in self._uses] if len(self._made) > KEPT else []
        for old in unused[: len(self._made) - KEPT]:
            digest, _ = self._made.pop(old).result()
            file_of(self.root, digest).unlink(missing_ok=True)

    async def _ask(self, ids: list[int]) -> tuple[str, int]:
        start = time.perf_counter()
        try:
            reply = await self._reply(ids)
        except (OSError, ValueError):
            reply = {"status": 503, "error": "keepsight: the prefix worker does not answer; try again later"}
        if "error" in reply:
            self._metrics.refused.labels(str(reply["status"])).inc()
            raise Refused(reply["status"], reply["error"])
        self._metrics.seconds.observe(time.perf_counter() - start)
        self._metrics.tokens.inc(len(ids))
        self._metrics.entries.inc(reply["entries"])
        return reply["id"], reply["entries"]

    async def _reply(self, ids: list[int]) -> dict[str, Any]:
        reader, writer = await asyncio.open_unix_connection(self.socket)
        try:
            writer.write(json.dumps({"ids": ids}).encode() + b"\n")
            await writer.drain()
            return json.loads(await reader.readline())
        finally:
            writer.close()
