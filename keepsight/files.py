"""Reading and writing files without ever leaving a half-written one. Every folder may import this file.

JSON objects, of a file or of a line, are written with a digest of themselves; see `keepsight.signed_json`.
"""

import csv
import hashlib
import io
import os
import re
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from keepsight.atomic import atomic_file
from keepsight.errors import UserError
from keepsight.signed_json import from_json, to_json

if TYPE_CHECKING:
    from matplotlib.figure import Figure

DPI = 150
"""Resolution of plots, in dots per inch."""

Row = dict[str, Any]
_FORMULA = re.compile(r"[=@\t\r]|[+-](?![\d.])")


def require_writable(out: Path, folder: bool = True) -> None:
    """Refuse a path that nothing can be written to, before hours are spent on what is to be written.

    Args:
        out: A path that need not exist.
        folder: Whether it is to be a folder, or else a file.

    Raises:
        UserError: it is a file or a folder where it must not be, or lies in one that cannot be written to.
    """
    if out.exists() and out.is_dir() != folder:
        raise UserError(f"out={out} is a {'file' if folder else 'folder'}; name a {'folder' if folder else 'file'}")
    nearest = _nearest(out if folder else out.parent)
    if not nearest.is_dir():
        raise UserError(f"out={out} lies in {nearest}, which is a file; choose another out=")
    if not os.access(nearest, os.W_OK | os.X_OK):
        raise UserError(f"out={out}: {nearest} cannot be written to; choose another out=")


def free_bytes(path: Path) -> int:
    """The room that is left on the disk of a path that need not exist."""
    return shutil.disk_usage(_nearest(path)).free


def _nearest(path: Path) -> Path:
    """The path, or the first folder above it that exists."""
    return next(each for each in (path.absolute(), *path.absolute().parents) if each.exists())


def write_text(path: Path, text: str) -> None:
    """Write `text` (UTF-8) so that `path` holds either all of it or what it held before."""
    with atomic_file(path) as unfinished:
        unfinished.write_text(text, encoding="utf-8")


def write_png(path: Path, figure: "Figure") -> None:
    """Write a figure as PNG with `DPI` dots per inch, so that `path` holds either all of it or what it held before."""
    with atomic_file(path) as unfinished:
        figure.savefig(unfinished, format="png", dpi=DPI)


def write_readme(folder: Path, card: str, curves: "Figure | None" = None) -> None:
    """Write a model card as README.md and, where they are given, the training's curves as training.png."""
    write_text(folder / "README.md", card)
    if curves is not None:
        write_png(folder / "training.png", curves)


def write_csv(path: Path, columns: Sequence[str], rows: Iterable[Mapping[str, object]]) -> None:
    """`write_text` of a table with a header; a text that a spreadsheet would run as a formula gets a quote in front."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(columns)
    writer.writerows([_cell(row[column]) for column in columns] for row in rows)
    write_text(path, text.getvalue())


def _cell(value: object) -> object:
    return f"'{value}" if isinstance(value, str) and _FORMULA.match(value) else value


def write_json(path: Path, value: Any) -> None:
    """`write_text` of `value` as indented JSON, with a digest where it is an object."""
    write_text(path, to_json(value, indent=2) + "\n")


def read_json(path: Path, kind: Any = Any) -> Any:
    """The JSON value of a file.

    Args:
        path: The file.
        kind: Type of the value, such as a dataclass; nothing is converted to it, and nothing may be missing or surplus.

    Raises:
        UserError: the file is missing, is not JSON, is not of that type, or was changed.
    """
    try:
        return from_json(path.read_bytes(), kind)
    except FileNotFoundError:
        raise UserError(f"{path}: no such file") from None
    except ValueError as error:
        raise UserError(f"{path}: {error}; restore the file or make it again") from None


def read_jsonl(path: Path, kind: Any = Row) -> Iterator[Any]:
    """The values of a JSON Lines file, one per line; empty lines are skipped.

    Args:
        path: The file.
        kind: Type of a line's value, as in `read_json`.

    Raises:
        UserError: a line is not JSON, not of that type, or was changed; its number is named.
    """
    for _, value in _lines(path, kind):
        if isinstance(value, UserError):
            raise value
        yield value


def sound_lines(path: Path, kind: Any = Row) -> tuple[list[Any], list[UserError]]:
    """The values of the lines that `read_jsonl` takes, and the errors of the others."""
    values = [value for _, value in _lines(path, kind)]
    faults = [value for value in values if isinstance(value, UserError)]
    return [value for value in values if not isinstance(value, UserError)], faults


def _lines(path: Path, kind: Any) -> Iterator[tuple[int, Any]]:
    """The number of each line that is not empty, and its value or what is wrong with it."""
    with path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            try:
                value = from_json(line, kind)
            except ValueError as error:
                value = UserError(f"{path}:{number}: {error}")
            yield number, value


def whole_lines(path: Path, kind: Any = Row) -> list[Any]:
    """`read_jsonl` as a list, empty if the file is missing; a last line torn by a kill is removed from the file."""
    if not path.exists():
        return []
    cut_torn_line(path)
    return list(read_jsonl(path, kind))


def cut_torn_line(path: Path) -> None:
    """Remove a last line without an end, which a kill has torn, from a file."""
    text = path.read_bytes()
    whole = text.rfind(b"\n") + 1
    if whole < len(text):
        os.truncate(path, whole)


def append_lines(path: Path, rows: Iterable[Row]) -> None:
    """Append objects to a JSON Lines file, one per line, each with a digest."""
    with path.open("a", encoding="utf-8") as stream:
        stream.write(_as_lines(rows))
        stream.flush()
        os.fsync(stream.fileno())


def write_lines(path: Path, rows: Iterable[Row]) -> None:
    """`write_text` of objects as a JSON Lines file, each with a digest."""
    write_text(path, _as_lines(rows))


def _as_lines(rows: Iterable[Row]) -> str:
    return "".join(to_json(row) + "\n" for row in rows)


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
