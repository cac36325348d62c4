"""Methods from names and plain values, as YAML and the command line give them.

`{name: snapkv, window: 16, pool: {kernel: 5}, allocate: adakv}`: an option is a field of the method, and a part (an
observer, drafter, reduction, pooling or allocation) is its name, a mapping with its name and options, or a mapping of
options alone, which change the part that the method has. `adapter`, `retrieval` and `scorer` name a trained module of
the method's own: `{name: lookaheadkv, adapter: DIR, label: longer}`, `{name: kvzap, scorer: DIR}`; `selection` names
how a lookahead module selects: `{name: lookaheadkv, selection: paper}`. Weights of heads may be a file of
`keepsight finetune`: `{name: snapkv, allocate: {name: global, weights: DIR/head_weights.json}}`.

`Resources` hold the trained adapters and heads, the draft and the tokenizer that some methods need.
"""

import dataclasses
import difflib
from collections.abc import Callable, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

from transformers import PreTrainedModel, PreTrainedTokenizerBase
from typing_extensions import override

from keepsight.errors import UserError
from keepsight.files import at_home, read_json
from keepsight.models.draft_sources import DraftHeadSource, DraftSource
from keepsight.models.lookahead import LookaheadAdapter
from keepsight.models.retrieval_head import RetrievalHead
from keepsight.models.scorers import Scorer
from keepsight.runtime.drafting.observer import DraftObserver
from keepsight.runtime.drafting.speckv import MInference, ModelDrafter, SparsePrefill, SpecKV
from keepsight.runtime.generate import Method
from keepsight.runtime.importance import NO_POOL, Pool, Reduce
from keepsight.runtime.methods.lookaheadkv import LookaheadKV, adapter_fields
from keepsight.runtime.methods.reconstruction import KVzip, KVzipPlus
from keepsight.runtime.methods.restore import RestoreKV, RestoreWeights
from keepsight.runtime.methods.scored import ScoredEvict, TrainedScores
from keepsight.runtime.prompt_compression.contextual import Contextual
from keepsight.runtime.prompt_compression.r2c import Fusion
from keepsight.runtime.prompt_compression.text import Cosine, Package
from keepsight.runtime.registry import ALLOCATIONS, DRAFTERS, METHODS, OBSERVERS

Published = TypeVar("Published", bound=Scorer | RestoreWeights)
_RESOURCE_FIELDS = ("artifact", "head", "draft", "tokenizer")
_MODULE_OPTIONS = ("adapter", "retrieval", "scorer")


@dataclasses.dataclass(frozen=True)
class Later:
    """Placeholder in a method for a resource that needs the loaded base model: a draft, tokenizer or head."""

    name: str


@dataclasses.dataclass(frozen=True)
class Resources:
    """Trained modules, draft and tokenizer of methods, each loaded once, when it is first needed.

    Attributes:
        adapter: Folder or Hub id of a lookahead adapter.
        draft: Source of the draft model, or a draft head; or a function that returns it when a method needs it.
        tokenizer: The base model's tokenizer.
        retrieval: Folder or Hub id of a retrieval head.
        target: The base model, for which the retrieval head must have been trained; None to check nothing.
        scorer: File, folder or Hub id of the weights of a trained scorer.
    """

    adapter: str | Path | None = None
    draft: DraftSource | DraftHeadSource | Callable[[], DraftSource | DraftHeadSource | Later | None] | None = None
    tokenizer: PreTrainedTokenizerBase | Later | None = None
    retrieval: str | Path | None = None
    target: PreTrainedModel | None = None
    scorer: str | Path | None = None
    _scorers: dict[type, Any] = dataclasses.field(default_factory=dict, init=False, repr=False, compare=False)
    _variants: dict[Any, "Resources"] = dataclasses.field(default_factory=dict, init=False, repr=False, compare=False)

    @cached_property
    def artifact(self) -> LookaheadAdapter:
        """The adapter, loaded; a `UserError` if there is none, or it cannot be loaded."""
        if self.adapter is None:
            raise UserError("needs adapter=FOLDER_OR_HUB_ID; train one with train_lookahead.py")
        artifact = LookaheadAdapter.from_pretrained(self.adapter)
        self.check(artifact)
        return artifact

    def check(self, artifact: LookaheadAdapter) -> None:
        """Warn if the base model's tokenizer is known and is not the adapter's."""
        if isinstance(self.tokenizer, PreTrainedTokenizerBase):
            artifact.check_tokenizer(self.tokenizer)

    @cached_property
    def head(self) -> RetrievalHead:
        """The retrieval head, loaded; with a base model, on its device, and with the layers of its features named.

        Raises:
            UserError: there is none, it cannot be loaded, or it is for another base model.
        """
        if self.retrieval is None:
            raise UserError("needs retrieval=FOLDER_OR_HUB_ID; train one with train_retrieval_head.py")
        head = RetrievalHead.from_pretrained(self.retrieval, model=self.target)
        if self.target is not None:
            feature_layers = head.layers_of(self.target) or None
            head.config = dataclasses.replace(head.config, feature_layers=feature_layers)
        return head

    def scorer_of(self, kind: type[Published]) -> Published:
        """The trained scorer of a method, or other published weights of a method, loaded.

        Raises:
            UserError: there is none, it cannot be loaded, or it is for another method.
        """
        if self.scorer is None:
            raise UserError("needs scorer=FILE_FOLDER_OR_HUB_ID, its published weights")
        if kind not in self._scorers:
            self._scorers[kind] = kind.from_pretrained(self.scorer)
        return self._scorers[kind]

    def with_modules(self, **references: str) -> "Resources":
        """These resources with another adapter, retrieval head or scorer; each is loaded once."""
        changes: dict[str, Any] = {}
        for name, reference in references.items():
            if reference != str(getattr(self, name)):
                changes[name] = reference
        if not changes:
            return self
        key = tuple(sorted(changes.items()))
        return self._variants.setdefault(key, dataclasses.replace(self, **changes))

    def find(self, name: str) -> object:
        """The resource that fills a field called `name`: artifact, head, draft or tokenizer.

        Raises:
            UserError: there is none.
        """
        resource = getattr(self, name)
        if name == "draft" and callable(resource):
            resource = resource()
        if resource is not None:
            return resource
        if name == "draft":
            raise UserError(
                "needs a draft: set draft.layers=[...] (keepsight bench draft finds good ones), draft.id= or "
                "draft.head="
            )
        raise UserError("needs the base model's tokenizer")


@dataclasses.dataclass(frozen=True)
class ResourcesLater(Resources):
    """Resources before the base model is loaded: methods made with it are only checked, and hold `Later`."""

    @override
    def find(self, name: str) -> object:
        resource = super().find(name)  # refuses what is missing, or cannot be loaded
        return resource if name == "artifact" else Later(name)


def make_method(name: str, budget: int | float | None, resources: Resources | None = None, /, **options: Any) -> Method:
    """A method by its name in `METHODS`.

    Args:
        name: The method's name, such as `snapkv`; `evict` for a composition whose observer is among the options.
        budget: Entries per layer and KV head, or a ratio; unused by methods that keep all entries.
        resources: Adapter, retrieval head, draft and tokenizer, for the methods that need them.
        options: Other fields of the method, as values or as plain text and mappings; `adapter`, `retrieval` or
            `scorer`, a folder or Hub id, in place of that of the resources.

    Raises:
        UserError: an unknown name or option, a value out of range, or a resource that is missing.
    """
    kind = _method_class(name)
    modules = {}
    for option in _MODULE_OPTIONS:
        if options.get(option) is not None:
            modules[option] = str(options.pop(option))
    selection = options.pop("selection", None) if kind is LookaheadKV else None
    if resources is None:
        resources = Resources()
    reader = _OptionReader(resources.with_modules(**modules), selection)
    has_budget = has_field(name, "budget")
    if budget is None and has_budget:
        raise UserError(f"method {name!r} needs a budget, in entries per layer and KV head")

    constructor: Any = kind
    try:
        fields = reader.fields(kind, options, reader.defaults(kind), already_set=("budget",))
        method: Method = constructor(budget, **fields) if has_budget else constructor(**fields)
    except UserError as error:
        message = str(error)
        if not message.startswith(f"{kind.__name__}:"):
            message = f"method {name!r}: {message}"
        raise UserError(message) from None

    is_used = {
        "adapter": method.adapter_digest is not None,
        "retrieval": method.uses_retrieval_head,
        "scorer": isinstance(method, ScoredEvict | RestoreKV),
    }
    for option in modules:
        if not is_used[option]:
            raise UserError(f"method {name!r}: there is no option {option!r}, it uses none")
    return method


def has_field(method: str, field: str) -> bool:
    """Whether the method of this name has a field; a `UserError` if there is no such method."""
    kind: Any = _method_class(method)
    return field in {method_field.name for method_field in dataclasses.fields(kind)}


def _method_class(name: str) -> type[Method]:
    if name in METHODS:
        return METHODS[name]
    similar = difflib.get_close_matches(name, METHODS, n=1)
    hint = f"; did you mean {similar[0]!r}?" if similar else ""
    raise UserError(f"method {name!r} is unknown; choose one of {', '.join(sorted(METHODS))}{hint}")


@dataclasses.dataclass(frozen=True)
class _OptionReader:
    """Reads plain values; parts that they leave out come from the resources.

    Attributes:
        resources: The resources.
        selection: How a lookahead module selects; None for its own way.
    """

    resources: Resources
    selection: str | None = None

    def defaults(self, kind: type[Method]) -> dict[str, Any]:
        """Fields of a method that depend on the resources."""
        if kind is LookaheadKV:
            return adapter_fields(self.resources.artifact, self.selection)
        if issubclass(kind, ScoredEvict):
            return {"observer": TrainedScores(self.resources.scorer_of(kind.scorer))}
        if kind is SpecKV:
            draft: Any = self.resources.find("draft")
            return {"observer": DraftObserver(ModelDrafter(draft), window=None)}
        if issubclass(kind, RestoreKV):
            weights = self.resources.scorer_of(RestoreWeights)
            scores = KVzipPlus if weights.plus else kind
            return {"observer": scores.observer_of(self.resources.find("tokenizer")), "weights": weights}
        if issubclass(kind, KVzip):
            return {"observer": kind.observer_of(self.resources.find("tokenizer"))}
        return {}

    def fields(
        self, kind: type, options: Mapping[str, Any], defaults: Mapping[str, Any], already_set: tuple[str, ...] = ()
    ) -> dict[str, Any]:
        """Arguments for `kind` from options, defaults and resources, but for those in `already_set`.

        Raises:
            UserError: an unknown option, or a value that is missing.
        """
        kind_fields = [field for field in dataclasses.fields(kind) if field.name not in already_set]
        default_of = {field.name: field.default for field in kind_fields if field.name not in _RESOURCE_FIELDS}
        unknown = sorted(set(options) - set(default_of), key=str)
        if unknown:
            raise UserError(f"there is no option {unknown[0]!r}; it takes {', '.join(default_of) or 'none'}")

        values = dict(defaults)
        for name, value in options.items():
            default = defaults.get(name, default_of[name])
            values[name] = self.field_value(name, value, default)

        for field in kind_fields:
            is_required = field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
            if not is_required or field.name in values:
                continue
            if field.name in _RESOURCE_FIELDS:
                values[field.name] = self.resources.find(field.name)
            elif field.name == "observer":
                raise UserError(f"option 'observer' is missing, one of {', '.join(sorted(OBSERVERS))}")
            else:
                raise UserError(f"option {field.name!r} is missing")
        return values

    def field_value(self, name: str, value: Any, default: Any) -> Any:
        """The value of the field `name`, as its option gives it."""
        if name == "inner" and isinstance(value, str | Mapping):
            options: dict[str, Any] = {"name": value} if isinstance(value, str) else dict(value)
            method = str(options.pop("name", ""))
            budget = options.pop("budget", None)
            return make_method(method, budget, self.resources, **options)
        if name in ("pool", "first_pool") and isinstance(value, str):
            return NO_POOL if value == "none" else Pool(value)
        if name == "weights" and isinstance(value, str):
            return read_json(Path(at_home(value)))
        if name == "reduce" and isinstance(value, str):
            return Reduce(value, value)
        if name in _PART_CLASSES:
            return self.make_part(name, value, default)
        return value

    def make_part(self, role: str, value: Any, default: Any) -> Any:
        """A part from its name, from a mapping with its name and options, or from options that change `default`.

        Raises:
            UserError: an unknown name or option, or a value out of range.
        """
        if value is not default and isinstance(value, int | float | list | None):
            raise UserError(f"{role}: {value!r} must be a name, or a mapping with a name and options")
        if not isinstance(value, str | Mapping):
            return value

        classes = _PART_CLASSES[role]
        options = {"name": value} if isinstance(value, str) else dict(value)
        name = options.pop("name", None)
        default_options: dict[str, Any] = {}
        kind: Any
        if name is not None:
            if not isinstance(name, str) or name not in classes:
                raise UserError(f"{role}: {name!r} is unknown; choose one of {', '.join(sorted(classes))}")
            kind = classes[name]
        elif dataclasses.is_dataclass(default):
            kind = type(default)
            for field in dataclasses.fields(kind):
                default_options[field.name] = getattr(default, field.name)
        else:
            raise UserError(f"{role}: give it a name, one of {', '.join(sorted(classes))}")

        try:
            return kind(**self.fields(kind, options, default_options))
        except UserError as error:
            message = str(error)
            if role not in message:
                message = f"{role}: {message}"
            raise UserError(message) from None


_PART_CLASSES: dict[str, Mapping[str, type]] = {
    "observer": OBSERVERS,
    "drafter": DRAFTERS,
    "allocate": ALLOCATIONS,
    "pool": {},
    "first_pool": {},
    "reduce": {},
    "sparse": {"vertical_slash": SparsePrefill, "minference": MInference},
    "label": {"package": Package},
    "similarity": {"cosine": Cosine, "contextual": Contextual},
    "relevance": {"fusion": Fusion},
}
