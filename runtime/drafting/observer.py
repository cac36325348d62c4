"""Draft tokens observe the prompt from the positions of the answer: the observer of SpecKV, DapQ and the oracle."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Annotated

import torch
from annotated_types import Ge
from torch import Tensor
from transformers import PreTrainedModel
from typing_extensions import override

from keepsight.errors import UserError, Whole
from keepsight.runtime import registry
from keepsight.runtime.generate import decode, end_ids, stop_after
from keepsight.runtime.images import Images
from keepsight.runtime.importance import Reduce
from keepsight.runtime.observe import Observer, look_back
from keepsight.runtime.state import Needs, State
from keepsight.runtime.tail import Tail


@dataclass(frozen=True)
class DraftIds:
    """The tokens [B, T] int64 of a draft, in place of the answer, padded on the right where `mask` is False."""

    ids: Tensor
    mask: Tensor | None = None


class Drafter(ABC):
    """Writes a draft of the answer."""

    @abstractmethod
    def __call__(self, model: PreTrainedModel, state: State) -> DraftIds:
        """Write the draft for a state that `model`, the base model, has read."""

    @property
    def from_tokens(self) -> bool:
        """Whether the draft depends on the prompt's tokens and images alone, so that `before` writes it."""
        return False

    def before(
        self, model: PreTrainedModel, tokens: Tensor, mask: Tensor | None, images: Images | None = None
    ) -> DraftIds:
        """The draft for prompts [B, N], with `images`, that `model` has not read; `mask` is 0 for padding.

        Raises:
            UserError: the drafter needs what the model has read.
        """
        raise UserError(
            f"{type(self).__name__} writes its draft from a prompt that the model has read",
            field="observer",
            code="model",
        )

    def needs(self) -> Needs:
        """What the prefill must record for this drafter."""
        return Needs()

    @abstractmethod
    def longest(self) -> int:
        """Maximum length of a draft in tokens."""


class PromptDrafter(Drafter):
    """Writes a draft from the tokens of a prompt alone."""

    @abstractmethod
    def write(self, model: PreTrainedModel, tokens: Tensor, mask: Tensor | None) -> DraftIds:
        """The draft for tokens [B, M] that `model`, the base model, need not have read; `mask` is 0 for padding."""

    @override
    def __call__(self, model: PreTrainedModel, state: State) -> DraftIds:
        return self.write(model, state.tokens, state.tokens_mask)

    @property
    @override
    def from_tokens(self) -> bool:
        return True

    @override
    def before(
        self, model: PreTrainedModel, tokens: Tensor, mask: Tensor | None, images: Images | None = None
    ) -> DraftIds:
        return self.write(model, tokens, mask)


@dataclass(frozen=True, eq=False)
class FixedDraft(PromptDrafter):
    """A draft of known tokens."""

    draft: DraftIds

    @override
    def write(self, model: PreTrainedModel, tokens: Tensor, mask: Tensor | None) -> DraftIds:
        return self.draft

    @override
    def longest(self) -> int:
        return self.draft.ids.shape[1]


@registry.observer("draft_tokens")
@dataclass(frozen=True)
class DraftObserver(Observer):
    """The tokens of a draft observe, at the positions of the answer, and so do the last prompt tokens.

    Attributes:
        drafter: Writes the draft.
        window: Number of last prompt tokens that observe too; None for the method's window.
        start: Offset of the draft from the prompt's end, in tokens (DapQ, arXiv 2603.11564, section 6.3). With a
            negative offset the draft attends only to the entries before it, and the later ones score 0.
    """

    drafter: Drafter
    window: Whole | None = 0
    start: Annotated[int, Ge(-(2**31)), "a whole number"] = 0
    signed = False

    @override
    def __call__(self, model: PreTrainedModel, state: State, reduce: Reduce) -> list[Tensor]:
        draft = self.drafter(model, state)
        embeddings = model.get_input_embeddings()(draft.ids)
        return look_back(
            model,
            state,
            embeddings,
            reduce=reduce,
            observer_mask=draft.mask,
            window=self.window or 0,
            start=self.start,
        )

    @property
    @override
    def joins_prefill(self) -> bool:
        return self.start == 0 and self.drafter.from_tokens

    @override
    def tail(
        self,
        model: PreTrainedModel,
        tokens: Tensor,
        mask: Tensor | None,
        reduce: Reduce,
        images: Images | None = None,
    ) -> Tail | None:
        if not self.joins_prefill:
            return None
        draft = self.drafter.before(model, tokens, mask, images)
        embeddings = model.get_input_embeddings()(draft.ids)
        return Tail(embeddings, reduce, draft.mask, self.window or 0)

    @override
    def needs(self) -> Needs:
        return super().needs() | self.drafter.needs()

    @override
    def positions(self) -> int:
        return self.drafter.longest() + max(self.start, 0)


def greedy_draft(model: PreTrainedModel, state: State, tokens: int) -> DraftIds:
    """Write a greedy answer of at most `tokens` tokens, its end token included; the state's cache grows."""
    end = end_ids(model)
    ids = decode(model, state, stop_after(tokens, end), pad_token=0).ids
    return DraftIds(ids, until_end(ids, end))


def until_end(ids: Tensor, end: int | list[int] | None) -> Tensor | None:
    """[B, T] bool: True up to and including each row's first end token; None when all of it is True."""
    if end is None:
        return None
    is_end = torch.isin(ids, torch.tensor(end, device=ids.device)).long()
    ends_before = is_end.cumsum(dim=1) - is_end
    mask = ends_before == 0
    return None if bool(mask.all()) else mask
