"""The keys of a configuration: their types and defaults from its dataclasses, their help from its docstrings."""

import inspect
import re
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from typing import Any, get_type_hints


def describe(schema: type) -> Iterator[tuple[str, str, str]]:
    """(key, default, help) of every key of a configuration, nested ones as `model.dtype`."""
    for key, _, default, note in keys_of(schema):
        yield key, "required" if default == "???" else str(default), note


def groups(schema: type) -> Iterator[tuple[str, str]]:
    """(key, help) of every key; nested ones are one group, `model.*`."""
    notes, hints = _attribute_notes(schema), get_type_hints(schema)
    for each in fields(schema):
        if each.name in notes:
            yield f"{each.name}.*" if is_dataclass(hints[each.name]) else f"{each.name}=", notes[each.name]


def keys_of(schema: type, prefix: str = "", defaults: Any = None) -> Iterator[tuple[str, Any, Any, str]]:
    """(key, type, default, help) of every key; `defaults` is an instance that holds other defaults than its class."""
    notes = _attribute_notes(schema)
    hints = get_type_hints(schema)
    for each in fields(schema):
        if each.name == "defaults":
            continue
        kind = hints[each.name]
        default = each.default_factory() if callable(each.default_factory) else each.default
        default = default if defaults is None else getattr(defaults, each.name)
        if isinstance(kind, type) and is_dataclass(kind):
            yield from keys_of(kind, f"{prefix}{each.name}.", default)
            continue
        yield f"{prefix}{each.name}", kind, default, notes.get(each.name, "")


def _attribute_notes(schema: type) -> dict[str, str]:
    """What the docstrings of a dataclass and its bases say under `Attributes:`."""
    notes: dict[str, str] = {}
    for base in reversed(schema.__mro__):
        section = inspect.cleandoc(base.__doc__ or "").partition("Attributes:\n")[2].split("\nRaises:")[0]
        for name, note in re.findall(r"^    (\w+): (.*(?:\n {8,}.*)*)", section, flags=re.MULTILINE):
            notes[name] = " ".join(note.split())
    return notes
