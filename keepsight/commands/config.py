"""Configuration: `key=value` overrides on top of a recipe, typed by dataclasses, composed by Hydra."""

import difflib
import functools
import re
from dataclasses import dataclass, field
from typing import Any, TypeVar, cast, get_args, get_origin

from hydra import compose, initialize_config_module
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.errors import HydraException, OverrideParseException
from omegaconf import OmegaConf
from omegaconf.errors import MissingMandatoryValue, OmegaConfBaseException

from keepsight.commands.config_keys import keys_of
from keepsight.errors import UserError
from keepsight.models.lookahead_settings import LookaheadSettings
from keepsight.train.head_settings import (
    DraftHeadSettings,
    FinetuneSettings,
    HeadWeightsSettings,
    RetrievalHeadSettings,
)
from keepsight.train.settings import LookaheadTrainSettings, ReplaySettings

DEFAULT_RECIPE = "smollm2-135m"
_LARGEST = 1 << 40
"""Largest whole number that a key takes; larger ones overflow where sizes are computed from them."""


@dataclass
class ModelConfig:
    """The target.

    Attributes:
        id: Hub id or local folder.
        revision: Branch, tag or commit on the Hub.
        packaged: PACKAGE/FILE.gguf of an installed Python package, used when the Hub cannot be reached.
        packaged_id: Hub id of the model that the packaged file holds; the file is used for no other.
        packaged_digest: Expected digest of the packaged file, sha256:...
        dtype: auto, float32, bfloat16 or float16.
        device: auto, cpu, cuda, cuda:1, ...
        attention: auto, sdpa, eager or flash_attention_2.
        template: Arguments of its chat template that differ from the template's own, such as {enable_thinking: false}.
        quantize: nf4 or int8: its weights are quantised by bitsandbytes while they are loaded.
        device_map: auto divides its layers over the GPUs of one process, and keeps on the CPU those that these cannot
            hold, until they run; fsdp2 shards every layer over the processes that train a lookahead module.
        trust_remote_code: Run code from the model's repository; leave it off unless you have read that code.
    """

    id: str = "???"
    revision: str | None = None
    packaged: str | None = None
    packaged_id: str | None = None
    packaged_digest: str | None = None
    dtype: str = "auto"
    device: str = "auto"
    attention: str = "auto"
    template: dict[str, Any] = field(default_factory=dict)
    quantize: str | None = None
    device_map: str | None = None
    trust_remote_code: bool = False

    @property
    def own_file(self) -> str | None:
        """The packaged file, where it holds this model."""
        return self.packaged if self.packaged_id == self.id else None


@dataclass
class DraftConfig:
    """The draft of the methods that need one (SpecKV, SpecPC): at most one of `layers`, `id` and `head`.

    Attributes:
        layers: Indices of the target's own layers that make up the draft, ascending; `keepsight draft` finds good ones.
        id: Hub id or local folder of another model with the target's vocabulary.
        revision: Branch, tag or commit of the model or head on the Hub.
        head: EAGLE draft head of the target, a folder or Hub id, instead of a model.
    """

    layers: list[int] | None = None
    id: str | None = None
    revision: str | None = None
    head: str | None = None


@dataclass
class Recipe:
    """What a file in recipes/recipe/ sets; every command takes all of it, and each key can be overridden.

    Attributes:
        model: The target.
        adapter: Lookahead adapter: a folder, a Hub id, or shipped:NAME for one that comes with keepsight.
        retrieval: Retrieval head: a folder, a Hub id, or shipped:NAME for one that comes with keepsight.
        draft: The draft of the methods that need one.
        lookahead: Shape of a lookahead module in training.
        train: Optimisation of a lookahead module.
        replay: How readings of the target are kept in a training that uses each several times.
        draft_head: Shape and training of a draft head.
        retrieval_head: Variant and distillation of a retrieval head.
        head_weights: Training of the weights by which a lookahead module's heads share one budget.
        finetune: Further training of a lookahead module on what evicting costs the target's answers.
    """

    defaults: list[Any] = field(default_factory=lambda: ["_self_", {"recipe": DEFAULT_RECIPE}])
    model: ModelConfig = field(default_factory=ModelConfig)
    adapter: str | None = None
    retrieval: str | None = None
    draft: DraftConfig = field(default_factory=DraftConfig)
    lookahead: LookaheadSettings = field(default_factory=LookaheadSettings)
    train: LookaheadTrainSettings = field(default_factory=LookaheadTrainSettings)
    replay: ReplaySettings = field(default_factory=ReplaySettings)
    draft_head: DraftHeadSettings = field(default_factory=DraftHeadSettings)
    retrieval_head: RetrievalHeadSettings = field(default_factory=RetrievalHeadSettings)
    head_weights: HeadWeightsSettings = field(default_factory=HeadWeightsSettings)
    finetune: FinetuneSettings = field(default_factory=FinetuneSettings)

    def check(self) -> None:
        """Refuse values out of range, before anything is loaded or written.

        Raises:
            UserError: a value is out of range.
        """
        for settings in (self.lookahead, self.draft_head, self.retrieval_head, self.head_weights, self.finetune):
            settings.check()
        self.train.check("train")
        self.replay.check()


Command = TypeVar("Command", bound=Any)


def parse(schema: type[Command], overrides: list[str]) -> Command:
    """Build a command's configuration from its `key=value` arguments; a `Recipe` begins with a recipe's values.

    Raises:
        UserError: an unknown recipe or key, a value of the wrong type or out of range, or a required key that is not
            given.
    """
    ConfigStore.instance().store(name="command", node=schema)
    GlobalHydra.instance().clear()
    kinds = {key: kind for key, kind, _, _ in keys_of(schema)} | ({"recipe": str} if issubclass(schema, Recipe) else {})
    try:
        with initialize_config_module("keepsight.recipes", version_base="1.3"):
            composed = compose("command", overrides=[_readable(override, kinds) for override in overrides])
        config = OmegaConf.to_object(composed)
    except (HydraException, OmegaConfBaseException) as error:
        raise UserError(_explain(error)) from None
    for key, _, default, _ in keys_of(schema):
        value = functools.reduce(getattr, key.split("."), config)
        if key == "out" and default == "???" and value == "":
            raise UserError(f"{key}= is required; see --help")
        _require_small(key, value)
    if isinstance(config, Recipe):
        config.check()
    return cast(Command, config)


def _require_small(key: str, value: Any) -> None:
    """Refuse whole numbers that would overflow later."""
    if isinstance(value, list | dict):
        for each in value.values() if isinstance(value, dict) else value:
            _require_small(key, each)
    elif type(value) is int and abs(value) > _LARGEST:
        raise UserError(f"{key}: {value} is too large; the limit is {_LARGEST}")


def at_least_one(config: Recipe, *keys: str) -> None:
    """Check keys that count something, and lists that must not be empty.

    Raises:
        UserError: a value is below 1, or a list holds none.
    """
    for key in keys:
        value = getattr(config, key)
        if value == []:
            raise UserError(f"{key}=[] must hold at least one value")
        values = value if isinstance(value, list) else [value]
        if any(isinstance(each, int) and each < 1 for each in values):
            raise UserError(f"{key}={value} must be at least 1")


def _readable(override: str, kinds: dict[str, Any]) -> str:
    """`key=value` with a known key, and text in quotes: to Hydra's grammar commas and brackets mean something."""
    key, _, value = override.partition("=")
    if key not in kinds:
        group = [known for known in kinds if known.startswith(f"{key}.")]
        near = difflib.get_close_matches(key, kinds, n=1, cutoff=0.5)
        hint = f"it holds {', '.join(group)}" if group else f"did you mean {near[0]!r}?" if near else "see --help"
        raise UserError(f"{key!r} is no key of this command; {hint}")
    if any("\ud800" <= letter <= "\udfff" for letter in value):
        raise UserError(f"{key}= is no UTF-8 text: {value!r}")
    if kinds[key] in (bool, bool | None) and value.lower() not in ("true", "false", "null"):
        raise UserError(f"{key}={value} must be true or false")  # OmegaConf takes any number for one of them
    if get_origin(kinds.get(key)) is dict:
        return f"++{override}"  # Hydra takes an empty mapping's new keys only so
    if _is_list(kinds.get(key)) and not value.startswith("[") and value != "null":
        return f"{key}=[{value}]"
    is_quoted = len(value) > 1 and value[0] == value[-1] and value[0] in "\"'"
    if kinds.get(key) not in (str, str | None) or value == "null" or is_quoted:
        return override
    value = value.replace("${", r"\${")
    quoted = re.sub(r"(\\*)('|\Z)", lambda found: found[1] * 2 + found[2].replace("'", r"\'"), value)
    return f"{key}='{quoted}'"


def _is_list(kind: Any) -> bool:
    return list in (get_origin(kind), *map(get_origin, get_args(kind)))


def _explain(error: Exception) -> str:
    """Hydra's message as one line about the argument at fault."""
    text = " ".join(str(error).split())
    if isinstance(error, MissingMandatoryValue):
        return f"{error.full_key}= is required; see --help"
    if isinstance(error, OverrideParseException):
        return f"{error.override!r} cannot be read; write key=value, a list as key=[a,b], text with symbols in quotes"
    if ambiguous := re.match("Ambiguous value for argument '(.*?)'", text):
        return f"{ambiguous[1]}: this key takes one value"
    if wrong := re.match("Error merging override (.*)", text):
        reason = str(error.__cause__).partition("\n")[0]
        return f"{wrong[1]}: {reason}"
    if recipe := re.search(
        r"Could not find 'recipe/([^']+)' Available options in 'recipe': (.*?)(?: Config search|$)", text
    ):
        return f"recipe={recipe.group(1)} is unknown; choose one of {', '.join(recipe.group(2).split())}"
    return text
