"""User errors, checked options, and escaping of untrusted text. Every folder may import it; it imports none."""

import codecs
import dataclasses
import functools
import inspect
import io
import re
import sys
from collections.abc import Mapping
from numbers import Integral
from typing import Annotated, Any, Literal, TypeVar, get_args, get_origin

from annotated_types import Ge, Gt, Le
from pydantic import ConfigDict, TypeAdapter, ValidationError
from typing_extensions import Self

Kind = TypeVar("Kind", bound="type[Any]")
Whole = Annotated[int, Ge(0), "a whole number of at least 0"]
Positive = Annotated[int, Ge(1), "a whole number of at least 1"]
Share = Annotated[float, Ge(0), Le(1), "between 0 and 1"]
Budget = Annotated[Positive | Annotated[float, Gt(0), Le(1)], "a whole number of at least 1, or a ratio in (0, 1]"]
"""Types of options; `as_options` refuses other values with the text at their end."""

_BOUNDS = {
    "finite_number",
    "greater_than",
    "greater_than_equal",
    "less_than",
    "less_than_equal",
    "multiple_of",
    "too_long",
    "too_short",
}
"""What pydantic calls values of the right type that are out of bounds."""
_STEERING = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


Code = Literal["missing", "unknown", "type", "range", "conflict", "model", "file", "data", "memory", "state", "service"]
"""What can be wrong with a field; `UserError` says what each means."""


class UserError(ValueError):
    """Bad input: the message is one line that names the file, field or value, what was expected, and what to do.

    The command line prints the message without a traceback and ends with exit code 2. Messages may be worded anew at
    any time; `field` and `code` stay.

    Attributes:
        field: The key, option, argument, tensor or file that the error is about, as users write it, such as `budget`
            or `model.id`; empty where it is about none.
        code: What is wrong with it; empty where nobody has asked yet.
            missing: a value, file, folder or package that is needed is not there.
            unknown: a name that is none of those there are.
            type: a value of another type or form, such as a text that cannot be parsed.
            range: a value outside its bounds, a text too long or too short, or nothing left to work on.
            conflict: settings that exclude each other, do not apply here, or differ from those the work began with.
            model: a model, tokenizer or method that cannot do this, or a module that is for another one.
            file: a file or folder that cannot be read or written, or whose contents are damaged or no such file's.
            data: a row, message, answer or number that cannot be used.
            memory: something does not fit into memory or onto the disk.
            state: a cache or saved state that cannot be continued, cropped, joined or read so.
            service: a server, the Hub or another program that fails.
    """

    def __init__(self, message: str, *, field: str = "", code: Code | Literal[""] = "") -> None:
        super().__init__(message)
        self.field = field
        self.code: Code | Literal[""] = code

    def reworded(self, message: str) -> Self:
        """The same error with another message, such as this one behind the name of a file."""
        return type(self)(message, field=self.field, code=self.code)


class UnfitModel(UserError):
    """A model that a method, with these options, cannot run on; `methods=all` leaves the method out."""


class BadRow(UserError):
    """A row of data, or an answer to it, that cannot be used; the run continues without it."""


def require_whole(name: str, least: int = 0, **values: object) -> None:
    """UserError, which begins with `name`, for the first value that is not a whole number of at least `least`."""
    for field, value in values.items():
        message = f"{name}: {field} {value!r} must be a whole number of at least {least}"
        if isinstance(value, bool) or not isinstance(value, Integral):
            raise UserError(message, field=field, code="type")
        if value < least:
            raise UserError(message, field=field, code="range")


def require_kind(kind: Any, name: str, value: object) -> None:
    """UserError for a value outside a type such as `Whole`.

    The message begins with `name`, whose last word is the field, such as `SnapKV: budget`.
    """
    try:
        _adapter(kind).validate_python(value)
    except ValidationError as error:
        message = f"{name} {value!r} {_expected(kind)}"
        raise UserError(message, field=name.rpartition(" ")[2], code=code_of(error)) from None


def require_same(subject: str, before: Mapping[str, object], now: Mapping[str, object], advice: str) -> None:
    """UserError with every difference from the settings that `subject` began with (`runs/data: this data was made`).

    Its `field` is the first setting that differs.
    """
    differences = {}
    for name in {**before, **now}:
        if before.get(name) != now.get(name):
            differences[name] = f"{name}={before.get(name)!r}, now it is {now.get(name)!r}"
    if differences:
        message = f"{subject} with {'; '.join(differences.values())}; {advice}"
        raise UserError(message, field=next(iter(differences)), code="conflict")


def printable(text: str, lines: bool = False) -> str:
    """Text from files, servers or users, with all characters escaped that could control a terminal.

    `lines` allows line breaks, and the zero-width characters that some scripts need.
    """
    if lines:
        return _STEERING.sub(lambda match: _escaped(match[0]), text)
    return "".join(character if character.isprintable() else _escaped(character) for character in text)


def print_any_text() -> None:
    """Let stdout and stderr replace characters that their encoding lacks, which would be an error."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper) and codecs.lookup(stream.encoding).name != "utf-8":
            errors = "replace" if stream.errors == "strict" else stream.errors
            stream.reconfigure(errors=errors)


def _escaped(character: str) -> str:
    return character.encode("unicode_escape").decode()


def one_line(error: object, longest: int = 300) -> str:
    """The message of an error from elsewhere on one line, of at most so many characters."""
    return " ".join(str(error).split())[:longest]


def as_options(kind: Kind) -> Kind:
    """Let a dataclass of options take scalars of numpy and torch, check them, and show what differs from its defaults.

    Values of fields whose type is bool, a range such as `Whole`, or `Annotated` with the `Literal` of its choices, here
    or in a base class, are checked before `__post_init__`, and refused with a `UserError`; so are unknown options.
    Where `budget` is the first field, `compression_ratio=r` stands for a budget that keeps 1 - r of the prompt's
    entries, as in kvpress.
    """
    if not hasattr(kind, "__dataclass_fields__"):
        return kind
    options_class: Any = kind
    init = options_class.__init__
    signature = inspect.signature(init)
    taken = [*signature.parameters][1:]
    takes_ratio = taken[:1] == ["budget"]
    checked_types = dict(getattr(kind, "_checked_types", {}))
    for field in dataclasses.fields(kind):
        if _expected(field.type):
            checked_types[field.name] = field.type
    options_class._checked_types = checked_types

    @functools.wraps(init)
    def __init__(self: Any, *args: Any, **options: Any) -> None:
        if takes_ratio and "compression_ratio" in options:
            if args or "budget" in options:
                message = f"{kind.__name__}: give a budget or a compression_ratio, not both"
                raise UserError(message, field="compression_ratio", code="conflict")
            options["budget"] = _kept_share(kind.__name__, options.pop("compression_ratio"))
        unknown = sorted(options.keys() - set(taken))
        if unknown:
            message = f"{kind.__name__}: there is no option {unknown[0]!r}; it takes {', '.join(taken)}"
            raise UserError(message, field=unknown[0], code="unknown")
        bound = signature.bind(self, *args, **options)
        for name, value in bound.arguments.items():
            if getattr(value, "ndim", None) == 0:
                value = value.item()
                bound.arguments[name] = value
            if name in checked_types:
                require_kind(checked_types[name], f"{kind.__name__}: {name}", value)
        init(*bound.args, **bound.kwargs)

    options_class.__init__ = __init__
    options_class.__repr__ = _changed_options
    return kind


@functools.cache
def _adapter(kind: Any) -> TypeAdapter[Any]:
    """What checks values of a type; of `Annotated` with the `Literal` of its choices, these."""
    for annotation in getattr(kind, "__metadata__", ()):
        if get_origin(annotation) is Literal:
            return TypeAdapter(annotation, config=ConfigDict(strict=True))
    return TypeAdapter(kind, config=ConfigDict(strict=True))


def _expected(kind: Any) -> str:
    """What is expected of values of a type, for messages; empty where that is not checked."""
    if kind is bool:
        return "must be true or false"
    if get_origin(kind) is Literal:
        return f"is unknown; choose one of {', '.join(map(str, get_args(kind)))}"
    if isinstance(kind, str):
        return f"must be {kind}"
    for annotation in getattr(kind, "__metadata__", get_args(kind)):
        text = _expected(annotation)
        if text:
            return text
    return ""


def _kept_share(name: str, ratio: Any) -> float:
    if getattr(ratio, "ndim", None) == 0:
        ratio = ratio.item()
    is_number = type(ratio) in (int, float)
    if not is_number or not 0 <= ratio < 1:
        message = f"{name}: compression_ratio {ratio!r} must be a number from 0 to below 1, the evicted share"
        code: Code = "range" if is_number else "type"
        raise UserError(message, field="compression_ratio", code=code)
    return round(1.0 - ratio, 12)  # without the noise of 1 - 0.9


def _changed_options(options: Any) -> str:
    """One line: the fields that differ from their defaults; of a value that is long, its type."""
    changed = []
    for field in dataclasses.fields(options):
        value = getattr(options, field.name)
        if field.repr and not (value is field.default or value == field.default):
            text = repr(value)
            if len(text) > 200 or "\n" in text:
                text = f"{type(value).__name__}(...)"
            changed.append(f"{field.name}={text}")
    return f"{type(options).__name__}({', '.join(changed)})"


def code_of(error: ValidationError) -> Code:
    """The code of what pydantic found: of a union of types, `range` where one of them is only out of bounds."""
    kinds = {fault["type"] for fault in error.errors()}
    if kinds & _BOUNDS:
        return "range"
    if "missing" in kinds:
        return "missing"
    return "unknown" if kinds & {"literal_error", "enum", "unknown"} else "type"


def reason_of(error: ValidationError) -> str:
    """What pydantic found, in words that suit any key."""
    (first, *_) = error.errors()
    limits = first.get("ctx", {})
    if first["type"] == "too_short":
        least = limits["min_length"]
        return "must not be empty" if least == 1 else f"must have at least {least} values"
    if first["type"] == "too_long":
        return f"must have at most {limits['max_length']} values"
    message = first["msg"].removeprefix("Value error, ")
    return re.sub("^(Input|List|Value) should", "must", message)
