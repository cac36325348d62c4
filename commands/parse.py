"""Configurations: `key=value` arguments over a recipe's values, typed by OmegaConf and checked by pydantic.

Arguments may also be options (`--key value`) or positional; values are in Hydra's grammar, texts need no quotes.
"""

import difflib
import functools
import inspect
import itertools
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any, NamedTuple, TypeVar, cast, get_args, get_origin, get_type_hints

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Quote, QuotedString
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import TypeAdapter, ValidationError

from keepsight.commands.recipe import RecipeChoice, choose_recipe, preset_values, recipe_values, say_once
from keepsight.errors import UserError
from keepsight.files import at_home
from keepsight.models.lookahead_settings import SELECTIONS

_LARGEST = 1 << 40
"""Largest whole number that a key takes; larger ones overflow where sizes are computed from them."""
_NO_PATHS = ("prompt", "system", "title", "data_notes", "model.template", "judge.options")
"""Keys of texts, in which a `~` at the start is one; `prompt=@~/FILE` is read at home all the same."""
_HOME = re.compile(r"(^|[\[,:]\s*)(~(?=[/,\]}]|\w*/)[^,\[\]{}'\"]*)")
Command = TypeVar("Command", bound=Any)


class Key(NamedTuple):
    """A key of a configuration: name, such as `model.dtype`, type, the type with pydantic's checks, and help."""

    name: str
    kind: Any
    checked: Any
    note: str


def overrides_of(schema: type, keys: Sequence[Key], arguments: Sequence[str]) -> list[str]:
    """The arguments as `key=value`.

    `--dry-run` means dry_run=true, and `--tasks niah` tasks=niah. Other arguments without `=` are values of the
    schema's POSITIONAL keys, or of its POSITIONAL_LIST.
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
    """Double the backslashes before a quote or a text's end, and escape the quote, as Hydra's grammar requires."""
    return found[1] * 2 + ("\\'" if found[2] else "")


def texts_of(overrides: Sequence[str]) -> dict[str, str]:
    """The text of each key's value; UserError for a key that is set twice."""
    given: dict[str, str] = {}
    for override in overrides:
        key, _, value = override.partition("=")
        if key in given:
            raise UserError(f"{key}= is set twice: {given[key]!r} and {value!r}; set it once")
        given[key] = value
    return given


def unknown_key(name: str, known: Iterable[str]) -> str:
    """The error message for a key that a command does not have."""
    group = [key for key in known if key.startswith(f"{name}.")]
    near = difflib.get_close_matches(name, [*known], n=1, cutoff=0.5)
    hint = f"it holds {', '.join(group)}" if group else f"did you mean {near[0]!r}?" if near else "see --help"
    return f"{name!r} is no key of this command; {hint}"


def value_of(name: str, kind: Any, text: str) -> Any:
    """Parse a key's value. If the key's type is a text it is taken literally, and a list needs no brackets."""
    kinds = _parts(kind)
    if any("\ud800" <= letter <= "\udfff" for letter in text):
        raise UserError(f"{name}= is not UTF-8 text: {text!r}")
    if bool in kinds and text.lower() not in ("true", "false", "null"):
        raise UserError(f"{name}={text} must be true or false")  # OmegaConf takes any number for one of them
    is_quoted = len(text) > 1 and text[0] == text[-1] and text[0] in "\"'"
    is_list = list in (*kinds, *map(get_origin, kinds))
    if str in kinds and not is_list and dict not in kinds and text != "null" and not is_quoted:
        return _at_home(name, text.replace("${", r"\${"))
    bracketed = f"[{text}]" if is_list and not text.startswith("[") and text != "null" else text
    if name not in _NO_PATHS:
        bracketed = _HOME.sub(_quoted_at_home, bracketed)
    try:
        parsed = OverridesParser.create().parse_override(f"{name}={bracketed}")
    except HydraException:
        said = "write key=value, a list as key=[a,b], text with symbols in quotes"
        raise UserError(f"{f'{name}={text}'!r} cannot be read; {said}") from None
    if parsed.is_sweep_override():
        raise UserError(f"{name}={text}: this key takes one value")
    return _at_home(name, parsed.value())


def _at_home(name: str, value: Any) -> Any:
    """A key's value, whose texts, at any depth, begin with the home folder in place of `~`."""
    if isinstance(value, list):
        return [_at_home(name, element) for element in value]
    if isinstance(value, dict):
        return {key: _at_home(name, element) for key, element in value.items()}
    return at_home(value) if isinstance(value, str) and name not in _NO_PATHS else value


def _quoted_at_home(found: re.Match[str]) -> str:
    """A path in a list or a mapping, in quotes: Hydra's grammar has no `~`."""
    return found[1] + QuotedString(at_home(found[2].rstrip()), Quote.double).with_quotes()


def _parts(kind: Any) -> tuple[Any, ...]:
    return get_origin(kind) or kind, *get_args(kind)


def parse(schema: type[Command], overrides: Sequence[str]) -> Command:
    """A command's configuration from `key=value` texts; one with a model begins with a recipe's values.

    UserError: an unknown recipe or key, a key twice or missing, a value of the wrong type or out of range.
    """
    composed, choice = compose_config(schema, overrides)
    say_once(choice.note)
    keys, missing = [*keys_of(schema)], OmegaConf.missing_keys(composed)
    for key in keys:
        if key.name in missing or (key.name == "out" and OmegaConf.select(composed, "out") == ""):
            raise UserError(f"{key.name}= is required; see --help")
    config = OmegaConf.to_object(composed)
    for key in keys:
        _check(key, functools.reduce(getattr, key.name.split("."), config))
    for each in fields(schema):
        check = getattr(getattr(config, each.name), "check", None)  # a section's own, such as over several keys
        if check is not None and each.name != "server":  # which is checked where it is used
            check(*[each.name][: len(inspect.signature(check).parameters)])
    return cast(Command, config)


def parse_cells(schema: type[Command], overrides: Sequence[str]) -> dict[str, tuple[dict[str, str], Command]]:
    """A configuration for every combination of values, if keys in the schema's VARIED have several.

    Several values are `key=[a,b]` or `key=a,b`; of keys whose value is a list, `key=[[a],[b,c]]`. UserError for a value
    that is named twice, and as in `parse`.

    Returns:
        By name, such as `tokens8-rank32`: the values of the keys that have several, and the configuration; nothing if
        no key has several.
    """
    lists = {key.name for key in keys_of(schema) if get_origin(key.kind) is list}
    given = {key: text for key, text in texts_of(overrides).items() if key in schema.VARIED}
    several = {key: _several(text, key in lists) for key, text in given.items()}
    several = {key: values for key, values in several.items() if len(values) > 1}
    if not several:
        return {}
    rest = [each for each in overrides if each.partition("=")[0] not in several]
    cells = {}
    for combination in itertools.product(*several.values()):
        values = dict(zip(several, combination, strict=True))
        words = (key.partition(".")[2] + "+".join(re.findall(r"[\w.-]+", value)) for key, value in values.items())
        if (name := "-".join(words)) in cells:
            raise UserError(f"{', '.join(f'{key}={given[key]}' for key in several)} names a value twice")
        cells[name] = values, parse(schema, [*rest, *(f"{key}={value}" for key, value in values.items())])
    return cells


def _several(text: str, is_list: bool) -> list[str]:
    if is_list and not text.startswith("[["):
        return [text]
    inner = text[1:-1] if text.startswith("[") and text.endswith("]") else text
    return [each.strip() for each in re.split(r",(?![^\[]*\])", inner)] if "[" not in inner or is_list else [text]


def compose_config(schema: type, overrides: Sequence[str]) -> tuple[DictConfig, RecipeChoice]:
    """The values of a configuration's keys: the arguments', the preset's, the recipe's, the defaults; and the recipe.

    Types are checked.
    """
    kinds, given = {key.name: key.kind for key in keys_of(schema)}, texts_of(overrides)
    if "model.id" in given:
        given["model.id"] = at_home(given["model.id"])
    choice = RecipeChoice(None, ())
    if "model.id" in kinds:
        choice = choose_recipe(schema, given)
        given.pop("recipe", None)
    if unknown := [name for name in given if name not in kinds]:
        raise UserError(unknown_key(unknown[0], kinds))
    values = recipe_values(choice)
    of_recipe, of_arguments = (_selecting(kinds, each.get("selection")) for each in (values, given))
    table = preset_values(schema, given.get("preset"))
    composed: Any = OmegaConf.merge(OmegaConf.structured(schema), of_recipe, values, table, of_arguments)
    for name, text in given.items():
        try:
            OmegaConf.update(composed, name, value_of(name, kinds[name], text))
        except OmegaConfBaseException as error:
            raise UserError(f"{name}={text}: {str(error).partition(chr(10))[0]}") from None
    return composed, choice


def _selecting(kinds: Mapping[str, Any], selection: str | None) -> dict[str, Any]:
    """The keys of lookahead.* that `selection=` stands for. Single keys written after it override it."""
    return {"lookahead": SELECTIONS.get(selection or "", {})} if "lookahead.queries" in kinds else {}


def keys_of(schema: type, prefix: str = "") -> Iterator[Key]:
    """Every key of a configuration, nested ones as `model.dtype`; required and plain ones come before nested ones."""
    notes, checked, kinds = notes_of(schema), get_type_hints(schema, include_extras=True), get_type_hints(schema)
    nested = [each.name for each in fields(schema) if is_dataclass(kinds[each.name])]
    plain = [each for each in fields(schema) if each.name not in nested]
    for each in sorted(plain, key=lambda each: each.default != "???"):
        yield Key(prefix + each.name, kinds[each.name], checked[each.name], notes.get(each.name, ""))
    for name in nested:
        yield from keys_of(kinds[name], f"{prefix}{name}.")


def notes_of(schema: type) -> dict[str, str]:
    """The `Attributes:` of the docstrings of a dataclass and its bases."""
    notes: dict[str, str] = {}
    for base in reversed(schema.__mro__):
        section = inspect.cleandoc(base.__doc__ or "").partition("Attributes:\n")[2].split("\nRaises:")[0]
        for name, note in re.findall(r"^    (\w+): (.*(?:\n {8,}.*)*)", section, flags=re.MULTILINE):
            notes[name] = " ".join(note.split())
    return notes


def _check(key: Key, value: Any) -> None:
    for each in value.values() if isinstance(value, dict) else value if isinstance(value, list) else [value]:
        if type(each) is int and abs(each) > _LARGEST:
            raise UserError(f"{key.name}: {each} is too large; the limit is {_LARGEST}")
    try:
        TypeAdapter(key.checked).validate_python(value)
    except ValidationError as error:
        said = error.errors()[0]["msg"].removeprefix("Value error, ")
        raise UserError(f"{key.name}={value} {re.sub('^(Input|List|Value) should', 'must', said)}") from None
