"""A folder of a server's own, which no other server touches, and which the next one removes after a crash."""

import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

MEMORY = Path("/dev/shm")
"""Where Linux keeps files in memory."""
PREFIX = "keepsight-serve-"
_UNLOCKED = "keepsight-new-"
"""A folder that is not locked yet has another name: it could be taken for one of a server that has ended."""


def memory_folder(nbytes: int) -> Path | None:
    """A folder whose files are in memory, with room for so many bytes; None where there is none."""
    with suppress(OSError):
        if os.access(MEMORY, os.W_OK | os.X_OK) and shutil.disk_usage(MEMORY).free >= nbytes:
            return MEMORY
    return None


@contextmanager
def server_folder(parent: Path | None = None) -> Iterator[Path]:
    """A new folder in `parent`, by default the system's temporary folder; at the end it is removed.

    It is locked as long as this process lives: the lock tells other servers, which remove unlocked ones when they
    start, and systemd's cleaner of temporary folders, which leaves locked ones alone.
    """
    parent = parent or Path(tempfile.gettempdir())
    for folder in parent.glob(f"{PREFIX}*"):
        _remove_abandoned(folder)
    unlocked = Path(tempfile.mkdtemp(prefix=_UNLOCKED, dir=parent))
    descriptor = os.open(unlocked, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        folder = unlocked.rename(unlocked.with_name(PREFIX + unlocked.name.removeprefix(_UNLOCKED)))
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)
    finally:
        os.close(descriptor)


def _remove_abandoned(folder: Path) -> None:
    """Remove a folder of this user that no process has locked."""
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except OSError:  # another user's, or removed meanwhile
        return
    try:
        if os.fstat(descriptor).st_uid != os.geteuid():
            return
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(folder, ignore_errors=True)
    except BlockingIOError:
        pass  # its server is running
    finally:
        os.close(descriptor)
