"""Fields of the rows that benchmarks come in, checked where they are read."""

import re
from collections.abc import Mapping
from typing import Any

from keepsight.errors import UserError


def text_field(where: str, row: Mapping[str, Any], name: str) -> str:
    """A text.

    Raises:
        UserError: it is missing or no text; `where` names the row.
    """
    if not isinstance(row.get(name), str):
        raise UserError(f"{where}: field {name!r} must be a text, {_got(row, name)}")
    return row[name]


def texts_field(where: str, row: Mapping[str, Any], name: str) -> tuple[str, ...]:
    """A list of at least one text.

    Raises:
        UserError: it is missing or something else; `where` names the row.
    """
    value = row.get(name)
    if not isinstance(value, list) or not value or not all(isinstance(text, str) for text in value):
        raise UserError(f"{where}: field {name!r} must be a list of texts that is not empty, {_got(row, name)}")
    return tuple(value)


def _got(row: Mapping[str, Any], name: str) -> str:
    return f"got {str(row[name])[:60]!r}" if name in row else "but it is missing"


def fill_in(template: str, fields: Mapping[str, str]) -> str:
    """Put the fields in, in one pass: braces in a field's own text stay text, and nothing is looked up in objects."""
    return re.sub("{(" + "|".join(fields) + ")}", lambda match: fields[match[1]], template)


def bucket(tokens: int) -> int:
    """The smallest of 512, 1024, 2048, ... that is at least this number of tokens."""
    return max(512, 1 << (tokens - 1).bit_length())


def ruler_family(task: str) -> str:
    """The family of one of RULER's tasks: `niah` of `niah_single_1`."""
    return task.split("_")[0]
