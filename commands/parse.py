"""Configurations: `key=value` arguments over a recipe's values, typed by OmegaConf and checked by pydantic.

Arguments may also be options (`--key value`) or positional; values are in Hydra's grammar, texts need no quotes.
"""

import difflib
import inspect
import itertools
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from operator import attrgetter
from pathlib import Path
from types import UnionType
from typing import Any, NamedTuple, TypeVar, Union, cast, get_args, get_origin, get_type_hints

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Quote, QuotedString
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import TypeAdapter, ValidationError

from keepsight.commands.recipe import (
    RecipeChoice,
    choose_recipe,
    model_of_adapter,
    preset_values,
    recipe_files,
    recipe_values,
    say_once,
)
from keepsight.errors import UserError, code_of, reason_of
from keepsight.files import at_home
from keepsight.models.lookahead_settings import SELECTIONS

_LARGEST = 1 << 40
"""Largest whole number that a key takes; larger ones overflow where sizes are computed from them."""
_NO_PATHS = ("prompt", "system", "title", "data_notes", "model.template", "judge.options")
"""Keys of texts, in which a `~` at the start is one; `prompt=@~/FILE` is read at home all the same."""
_HOME = re.compile(r"(^|[\[,:]\s*)(~(?=[/,\]}]|\w*/)[^,\[\]{}'\"]*)")
_PLAIN = re.compile(r"(?!(?:true|false|null|nan|inf)$)[A-Za-z_/][\w./@-]*(?::[\w./@-]+)?", re.IGNORECASE)
"""Texts that Hydra's grammar takes for texts without quotes."""
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
    schema's POSITIONAL keys, or of its POSITIONAL_LIST; of commands that have neither, the first is the model.
    `model=` names a recipe, or the model as `model.id=` does.
    """
    kinds = {key.name: key.kind for key in keys}
    kinds["recipe"] = str
    has_model = "model.id" in kinds
    if has_model:
        kinds["model"] = str
    list_key = getattr(schema, "POSITIONAL_LIST", None)
    default_keys = ("model",) if has_model and list_key is None else ()
    positional_keys = iter(getattr(schema, "POSITIONAL", default_keys))
    overrides = list[str]()
    list_values = list[str]()
    remaining = iter(arguments)
    for argument in remaining:
        if argument.startswith("--"):
            name, equals, value = argument.removeprefix("--").partition("=")
            name = name.replace("-", "_")
            if name not in kinds:
                raise _unknown_key(name, kinds)
            if not equals and bool in _types(kinds[name]):
                value = "true"
            elif not equals:
                value = next(remaining, "")
                if not value:
                    raise UserError(f"{argument} needs a value; write {name}=VALUE", field=name, code="missing")
            overrides.append(f"{name}={value}")
        elif "=" in argument:
            overrides.append(argument)
        elif list_key is not None:
            list_values.append(_in_quotes(argument))
        else:
            key = next(positional_keys, None)
            if key is None:
                raise UserError(
                    f"{argument!r} is not understood; arguments are written key=value, see --help",
                    field="arguments",
                    code="unknown",
                )
            overrides.append(f"{key}={argument}")
    if list_values:
        overrides.append(f"{list_key}=[{','.join(list_values)}]")
    if has_model:
        overrides = [_recipe_or_model(override) for override in overrides]
    return overrides


def _recipe_or_model(override: str) -> str:
    """`model=` as `recipe=` where a recipe has that name and no folder, else as `model.id=`; others as they are."""
    key, _, value = override.partition("=")
    if key != "model":
        return override
    is_recipe = value in recipe_files("recipe") and not Path(at_home(value)).exists()
    return f"{'recipe' if is_recipe else 'model.id'}={value}"


def quoted(value: Any) -> str:
    """A plain value in Hydra's grammar, as an argument of another command has it."""
    if isinstance(value, dict):
        return "{" + ",".join(f"{key}:{quoted(element)}" for key, element in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ",".join(map(quoted, value)) + "]"
    if isinstance(value, str):
        return value if _PLAIN.fullmatch(value) else _in_quotes(value)
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return str(value)


def _in_quotes(text: str) -> str:
    """A text as a quoted one of Hydra's grammar."""
    return "'" + re.sub(r"(\\*)('|$)", _escaped, text) + "'"


def _escaped(match: re.Match[str]) -> str:
    """Double the backslashes before a quote or a text's end, and escape the quote, as Hydra's grammar requires."""
    backslashes, quote = match.groups()
    return backslashes * 2 + ("\\'" if quote else "")


def _texts_by_key(overrides: Sequence[str]) -> dict[str, str]:
    """The text of each key's value; UserError for a key that is set twice."""
    texts: dict[str, str] = {}
    for override in overrides:
        key, _, text = override.partition("=")
        if key in texts:
            raise UserError(
                f"{key}= is set twice: {texts[key]!r} and {text!r}; set it once", field=key, code="conflict"
            )
        texts[key] = text
    return texts


def _unknown_key(name: str, keys: Iterable[str]) -> UserError:
    """The error for a key that is not among a command's keys."""
    keys_of_section = [key for key in keys if key.startswith(f"{name}.")]
    similar_keys = difflib.get_close_matches(name, [*keys], n=1, cutoff=0.5)
    if keys_of_section:
        hint = f"it holds {', '.join(keys_of_section)}"
    elif similar_keys:
        hint = f"did you mean {similar_keys[0]!r}?"
    else:
        hint = "see --help"
    return UserError(f"{name!r} is no key of this command; {hint}", field=name, code="unknown")


def value_of(name: str, kind: Any, text: str) -> Any:
    """Parse a key's value. If the key's type is a text it is taken literally, and a list needs no brackets."""
    types = _types(kind)
    if any("\ud800" <= letter <= "\udfff" for letter in text):
        raise UserError(f"{name}= is not UTF-8 text: {text!r}", field=name, code="type")
    # OmegaConf would take any number for a boolean.
    if bool in types and text.lower() not in ("true", "false", "null"):
        raise UserError(f"{name}={text} must be true or false", field=name, code="type")
    is_quoted = len(text) > 1 and text[0] == text[-1] and text[0] in "\"'"
    is_list = list in (*types, *map(get_origin, types))
    if str in types and not is_list and dict not in types and text != "null" and not is_quoted:
        return _at_home(name, text.replace("${", r"\${"))

    expression = text
    if is_list and not text.startswith("[") and text != "null":
        expression = f"[{text}]"
    if name not in _NO_PATHS:
        expression = _HOME.sub(_quoted_at_home, expression)
    try:
        override = OverridesParser.create().parse_override(f"{name}={expression}")
    except HydraException:
        advice = "write key=value, a list as key=[a,b], text with symbols in quotes"
        raise UserError(f"{f'{name}={text}'!r} cannot be read; {advice}", field=name, code="type") from None
    if override.is_sweep_override():
        raise UserError(f"{name}={text}: this key takes one value", field=name, code="type")
    return _at_home(name, override.value())


def _at_home(name: str, value: Any) -> Any:
    """A key's value, whose texts, at any depth, begin with the home folder in place of `~`."""
    if isinstance(value, list):
        return [_at_home(name, element) for element in value]
    if isinstance(value, dict):
        return {key: _at_home(name, element) for key, element in value.items()}
    if isinstance(value, str) and name not in _NO_PATHS:
        return at_home(value)
    return value


def _quoted_at_home(match: re.Match[str]) -> str:
    """A path in a list or a mapping, in quotes: Hydra's grammar has no `~`."""
    separator, path = match.groups()
    return separator + QuotedString(at_home(path.rstrip()), Quote.double).with_quotes()


_WORDS = {int: "a whole number", float: "a number", bool: "true or false", str: "a text", type(None): "null"}


def _in_words(kind: Any) -> str:
    """What values a type has, for errors: of `list[int] | None` a list of whole numbers, or null."""
    origin = get_origin(kind)
    if origin in (Union, UnionType):
        choices = [choice for choice in get_args(kind) if choice is not int or float not in get_args(kind)]
        return ", or ".join(_in_words(choice) for choice in choices)
    if (origin or kind) is list:
        elements = {_in_words(element).partition(", or ")[0] for element in get_args(kind)}
        plural = {"a whole number": "whole numbers", "a number": "numbers", "a text": "texts"}
        named = [plural[words] for words in sorted(elements) if words in plural]
        return f"a list of {named[0]}" if named else "a list, as [a,b]"
    if (origin or kind) is dict:
        return "a mapping, as {key: value}"
    return _WORDS.get(kind, "another kind of value")


def _types(kind: Any) -> tuple[Any, ...]:
    """A type and its arguments: of `int | None` both, of `list[str]` list and str."""
    return get_origin(kind) or kind, *get_args(kind)


def parse(schema: type[Command], overrides: Sequence[str]) -> Command:
    """A command's configuration from `key=value` texts; one with a model begins with a recipe's values.

    UserError: an unknown recipe or key, a key twice or missing, a value of the wrong type or out of range.
    """
    composed, choice = compose_config(schema, overrides)
    say_once(choice.note)
    keys = list(keys_of(schema))
    missing = OmegaConf.missing_keys(composed)
    for key in keys:
        if key.name in missing or (key.name == "out" and OmegaConf.select(composed, "out") == ""):
            raise UserError(f"{key.name}= is required; see --help", field=key.name, code="missing")

    config = OmegaConf.to_object(composed)
    for key in keys:
        _check(key, attrgetter(key.name)(config))
    for section in fields(schema):
        check_section = getattr(getattr(config, section.name), "check", None)  # such as over several keys
        if check_section is None or section.name == "server":  # which is checked where it is used
            continue
        if inspect.signature(check_section).parameters:
            check_section(section.name)
        else:
            check_section()
    return cast(Command, config)


def parse_cells(schema: type[Command], overrides: Sequence[str]) -> dict[str, tuple[dict[str, str], Command]]:
    """A configuration for every combination of values, if keys in the schema's VARIED have several.

    Several values are `key=[a,b]` or `key=a,b`; of keys whose value is a list, `key=[[a],[b,c]]`. UserError for a value
    that is named twice, and as in `parse`.

    Returns:
        By name, such as `tokens8-rank32`: the values of the keys that have several, and the configuration; nothing if
        no key has several.
    """
    texts = _texts_by_key(overrides)
    varied_values: dict[str, list[str]] = {}
    for config_key in keys_of(schema):
        name = config_key.name
        if name in schema.VARIED and name in texts:
            values = _listed_values(texts[name], get_origin(config_key.kind) is list)
            if len(values) > 1:
                varied_values[name] = values
    if not varied_values:
        return {}

    varied_keys = [key for key in texts if key in varied_values]  # in the order of the arguments
    shared_overrides = [override for override in overrides if override.partition("=")[0] not in varied_values]
    cells = {}
    for combination in itertools.product(*(varied_values[key] for key in varied_keys)):
        values_by_key = dict(zip(varied_keys, combination, strict=True))
        words = []
        for key, value in values_by_key.items():
            words.append(key.rpartition(".")[2] + "+".join(re.findall(r"[\w.-]+", value)))
        name = "-".join(words)
        if name in cells:
            arguments = ", ".join(f"{key}={texts[key]}" for key in varied_keys)
            raise UserError(f"{arguments} names a value twice", field=varied_keys[0], code="conflict")
        cell_overrides = [f"{key}={value}" for key, value in values_by_key.items()]
        cells[name] = values_by_key, parse(schema, [*shared_overrides, *cell_overrides])
    return cells


def _listed_values(text: str, is_list: bool) -> list[str]:
    """The values that a text lists for a key, of which `is_list` says whether each value is a list itself."""
    if is_list and not text.startswith("[["):
        return [text]
    inner = text[1:-1] if text.startswith("[") and text.endswith("]") else text
    if "[" in inner and not is_list:
        return [text]
    return [value.strip() for value in re.split(r",(?![^\[]*\])", inner)]


def compose_config(schema: type, overrides: Sequence[str]) -> tuple[DictConfig, RecipeChoice]:
    """The values of a configuration's keys: the arguments', the preset's, the recipe's, the defaults; and the recipe.

    Types are checked.
    """
    kinds = {key.name: key.kind for key in keys_of(schema)}
    texts = _texts_by_key(overrides)
    if "model.id" in texts:
        texts["model.id"] = at_home(texts["model.id"])
    choice = RecipeChoice(None, ())
    model_of_texts: dict[str, str] = {}
    if "model.id" in kinds:
        names_model = "recipe" in texts or "model.id" in texts
        if "adapter" in kinds and texts.get("adapter", "null") != "null" and not names_model:
            model_of_texts = model_of_adapter(value_of("adapter", kinds["adapter"], texts["adapter"]))
        choice = choose_recipe(schema, {**texts, **model_of_texts})
        if model_of_texts:
            choice = choice._replace(note=f"adapter={texts['adapter']} was trained for this model; {choice.note}")
        texts.pop("recipe", None)
    for name in texts:
        if name not in kinds:
            raise _unknown_key(name, kinds)

    recipe = recipe_values(choice)
    preset = preset_values(schema, texts.get("preset"))
    selection_of_recipe = _selection_keys(kinds, recipe.get("selection"))
    selection_of_arguments = _selection_keys(kinds, texts.get("selection"))
    composed: Any = OmegaConf.merge(
        OmegaConf.structured(schema), selection_of_recipe, recipe, preset, selection_of_arguments
    )
    for name, text in {**model_of_texts, **texts}.items():
        try:
            OmegaConf.update(composed, name, value_of(name, kinds[name], text))
        except OmegaConfBaseException:
            raise UserError(f"{name}={text} must be {_in_words(kinds[name])}", field=name, code="type") from None
    return composed, choice


def _selection_keys(kinds: Mapping[str, Any], selection: str | None) -> dict[str, Any]:
    """The keys of lookahead.* that `selection=` stands for. Single keys written after it override it."""
    if "lookahead.queries" not in kinds:
        return {}
    return {"lookahead": SELECTIONS.get(selection or "", {})}


def keys_of(schema: type, prefix: str = "") -> Iterator[Key]:
    """Every key of a configuration, nested ones as `model.dtype`; required and plain ones come before nested ones."""
    kinds = get_type_hints(schema)
    checked_kinds = get_type_hints(schema, include_extras=True)
    notes = notes_of(schema)
    sections = [key.name for key in fields(schema) if is_dataclass(kinds[key.name])]
    plain_keys = [key for key in fields(schema) if key.name not in sections]
    plain_keys.sort(key=lambda key: key.default != "???")
    for key in plain_keys:
        yield Key(prefix + key.name, kinds[key.name], checked_kinds[key.name], notes.get(key.name, ""))
    for section in sections:
        yield from keys_of(kinds[section], f"{prefix}{section}.")


def notes_of(schema: type) -> dict[str, str]:
    """The `Attributes:` of the docstrings of a dataclass and its bases."""
    notes: dict[str, str] = {}
    for base in reversed(schema.__mro__):
        section = inspect.cleandoc(base.__doc__ or "").partition("Attributes:\n")[2].split("\nRaises:")[0]
        for name, note in re.findall(r"^    (\w+): (.*(?:\n {8,}.*)*)", section, flags=re.MULTILINE):
            notes[name] = " ".join(note.split())
    return notes


def _check(key: Key, value: Any) -> None:
    """UserError for a value out of its key's range."""
    elements = [value]
    if isinstance(value, dict):
        elements = list(value.values())
    elif isinstance(value, list):
        elements = value
    for element in elements:
        if type(element) is int and abs(element) > _LARGEST:
            raise UserError(
                f"{key.name}: {element} is too large; the limit is {_LARGEST}", field=key.name, code="range"
            )
    try:
        TypeAdapter(key.checked).validate_python(value)
    except ValidationError as error:
        message = f"{key.name}={value} {reason_of(error)}"
        raise UserError(message, field=key.name, code=code_of(error)) from None
