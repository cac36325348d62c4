"""Arguments as they are typed: dashes, positional ones, and values in Hydra's grammar; texts need no quotes."""

import difflib
import re
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, get_args, get_origin

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException

from keepsight.errors import UserError


class Key(NamedTuple):
    """A key of a configuration: its name, such as `model.dtype`, its type, this with pydantic's checks, its help."""

    name: str
    kind: Any
    checked: Any
    note: str


def overrides_of(schema: type, keys: Sequence[Key], arguments: Sequence[str]) -> list[str]:
    """The arguments as `key=value`.

    `--dry-run` is dry_run=true and `--tasks niah` tasks=niah; what else has no `=` is the value of one of the schema's
    POSITIONAL keys, or one of the values of its POSITIONAL_LIST.
    """
    kinds = {key.name: key.kind for key in keys} | {"recipe": str}
    positional, many = iter(getattr(schema, "POSITIONAL", ())), getattr(schema, "POSITIONAL_LIST", None)
    overrides, listed, rest = list[str](), list[str](), iter(arguments)
    for argument in rest:
        if argument.startswith("--"):
            name, given, value = argument.removeprefix("--").partition("=")
            if (name := name.replace("-", "_")) not in kinds:
                raise UserError(unknown_key(name, kinds))
            if not given and bool in _parts(kinds[name]):
                value = "true"
            elif not given and not (value := next(rest, "")):
                raise UserError(f"{argument} needs a value; write {name}=VALUE")
            overrides.append(f"{name}={value}")
        elif "=" in argument:
            overrides.append(argument)
        elif many is not None:
            listed.append("'" + re.sub(r"(\\*)('|$)", _escaped, argument) + "'")
        elif (key := next(positional, None)) is not None:
            overrides.append(f"{key}={argument}")
        else:
            raise UserError(f"{argument!r} is not understood; arguments are written key=value, see --help")
    return [*overrides, f"{many}=[{','.join(listed)}]"] if listed else overrides


def _escaped(found: re.Match[str]) -> str:
    """A quote, or the end of a text, after backslashes: Hydra reads these as they are, but before a quote."""
    return found[1] * 2 + ("\\'" if found[2] else "")


def texts_of(overrides: Sequence[str]) -> dict[str, str]:
    """The text of each key's value.

    Raises:
        UserError: a key is given twice.
    """
    given: dict[str, str] = {}
    for override in overrides:
        key, _, value = override.partition("=")
        if key in given:
            raise UserError(f"{key}= is set twice: {given[key]!r} and {value!r}; set it once")
        given[key] = value
    return given


def unknown_key(name: str, known: Iterable[str]) -> str:
    """What is said of a key that a command does not have."""
    group = [key for key in known if key.startswith(f"{name}.")]
    near = difflib.get_close_matches(name, [*known], n=1, cutoff=0.5)
    hint = f"it holds {', '.join(group)}" if group else f"did you mean {near[0]!r}?" if near else "see --help"
    return f"{name!r} is no key of this command; {hint}"


def value_of(name: str, kind: Any, text: str) -> Any:
    """The value of a key's text; where the key's type is a text it stands for itself, and a list needs no brackets."""
    kinds = _parts(kind)
    if any("\ud800" <= letter <= "\udfff" for letter in text):
        raise UserError(f"{name}= is not UTF-8 text: {text!r}")
    if bool in kinds and text.lower() not in ("true", "false", "null"):
        raise UserError(f"{name}={text} must be true or false")  # OmegaConf takes any number for one of them
    is_quoted = len(text) > 1 and text[0] == text[-1] and text[0] in "\"'"
    is_list = list in (*kinds, *map(get_origin, kinds))
    if str in kinds and not is_list and dict not in kinds and text != "null" and not is_quoted:
        return text.replace("${", r"\${")
    bracketed = f"[{text}]" if is_list and not text.startswith("[") and text != "null" else text
    try:
        parsed = OverridesParser.create().parse_override(f"{name}={bracketed}")
    except HydraException:
        said = "write key=value, a list as key=[a,b], text with symbols in quotes"
        raise UserError(f"{f'{name}={text}'!r} cannot be read; {said}") from None
    if parsed.is_sweep_override():
        raise UserError(f"{name}={text}: this key takes one value")
    return parsed.value()


def _parts(kind: Any) -> tuple[Any, ...]:
    return get_origin(kind) or kind, *get_args(kind)
