"""Files and folders that are written whole or not at all."""

import os
import shutil
import socket
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil

_UNFINISHED = ".unfinished-"


@contextmanager
def atomic_folder(folder: Path) -> Iterator[Path]:
    """Yield an empty folder that takes the place of `folder` when the block ends, replacing what stood there.

    When the block raises, `folder` is as it was.
    """
    with _unfinished(folder.parent) as beside:
        made = beside / folder.name
        made.mkdir()
        yield made
        sync(*made.rglob("*"), made)
        if folder.exists():
            folder.rename(beside / "replaced")
        made.rename(folder)
        sync(folder.parent)


@contextmanager
def atomic_files(folder: Path, last: str) -> Iterator[Path]:
    """Yield an empty folder whose files move into `folder` when the block ends, the one called `last` after the others.

    Whoever needs `last` to read the folder never sees it half-written; files of other names stay.
    """
    with _unfinished(folder) as unfinished:
        yield unfinished
        paths = sorted(unfinished.iterdir(), key=lambda path: path.name == last)
        sync(*paths)
        (folder / last).unlink(missing_ok=True)
        for path in paths:
            path.replace(folder / path.name)
        sync(folder)


@contextmanager
def atomic_file(path: Path) -> Iterator[Path]:
    """Yield a path of the same name elsewhere; the file written there becomes `path` when the block ends.

    When the block raises, `path` is as it was.
    """
    with _unfinished(path.parent) as beside:
        yield beside / path.name
        sync(beside / path.name)
        (beside / path.name).replace(path)
        sync(path.parent)


@contextmanager
def _unfinished(folder: Path) -> Iterator[Path]:
    """Yield an empty folder in `folder`, removed at the end; what processes that were killed left there goes first."""
    folder.mkdir(parents=True, exist_ok=True)
    for left in folder.glob(f"{_UNFINISHED}*"):
        if _is_abandoned(left):
            shutil.rmtree(left, ignore_errors=True)
    made = Path(tempfile.mkdtemp(prefix=f"{_UNFINISHED}{socket.gethostname()}-{os.getpid()}-", dir=folder))
    try:
        yield made
    finally:
        shutil.rmtree(made, ignore_errors=True)


def _is_abandoned(unfinished: Path) -> bool:
    """Whether the process that made the folder, on this machine, is gone; another may have its number now."""
    host, _, process = unfinished.name.removeprefix(_UNFINISHED).rpartition("-")[0].rpartition("-")
    if host != socket.gethostname() or not process.isdecimal():
        return False
    with suppress(psutil.NoSuchProcess, FileNotFoundError):
        return psutil.Process(int(process)).create_time() > unfinished.stat().st_mtime + 1
    return True


def sync(*paths: Path) -> None:
    """Wait until files and folders are on the disk: what a resume stands on must survive a power cut."""
    for path in paths:
        opened = os.open(path, os.O_RDONLY)
        try:
            os.fsync(opened)
        finally:
            os.close(opened)
