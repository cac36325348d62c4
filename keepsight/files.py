"""Reading and writing files without ever leaving a half-written one. Every folder may import this file."""

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from keepsight.errors import UserError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

DPI = 150
"""Resolution of plots, in dots per inch."""


@contextmanager
def atomic_folder(folder: Path) -> Iterator[Path]:
    """Yield an empty folder beside `folder` that takes its name when the block ends, replacing what stood there.

    When the block raises, `folder` is as it was.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    unfinished = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        yield unfinished
        unfinished.chmod(0o755)
        replaced = folder.with_name(f"{unfinished.name}-replaced")
        if folder.exists():
            folder.rename(replaced)
        unfinished.rename(folder)
        shutil.rmtree(replaced, ignore_errors=True)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


@contextmanager
def atomic_files(folder: Path, last: str) -> Iterator[Path]:
    """Yield an empty folder whose files move into `folder` when the block ends, the one called `last` after the others.

    Whoever needs `last` to read the folder never sees it half-written; files of other names stay.
    """
    folder.mkdir(parents=True, exist_ok=True)
    unfinished = Path(tempfile.mkdtemp(prefix=".unfinished-", dir=folder))
    try:
        yield unfinished
        (folder / last).unlink(missing_ok=True)
        for path in sorted(unfinished.iterdir(), key=lambda path: path.name == last):
            path.replace(folder / path.name)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


@contextmanager
def atomic_file(path: Path) -> Iterator[Path]:
    """Yield a path beside `path`; the file written there takes the name `path` when the block ends.

    When the block raises, `path` is as it was.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        yield unfinished
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)


def write_text(path: Path, text: str) -> None:
    """Write `text` (UTF-8) so that `path` holds either all of it or what it held before."""
    with atomic_file(path) as unfinished:
        unfinished.write_text(text, encoding="utf-8")


def write_png(path: Path, figure: "Figure") -> None:
    """Write a figure as PNG with `DPI` dots per inch, so that `path` holds either all of it or what it held before."""
    with atomic_file(path) as unfinished:
        figure.savefig(unfinished, format="png", dpi=DPI)


def write_json(path: Path, value: Any) -> None:
    """`write_text` of `value` as indented JSON."""
    write_text(path, json.dumps(value, indent=2, ensure_ascii=False) + "\n")


def read_json(path: Path) -> Any:
    """The JSON value of a file.

    Raises:
        UserError: the file is missing or is not JSON.
    """
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"{path}: no such file") from None
    except ValueError as error:
        raise UserError(f"{path}: not valid JSON ({error}); restore the file or make it again") from None


def read_jsonl(path: Path) -> Iterator[dict[str, Any]]:
    """The objects of a JSON Lines file, one per line; empty lines are skipped.

    Raises:
        UserError: a line is not a JSON object; its number is named.
    """
    with path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except ValueError as error:
                raise UserError(f"{path}:{number}: not valid JSON ({error}); is the line cut off?") from None
            if not isinstance(row, dict):
                raise UserError(f"{path}:{number}: expected a JSON object, got {type(row).__name__}")
            yield row


def whole_lines(path: Path) -> list[dict[str, Any]]:
    """The objects of a JSON Lines file; none if it is missing. A last line torn by a kill is removed from it."""
    if not path.exists():
        return []
    text = path.read_bytes()
    whole = text.rfind(b"\n") + 1
    if whole < len(text):
        os.truncate(path, whole)
    return list(read_jsonl(path))


def append_lines(path: Path, rows: Iterable[dict[str, Any]]) -> None:
    """Append objects to a JSON Lines file, one per line."""
    with path.open("a", encoding="utf-8") as stream:
        stream.write(_lines(rows))


def write_lines(path: Path, rows: Iterable[dict[str, Any]]) -> None:
    """`write_text` of objects as a JSON Lines file."""
    write_text(path, _lines(rows))


def _lines(rows: Iterable[dict[str, Any]]) -> str:
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)


def file_digest(path: Path) -> str:
    """`sha256:` and the hexadecimal digest of a file's bytes."""
    with path.open("rb") as stream:
        digest = hashlib.sha256()
        while block := stream.read(1 << 20):
            digest.update(block)
    return f"sha256:{digest.hexdigest()}"


def text_digest(text: str) -> str:
    """`sha256:` and the hexadecimal digest of a text's UTF-8 bytes."""
    return f"sha256:{hashlib.sha256(text.encode()).hexdigest()}"
