"""Dataclasses of options, such as methods and their parts: what they accept, and how they are shown."""

import dataclasses
import functools
import inspect
from typing import Any, TypeVar

from keepsight.errors import UserError

Kind = TypeVar("Kind", bound="type[Any]")


def as_options(kind: Kind) -> Kind:
    """Let a dataclass of options take scalars of numpy and torch, and show only what differs from its defaults.

    Where `budget` is its first field, `compression_ratio=r` stands for a budget that keeps 1 - r of the prompt's
    entries, as in kvpress.
    """
    if not hasattr(kind, "__dataclass_fields__"):
        return kind
    made: Any = kind
    init = made.__init__
    signature = inspect.signature(init)
    takes_ratio = [*signature.parameters][1:2] == ["budget"]

    @functools.wraps(init)
    def __init__(self: Any, *args: Any, **options: Any) -> None:
        if takes_ratio and "compression_ratio" in options:
            if args or "budget" in options:
                raise UserError(f"{kind.__name__}: give a budget or a compression_ratio, not both")
            options["budget"] = _kept_share(kind.__name__, options.pop("compression_ratio"))
        given = signature.bind(self, *args, **options)
        for name, value in given.arguments.items():
            if getattr(value, "ndim", None) == 0:
                given.arguments[name] = value.item()
        init(*given.args, **given.kwargs)

    made.__init__, made.__repr__ = __init__, _shown
    return kind


def _kept_share(name: str, ratio: Any) -> float:
    ratio = ratio.item() if getattr(ratio, "ndim", None) == 0 else ratio
    if type(ratio) not in (int, float) or not 0 <= ratio < 1:
        raise UserError(f"{name}: compression_ratio {ratio!r} must be a number from 0 to below 1, the evicted share")
    return round(1.0 - ratio, 12)  # without the noise of 1 - 0.9


def _shown(options: Any) -> str:
    """One line: the fields that differ from their defaults; of a value that is long, its type."""
    shown = []
    for each in dataclasses.fields(options):
        value = getattr(options, each.name)
        if each.repr and not (value is each.default or value == each.default):
            text = repr(value)
            short = len(text) <= 200 and "\n" not in text
            shown.append(f"{each.name}={text if short else type(value).__name__ + '(...)'}")
    return f"{type(options).__name__}({', '.join(shown)})"
