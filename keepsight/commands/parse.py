"""Configurations: `key=value` arguments over a recipe's values, typed by OmegaConf and checked by pydantic."""

import functools
import inspect
import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any, TypeVar, cast, get_origin, get_type_hints

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import TypeAdapter, ValidationError

from keepsight.commands.arguments import Key, texts_of, unknown_key, value_of
from keepsight.commands.recipe import Choice, chosen, preset_values, say_once, values_of
from keepsight.errors import UserError
from keepsight.models.lookahead_settings import SELECTIONS

_LARGEST = 1 << 40
"""Largest whole number that a key takes; larger ones overflow where sizes are computed from them."""
Command = TypeVar("Command", bound=Any)


def parse(schema: type[Command], overrides: Sequence[str]) -> Command:
    """Build a command's configuration from `key=value` texts; one with a model begins with a recipe's values.

    Raises:
        UserError: an unknown recipe or key, a key twice, a value of the wrong type or out of range, or a required key
            that is missing.
    """
    composed, choice = compose_config(schema, overrides)
    say_once(choice.said)
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
    """A configuration for every combination of the values of keys in the schema's VARIED that have several.

    Several values are `key=[a,b]` or `key=a,b`; of keys whose value is a list, `key=[[a],[b,c]]`.

    Returns:
        By name, such as `tokens8-rank32`: the values of the keys that have several, and the configuration; nothing if
        no key has several.

    Raises:
        UserError: a key names a value twice, or a configuration is refused, as by `parse`.
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


def compose_config(schema: type, overrides: Sequence[str]) -> tuple[DictConfig, Choice]:
    """The values of a configuration's keys: the arguments', the preset's, the recipe's, the defaults; and the recipe.

    Types are checked.
    """
    kinds, given = {key.name: key.kind for key in keys_of(schema)}, texts_of(overrides)
    choice = Choice(None, ())
    if "model.id" in kinds:
        choice = chosen(schema, given)
        given.pop("recipe", None)
    if unknown := [name for name in given if name not in kinds]:
        raise UserError(unknown_key(unknown[0], kinds))
    values = values_of(choice)
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
    """What `selection=` stands for in training. Single keys written after it override it."""
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
