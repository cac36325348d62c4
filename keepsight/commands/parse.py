"""Configurations from the command line: `key=value` arguments over a recipe, composed and typed by Hydra."""

import difflib
import functools
import inspect
import itertools
import json
import os
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import fields, is_dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any, NamedTuple, TypeVar, cast, get_args, get_origin, get_type_hints

from hydra import compose, initialize_config_module
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import TypeAdapter, ValidationError

from keepsight.errors import UserError

DEFAULT_RECIPE = "smollm2-135m"
_SETTINGS = ("lookahead", "train", "replay", "finetune", "draft_head", "retrieval_head")
"""Sections that do not depend on a model's weights."""
_LARGEST = 1 << 40
"""Largest whole number that a key takes; larger ones overflow where sizes are computed from them."""
Command = TypeVar("Command", bound=Any)


class Key(NamedTuple):
    """A key of a configuration: its name, such as `model.dtype`, its annotated type and its help."""

    name: str
    kind: Any
    note: str

    @property
    def plain(self) -> Any:
        """The type without pydantic's checks."""
        return self.kind.__origin__ if hasattr(self.kind, "__metadata__") else self.kind


def parse(schema: type[Command], arguments: Sequence[str]) -> Command:
    """Build a command's configuration from its `key=value` arguments; one with a model begins with a recipe's values.

    Raises:
        UserError: an unknown recipe or key, a key twice, a value of the wrong type or out of range, or a required key
            that is missing.
    """
    composed = compose_config(schema, arguments)
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


def parse_cells(schema: type[Command], arguments: Sequence[str]) -> dict[str, tuple[dict[str, str], Command]]:
    """A configuration for every combination of the values of keys in the schema's VARIED that have several.

    Several values are `key=[a,b]` or `key=a,b`; of keys whose value is a list, `key=[[a],[b,c]]`.

    Returns:
        By name, such as `tokens8-rank32`: the values of the keys that have several, and the configuration; nothing if
        no key has several.

    Raises:
        UserError: a key names a value twice, or a configuration is refused, as by `parse`.
    """
    lists = {key.name for key in keys_of(schema) if get_origin(key.plain) is list}
    given = {key: text for key, text in _by_key(arguments).items() if key in schema.VARIED}
    several = {key: _several(text, key in lists) for key, text in given.items()}
    several = {key: values for key, values in several.items() if len(values) > 1}
    if not several:
        return {}
    rest = [each for each in arguments if each.partition("=")[0] not in several]
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


def compose_config(schema: type, arguments: Sequence[str]) -> DictConfig:
    """The values of a configuration's keys: the arguments', else the recipe's, else the defaults; types are checked."""
    keys, given = {key.name: key for key in keys_of(schema)}, _by_key(arguments)
    recipe = given.pop("recipe", None) if "model.id" in keys else None
    if unknown := [name for name in given if name not in keys]:
        raise UserError(_unknown(unknown[0], [*keys]))
    composed: Any = OmegaConf.structured(schema)
    if recipe is not None:
        composed = OmegaConf.merge(composed, _recipe_values(recipe, [*composed]))
    elif "model.id" in given:
        composed = OmegaConf.merge(composed, _inferred_values(given["model.id"], [*composed]))
    elif "model.id" in keys and not getattr(schema, "NEEDS_MODEL", False):
        composed = OmegaConf.merge(composed, _recipe_values(DEFAULT_RECIPE, [*composed]))
    for name, text in given.items():
        try:
            OmegaConf.update(composed, name, _value(keys[name], text))
        except OmegaConfBaseException as error:
            raise UserError(f"{name}={text}: {str(error).partition(chr(10))[0]}") from None
    return composed


def keys_of(schema: type, prefix: str = "") -> Iterator[Key]:
    """Every key of a configuration, nested ones as `model.dtype`; required and plain ones come before nested ones."""
    notes, hints = notes_of(schema), get_type_hints(schema, include_extras=True)
    nested = [each.name for each in fields(schema) if is_dataclass(hints[each.name])]
    plain = [each for each in fields(schema) if each.name not in nested]
    for each in sorted(plain, key=lambda each: each.default != "???"):
        yield Key(prefix + each.name, hints[each.name], notes.get(each.name, ""))
    for name in nested:
        yield from keys_of(hints[name], f"{prefix}{name}.")


def notes_of(schema: type) -> dict[str, str]:
    """The `Attributes:` of the docstrings of a dataclass and its bases."""
    notes: dict[str, str] = {}
    for base in reversed(schema.__mro__):
        section = inspect.cleandoc(base.__doc__ or "").partition("Attributes:\n")[2].split("\nRaises:")[0]
        for name, note in re.findall(r"^    (\w+): (.*(?:\n {8,}.*)*)", section, flags=re.MULTILINE):
            notes[name] = " ".join(note.split())
    return notes


def recipes() -> dict[str, DictConfig]:
    """The plain content of every file in recipes/recipe/, by name."""
    found = [Path(str(path)) for path in (files("keepsight.recipes") / "recipe").iterdir()]
    return {path.stem: cast(DictConfig, OmegaConf.load(path)) for path in sorted(found) if path.suffix == ".yaml"}


def _recipe_values(name: str, sections: Sequence[str]) -> DictConfig:
    """The values that a recipe has for these keys and sections.

    Raises:
        UserError: there is no such recipe.
    """
    if name not in (known := recipes()):
        raise UserError(f"recipe={name} is unknown; choose one of {', '.join(known)}")
    GlobalHydra.instance().clear()
    with initialize_config_module("keepsight.recipes", version_base="1.3"):
        return OmegaConf.masked_copy(compose(f"recipe/{name}"), list(sections))


def _inferred_values(model_id: str, sections: Sequence[str]) -> DictConfig:
    """The values for a model without `recipe=`, and a line that says where they are from.

    They are those of the recipe of this Hub id, or the training settings (no adapter, head or draft) of the recipe of a
    model of the same architecture and size, or none: then the dataclasses' defaults apply, which are the papers'.
    """
    known = recipes()
    ids = {found.model.id: name for name, found in known.items() if "model" in found}
    shape = _shape(model_id)
    fitting = [name for name, found in known.items() if shape and list(found.get("fits", [])) == shape]
    if name := ids.get(model_id):
        said, values = f"recipe={name}", _recipe_values(name, sections)
    elif fitting:
        said = f"training settings of recipe={fitting[0]}, which is for this architecture and size"
        values = _recipe_values(fitting[0], [each for each in sections if each in _SETTINGS])
    else:
        said, values = "no recipe is for this model, the papers' settings apply", OmegaConf.create()
    _say_once(f"model.id={model_id}: {said}")
    return values


@functools.cache
def _say_once(line: str) -> None:
    if os.environ.get("RANK", "0") == "0":
        print(line, file=sys.stderr)


def _shape(model_id: str) -> list[Any] | None:
    """Architecture, hidden size and number of layers of a local or cached model, as `fits` in recipes names them."""
    path = Path(model_id, "config.json")
    if not path.is_file():
        from huggingface_hub import try_to_load_from_cache
        from huggingface_hub.errors import HFValidationError

        try:
            path = Path(str(try_to_load_from_cache(model_id, "config.json")))
        except HFValidationError:
            return None
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
        text = config.get("text_config", config)
        return [config["model_type"], text["hidden_size"], text["num_hidden_layers"]]
    except (OSError, ValueError, KeyError, AttributeError, TypeError):
        return None


def _by_key(arguments: Sequence[str]) -> dict[str, str]:
    given: dict[str, str] = {}
    for argument in arguments:
        key, _, value = argument.partition("=")
        if key in given:
            raise UserError(f"{key}= is given twice: {given[key]!r} and {value!r}; give it once")
        given[key] = value
    return given


def _unknown(name: str, keys: list[str]) -> str:
    group = [known for known in keys if known.startswith(f"{name}.")]
    near = difflib.get_close_matches(name, keys, n=1, cutoff=0.5)
    hint = f"it holds {', '.join(group)}" if group else f"did you mean {near[0]!r}?" if near else "see --help"
    return f"{name!r} is no key of this command; {hint}"


def _value(key: Key, text: str) -> Any:
    """A value as Hydra's grammar reads it; a text stands for itself, and a list needs no brackets."""
    kinds = (get_origin(key.plain) or key.plain, *get_args(key.plain))
    if any("\ud800" <= letter <= "\udfff" for letter in text):
        raise UserError(f"{key.name}= is no UTF-8 text: {text!r}")
    if bool in kinds and text.lower() not in ("true", "false", "null"):
        raise UserError(f"{key.name}={text} must be true or false")  # OmegaConf takes any number for one of them
    is_quoted = len(text) > 1 and text[0] == text[-1] and text[0] in "\"'"
    is_list = list in (*kinds, *map(get_origin, kinds))
    if str in kinds and not is_list and dict not in kinds and text != "null" and not is_quoted:
        return text.replace("${", r"\${")
    bracketed = f"[{text}]" if is_list and not text.startswith("[") and text != "null" else text
    try:
        parsed = OverridesParser.create().parse_override(f"{key.name}={bracketed}")
    except HydraException:
        said = "write key=value, a list as key=[a,b], text with symbols in quotes"
        raise UserError(f"{f'{key.name}={text}'!r} cannot be read; {said}") from None
    if parsed.is_sweep_override():
        raise UserError(f"{key.name}={text}: this key takes one value")
    return parsed.value()


def _check(key: Key, value: Any) -> None:
    """Check a value against pydantic's constraints on its type.

    Raises:
        UserError: it is out of range.
    """
    for each in value.values() if isinstance(value, dict) else value if isinstance(value, list) else [value]:
        if type(each) is int and abs(each) > _LARGEST:
            raise UserError(f"{key.name}: {each} is too large; the limit is {_LARGEST}")
    try:
        TypeAdapter(key.kind).validate_python(value)
    except ValidationError as error:
        said = error.errors()[0]["msg"].removeprefix("Value error, ")
        raise UserError(f"{key.name}={value} {re.sub('^(Input|List|Value) should', 'must', said)}") from None
