"""In vLLM's server: long prompts become prefixes, which a `Worker` beside it reads and keeps.

`keepsight.serving.vllm.engine_reader` has the reader without a worker.
"""

import asyncio
import json
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from functools import cache
from typing import Any, TypeAlias

from typing_extensions import override

from keepsight.errors import UserError
from keepsight.serving.choices import NO_CHOICES, Choice, Choices, entries_of
from keepsight.serving.inside import shortest_evicted
from keepsight.serving.prefix import CONTEXT_EXCEEDED

Complete: TypeAlias = Callable[[dict[str, Any], Callable[[], bool]], Awaitable[tuple[int, Any]]]
"""Sends a completion to the engine, and breaks it off once a function is true; returns the status and the reply."""


class Metrics:
    """Metrics of long prompts, which vLLM's `/metrics` shows beside its own."""

    def __init__(self) -> None:
        from prometheus_client import Counter, Histogram  # a part of vLLM

        self.prompts = Counter("keepsight_prompts", "Long prompts answered from a prefix, read or known", ["of"])
        self.tokens = Counter("keepsight_prompt_tokens", "Tokens of the prompts that were read")
        self.entries = Counter("keepsight_kept_entries", "Entries that each KV head keeps of them, on average")
        self.refused = Counter("keepsight_refused", "Long prompts that were refused", ["status"])
        self.seconds = Histogram(
            "keepsight_read_seconds",
            "Seconds that a prompt waited and was read in",
            buckets=(0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120),
        )


@cache
def metrics() -> Metrics:
    """The metrics of this process, whose registry takes each name once."""
    return Metrics()


class Refused(UserError):
    """A request that is answered with an HTTP status of its own.

    Args:
        status: HTTP status.
        message: One line.
        openai_code: OpenAI's code of the error; None for the status.
        field: The field of the request that it is about.
    """

    def __init__(self, status: int, message: str, openai_code: str | None = None, field: str = "") -> None:
        super().__init__(message, field=field)
        self.status = status
        self.openai_code = openai_code


class Reader(ABC):
    """Makes prefixes of long prompts.

    Args:
        least: Number of tokens of the shortest prompts that are read.
        context: The model's context, into which a prompt and its answer must fit.
        answer_tokens: Length of an answer whose request names none.
        choices: What requests may choose.
    """

    def __init__(
        self,
        least: int,
        context: int = sys.maxsize,
        answer_tokens: int = sys.maxsize,
        *,
        choices: Choices = NO_CHOICES,
    ) -> None:
        self.least = least
        self.context = context
        self.answer_tokens = answer_tokens
        self.choices = choices
        self._metrics = metrics()

    def evicts(self, tokens: int, choice: Choice, letters: int) -> bool:
        """Whether a prompt of so many tokens is evicted from, all of it but the last; vLLM alone reads shorter ones.

        By a budget of its own, twice that budget is enough where the server's is larger; `letters` entries encode a
        prefix's id.
        """
        if choice.budget is None:
            return tokens >= self.least
        least = min(self.least, shortest_evicted(choice.budget, letters))
        return tokens >= least and entries_of(choice.budget, tokens - 1) < tokens - 1

    def longest_answer(self, tokens: int, wanted: Any) -> int | None:
        """The length that a prompt of so many tokens leaves for its answer; None if it need not be set.

        vLLM knows only the entries that are kept of the prompt. `wanted` is the length that the request names.

        Raises:
            Refused: it does not fit.
        """
        room = self.context - tokens
        least = 1
        if type(wanted) is int and wanted > 0:
            least = wanted
        if room < least:
            raise Refused(
                400,
                f"This model's maximum context length is {self.context} tokens. However, you requested "
                f"{tokens + least} tokens ({tokens} in the prompt, {least} for the answer). Please reduce either.",
                CONTEXT_EXCEEDED,
            )
        if wanted is None and room < self.answer_tokens:
            return room
        return None

    @abstractmethod
    def prefix(
        self, ids: list[int], salt: str, choice: Choice, complete: Complete
    ) -> AbstractAsyncContextManager[tuple[str, int]]:
        """The digest and the entries of a prompt's prefix, whose file stays at least as long as this is open.

        Requests share the prefix of a prompt unless their `salt` or `choice` differs; `complete` asks the engine.

        Raises:
            Refused: the prompt is refused, or nobody reads it.
        """

    def _count(self, reply: dict[str, Any], tokens: int, seconds: float, is_repeated: bool) -> tuple[str, int]:
        """The digest and the entries of a reply, which is counted; `Refused` for an error."""
        if "error" in reply:
            self._metrics.refused.labels(str(reply["status"])).inc()
            raise Refused(reply["status"], reply["error"], reply.get("code"), reply.get("field", ""))
        if is_repeated:
            self._metrics.prompts.labels("known").inc()
        else:
            self._metrics.prompts.labels("read").inc()
            self._metrics.seconds.observe(seconds)
            self._metrics.tokens.inc(tokens)
            self._metrics.entries.inc(reply["entries"])
        return reply["id"], reply["entries"]


class WorkerReader(Reader):
    """Lets the worker at a socket read prompts.

    Args:
        socket: The path of the socket.
        limits, choices: See `Reader`.
    """

    def __init__(self, socket: str, *limits: int, choices: Choices = NO_CHOICES) -> None:
        super().__init__(*limits, choices=choices)
        self.socket = socket

    @override
    @asynccontextmanager
    async def prefix(
        self, ids: list[int], salt: str, choice: Choice, complete: Complete
    ) -> AsyncIterator[tuple[str, int]]:
        line = {"ids": ids, "salt": salt, "adapter": choice.adapter, "budget": choice.budget}
        start = time.perf_counter()
        async with AsyncExitStack() as open_connection:
            try:
                reader, writer = await asyncio.open_unix_connection(self.socket)
                open_connection.callback(writer.close)
                writer.write(json.dumps(line).encode() + b"\n")
                await writer.drain()
                reply = json.loads(await reader.readline())
            except (OSError, ValueError):
                reply = {"status": 503, "error": "keepsight: the prefix worker does not answer; try again later"}
            seconds = time.perf_counter() - start
            yield self._count(reply, len(ids), seconds, bool(reply.get("known")))
