"""What can happen to a file: each kind changes one in place, and returns False where it does not apply."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from keepsight.files import file_digest, from_json, write_json

_OTHER: tuple[Any, ...] = (None, -1, 10**13, 1.5, "text", [], {}, {"a": [1]}, True, "=1+1", "\x1b[2J")
_NO_JSON = ("", "{", "[" * 100_000, '{"a": ' * 100_000, '"\\ud800"', "\x80\x04N.", "nan", '{"a": 1} {}')


def truncated(path: Path, rng: Random) -> None:
    """Cut off anywhere."""
    content = path.read_bytes()
    path.write_bytes(content[: rng.randrange(len(content))])


def emptied(path: Path, rng: Random) -> None:
    """Without content."""
    path.write_bytes(b"")


def flipped(path: Path, rng: Random) -> None:
    """One bit is another."""
    content = bytearray(path.read_bytes())
    content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
    path.write_bytes(content)


def zeroed(path: Path, rng: Random) -> None:
    """A block is zero, as after a power cut."""
    content = bytearray(path.read_bytes())
    start = rng.randrange(len(content))
    content[start : start + 512] = bytes(len(content[start : start + 512]))
    path.write_bytes(content)


def repeated(path: Path, rng: Random) -> None:
    """A part stands twice, a line where the file has lines."""
    lines = path.read_bytes().splitlines(keepends=True)
    index = rng.randrange(len(lines))
    path.write_bytes(b"".join([*lines[: index + 1], *lines[index:]]))


def removed(path: Path, rng: Random) -> None:
    """The file is gone."""
    path.unlink()


def a_folder(path: Path, rng: Random) -> None:
    """A folder of that name."""
    path.unlink()
    path.mkdir()


def other_content(path: Path, rng: Random) -> None:
    """Something else, JSON or not."""
    path.write_text(rng.choice([*map(json.dumps, _OTHER), *_NO_JSON]) + "\n", encoding="utf-8")


def other_value(path: Path, rng: Random) -> bool | None:
    """JSON in which one value is of another kind or gone."""
    if path.suffix == ".json":
        value = from_json(path.read_bytes())
        write_json(path, _changed(value, rng))
    elif path.suffix == ".jsonl":
        lines = path.read_bytes().splitlines()
        index = rng.randrange(len(lines))
        changed = _changed(from_json(lines[index]), rng)
        lines[index] = json.dumps(changed, ensure_ascii=False).encode()
        path.write_bytes(b"\n".join(lines) + b"\n")
    else:
        return False
    return None


def spoilt_tensor(path: Path, rng: Random) -> bool | None:
    """A tensor holds NaN, has another shape or another name; digests beside it fit."""
    if path.suffix != ".safetensors":
        return False
    tensors = load_file(path)
    digest = file_digest(path)
    name = rng.choice(sorted(tensors))
    kind = rng.choice(["nan", "shape", "name"])
    if kind == "nan" and tensors[name].is_floating_point():
        tensors[name].view(-1)[0] = torch.nan
    elif kind == "name":
        tensors["other"] = tensors.pop(name)
    else:
        tensors[name] = torch.cat([tensors[name], tensors[name]])
    save_file(tensors, path)
    for beside in path.parent.glob("*.json"):
        text = beside.read_text(encoding="utf-8")
        if digest in text:
            write_json(beside, json.loads(text.replace(digest, file_digest(path))))
    return None


def _changed(value: Any, rng: Random) -> Any:
    """The value with one value in it, at any depth, changed or gone."""
    if not isinstance(value, dict | list) or not value or rng.random() < 0.15:
        return rng.choice(_OTHER)
    key = rng.choice([*value]) if isinstance(value, dict) else rng.randrange(len(value))
    if rng.random() < 0.2:
        value.pop(key)
    else:
        value[key] = _changed(value[key], rng)
    return value


FORGED = (other_value, spoilt_tensor)
"""No digest can show these: what is well-formed is another file."""
KINDS: tuple[Callable[[Path, Random], bool | None], ...] = (
    *(truncated, emptied, flipped, zeroed, repeated, removed, a_folder, other_content),
    *FORGED,
)


def restore(path: Path, original: Path) -> None:
    """Bring a file back."""
    if path.is_dir():
        shutil.rmtree(path)
    shutil.copyfile(original, path)
