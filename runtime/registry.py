"""The registry: names of methods and their parts in YAML and on the command line, and styles in plots.

A new method is one file: a class under `@method("name")`. Files in `runtime/methods/` are found by themselves, others
are named as a plugin (`plugins=[my_module]`).

`{name: snapkv, window: 16, pool: {kernel: 5}, allocate: adakv}`: an option is a field of the method, and a part (an
observer, drafter, reduction, pooling or allocation) is its name, a mapping with its name and options, or a mapping of
options alone, which change the part that the method has. `Method.build` makes a method of these, and the classes take
parts so as well: `SnapKV(128, pool={"kernel": 5}, allocate="adakv")`.
"""

import dataclasses
import difflib
import functools
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar, cast

from keepsight.errors import UserError, as_options
from keepsight.files import at_home, read_json
from keepsight.runtime.importance import NO_POOL, Pool, Reduce
from keepsight.runtime.resources import Resources

Line = Literal["-", "--", "-.", ":"]
Registered = TypeVar("Registered", bound=type)


@dataclass(frozen=True)
class Style:
    """Colour, marker and line of a method, as matplotlib takes them."""

    colour: str
    marker: str
    line: Line = "-"


METHODS: dict[str, type[Any]] = {}
PARTS: dict[str, dict[str, type[Any]]] = {"pool": {}, "first_pool": {}, "reduce": {}}
"""Classes of parts by their names, for each field that holds one; these three have one class each, without a name."""
OBSERVERS = PARTS.setdefault("observer", {})
DRAFTERS = PARTS.setdefault("drafter", {})
ALLOCATIONS = PARTS.setdefault("allocate", {})
LABELS: dict[str, str] = {}
"""Labels of methods in plots and pages, where they differ from their names."""
STYLES: dict[str, Style] = {}
"""How methods are drawn; methods without a style take the remaining colours."""


def method(
    name: str, *, label: str = "", colour: str = "", marker: str = "", line: Line = "-"
) -> Callable[[Registered], Registered]:
    """Register a method under the name that `methods=` calls it by.

    Plots and pages call it `label`, its name by default, and draw it in the `colour` `#RRGGBB`, one of the remaining
    colours by default, with a `marker` and a `line` of matplotlib.
    """
    if label:
        LABELS[name] = label
    if colour:
        STYLES[name] = Style(colour, marker, line)
    return _into(METHODS, name)


def _into(table: dict[str, type[Any]], name: str) -> Callable[[Registered], Registered]:
    def register(kind: Registered) -> Registered:
        table[name] = _taking_parts_by_name(as_options(kind))
        return kind

    return register


def _taking_parts_by_name(kind: Registered) -> Registered:
    """Let a dataclass take parts as YAML names them: `SnapKV(128, allocate="adakv", pool={"kernel": 5})`."""
    if not dataclasses.is_dataclass(cast(Any, kind)):
        return kind
    options_class: Any = kind
    init = options_class.__init__
    names = [*inspect.signature(init).parameters][1:]
    defaults = {field.name: field.default for field in dataclasses.fields(options_class)}

    def read(name: str, value: Any) -> Any:
        if name not in defaults or not isinstance(value, str | Mapping):
            return value
        try:
            return _field_value(name, value, defaults[name], Resources())
        except UserError as error:
            raise error.reworded(f"{kind.__name__}: {error}") from None

    @functools.wraps(init)
    def __init__(self: Any, *args: Any, **options: Any) -> None:
        positional = [read(name, value) for name, value in zip(names, args, strict=False)]
        by_name = {name: read(name, value) for name, value in options.items()}
        init(self, *positional, *args[len(names) :], **by_name)

    options_class.__init__ = __init__
    return kind


def part(role: str, name: str) -> Callable[[Registered], Registered]:
    """Register a class by its name, for the option `role` of methods."""
    return _into(PARTS.setdefault(role, {}), name)


def observer(name: str) -> Callable[[Registered], Registered]:
    """Register a class by its name, for the option `observer`."""
    return part("observer", name)


def drafter(name: str) -> Callable[[Registered], Registered]:
    """Register a class by its name, for the option `drafter`."""
    return part("drafter", name)


def allocation(name: str) -> Callable[[Registered], Registered]:
    """Register a class by its name, for the option `allocate`."""
    return part("allocate", name)


def method_class(name: str) -> type[Any]:
    """The class of a method, a `keepsight.runtime.generate.Method`; a `UserError` if there is none of this name."""
    if name in METHODS:
        return METHODS[name]
    similar = difflib.get_close_matches(name, METHODS, n=1)
    hint = f"; did you mean {similar[0]!r}?" if similar else ""
    raise UserError(
        f"method {name!r} is unknown; choose one of {', '.join(sorted(METHODS))}{hint}", field="method", code="unknown"
    )


def name_of(kind: type) -> str:
    """The name of a method's class in `METHODS`; of a class that is not registered, its own."""
    for name, registered in METHODS.items():
        if registered is kind:
            return name
    return kind.__name__


def has_field(method: str, field: str) -> bool:
    """Whether the method of this name has a field; a `UserError` if there is no such method."""
    return field in field_names(method_class(method))


def field_names(kind: type[Any]) -> list[str]:
    """The names of a dataclass's fields."""
    return [field.name for field in dataclasses.fields(kind)]


# From plain values to parts

_RESOURCE_FIELDS = ("artifact", "head", "draft", "tokenizer")
"""Fields that the resources fill, never an option."""


def fields_of(
    kind: type,
    options: Mapping[str, Any],
    resources: Resources,
    defaults: Mapping[str, Any] | None = None,
    already_set: tuple[str, ...] = (),
) -> dict[str, Any]:
    """Arguments for a class from options, as YAML gives them, from `defaults` that differ from its own, and resources.

    Fields in `already_set` are left out. A `UserError` for an unknown option, or a value that is missing.
    """
    kind_fields = [field for field in dataclasses.fields(kind) if field.name not in already_set]
    default_of = {field.name: field.default for field in kind_fields if field.name not in _RESOURCE_FIELDS}
    unknown = sorted(set(options) - set(default_of), key=str)
    if unknown:
        raise UserError(
            f"there is no option {unknown[0]!r}; it takes {', '.join(default_of) or 'none'}",
            field=str(unknown[0]),
            code="unknown",
        )

    values = dict(defaults or {})
    for name, value in options.items():
        default = values.get(name, default_of[name])
        values[name] = _field_value(name, value, default, resources)

    for field in kind_fields:
        is_required = field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
        if not is_required or field.name in values:
            continue
        if field.name in _RESOURCE_FIELDS:
            values[field.name] = resources.find(field.name)
        elif field.name == "observer":
            raise UserError(
                f"option 'observer' is missing, one of {', '.join(sorted(OBSERVERS))}", field="observer", code="missing"
            )
        else:
            raise UserError(f"option {field.name!r} is missing", field=field.name, code="missing")
    return values


def _field_value(name: str, value: Any, default: Any, resources: Resources) -> Any:
    """The value of the field `name`, as its option gives it."""
    if name == "inner" and isinstance(value, str | Mapping):
        options: dict[str, Any] = {"name": value} if isinstance(value, str) else dict(value)
        inner = method_class(str(options.pop("name", "")))
        budget = options.pop("budget", None)
        return inner.build(resources, budget, **options)
    if name in ("pool", "first_pool") and isinstance(value, str):
        return NO_POOL if value == "none" else Pool(value)
    if name == "weights" and isinstance(value, str):
        return read_json(Path(at_home(value)))
    if name == "reduce" and isinstance(value, str):
        return Reduce(value, value)
    if name in PARTS:
        return _part(name, value, default, resources)
    return value


def _part(role: str, value: Any, default: Any, resources: Resources) -> Any:
    """A part from its name, from a mapping with its name and options, or from options that change `default`.

    Raises:
        UserError: an unknown name or option, or a value out of range.
    """
    if value is not default and isinstance(value, int | float | list | None):
        raise UserError(
            f"{role}: {value!r} must be a name, or a mapping with a name and options", field=role, code="type"
        )
    if not isinstance(value, str | Mapping):
        return value

    classes = PARTS[role]
    options = {"name": value} if isinstance(value, str) else dict(value)
    name = options.pop("name", None)
    default_options: dict[str, Any] = {}
    kind: Any
    if name is not None:
        if not isinstance(name, str) or name not in classes:
            raise UserError(
                f"{role}: {name!r} is unknown; choose one of {', '.join(sorted(classes))}", field=role, code="unknown"
            )
        kind = classes[name]
    elif dataclasses.is_dataclass(default):
        kind = type(default)
        for field in dataclasses.fields(kind):
            default_options[field.name] = getattr(default, field.name)
    else:
        raise UserError(f"{role}: give it a name, one of {', '.join(sorted(classes))}", field=role, code="missing")

    try:
        return kind(**fields_of(kind, options, resources, default_options))
    except UserError as error:
        message = str(error)
        if role not in message:
            message = f"{role}: {message}"
        raise error.reworded(message) from None
