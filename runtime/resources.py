"""What methods need beside their options: trained modules, the draft and the base model's tokenizer."""

import dataclasses
from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol, TypeVar

from transformers import PreTrainedModel, PreTrainedTokenizerBase
from typing_extensions import Self

from keepsight.errors import UserError
from keepsight.models.draft_sources import DraftHeadSource, DraftSource
from keepsight.models.lookahead import LookaheadAdapter
from keepsight.models.retrieval_head import RetrievalHead


class PublishedWeights(Protocol):
    """Published weights of a method: its trained scorer, or others."""

    @classmethod
    def from_pretrained(cls, reference: str | Path) -> Self:
        """Load them from a file, a folder or the Hub."""
        ...


Published = TypeVar("Published", bound=PublishedWeights)
MODULES = ("adapter", "retrieval", "scorer")
"""Trained modules, which a method may name among its options in place of those of the command."""


@dataclasses.dataclass(frozen=True)
class Resources:
    """Trained modules, draft and tokenizer of methods, each loaded once, when it is first needed.

    The base model need not have its weights yet (`keepsight.models.targets.outline_target`): methods are built and
    checked before these are loaded.

    Attributes:
        adapter: Folder or Hub id of a lookahead adapter.
        draft: Source of the draft model, or a draft head; or a function that returns it when a method needs it.
        tokenizer: The base model's tokenizer.
        retrieval: Folder or Hub id of a retrieval head.
        target: The base model, or one on the meta device, with which methods and modules are compared; None to compare
            nothing.
        scorer: File, folder or Hub id of the weights of a trained scorer.
        drafts: Returns the draft that a method's option `draft` describes; None where methods cannot have their own.
    """

    adapter: str | Path | None = None
    draft: DraftSource | DraftHeadSource | Callable[[], DraftSource | DraftHeadSource | None] | None = None
    tokenizer: PreTrainedTokenizerBase | None = None
    retrieval: str | Path | None = None
    target: PreTrainedModel | None = None
    scorer: str | Path | None = None
    drafts: Callable[[Any], DraftSource | DraftHeadSource | None] | None = None
    _scorers: dict[type, Any] = dataclasses.field(default_factory=dict, init=False, repr=False, compare=False)
    _variants: dict[Any, "Resources"] = dataclasses.field(default_factory=dict, init=False, repr=False, compare=False)

    @cached_property
    def artifact(self) -> LookaheadAdapter:
        """The adapter, loaded; a `UserError` if there is none, or it cannot be loaded."""
        if self.adapter is None:
            raise UserError(
                "needs adapter=FOLDER_OR_HUB_ID; train one with train_lookahead.py", field="adapter", code="missing"
            )
        artifact = LookaheadAdapter.from_pretrained(self.adapter)
        if self.target is not None and self.tokenizer is not None:
            artifact.check_tokenizer(self.tokenizer)
        return artifact

    @cached_property
    def head(self) -> RetrievalHead:
        """The retrieval head, loaded; with a base model, in its dtype, and with the layers of its features named.

        Raises:
            UserError: there is none, it cannot be loaded, or it is for another base model.
        """
        if self.retrieval is None:
            raise UserError(
                "needs retrieval=FOLDER_OR_HUB_ID; train one with train_retrieval_head.py",
                field="retrieval",
                code="missing",
            )
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
            raise UserError("needs scorer=FILE_FOLDER_OR_HUB_ID, its published weights", field="scorer", code="missing")
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

    def with_draft(self, description: Any) -> "Resources":
        """These resources with the draft that a method's option describes; found once for equal descriptions."""
        if self.drafts is None:
            raise UserError(
                "there is no option 'draft' here; a draft is given for all methods", field="draft", code="unknown"
            )
        key = ("draft", str(description))
        if key not in self._variants:
            self._variants[key] = dataclasses.replace(self, draft=self.drafts(description))
        return self._variants[key]

    def find(self, name: str) -> Any:
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
                "draft.head=",
                field="draft",
                code="missing",
            )
        raise UserError("needs the base model's tokenizer", field="tokenizer", code="missing")
