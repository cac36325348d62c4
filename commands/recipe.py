"""Recipes and presets: the values of keys that the arguments do not give, by model and by table of a paper."""

import functools
import json
import os
import re
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
from keepsight.files import package_yaml

DEFAULT_RECIPE = "smollm2-135m"
_SETTINGS = ("lookahead", "train", "replay", "finetune", "draft_head", "retrieval_head")
"""Sections that do not depend on a model's weights. `fresh` is not among them: its prompts cost hours."""

_COMMIT = re.compile("[0-9a-f]{40}")
"""A revision on the Hub, as an adapter records it."""
_QUANTIZE = {"4bit": "nf4", "8bit": "int8"}
"""Values of `model.quantize` by the end of the version of a base model that was quantised."""


class RecipeChoice(NamedTuple):
    """A command's recipe (None for none), the sections it takes from it, and the line that names it."""

    name: str | None
    sections: Sequence[str]
    note: str = ""


def choose_recipe(schema: type, arguments: Mapping[str, str]) -> RecipeChoice:
    """The recipe for the arguments of a command that has a model.

    The first that exists: the recipe named by `recipe=`; the one for the Hub id `model.id=`; the training settings
    (no adapter, head or draft) of one for the same architecture and size; none. With none, the dataclasses' defaults
    apply. Without either key it is DEFAULT_RECIPE, unless the schema NEEDS_MODEL.
    """
    sections = [section.name for section in fields(schema)]
    if "recipe" in arguments:
        return RecipeChoice(arguments["recipe"], sections)

    model_id = arguments.get("model.id")
    if model_id is None:
        if getattr(schema, "NEEDS_MODEL", False):
            return RecipeChoice(None, sections)
        note = f"recipe={DEFAULT_RECIPE}, as neither recipe= nor model.id= is set"
        return RecipeChoice(DEFAULT_RECIPE, sections, note)

    recipe_of_model = {recipe.model.id: name for name, recipe in recipes().items() if "model" in recipe}
    if model_id in recipe_of_model:
        name = recipe_of_model[model_id]
        return RecipeChoice(name, sections, f"model.id={model_id}: recipe={name}")

    shape = _shape(model_id, arguments.get("model.revision"))
    for name, recipe in recipes().items():
        if shape and list(recipe.get("fits", [])) == shape:
            note = f"training settings of recipe={name}, which is for this architecture and size"
            settings = [section for section in sections if section in _SETTINGS]
            return RecipeChoice(name, settings, f"model.id={model_id}: {note}")
    return RecipeChoice(None, sections, f"model.id={model_id}: no recipe is for this model, the defaults apply")


def model_of_adapter(reference: str) -> dict[str, str]:
    """The keys `model.*` of the base model that an adapter was trained for, as texts.

    Its Hub id; the revision where the adapter records a commit; nf4 or int8 where the model was quantised so.

    Raises:
        UserError: there is no such adapter, or its base model was a folder, which the adapter does not name.
    """
    from keepsight.models.artifacts import fetch
    from keepsight.models.lookahead import recorded_provenance

    provenance = recorded_provenance(fetch(reference))
    model_id = provenance.base_model
    if "/" not in model_id:
        raise UserError(
            f"adapter={reference}: its base model {model_id!r} was a folder, whose path is not recorded; "
            "give the folder as model.id=",
            field="model.id",
            code="missing",
        )
    keys = {"model.id": model_id}
    version, _, quantisation = (provenance.identity.model or "").partition(" quantised by ")
    if _COMMIT.fullmatch(version):
        keys["model.revision"] = version
    for kind, quantize in _QUANTIZE.items():
        if quantisation.endswith(kind):
            keys["model.quantize"] = quantize
    return keys


def recipe_values(choice: RecipeChoice) -> DictConfig:
    """The recipe's values of the sections; UserError if there is no such recipe."""
    if choice.name is None:
        return OmegaConf.create()
    names = recipe_files("recipe")
    if choice.name not in names:
        raise UserError(
            f"recipe={choice.name} is unknown; choose one of {', '.join(names)}", field="recipe", code="unknown"
        )
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
    presets_by_name = {}
    for name in recipe_files("preset"):
        values = package_yaml("keepsight.recipes", f"preset/{name}")
        table = values.pop("table")
        command = values.pop("command")
        presets_by_name[name] = Preset(table, command, values)
    return presets_by_name


def presets_of(schema: type) -> dict[str, Preset]:
    """The presets of the command with this schema, which its docstring names."""
    help_text = str(schema.__doc__)
    return {name: preset for name, preset in presets().items() if help_text.startswith(f"keepsight {preset.command}:")}


def preset_values(schema: type, name: str | None) -> dict[str, Any]:
    """The values of a preset, none without a name; UserError if the command has no such preset."""
    if name is None:
        return {}
    presets_here = presets_of(schema)
    if name not in presets_here:
        elsewhere = f"; keepsight {presets()[name].command} has it" if name in presets() else ""
        names = ", ".join(presets_here) or "no preset"
        raise UserError(
            f"preset={name} is unknown here{elsewhere}; choose one of {names}", field="preset", code="unknown"
        )
    return presets_here[name].values


def table_of(config: Any) -> str | None:
    """The table that `preset=` names, with the keys whose values differ from the preset's."""
    name = getattr(config, "preset", None)
    if not name:
        return None
    preset = presets()[name]
    changed_keys = list(_changed_keys(preset.values, config))
    if not changed_keys:
        return preset.table
    return f"{preset.table}; with other {', '.join(changed_keys)}"


def _changed_keys(preset_values: Mapping[str, Any], config: Any, prefix: str = "") -> Iterator[str]:
    """The keys whose values in a configuration, or in a section of it, are not the preset's."""
    for name, preset_value in preset_values.items():
        value = getattr(config, name)
        if is_dataclass(value):
            yield from _changed_keys(preset_value, value, f"{prefix}{name}.")
        elif value != preset_value:
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
    folder = files("keepsight.recipes") / kind
    paths = sorted(Path(str(path)) for path in folder.iterdir())
    return {path.stem: path for path in paths if path.suffix == ".yaml"}


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

    cached_path = try_to_load_from_cache(model_id, "config.json", revision=revision)
    if isinstance(cached_path, str):
        return Path(cached_path)
    from keepsight.models import model_files

    if "/" not in model_id or not model_files.hub_answers():
        raise FileNotFoundError(model_id)
    return Path(hf_hub_download(model_id, "config.json", revision=revision))
