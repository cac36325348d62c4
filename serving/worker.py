"""Reads prompts for an engine beside it: each is evicted from by one method and written as a prefix.

It listens on a Unix socket. A connection sends one line, {"ids": [...]}, and gets one: {"id": ..., "entries": ...}, or
{"error": ..., "status": ...} with an HTTP status. Prompts are read one at a time, in order of arrival.
"""

import asyncio
import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from keepsight.errors import UserError, one_line
from keepsight.models.decoder import context_of
from keepsight.models.targets import Target
from keepsight.runtime.evict import Evict
from keepsight.serving.export import export, placeholders_of
from keepsight.serving.prefix import alphabet_of, file_of, letters_within

_LONGEST_LINE = 2**26


class Worker:
    """Reads prompts, and writes their prefixes to the folder `root`.

    `page` is the number of entries of a page where heads keep different numbers; 0 where all keep the same. Where more
    than `waiting` prompts wait, others are refused with 429.
    """

    def __init__(self, target: Target, method: Evict, root: Path, *, page: int, waiting: int) -> None:
        self.target, self.method, self.root, self.page, self.waiting = target, method, root, page, waiting
        self.alphabet = alphabet_of(target.tokenizer)
        self._load, self._thread = 0, ThreadPoolExecutor(1, "keepsight-worker")
        self._made, self._turn, self._closed = set[str](), asyncio.Lock(), False

    def close(self) -> None:
        """Remove the prefixes that are still there, and wait for the prompt that is being read, which leaves none."""
        self._closed = True
        self._remove_made()
        self._thread.shutdown(cancel_futures=True)
        self._remove_made()

    def _remove_made(self) -> None:
        for digest in [*self._made]:  # the thread may add one meanwhile
            self._remove(digest)

    def _remove(self, digest: str) -> None:
        file_of(self.root, digest).unlink(missing_ok=True)
        self._made.discard(digest)

    async def serve(self, socket: Path) -> None:
        """Answer at a socket until cancelled."""
        async with await asyncio.start_unix_server(self._connected, socket, limit=_LONGEST_LINE) as server:
            await server.serve_forever()

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            line = await reader.readline()
            try:
                ids = json.loads(line)["ids"]
            except (ValueError, KeyError, TypeError):
                return  # no line of the middleware's
            if (reply := await self._reply(ids, reader)) is not None:
                writer.write(json.dumps(reply).encode() + b"\n")
                await writer.drain()
        except (OSError, ValueError):
            pass  # the client has left, or sent a line beyond the limit
        finally:
            writer.close()

    async def _reply(self, ids: list[int], reader: asyncio.StreamReader) -> dict[str, Any] | None:
        """The reply; None if the client left, or the worker was closed, before its turn came."""
        if self._load > self.waiting:
            return {"error": f"keepsight: {self.waiting} long prompts are waiting; try again later", "status": 429}
        self._load += 1
        try:
            async with self._turn:
                if self._closed or reader.at_eof():
                    return None
                before = len(self._made)
                reply = await asyncio.get_running_loop().run_in_executor(self._thread, self.read, ids)
                if reader.at_eof() and len(self._made) > before:  # the client has left, and nobody else will ask for it
                    self._remove(reply["id"])
                return reply
        finally:
            self._load -= 1

    @torch.no_grad()
    def read(self, ids: list[int]) -> dict[str, Any]:
        """Write the prefix of a prompt."""
        model = self.target.model
        try:
            self.method.check(len(ids), context_of(model))
            state = self.method.start(model, torch.tensor([ids], device=model.device))
            if self._closed:
                return {"error": "keepsight: the server is shutting down", "status": 503}
            letters_within(placeholders_of(state, self.page), self.alphabet)
            # The method's name sets these files apart from those of `keepsight prefix`, which are never removed.
            digest, header = export(model, state, self.root, page=self.page, method=f"serve: {self.method!r}")
            self._made.add(digest)
        except UserError as error:
            return {"error": f"keepsight: {one_line(error)}", "status": 400}
        except Exception as error:  # such as a lack of memory: the next prompt may be shorter
            return {"error": f"keepsight: {type(error).__name__} while the prompt was read", "status": 500}
        return {"id": digest, "entries": header.entries}
