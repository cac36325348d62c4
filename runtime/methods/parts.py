"""Parts of methods from plain values, as YAML and the command line give them.

`observer: {name: prompt_window, size: 16}`, `pool: {kernel: 5}`, `reduce: max`, `allocate: adakv`. What is not named
stays as the method has it.
"""

from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any, TypeVar

from keepsight.errors import UserError
from keepsight.runtime.allocate import ALLOCATIONS, Allocation
from keepsight.runtime.importance import NO_POOL, Pool, Reduce

Part = TypeVar("Part")


def build(kinds: Mapping[str, type[Part]], role: str, value: Any, default: Part | None = None) -> Part:
    """A part from its name, or from a mapping with its name and options.

    Args:
        kinds: Parts by name.
        role: What the part is for, such as `observer`: the key it was given under.
        value: `NAME` or `{name: NAME, option: value}`; without a name the options change `default`.
        default: The part to change.

    Raises:
        UserError: an unknown name or option, or a value out of range.
    """
    if not isinstance(value, str | dict):
        raise UserError(f"{role}: {value!r} is neither a name nor a mapping {{name: NAME, option: value}}")
    options = {"name": value} if isinstance(value, str) else dict(value)
    name = options.pop("name", None)
    if name is None and default is not None:
        kind = type(default)
    elif name in kinds:
        kind = kinds[name]
    else:
        raise UserError(f"{role}: {name!r} is unknown; choose one of {', '.join(kinds)}")
    known = [each.name for each in fields(kind)]  # type: ignore[arg-type]
    if unknown := sorted(set(options) - set(known)):
        raise UserError(f"{role}: there is no option {unknown[0]!r}; it takes {', '.join(known) or 'none'}")
    if name is None and default is not None:
        return replace(default, **options)  # type: ignore[type-var]
    return _made(kind, role, options)


def _made(kind: type[Part], role: str, options: dict[str, Any]) -> Part:
    required = [each.name for each in fields(kind) if _has_no_default(each)]  # type: ignore[arg-type]
    if missing := [each for each in required if each not in options]:
        raise UserError(f"{role}: option {missing[0]!r} is missing")
    return kind(**options)


def _has_no_default(field: Any) -> bool:
    return "MISSING" in repr(field.default) and "MISSING" in repr(field.default_factory)


def reduction(value: Any, default: Reduce) -> Reduce:
    """A `Reduce` from `mean`, `max`, or `{queries: ..., heads: ...}`."""
    if isinstance(value, str):
        return Reduce(value, value)
    return build({}, "reduce", value, default)


def pooling(value: Any, default: Pool) -> Pool:
    """A `Pool` from `none`, `max`, `avg`, or `{kind: ..., kernel: ...}`."""
    if value in ("none", None):
        return NO_POOL
    if isinstance(value, str):
        return replace(default, kind=value) if default.kernel > 1 else Pool(value)
    return build({}, "pool", value, default)


def allocation(value: Any, default: Allocation) -> Allocation:
    """An `Allocation` from `uniform`, `pyramidkv`, `adakv`, or `{name: ..., option: value}`."""
    return build(ALLOCATIONS, "allocate", value, default)
