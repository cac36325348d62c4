"""Reads prompts for an engine beside it: each is evicted from by one method and written as a prefix.

It listens on a Unix socket. A connection sends one line, {"ids": [...], "salt": ..., "adapter": ..., "budget": ...},
and gets one: {"id": ..., "entries": ..., "known": ...}, or {"error": ..., "status": ...} with an HTTP status and
perhaps a "code" and a "field". A connection is a lease: the prefix stays at least until it is closed, and a prompt that
nobody waits for any more is read no further. Prompts are read one at a time, in order of arrival; those of the same
tokens, salt, adapter and budget share a prefix.
"""

import asyncio
import json
import logging
import sys
import threading
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch

from keepsight.errors import UserError, one_line
from keepsight.models.decoder import context_of, decoder_layers
from keepsight.models.lora import hooked
from keepsight.models.targets import Target
from keepsight.runtime.evict import Evict
from keepsight.serving.choices import ADAPTER, Choice, chosen_by
from keepsight.serving.export import export, placeholders_of
from keepsight.serving.kept import KeptPrompts, Prompt
from keepsight.serving.prefix import CONTEXT_EXCEEDED, alphabet_of, file_of, require_spellable

logger = logging.getLogger(__name__)

_LONGEST_LINE = 2**26
"""Bytes of the longest request."""
_SHUTTING_DOWN = {"error": "keepsight: the server is shutting down", "status": 503}


class Abandoned(Exception):
    """Nobody waits for a prompt any more."""


class TooLong(UserError):
    """A prompt that does not fit the model's context."""


class Worker:
    """Reads prompts, and writes their prefixes to the folder `root`, which no other worker may use.

    Args:
        target: The model.
        method: The method that evicts.
        adapters: Methods with other adapters, by the names that requests choose them by.
        root: The folder.
        page: Entries of a page where heads keep different numbers; 0 where all keep the same.
        waiting: Number of prompts that may wait; others are refused with 429.
        max_bytes: Size of the prefixes that are kept in case their prompts come again. Those in use may be more.
        max_tokens: Longest prompt; 0 for the model's context.
    """

    def __init__(
        self,
        target: Target,
        method: Evict,
        root: Path,
        *,
        adapters: Mapping[str, Evict] | None = None,
        page: int,
        waiting: int,
        max_bytes: int = 2**31,
        max_tokens: int = 0,
    ) -> None:
        self.target = target
        self.method = method
        self.adapters = adapters or {}
        self.root = root
        self.page = page
        self.waiting = waiting
        self.kept = KeptPrompts(max_bytes)
        self.context = context_of(target.model)
        self.max_tokens = min(self.context, max_tokens or sys.maxsize)
        self.alphabet = alphabet_of(target.tokenizer)
        self._thread = ThreadPoolExecutor(1, "keepsight-worker")
        self._turn = asyncio.Lock()
        self._closed = threading.Event()
        self._is_compared = False

    def stop(self) -> None:
        """Refuse all prompts from now on, also those that wait or are being read; prefixes in use stay."""
        self._closed.set()
        for prompt in self.kept:
            prompt.left.set()

    def close(self) -> None:
        """Stop, wait for the prompt that is being read, which leaves none, and remove all prefixes."""
        self.stop()
        self._thread.shutdown(cancel_futures=True)
        for prompt in self.kept:
            prompt.remove()

    async def serve(self, socket: Path) -> None:
        """Answer at a socket until cancelled."""
        async with await asyncio.start_unix_server(self._connected, socket, limit=_LONGEST_LINE) as server:
            await server.serve_forever()

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            request = await _request_of(reader)
            if request is not None:
                await self._answer(*request, reader, writer)
        except (OSError, ValueError):
            pass  # the client has left, or sent a line beyond the limit
        finally:
            writer.close()

    async def _answer(
        self,
        ids: list[int],
        salt: str,
        choice: Choice,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
    ) -> None:
        """Reply, and hold the prefix until the connection is closed."""
        refusal = self._token_refusal(ids)
        if refusal is not None:
            await _send(writer, refusal)
            return
        try:
            method = self._method(choice)
        except UserError as error:
            await _send(writer, {"error": one_line(error), "status": 400, "field": error.field})
            return
        choice = Choice(choice.adapter, method.budget)  # the same where a request names the server's own budget
        is_repeated = self.kept.has(ids, salt, choice)
        refusal = None if is_repeated else self._queue_refusal()
        if refusal is not None:
            await _send(writer, refusal)
            return
        sharing_key = json.dumps([salt, choice.adapter])
        read = partial(self._read, ids=ids, sharing_key=sharing_key, method=method)
        with self.kept.lease(ids, salt, choice, read) as prompt:
            assert prompt.reading is not None
            gone = asyncio.ensure_future(reader.read())
            try:
                await asyncio.wait({prompt.reading, gone}, return_when=asyncio.FIRST_COMPLETED)
                if prompt.reading.done():
                    await _send(writer, prompt.reading.result() | {"known": is_repeated})
                    await gone
            finally:
                gone.cancel()

    def _method(self, choice: Choice) -> Evict:
        """The method that a request chooses; `UserError` if there is none."""
        method = self.method if choice.adapter is None else self.adapters.get(choice.adapter)
        if method is None:
            raise UserError(f"{ADAPTER}: there is no adapter {choice.adapter!r}", field=ADAPTER, code="unknown")
        return chosen_by(choice, method)

    def _token_refusal(self, ids: list[Any]) -> dict[str, Any] | None:
        """The reply to a prompt whose tokens are none of the model's; else None."""
        vocabulary = self.target.vocabulary
        for token in ids:
            if type(token) is not int or not 0 <= token < vocabulary:
                error = f"keepsight: {str(token)[:64]!r} is not a token id; the vocabulary has {vocabulary}"
                return {"error": error, "status": 400}
        return None

    def _queue_refusal(self) -> dict[str, Any] | None:
        """The reply to a further prompt while none is taken; else None."""
        if self._closed.is_set():
            return _SHUTTING_DOWN
        unread = sum(not prompt.is_read for prompt in self.kept)
        if unread > self.waiting:
            return {"error": f"keepsight: {self.waiting} long prompts are waiting; try again later", "status": 429}
        return None

    async def _read(self, prompt: Prompt, ids: list[int], sharing_key: str, method: Evict) -> dict[str, Any]:
        """The reply, once the prompt's turn has come."""
        async with self._turn:
            if prompt.left.is_set() or self._closed.is_set():
                return _SHUTTING_DOWN
            reply = await asyncio.get_running_loop().run_in_executor(
                self._thread, self.read, prompt, ids, sharing_key, method
            )
            if prompt.left.is_set():  # at the last moment: nobody will use the file
                prompt.remove()
                return _SHUTTING_DOWN
        self.kept.remove_oldest()
        return reply

    @torch.no_grad()
    def read(self, prompt: Prompt, ids: list[int], sharing_key: str, method: Evict) -> dict[str, Any]:
        """Write the prefix of a prompt's tokens, by a method; `sharing_key` is what sets it apart from equal ones."""
        model = self.target.model

        def stop_if_left(*_: Any) -> None:
            if prompt.left.is_set():
                raise Abandoned

        try:
            self._require_room(method, len(ids))
            require_spellable(min(method.budget_for(len(ids)), len(ids)), self.alphabet)
            with hooked((layer, stop_if_left) for layer in decoder_layers(model)):
                state = method.start(model, torch.tensor([ids], device=model.device))
            require_spellable(placeholders_of(state, self.page), self.alphabet)
        except Abandoned:
            return _SHUTTING_DOWN
        except TooLong as error:
            return {"error": one_line(error), "status": 400, "code": CONTEXT_EXCEEDED}
        except UserError as error:
            return {"error": f"keepsight: {one_line(error)}", "status": 400}
        except Exception as error:  # such as a lack of memory: the next prompt may be shorter
            return _failed(ids, error)
        try:
            # Those of another salt or adapter are not shared, nor their files.
            method_text = f"serve {sharing_key}: {method!r}"
            compare = not self._is_compared  # a model that depends on positions otherwise does so for each prompt
            digest, header = export(model, state, self.root, page=self.page, method=method_text, compare=compare)
            self._is_compared = True
            prompt.wrote(file_of(self.root, digest))
        except Exception as error:  # such as a full disk
            return _failed(ids, error)
        return {"id": digest, "entries": header.entries}

    def _require_room(self, method: Evict, length: int) -> None:
        """Refuse a prompt that the method cannot read; `TooLong` if it is a shorter one that it could."""
        method.check(length, sys.maxsize)
        is_too_long = length >= self.max_tokens  # one more token follows the prefix
        try:
            method.check(length, self.context)
        except UserError:
            is_too_long = True
        if is_too_long:
            raise TooLong(
                f"This model's maximum context length is {self.max_tokens} tokens. However, your prompt has "
                f"{length + 1} tokens, after which {type(method).__name__} may need room too. Please shorten the "
                "prompt.",
                field="prompt",
                code="range",
            )


async def _request_of(reader: asyncio.StreamReader) -> tuple[list[int], str, Choice] | None:
    """The tokens, the salt and the choice of a request; None for a line that is none of the middleware's."""
    line = await reader.readline()
    with suppress(ValueError, KeyError, TypeError):
        request = json.loads(line)
        choice = Choice(request.get("adapter"), request.get("budget"))
        return request["ids"], str(request.get("salt") or ""), choice
    return None


async def _send(writer: asyncio.StreamWriter, reply: dict[str, Any]) -> None:
    writer.write(json.dumps(reply).encode() + b"\n")
    await writer.drain()


def _failed(ids: list[int], error: Exception) -> dict[str, Any]:
    logger.error("a prompt of %d tokens failed: %s: %s", len(ids), type(error).__name__, one_line(error))
    cause = type(error).__name__
    if isinstance(error, OSError) and error.strerror:
        cause = f"{cause} ({error.strerror})"
    return {"error": f"keepsight: {cause} while the prompt was read", "status": 500}
