"""Reading and writing files: atomic writes, checked JSON and JSON Lines, tables, locks, digests, sizes."""

import codecs
import csv
import gzip
import hashlib
import io
import json
import os
import re
import shutil
import socket
import tempfile
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import psutil
import yaml
from filelock import FileLock, Timeout
from pydantic import TypeAdapter, ValidationError
from typing_extensions import is_typeddict

from keepsight.errors import UserError, code_of

if TYPE_CHECKING:
    from matplotlib.figure import Figure

DPI = 150
"""Resolution of plots, in dots per inch."""

JsonObject = dict[str, Any]
"""A JSON object: a line of a JSON Lines file."""
_UNITS = {
    **{"": 1, "B": 1},
    **{"KB": 1000, "MB": 1000**2, "GB": 1000**3, "TB": 1000**4},
    **{"KiB": 1024, "MiB": 1024**2, "GiB": 1024**3, "TiB": 1024**4},
}
_UNFINISHED = ".unfinished-"
_FORMULA = re.compile(r"[=@\t\r\n]|[+-](?!\d*\.?\d+(?:e[+-]?\d+)?\Z)", re.IGNORECASE)
"""Beginnings of texts that a spreadsheet may run; numbers with a sign are none."""
_UTF_16 = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
_YAML_BYTES = 1 << 20
_YAML_VALUES = 100_000
"""Largest YAML file, and number of values in one once its aliases are replaced; larger ones are no configurations."""


# Paths


def at_home(path: str | Path) -> str:
    """A path with the home folder in place of a `~` or `~USER` at its start, as in a shell; any other stays as it is.

    UserError where nobody's home folder is known: a folder would be called `~`, and whoever removes it loses theirs.
    """
    expanded = os.path.expanduser(path)
    if expanded.split("/", 1)[0] == "~":
        raise UserError(
            f"{path}: the home folder is not known; set HOME, or write the folder out", field="HOME", code="missing"
        )
    return str(expanded)


def require_writable(out: Path, folder: bool = True, key: str = "out") -> None:
    """UserError for a path that cannot be written to, before hours of work are lost.

    The path need not exist. It is to be a folder, or else a regular file; `key` is the command's key that names it.
    """
    for path in (out, *out.parents):
        if path.is_symlink() and not path.exists():
            raise UserError(
                f"{key}={out}: {path} is a broken link; remove it, or choose another {key}=", field=key, code="file"
            )
    if out.exists():
        expected = "folder" if folder else "file"
        if out.is_dir():
            kind = "folder"
        elif out.is_file():
            kind = "file"
        else:
            kind = "device or pipe"
        if kind != expected:
            raise UserError(f"{key}={out} is a {kind}; name a {expected}", field=key, code="file")
    nearest = _nearest_existing(out) if folder else _nearest_existing(out.parent)
    if not nearest.is_dir():
        raise UserError(
            f"{key}={out} lies in {nearest}, which is a file; choose another {key}=", field=key, code="file"
        )
    if not os.access(nearest, os.W_OK | os.X_OK):
        raise UserError(f"{key}={out}: {nearest} cannot be written to; choose another {key}=", field=key, code="file")


def free_bytes(path: Path) -> int:
    """Free bytes on the disk of a path that need not exist."""
    return shutil.disk_usage(_nearest_existing(path)).free


def _nearest_existing(path: Path) -> Path:
    """The path, or the first folder above it that exists."""
    path = path.absolute()
    while not path.exists():
        path = path.parent
    return path


# Atomic writes and locks


@contextmanager
def atomic_folder(folder: Path) -> Iterator[Path]:
    """Yield an empty folder that replaces `folder` when the block ends; when it raises, `folder` stays as it was."""
    folder = regular(Path(at_home(folder)))
    with _unfinished(folder.parent) as unfinished:
        new = unfinished / folder.name
        new.mkdir()
        yield new
        sync(*new.rglob("*"), new)
        if folder.exists():
            folder.rename(unfinished / "replaced")
        new.rename(folder)
        sync(folder.parent)


@contextmanager
def atomic_files(folder: Path, last: str) -> Iterator[Path]:
    """Yield an empty folder whose files move into `folder` when the block ends, the one called `last` after the others.

    A reader that requires `last` never sees a mixture of old and new files. Files of other names stay. UserError if one
    is a device, a pipe or a socket.
    """
    regular(folder, folder / last)
    with _unfinished(folder) as unfinished:
        yield unfinished
        paths = sorted(unfinished.iterdir(), key=lambda path: path.name == last)
        regular(folder, *(folder / path.name for path in paths))
        sync(*paths)
        (folder / last).unlink(missing_ok=True)
        for path in paths:
            path.replace(folder / path.name)
        sync(folder)


@contextmanager
def atomic_file(path: Path) -> Iterator[Path]:
    """Yield a temporary path, which becomes `path` when the block ends without an error; UserError for a device."""
    regular(path)
    with _unfinished(path.parent) as unfinished:
        new = unfinished / path.name
        yield new
        sync(new)
        new.replace(path)
        sync(path.parent)


def regular(path: Path, *others: Path) -> Path:
    """The path; UserError if it or one of the others is a device, a pipe or a socket."""
    for checked in (path, *others):
        if checked.exists() and not (checked.is_file() or checked.is_dir()):
            raise UserError(f"{checked}: not a regular file; choose another path", field=checked.name, code="file")
    return path


@contextmanager
def _unfinished(folder: Path) -> Iterator[Path]:
    """Yield an empty temporary folder in `folder`, after removing those of processes that were killed.

    UserError if it was removed within the block.
    """
    is_nested = any(part.startswith(_UNFINISHED) for part in folder.parts)
    if not is_nested:  # if the outer folder was removed, its files would be missing
        folder.mkdir(parents=True, exist_ok=True)
    for unfinished in folder.glob(f"{_UNFINISHED}*"):
        if _is_abandoned(unfinished):
            shutil.rmtree(unfinished, ignore_errors=True)
    temporary = Path(tempfile.mkdtemp(prefix=f"{_UNFINISHED}{socket.gethostname()}-{os.getpid()}-", dir=folder))
    try:
        yield temporary
    except FileNotFoundError:
        if is_nested or temporary.exists():
            raise
        raise UserError(
            f"{folder}: removed while it was being written; run the same command again", field="out", code="file"
        ) from None
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _is_abandoned(unfinished: Path) -> bool:
    """Whether the process of this machine that made the folder is gone; another may have its number now."""
    host, _, process = unfinished.name.removeprefix(_UNFINISHED).rpartition("-")[0].rpartition("-")
    if host != socket.gethostname() or not process.isdecimal():
        return False
    try:
        return psutil.Process(int(process)).create_time() > unfinished.stat().st_mtime + 1
    except (psutil.NoSuchProcess, FileNotFoundError):
        return True


def sync(*paths: Path) -> None:
    """Wait until files and folders are on the disk, so that they survive a power cut."""
    for path in paths:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


@contextmanager
def one_writer(folder: Path) -> Iterator[None]:
    """Lock a folder against other writers within the block; the lock of a killed process is free.

    UserError: another process has the lock, or the folder was removed within the block.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / ".lock"
    lock = FileLock(path, timeout=0)
    try:
        lock.acquire()
    except Timeout:
        holder = path.read_text(encoding="utf-8") if path.exists() else ""
        holder = holder or "another process"
        raise UserError(
            f"{folder}: {holder} is writing here; wait for it to end, or choose another out=",
            field="out",
            code="conflict",
        ) from None
    try:
        path.write_text(f"process {os.getpid()} on {socket.gethostname()}, since {datetime.now():%Y-%m-%d %H:%M},")
        yield
        if not path.exists():
            raise UserError(
                f"{folder}: removed while it was being written; run the same command again", field="out", code="file"
            )
    finally:
        path.unlink(missing_ok=True)
        lock.release()


# Texts, figures, tables


def write_text(path: Path, text: str) -> None:
    """Write text as UTF-8, atomically."""
    with atomic_file(path) as unfinished:
        unfinished.write_text(text, encoding="utf-8")


def write_png(path: Path, figure: "Figure") -> None:
    """Write a figure as PNG with `DPI` dots per inch, atomically."""
    with atomic_file(path) as unfinished:
        figure.savefig(unfinished, format="png", dpi=DPI)


def write_csv(path: Path, columns: Sequence[str], rows: Iterable[Mapping[str, object]]) -> None:
    """Write a table with a header; a text that a spreadsheet would run as a formula gets a quote in front."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(map(_cell, columns))
    for row in rows:
        writer.writerow([_cell(row[column]) for column in columns])
    write_text(path, text.getvalue())


def _cell(value: object) -> object:
    if not isinstance(value, str):
        return value
    text = re.sub("\r\n?", "\n", value)  # Python before 3.13 does not quote a carriage return, which begins a row
    return f"'{text}" if _FORMULA.match(text) else text


# JSON


def from_json(text: bytes, kind: Any = Any) -> Any:
    """The value of JSON in UTF-8; UserError (one line, with the field) if malformed or of another type.

    `kind` is the value's type, such as a dataclass. Nothing is converted, and no field may be missing or unknown; only
    a TypedDict may have others.
    """
    if text.startswith(_UTF_16):
        raise UserError("UTF-16; save it as UTF-8", code="file")
    text = text.strip().removeprefix(codecs.BOM_UTF8)
    extra: Literal["allow", "forbid"] = "allow" if is_typeddict(kind) else "forbid"
    try:
        return _adapter(kind).validate_json(text, strict=True, extra=extra)
    except ValidationError as error:
        message, field = _first_fault(error)
        cause = error.errors(include_url=False)[0].get("ctx", {}).get("error")
        if isinstance(cause, UserError):  # by a check of the class itself
            raise UserError(message, field=cause.field, code=cause.code) from None
        raise UserError(message, field=field, code=code_of(error)) from None


@cache
def _adapter(kind: Any) -> TypeAdapter[Any]:
    return TypeAdapter(kind)


def _first_fault(error: ValidationError) -> tuple[str, str]:
    """The first of pydantic's errors on one line: the field, what is wrong, and the value; and the field alone."""
    fault = error.errors(include_url=False)[0]
    value = fault["input"]
    message = " ".join(fault["msg"].removeprefix("Value error, ").split())
    if fault["type"] == "json_invalid":
        return f"not valid JSON ({message.removeprefix('Invalid JSON: ')}); is it cut off?", ""
    field = ".".join(map(str, fault["loc"]))
    prefix = f"{field}: " if field else ""
    if fault["type"] == "value_error" and isinstance(value, dict):  # by a check over several fields
        return prefix + message, field
    shown = type(value).__name__ if isinstance(value, dict | list) else repr(value)[:60]
    return f"{prefix}{message.replace('Input should be', 'expected')}, got {shown}", field


def write_json(path: Path, value: Any) -> None:
    """Write a value as indented JSON, atomically."""
    write_text(path, json.dumps(value, indent=2, ensure_ascii=False) + "\n")


def read_json(path: Path, kind: Any = Any) -> Any:
    """The JSON value of a file, `kind` as in `from_json`; UserError if missing, malformed, or of another type."""
    regular(path)
    try:
        return from_json(path.read_bytes(), kind)
    except FileNotFoundError:
        raise UserError(f"{path}: no such file", field=path.name, code="missing") from None
    except ValueError as error:
        raise UserError(f"{path}: {error}; restore the file or make it again", field=path.name, code="file") from None


def package_yaml(package: str, name: str) -> dict[str, Any]:
    """The content of the file NAME.yaml of a package of this project, read by libyaml where that is installed."""
    text = (files(package) / f"{name}.yaml").read_text(encoding="utf-8")
    return dict(yaml.load(text, getattr(yaml, "CSafeLoader", yaml.SafeLoader)))


def read_yaml(path: Path) -> str:
    """The text of a YAML file; UserError if it is none, or too large: in bytes, or with its aliases replaced."""
    with path.open("rb") as stream:
        content = stream.read(_YAML_BYTES + 1)
    if len(content) > _YAML_BYTES:
        raise UserError(
            f"{path}: larger than {size_text(_YAML_BYTES)}, too large for a configuration",
            field=path.name,
            code="memory",
        )
    try:
        encoding = "utf-16" if content.startswith(_UTF_16) else "utf-8-sig"
        text = content.decode(encoding)
        root = yaml.compose(text, yaml.SafeLoader)
        values = _count_values(root, {}) if root else 0
    except (yaml.YAMLError, UnicodeError, RecursionError) as error:
        raise UserError(
            f"{path}: not a YAML file ({' '.join(str(error).split())})", field=path.name, code="file"
        ) from None
    if values > _YAML_VALUES:
        raise UserError(f"{path}: with its aliases written out it is too large", field=path.name, code="memory")
    return text


def _count_values(node: yaml.Node, counts: dict[int, float]) -> float:
    """Number of values in a YAML node with its aliases replaced; infinite where an alias stands for itself.

    `counts` has the numbers of the nodes that were counted before, by id.
    """
    if id(node) in counts:
        return counts[id(node)]
    counts[id(node)] = float("inf")
    children = []
    if isinstance(node, yaml.SequenceNode):
        children = node.value
    elif isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            children += [key, value]
    counts[id(node)] = 1 + sum(_count_values(child, counts) for child in children)
    return counts[id(node)]


def read_jsonl(path: Path, kind: Any = JsonObject, *, skip_torn: bool = False) -> Iterator[Any]:
    """The value of each line that is not empty, `kind` as in `from_json`; UserError names a line that is malformed.

    With `skip_torn`, a last line that is cut off, as a kill or a writer at work leaves it, is left out.
    """
    with regular(path).open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            try:
                value = from_json(line, kind)
            except ValueError as error:
                if skip_torn and not line.endswith(b"\n"):
                    return
                raise UserError(f"{path}:{number}: {error}", field=path.name, code="file") from None
            yield value


def text_lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """Number, from 1, and UTF-8 of each line that is not empty; UserError if not UTF-8 or UTF-16, plain or gzipped."""
    data = path.read_bytes()
    try:
        if data.startswith(b"\x1f\x8b"):
            data = gzip.decompress(data)
        if data.startswith(_UTF_16):
            data = data.decode("utf-16").encode()
    except (OSError, EOFError, zlib.error, UnicodeError) as error:
        raise UserError(f"{path}: neither text nor gzipped text ({error})", field=path.name, code="file") from None
    for number, line in enumerate(data.removeprefix(codecs.BOM_UTF8).split(b"\n"), start=1):
        if line.strip():
            yield number, line


def whole_lines(path: Path, kind: Any = JsonObject) -> list[Any]:
    """`read_jsonl` as a list, empty if the file is missing; a last line torn by a kill is removed from the file."""
    if not path.exists():
        return []
    cut_torn_line(path)
    return list(read_jsonl(path, kind))


def cut_torn_line(path: Path) -> None:
    """Remove a last line that does not end, as a kill leaves it, from a file."""
    text = path.read_bytes()
    end = text.rfind(b"\n") + 1
    if end < len(text):
        os.truncate(path, end)


def append_lines(path: Path, rows: Iterable[JsonObject]) -> None:
    """Append objects to a JSON Lines file, and wait until they are on the disk."""
    regular(path)
    with path.open("a", encoding="utf-8") as stream:
        stream.write(_lines_of(rows))
        stream.flush()
        os.fsync(stream.fileno())


def write_lines(path: Path, rows: Iterable[JsonObject]) -> None:
    """Write objects as a JSON Lines file, atomically."""
    write_text(path, _lines_of(rows))


def _lines_of(rows: Iterable[JsonObject]) -> str:
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)


# Digests and sizes


def hex_digest(blocks: Iterable[bytes | memoryview]) -> str:
    """The 64 hexadecimal digits of the SHA-256 of blocks of bytes, one after the other."""
    sha256 = hashlib.sha256()
    for block in blocks:
        sha256.update(block)
    return sha256.hexdigest()


def bytes_digest(blocks: Iterable[bytes | memoryview]) -> str:
    """`sha256:` and the hexadecimal digest of blocks of bytes, one after the other."""
    return f"sha256:{hex_digest(blocks)}"


def file_digest(path: Path) -> str:
    """`sha256:` and the hexadecimal digest of a file's bytes."""
    with path.open("rb") as stream:
        return bytes_digest(iter(lambda: stream.read(1 << 20), b""))


def json_digest(value: Any) -> str:
    """`sha256:` and the hexadecimal digest of a value as JSON, the keys of objects in order."""
    return bytes_digest([json.dumps(value, sort_keys=True).encode()])


def read_bytes(text: str) -> int:
    """Bytes from text such as 24GiB, 24 GB, 1.5GiB or 25769803776; UserError for another form, or 0."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", text)
    size = 0
    if match is not None and match[2] in _UNITS:
        number, unit = match.groups()
        size = int(float(number) * _UNITS[unit])
    if size == 0:
        raise UserError(
            f"{text!r} is not an amount of memory; write it as 24GiB, 24GB or a number of bytes",
            field="memory",
            code="type",
        )
    return size


def size_text(size: int) -> str:
    """Bytes as text, in GiB, or MiB below one GiB."""
    if size >= 2**30:
        return f"{size / 2**30:.2f} GiB"
    return f"{size / 2**20:.2f} MiB"
