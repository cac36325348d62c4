"""The one configuration system: `key=value` overrides over a recipe, typed by dataclasses, composed by Hydra."""

import difflib
import inspect
import re
from collections.abc import Iterator
from dataclasses import MISSING, dataclass, field, fields, is_dataclass
from typing import Any, TypeVar, get_type_hints

from hydra import compose, initialize_config_module
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.errors import HydraException
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from keepsight.errors import UserError
from keepsight.models.lookahead import LookaheadSettings
from keepsight.train.trainer import TrainSettings

DEFAULT_RECIPE = "smollm2-135m"


@dataclass
class ModelConfig:
    """The target.

    Attributes:
        id: Hub id or local folder.
        revision: Branch, tag or commit on the Hub.
        packaged: package/file.gguf of an installed package, for when the Hub cannot be reached.
        packaged_digest: sha256:... that the packaged file must have.
        dtype: auto, float32, bfloat16 or float16.
        device: auto, cpu, cuda, cuda:1, ...
        attention: auto, sdpa, eager or flash_attention_2.
        trust_remote_code: Run code from the model's repository; leave it off unless you have read that code.
    """

    id: str = "???"
    revision: str | None = None
    packaged: str | None = None
    packaged_digest: str | None = None
    dtype: str = "auto"
    device: str = "auto"
    attention: str = "auto"
    trust_remote_code: bool = False


@dataclass
class Recipe:
    """What a file in recipes/recipe/ sets; every command takes all of it, and each key can be overridden.

    Attributes:
        model: The target.
        adapter: Lookahead adapter: a folder, a Hub id, or shipped:NAME for one that comes with keepsight.
        lookahead: Shape of a lookahead module in training.
        train: Its optimisation.
    """

    defaults: list[Any] = field(default_factory=lambda: ["_self_", {"recipe": DEFAULT_RECIPE}])
    model: ModelConfig = field(default_factory=ModelConfig)
    adapter: str | None = None
    lookahead: LookaheadSettings = field(default_factory=LookaheadSettings)
    train: TrainSettings = field(default_factory=TrainSettings)


Command = TypeVar("Command", bound=Recipe)


def parse(schema: type[Command], overrides: list[str]) -> Command:
    """A command's configuration from its `key=value` arguments.

    Raises:
        UserError: an unknown recipe or key, a value of the wrong type, or a required key that is not given.
    """
    ConfigStore.instance().store(name="command", node=schema)
    GlobalHydra.instance().clear()
    try:
        with initialize_config_module("keepsight.recipes", version_base="1.3"):
            composed = compose("command", overrides=overrides)
        config = OmegaConf.to_object(composed)
    except (HydraException, OmegaConfBaseException) as error:
        raise UserError(_explain(error, schema)) from None
    assert isinstance(config, schema)
    return config


def _explain(error: Exception, schema: type) -> str:
    """Hydra's message as one line, with the near match of a misspelt key or recipe."""
    text = " ".join(str(error).split())
    if missing := re.search(r"Missing mandatory value: (\S+)|missing value.*full_key: (\S+)", text):
        key = missing.group(1) or missing.group(2)
        return f"{key}= is required; see --help"
    if unknown := re.search(r"Could not override '([^']+)'|Key '([^']+)' (?:is not in struct|not in)", text):
        key = unknown.group(1) or unknown.group(2)
        near = difflib.get_close_matches(key, [row[0] for row in describe(schema)], n=1, cutoff=0.5)
        if "not in" in text:
            return f"{key!r} is no key of this command" + (f"; did you mean {near[0]!r}?" if near else "; see --help")
    if recipe := re.search(
        r"Could not find 'recipe/([^']+)' Available options in 'recipe': (.*?)(?: Config search|$)", text
    ):
        return f"recipe={recipe.group(1)} is unknown; choose one of {', '.join(recipe.group(2).split())}"
    return text


def describe(schema: type, prefix: str = "") -> Iterator[tuple[str, str, str]]:
    """(key, default, help) of every key of a configuration, nested ones as `model.dtype`."""
    notes = _attribute_notes(schema)
    hints = get_type_hints(schema)
    for each in fields(schema):
        if each.name == "defaults":
            continue
        kind = hints[each.name]
        if isinstance(kind, type) and is_dataclass(kind):
            yield from describe(kind, f"{prefix}{each.name}.")
            continue
        default = (
            each.default
            if each.default is not MISSING
            else each.default_factory()
            if callable(each.default_factory)
            else None
        )
        yield f"{prefix}{each.name}", "required" if default == "???" else str(default), notes.get(each.name, "")


def _attribute_notes(schema: type) -> dict[str, str]:
    """What the docstrings of a dataclass and its bases say under `Attributes:`."""
    notes: dict[str, str] = {}
    for base in reversed(schema.__mro__):
        section = inspect.cleandoc(base.__doc__ or "").partition("Attributes:\n")[2].split("\nRaises:")[0]
        for name, note in re.findall(r"^    (\w+): (.*(?:\n {8,}.*)*)", section, flags=re.MULTILINE):
            notes[name] = " ".join(note.split())
    return notes
