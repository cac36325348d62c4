"""What some methods need beside their options: a trained adapter or head, a draft, a tokenizer."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

from transformers import PreTrainedModel, PreTrainedTokenizerBase
from typing_extensions import override

from keepsight.errors import UserError
from keepsight.models.draft_sources import DraftHeadSource, DraftSource
from keepsight.models.lookahead import LookaheadAdapter
from keepsight.models.retrieval_head import RetrievalHead
from keepsight.models.scorers import Scorer
from keepsight.runtime.methods.restore import RestoreWeights

Published = TypeVar("Published", bound=Scorer | RestoreWeights)


@dataclass(frozen=True)
class Later:
    """Stands in a method for a resource that takes the loaded base model: a draft, tokenizer or head."""

    name: str


@dataclass(frozen=True)
class Resources:
    """What methods are made with, each loaded once, when it is first needed.

    Attributes:
        adapter: Folder or Hub id of a lookahead adapter.
        draft: Source of the draft model, or a draft head; or a function that gets it once a method needs it.
        tokenizer: The base model's tokenizer.
        retrieval: Folder or Hub id of a retrieval head.
        target: The model that the retrieval head must be for; None leaves that unchecked.
        scorer: File, folder or Hub id of the weights of a trained scorer.
    """

    adapter: str | Path | None = None
    draft: DraftSource | DraftHeadSource | Callable[[], DraftSource | DraftHeadSource | Later | None] | None = None
    tokenizer: PreTrainedTokenizerBase | Later | None = None
    retrieval: str | Path | None = None
    target: PreTrainedModel | None = None
    scorer: str | Path | None = None

    @cached_property
    def artifact(self) -> LookaheadAdapter:
        """The adapter, loaded.

        Raises:
            UserError: there is none, or it cannot be had.
        """
        if self.adapter is None:
            raise UserError("needs adapter=FOLDER_OR_HUB_ID; train one with train_lookahead.py")
        artifact = LookaheadAdapter.from_pretrained(self.adapter)
        self.check(artifact)
        return artifact

    def check(self, artifact: LookaheadAdapter) -> None:
        """Warn, where the base model's tokenizer is known, of another one than the adapter's."""
        if isinstance(self.tokenizer, PreTrainedTokenizerBase):
            artifact.check_tokenizer(self.tokenizer)

    @cached_property
    def head(self) -> RetrievalHead:
        """The retrieval head, loaded; with a base model, on its device, and with the layers of its features named.

        Raises:
            UserError: there is none, it cannot be had, or it is for another base model.
        """
        if self.retrieval is None:
            raise UserError("needs retrieval=FOLDER_OR_HUB_ID; train one with train_retrieval_head.py")
        head = RetrievalHead.from_pretrained(self.retrieval, model=self.target)
        if self.target is not None:
            head.config = replace(head.config, feature_layers=head.layers_of(self.target) or None)
        return head

    def scorer_of(self, kind: type[Published]) -> Published:
        """The trained scorer of a method, or other weights that were published for it, loaded.

        Raises:
            UserError: there is none, it cannot be had, or it is for another method.
        """
        if self.scorer is None:
            raise UserError("needs scorer=FILE_FOLDER_OR_HUB_ID, its published weights")
        if kind not in self._scorers:
            self._scorers[kind] = kind.from_pretrained(self.scorer)
        return self._scorers[kind]

    @cached_property
    def _scorers(self) -> dict[type, Any]:
        return {}

    def other(self, **named: str) -> "Resources":
        """These resources with another adapter, retrieval head or scorer; the same ones when they are named again."""
        changed = {key: value for key, value in named.items() if value != str(getattr(self, key))}
        if not changed:
            return self
        return self._others.setdefault(tuple(sorted(changed.items())), replace(self, **changed))  # type: ignore[arg-type]

    @cached_property
    def _others(self) -> "dict[tuple[tuple[str, str], ...], Resources]":
        return {}

    def find(self, name: str) -> object:
        """The resource that fills a field called `name`: artifact, head, draft or tokenizer.

        Raises:
            UserError: there is none.
        """
        if name in ("artifact", "head"):
            return getattr(self, name)
        given = getattr(self, name)
        found = given() if name == "draft" and callable(given) else given
        if found is not None:
            return found
        if name == "draft":
            raise UserError(
                "needs a draft: set draft.layers=[...] (keepsight bench draft finds good ones), draft.id= or "
                "draft.head="
            )
        raise UserError("needs the base model's tokenizer")


@dataclass(frozen=True)
class ResourcesLater(Resources):
    """What is known before the base model is loaded: methods made with it are only checked, and hold `Later`."""

    @override
    def find(self, name: str) -> object:
        found = super().find(name)  # refuses what is missing, or cannot be had
        return found if name == "artifact" else Later(name)
