"""What some methods need beside their options: a trained adapter, a draft."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from keepsight.errors import UserError
from keepsight.models.adapter import Artifact, load_lookahead
from keepsight.models.drafts import Draft
from keepsight.models.hub import fetch


@dataclass(frozen=True)
class Resources:
    """What is at hand to make methods of; everything is loaded once.

    Attributes:
        adapter: Lookahead adapter: a folder or Hub id.
        draft: The model that drafts for the target; or how to get it, asked when a method needs it.
        tokenizer: Of the target.
    """

    adapter: str | Path | None = None
    draft: Draft | Callable[[], Draft | None] | None = None
    tokenizer: PreTrainedTokenizerBase | None = None

    @cached_property
    def artifact(self) -> Artifact:
        """The adapter, loaded.

        Raises:
            UserError: there is none, or it cannot be had.
        """
        if self.adapter is None:
            raise UserError("needs adapter=FOLDER_OR_HUB_ID; train one with train_lookahead.py")
        return load_lookahead(fetch(str(self.adapter)))

    def find(self, name: str) -> object:
        """The resource that fills a field called `name`: artifact, draft or tokenizer.

        Raises:
            UserError: there is none.
        """
        if name == "artifact":
            return self.artifact
        given = getattr(self, name)
        found = given() if name == "draft" and callable(given) else given
        if found is not None:
            return found
        if name == "draft":
            raise UserError("needs a draft: set draft.layers=[...] (keepsight draft finds good ones) or draft.id=")
        raise UserError("needs the target's tokenizer")
