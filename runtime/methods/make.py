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
from keepsight.runtime.methods.lookaheadkv import LookaheadKV, parts_of
from keepsight.runtime.methods.reconstruction import KVzip, KVzipPlus
from keepsight.runtime.methods.restore import RestoreKV, RestoreWeights
from keepsight.runtime.methods.scored import ScoredEvict, TrainedScores
from keepsight.runtime.prompt_compression.contextual import Contextual
from keepsight.runtime.prompt_compression.r2c import Fusion
from keepsight.runtime.prompt_compression.text import Cosine, Package
from keepsight.runtime.registry import ALLOCATIONS, DRAFTERS, METHODS, OBSERVERS

Published = TypeVar("Published", bound=Scorer | RestoreWeights)
_RESOURCES = ("artifact", "head", "draft", "tokenizer")
_TRAINED = ("adapter", "retrieval", "scorer")


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
    _others: dict[Any, "Resources"] = dataclasses.field(default_factory=dict, init=False, repr=False, compare=False)

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
            head.config = dataclasses.replace(head.config, feature_layers=head.layers_of(self.target) or None)
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

    def other(self, **named: str) -> "Resources":
        """These resources with another adapter, retrieval head or scorer; loaded once for each name."""
        changed = {key: value for key, value in named.items() if value != str(getattr(self, key))}
        if not changed:
            return self
        return self._others.setdefault(tuple(sorted(changed.items())), dataclasses.replace(self, **changed))  # type: ignore[arg-type]

    def find(self, name: str) -> object:
        """The resource that fills a field called `name`: artifact, head, draft or tokenizer.

        Raises:
            UserError: there is none.
        """
        if name in ("artifact", "head"):
            return getattr(self, name)
        resource = getattr(self, name)
        found = resource() if name == "draft" and callable(resource) else resource
        if found is not None:
            return found
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
        found = super().find(name)  # refuses what is missing, or cannot be loaded
        return found if name == "artifact" else Later(name)


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
    kind = _kind(name)
    make: Any = kind
    named = {key: str(options.pop(key)) for key in _TRAINED if options.get(key) is not None}
    selection = options.pop("selection", None) if kind is LookaheadKV else None
    reader = _OptionReader((resources or Resources()).other(**named), selection)
    if budget is None and takes(name, "budget"):
        raise UserError(f"method {name!r} needs a budget, in entries per layer and KV head")
    try:
        parts = reader.fields(kind, options, reader.defaults(kind), taken=("budget",))
        method: Method = make(budget, **parts) if takes(name, "budget") else make(**parts)
    except UserError as error:
        is_named = str(error).startswith(f"{kind.__name__}:")
        raise UserError(str(error) if is_named else f"method {name!r}: {error}") from None
    used = {
        "adapter": method.adapter_digest is not None,
        "retrieval": method.uses_retrieval_head,
        "scorer": isinstance(method, ScoredEvict | RestoreKV),
    }
    if unused := [key for key in named if not used[key]]:
        raise UserError(f"method {name!r}: there is no option {unused[0]!r}, it uses none")
    return method


def takes(name: str, field: str) -> bool:
    """Whether a method has a field of this name; a `UserError` if there is no such method."""
    return any(each.name == field for each in dataclasses.fields(_kind(name)))  # type: ignore[arg-type]


def _kind(name: str) -> type[Method]:
    if name in METHODS:
        return METHODS[name]
    near = difflib.get_close_matches(name, METHODS, n=1)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    raise UserError(f"method {name!r} is unknown; choose one of {', '.join(sorted(METHODS))}{hint}")


@dataclasses.dataclass(frozen=True)
class _OptionReader:
    """Reads plain values; parts that they leave out come from the resources."""

    resources: Resources
    selection: str | None = None

    def defaults(self, kind: type[Method]) -> dict[str, Any]:
        """Parts that depend on the resources."""
        if kind is LookaheadKV:
            return parts_of(self.resources.artifact, self.selection)
        if issubclass(kind, ScoredEvict):
            return {"observer": TrainedScores(self.resources.scorer_of(kind.scorer))}
        if kind is SpecKV:
            draft: Any = self.resources.find("draft")
            return {"observer": DraftObserver(ModelDrafter(draft), window=None)}
        if issubclass(kind, KVzip):
            weights = self.resources.scorer_of(RestoreWeights) if issubclass(kind, RestoreKV) else None
            scores = KVzipPlus if weights and weights.plus else kind
            trained = {"weights": weights} if weights else {}
            return {"observer": scores.observer_of(self.resources.find("tokenizer"))} | trained
        return {}

    def fields(
        self, kind: type, options: Mapping[str, Any], defaults: Mapping[str, Any], taken: tuple[str, ...] = ()
    ) -> dict[str, Any]:
        """Arguments for `kind` from options, defaults and resources.

        Raises:
            UserError: an unknown option, or a value that is missing.
        """
        known = {each.name: each for each in dataclasses.fields(kind) if each.name not in (*taken, *_RESOURCES)}
        if unknown := sorted(set(options) - set(known), key=str):
            raise UserError(f"there is no option {unknown[0]!r}; it takes {', '.join(known) or 'none'}")
        values = dict(defaults)
        for name, value in options.items():
            values[name] = self.part(name, value, defaults.get(name, known[name].default))
        for each in dataclasses.fields(kind):
            required = each.default is dataclasses.MISSING and each.default_factory is dataclasses.MISSING
            if required and each.name not in (*values, *taken):
                if each.name not in _RESOURCES:
                    choices = f", one of {', '.join(sorted(OBSERVERS))}" if each.name == "observer" else ""
                    raise UserError(f"option {each.name!r} is missing{choices}")
                values[each.name] = self.resources.find(each.name)
        return values

    def part(self, role: str, value: Any, default: Any) -> Any:
        """The value of the field `role`."""
        if role == "inner" and isinstance(value, str | Mapping):
            options: dict[str, Any] = {"name": value} if isinstance(value, str) else dict(value)
            return make_method(str(options.pop("name", "")), options.pop("budget", None), self.resources, **options)
        if role in ("pool", "first_pool") and isinstance(value, str):
            return NO_POOL if value == "none" else Pool(value)
        if role == "weights" and isinstance(value, str):
            return read_json(Path(at_home(value)))
        if role == "reduce" and isinstance(value, str):
            return Reduce(value, value)
        return self.named(role, value, default) if role in _KINDS else value

    def named(self, role: str, value: Any, default: Any) -> Any:
        """A part from its name, from a mapping with its name and options, or from options that change `default`.

        Raises:
            UserError: an unknown name or option, or a value out of range.
        """
        if value is not default and isinstance(value, int | float | list | None):
            raise UserError(f"{role}: {value!r} must be a name, or a mapping with a name and options")
        if not isinstance(value, str | Mapping):
            return value
        options = {"name": value} if isinstance(value, str) else dict(value)
        name = options.pop("name", None)
        kinds = _KINDS.get(role) or {}
        if name is not None and not (isinstance(name, str) and name in kinds):
            raise UserError(f"{role}: {name!r} is unknown; choose one of {', '.join(sorted(kinds))}")
        if name is None and not dataclasses.is_dataclass(default):
            raise UserError(f"{role}: give it a name, one of {', '.join(sorted(kinds))}")
        kind: Any = type(default) if name is None else kinds[name]
        same = {each.name: getattr(default, each.name) for each in dataclasses.fields(kind)} if name is None else {}
        try:
            return kind(**self.fields(kind, options, same))
        except UserError as error:
            raise UserError(str(error) if role in str(error) else f"{role}: {error}") from None


_KINDS: dict[str, Mapping[str, type]] = {
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
