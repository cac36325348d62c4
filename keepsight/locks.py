"""One writer at a time. Every folder may import this file."""

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path

from filelock import FileLock, Timeout

from keepsight.errors import UserError


@contextmanager
def one_writer(folder: Path) -> Iterator[None]:
    """Keep every other process out of a folder within the block; a process that is killed holds nothing.

    Args:
        folder: Created if missing; those who write to it all take this lock.

    Raises:
        UserError: another process holds it; one line says which. Or the folder was removed within the block.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / ".lock"
    lock = FileLock(path, timeout=0)
    try:
        lock.acquire()
    except Timeout:
        holder = path.read_text(encoding="utf-8") if path.exists() else ""
        raise UserError(
            f"{folder}: {holder or 'another process'} is writing here; wait for it to end, or choose another out="
        ) from None
    try:
        path.write_text(f"process {os.getpid()} on {socket.gethostname()}, since {datetime.now():%Y-%m-%d %H:%M},")
        yield
        if not path.exists():
            raise UserError(f"{folder}: removed while it was being written; run the same command again")
    finally:
        path.unlink(missing_ok=True)
        lock.release()
