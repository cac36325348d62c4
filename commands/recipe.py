"""Recipes and presets: the values of keys that the arguments do not give, by model and by table of a paper."""

import functools
import json
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any, NamedTuple, cast

from hydra import compose, initialize_config_module
from hydra.core.global_hydra import GlobalHydra
from omegaconf import DictConfig, OmegaConf

from keepsight.errors import UserError
from keepsight.files import own_yaml

DEFAULT_RECIPE = "smollm2-135m"
_SETTINGS = ("lookahead", "train", "replay", "finetune", "draft_head", "retrieval_head")
"""Sections that do not depend on a model's weights. `fresh` is not among them: its prompts cost hours."""


class Choice(NamedTuple):
    """A command's recipe (None for none), the sections it takes from it, and the line that names it."""

    name: str | None
    sections: Sequence[str]
    said: str = ""


def chosen(schema: type, given: Mapping[str, str]) -> Choice:
    """The recipe for the arguments of a command that has a model.

    The first that exists: the recipe named by `recipe=`; the one for the Hub id `model.id=`; the training settings
    (no adapter, head or draft) of one for the same architecture and size; none. With none, the dataclasses' defaults
    apply. Without either key it is DEFAULT_RECIPE, unless the schema NEEDS_MODEL.
    """
    every = [each.name for each in fields(schema)]
    if "recipe" in given:
        return Choice(given["recipe"], every)
    if (model_id := given.get("model.id")) is None:
        if getattr(schema, "NEEDS_MODEL", False):
            return Choice(None, every)
        return Choice(DEFAULT_RECIPE, every, f"recipe={DEFAULT_RECIPE}, as neither recipe= nor model.id= is set")
    ids = {found.model.id: name for name, found in recipes().items() if "model" in found}
    if name := ids.get(model_id):
        return Choice(name, every, f"model.id={model_id}: recipe={name}")
    shape = _shape(model_id, given.get("model.revision"))
    for name, found in recipes().items():
        if shape and list(found.get("fits", [])) == shape:
            said = f"training settings of recipe={name}, which is for this architecture and size"
            return Choice(name, [each for each in every if each in _SETTINGS], f"model.id={model_id}: {said}")
    return Choice(None, every, f"model.id={model_id}: no recipe is for this model, the defaults apply")


def values_of(choice: Choice) -> DictConfig:
    """The recipe's values of the sections; UserError if there is no such recipe."""
    if choice.name is None:
        return OmegaConf.create()
    if choice.name not in (known := recipe_files("recipe")):
        raise UserError(f"recipe={choice.name} is unknown; choose one of {', '.join(known)}")
    GlobalHydra.instance().clear()
    with initialize_config_module("keepsight.recipes", version_base="1.3"):
        return OmegaConf.masked_copy(compose(f"recipe/{choice.name}"), list(choice.sections))


class Preset(NamedTuple):
    """A table of a paper: what it is called, the command that measures it, and the values of the command's keys."""

    table: str
    command: str
    values: dict[str, Any]


@functools.cache
def presets() -> dict[str, Preset]:
    """Every file in recipes/preset/, by name."""
    read = {name: own_yaml("keepsight.recipes", f"preset/{name}") for name in recipe_files("preset")}
    return {name: Preset(content.pop("table"), content.pop("command"), content) for name, content in read.items()}


def presets_of(schema: type) -> dict[str, Preset]:
    """The presets of the command with this schema, which its docstring names."""
    about = str(schema.__doc__)
    return {name: each for name, each in presets().items() if about.startswith(f"keepsight {each.command}:")}


def preset_values(schema: type, name: str | None) -> dict[str, Any]:
    """The values of a preset, none without a name; UserError if the command has no such preset."""
    if name is None:
        return {}
    if name not in (known := presets_of(schema)):
        others = f"; keepsight {presets()[name].command} has it" if name in presets() else ""
        raise UserError(f"preset={name} is unknown here{others}; choose one of {', '.join(known) or 'no preset'}")
    return known[name].values


def table_of(config: Any) -> str | None:
    """The table that `preset=` names, with the keys whose values differ from the preset's."""
    if not (name := getattr(config, "preset", None)):
        return None
    changed = [*_differing(presets()[name].values, config)]
    return presets()[name].table + (f"; with other {', '.join(changed)}" if changed else "")


def _differing(values: Mapping[str, Any], config: Any, prefix: str = "") -> Iterator[str]:
    for name, value in values.items():
        own = getattr(config, name)
        if is_dataclass(own):
            yield from _differing(value, own, f"{prefix}{name}.")
        elif own != value:
            yield prefix + name


@functools.cache
def say_once(line: str) -> None:
    """Print a line to stderr, in the first process of a launch alone."""
    if line and os.environ.get("RANK", "0") == "0":
        print(line, file=sys.stderr)


@functools.cache
def recipes() -> dict[str, DictConfig]:
    """The plain content of every file in recipes/recipe/, by name."""
    return {name: cast(DictConfig, OmegaConf.load(path)) for name, path in recipe_files("recipe").items()}


def recipe_files(kind: str) -> dict[str, Path]:
    """The files of a folder of recipes/, by name."""
    found = sorted(Path(str(path)) for path in (files("keepsight.recipes") / kind).iterdir())
    return {path.stem: path for path in found if path.suffix == ".yaml"}


def _shape(model_id: str, revision: str | None) -> list[Any] | None:
    """Architecture, hidden size and number of layers of a model, as `fits` in recipes names them; None if unknown."""
    path = Path(model_id, "config.json")
    try:
        if not path.is_file():
            path = _fetched(model_id, revision)
        config = json.loads(path.read_text(encoding="utf-8"))
        text = config.get("text_config", config)
        return [config["model_type"], text["hidden_size"], text["num_hidden_layers"]]
    except (OSError, ValueError, KeyError, AttributeError, TypeError):
        return None


@functools.cache
def _fetched(model_id: str, revision: str | None) -> Path:
    """The configuration from the Hub's cache or the Hub, so that a model's first run has the settings of later ones."""
    from huggingface_hub import hf_hub_download, try_to_load_from_cache

    found = try_to_load_from_cache(model_id, "config.json", revision=revision)
    if isinstance(found, str):
        return Path(found)
    from keepsight.models import model_files

    if "/" not in model_id or not model_files.hub_answers():
        raise FileNotFoundError(model_id)
    return Path(hf_hub_download(model_id, "config.json", revision=revision))
