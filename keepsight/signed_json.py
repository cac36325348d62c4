"""JSON that says when it was changed, read as values of known types. Every folder may import this file.

The text of an object begins with a digest of what follows: `{"_sha256": "16 hexadecimal digits", ...}`, which is no
part of the value. JSON from elsewhere has none and is read as it is.
"""

import hashlib
import json
import re
from functools import cache
from typing import Any

from pydantic import TypeAdapter, ValidationError
from typing_extensions import is_typeddict

_DIGEST = re.compile(rb'\{\s*"_sha256": "([0-9a-f]{16})",\s*')
_FIRST_KEY = re.compile(rb'\{\s*"(.{7})"')


def to_json(value: Any, indent: int | None = None) -> str:
    """The value as JSON, an object with its digest."""
    text = json.dumps(value, indent=indent, ensure_ascii=False)
    if not isinstance(value, dict) or not value:
        return text
    rest = text[1:].lstrip()
    opening, gap = ("{", " ") if indent is None else (f"{{\n{' ' * indent}", f"\n{' ' * indent}")
    return f'{opening}"_sha256": "{_digest(rest.encode())}",{gap}{rest}'


def from_json(text: bytes, kind: Any = Any) -> Any:
    """The value of JSON, without its digest.

    Args:
        text: UTF-8.
        kind: Type of the value, such as a dataclass. Nothing is converted, and no field may be missing or unknown;
            only a TypedDict may have others.

    Raises:
        ValueError: it is not JSON, not of that type, or was changed; the message is one line.
    """
    text = text.strip()
    if digest := _DIGEST.match(text):
        rest = text[digest.end() :]
        if _digest(rest) != digest[1].decode():
            raise ValueError("changed or cut off since it was written (the digest at its start differs)")
        text = b"{" + rest
    elif (key := _FIRST_KEY.match(text)) and sum(a != b for a, b in zip(key[1], b"_sha256", strict=True)) < 2:
        raise ValueError("changed since it was written (the digest at its start is none)")
    try:
        return _adapter(kind).validate_json(text, strict=True, extra="allow" if is_typeddict(kind) else "forbid")
    except ValidationError as error:
        raise ValueError(_first(error)) from None


@cache
def _adapter(kind: Any) -> TypeAdapter[Any]:
    return TypeAdapter(kind)


def _first(error: ValidationError) -> str:
    """The first of what is wrong, on one line."""
    first = error.errors(include_url=False)[0]
    said, got = " ".join(first["msg"].removeprefix("Value error, ").split()), first["input"]
    if first["type"] == "json_invalid":
        return f"not valid JSON ({said.removeprefix('Invalid JSON: ')}); is it cut off?"
    field = "".join(f"{part}." for part in first["loc"]).rstrip(".")
    shown = type(got).__name__ if isinstance(got, dict | list) else repr(got)[:60]
    return f"{field and field + ': '}{said.replace('Input should be', 'expected')}, got {shown}"


def _digest(text: bytes) -> str:
    return hashlib.sha256(text).hexdigest()[:16]
