"""Prompts that are read once: requests with the same tokens, salt and choice share a prefix.

It stays while one uses it.
"""

import asyncio
import json
import threading
from array import array
from collections import OrderedDict
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from keepsight.files import hex_digest
from keepsight.serving.choices import Choice


@dataclass
class Prompt:
    """A prompt that is being read, or whose prefix is kept.

    Attributes:
        leases: Number of requests that wait for it or use its prefix.
        left: Set once no request waits for it any more.
        reading: Its result is the reply: {"id": ..., "entries": ...}, or {"error": ..., "status": ...}.
        path: The prefix's file, once it is written.
        size: Bytes of the file.
    """

    leases: int = 0
    left: threading.Event = field(default_factory=threading.Event)
    reading: "asyncio.Task[dict[str, Any]] | None" = None
    path: Path | None = None
    size: int = 0

    @property
    def is_read(self) -> bool:
        """Whether the reply is there."""
        return self.reading is not None and self.reading.done()

    def wrote(self, path: Path) -> None:
        """Note the prefix's file."""
        self.size = path.stat().st_size
        self.path = path

    def remove(self) -> None:
        """Remove the prefix's file, if there is one."""
        if self.path is not None:
            self.path.unlink(missing_ok=True)
            self.path = None
            self.size = 0


class KeptPrompts:
    """The prompts of a server, in an event loop.

    Args:
        max_bytes: Size of the prefixes that are kept in case their prompts come again. Those in use may be more.
    """

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self._prompts: OrderedDict[str, Prompt] = OrderedDict()

    def __iter__(self) -> Iterator[Prompt]:
        return iter([*self._prompts.values()])  # another thread may look at them while the event loop changes them

    def has(self, ids: list[int], salt: str, choice: Choice) -> bool:
        """Whether a prompt is being read, or its prefix kept."""
        return _key_of(ids, salt, choice) in self._prompts

    @contextmanager
    def lease(
        self,
        ids: list[int],
        salt: str,
        choice: Choice,
        read: Callable[[Prompt], Coroutine[Any, Any, dict[str, Any]]],
    ) -> Iterator[Prompt]:
        """A prompt, whose prefix stays at least as long as this is open.

        `read` makes the reply where nobody else has asked for the prompt with this salt, adapter and budget before, or
        its file is lost.
        """
        key = _key_of(ids, salt, choice)
        prompt = self._prompts.setdefault(key, Prompt())
        if prompt.path is not None and not prompt.path.is_file():
            prompt.remove()  # such as by a cleaner of temporary folders; it is made again
            prompt.reading = None
        if prompt.reading is None:
            prompt.reading = asyncio.ensure_future(read(prompt))
        self._prompts.move_to_end(key)
        prompt.leases += 1
        try:
            yield prompt
        finally:
            self._leave(key, prompt)

    def _leave(self, key: str, prompt: Prompt) -> None:
        """End a lease; an unread prompt, or one that was refused, is forgotten with its last."""
        prompt.leases -= 1
        if not prompt.leases and (not prompt.is_read or prompt.path is None):
            prompt.left.set()
            self._prompts.pop(key, None)
        self.remove_oldest()

    def remove_oldest(self) -> None:
        """Remove prefixes that nobody uses where all together are too large, least recently used ones first."""
        total = sum(prompt.size for prompt in self._prompts.values())
        for key, prompt in [*self._prompts.items()]:
            if total <= self.max_bytes:
                return
            if not prompt.leases:
                total -= prompt.size
                self._prompts.pop(key).remove()


def _key_of(ids: list[int], salt: str, choice: Choice) -> str:
    sharing_key = json.dumps([salt, choice.adapter, choice.budget])
    return hex_digest([array("q", ids).tobytes(), sharing_key.encode()])
