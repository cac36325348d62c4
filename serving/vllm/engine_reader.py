"""In vLLM's server, without a worker: long prompts become prefixes that the engine itself makes.

One request of a client is two of the engine: a completion of all tokens but the last, of which the engine keeps what
`keepsight.serving.vllm.record` selects, and the client's own request, from the placeholders of that prefix.
"""

import asyncio
import logging
import time
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from typing_extensions import override

from keepsight.errors import one_line
from keepsight.serving.choices import NO_CHOICES, Choice, Choices
from keepsight.serving.kept import KeptPrompts, Prompt
from keepsight.serving.prefix import (
    EVICT,
    EVICTION_ERROR,
    EVICTION_STATUS,
    PLAIN_NAME,
    PREFIX_ID,
    file_of,
)
from keepsight.serving.vllm.access import is_stopping
from keepsight.serving.vllm.reader import Complete, Reader

logger = logging.getLogger("vllm.keepsight")
_UNREAD = {"error": "keepsight: the prompt was not read to its end; try again later", "status": 503}


class EngineReader(Reader):
    """Lets the engine read prompts and evict from them.

    Args:
        folder: Where the engine writes the prefixes; nobody else uses it.
        max_bytes: Size of the prefixes that are kept in case their prompts come again. Those in use may be more.
        budget: The budget of the engine's method.
        limits, choices: See `Reader`.
    """

    def __init__(
        self, folder: Path, max_bytes: int, budget: int | float, *limits: int, choices: Choices = NO_CHOICES
    ) -> None:
        super().__init__(*limits, choices=choices)
        self.folder = folder
        self.budget = budget
        self.kept = KeptPrompts(max_bytes)

    @override
    @asynccontextmanager
    async def prefix(
        self, ids: list[int], salt: str, choice: Choice, complete: Complete
    ) -> AsyncIterator[tuple[str, int]]:
        start = time.perf_counter()
        if choice.budget == self.budget:
            choice = Choice()
        is_repeated = self.kept.has(ids, salt, choice)
        wanted = True if choice.budget is None else choice.budget

        async def read(prompt: Prompt) -> dict[str, Any]:
            return await self._read(prompt, ids, salt, wanted, complete)

        with self.kept.lease(ids, salt, choice, read) as prompt:
            assert prompt.reading is not None
            reply = await asyncio.shield(prompt.reading)  # another request may wait for it too
            yield self._count(reply, len(ids), time.perf_counter() - start, is_repeated)

    async def _read(
        self, prompt: Prompt, ids: list[int], salt: str, wanted: bool | int | float, complete: Complete
    ) -> dict[str, Any]:
        """The reply: where the engine has put the prefix, or why there is none; `wanted` is True or a budget."""
        body: dict[str, Any] = {"prompt": ids, "max_tokens": 1, "temperature": 0}
        # No other prefix has this name, so that nobody else's file is removed with it.
        body["kv_transfer_params"] = {EVICT: wanted, PLAIN_NAME: uuid.uuid4().hex}
        if salt:
            body["cache_salt"] = salt
        try:
            status, reply = await complete(body, lambda: prompt.left.is_set() or is_stopping())
            result = _result_of(status, reply)
            if "id" in result:
                prompt.wrote(file_of(self.folder, result["id"]))
        except Exception as error:  # such as a file that somebody removed
            logger.error("a prompt of %d tokens failed: %s: %s", len(ids), type(error).__name__, one_line(error))
            result = {"error": f"keepsight: {type(error).__name__} while the prompt was read", "status": 500}
        if prompt.left.is_set():  # nobody will use the file
            prompt.remove()
            return _UNREAD
        self.kept.remove_oldest()
        return result


def _result_of(status: int, reply: Any) -> dict[str, Any]:
    """What the engine's reply says: {"id": ..., "entries": ...}, or {"error": ..., "status": ..., "code": ...}."""
    if not isinstance(reply, dict):  # vLLM's reply to a client that has left is null
        return _UNREAD
    if status != 200:
        error = reply.get("error") or {}
        code = error.get("code")
        message = one_line(str(error.get("message") or "vLLM refused the prompt"))
        return {"error": message, "status": status, "code": code if isinstance(code, str) else None}
    params = reply.get("kv_transfer_params") or {}
    if EVICTION_ERROR in params:
        return {"error": f"keepsight: {params[EVICTION_ERROR]}", "status": params.get(EVICTION_STATUS, 500)}
    if PREFIX_ID not in params:
        return {"error": "keepsight: the engine does not say what it kept; its log says why", "status": 500}
    return {"id": params[PREFIX_ID], "entries": params["entries"]}
