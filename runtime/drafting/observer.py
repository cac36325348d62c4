"""Draft tokens stand where the answer will be and observe the prompt from there.

LAQ, SpecKV, DapQ and the oracle differ in who writes the draft and in how many of the prompt's last queries observe
beside it; the rest is the same and is here.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from transformers import PreTrainedModel
from typing_extensions import override

from keepsight.errors import UserError
from keepsight.runtime.decode import decode, stop_after
from keepsight.runtime.importance import observed_attention
from keepsight.runtime.observe import Observer, look_back
from keepsight.runtime.state import Needs, State


@dataclass(frozen=True)
class Draft:
    """Tokens that stand in place of the answer.

    Attributes:
        ids: [B, T] int64, padded on the right.
        mask: [B, T] bool, False for padding; None when no row is padded.
    """

    ids: Tensor
    mask: Tensor | None = None


class Drafter(ABC):
    """Writes a draft of the answer."""

    @abstractmethod
    def __call__(self, model: PreTrainedModel, state: State) -> Draft:
        """The draft for a state that `model`, the target, has read."""

    def needs(self) -> Needs:
        """What the prefill must record for this drafter."""
        return Needs()

    @abstractmethod
    def longest(self) -> int:
        """The most tokens that a draft has."""


@dataclass(frozen=True, eq=False)
class Given(Drafter):
    """A draft that is there already."""

    draft: Draft

    @override
    def __call__(self, model: PreTrainedModel, state: State) -> Draft:
        return self.draft

    @override
    def longest(self) -> int:
        return self.draft.ids.shape[1]


@dataclass(frozen=True)
class DraftTokens(Observer):
    """The tokens of a draft observe, at the positions of the answer, together with the last prompt tokens.

    Attributes:
        drafter: Writes the draft.
        window: How many of the last prompt tokens observe too; None for as many as the method keeps.
    """

    drafter: Drafter
    window: int | None = 0

    def __post_init__(self) -> None:
        if self.window is not None and (type(self.window) is not int or self.window < 0):
            raise UserError(f"draft tokens: window {self.window!r} must be a whole number")

    @override
    def __call__(self, model: PreTrainedModel, state: State, reduction: str) -> list[Tensor]:
        draft = self.drafter(model, state)
        embeddings = model.get_input_embeddings()(draft.ids)
        observed = look_back(model, state, embeddings, observer_mask=draft.mask, reduction=reduction)
        if not self.window:
            return observed
        rows = held_rows(state, self.window)
        real = draft.mask if draft.mask is not None else torch.ones_like(draft.ids, dtype=torch.bool)
        return combine(window_attention(state, rows, reduction), observed, rows, real, reduction)

    @override
    def needs(self) -> Needs:
        return Needs(window=self.window or 0) | self.drafter.needs()

    @override
    def positions(self) -> int:
        return self.drafter.longest()

    @override
    def bound(self, budget: int | float, sinks: int, window: int) -> Observer:
        return replace(self, window=window) if self.window is None else self


def combine(of_window: list[Tensor], of_draft: list[Tensor], rows: int, real: Tensor, reduction: str) -> list[Tensor]:
    """What a prompt's last queries and a draft observe together.

    Args:
        of_window: For each layer, [B, H, C] float32, reduced over the window's queries.
        of_draft: The same, reduced over the draft's queries.
        rows: Queries of the window.
        real: [B, T] bool, False where the draft is padding.
        reduction: `mean` or `max`, as both were reduced.
    """
    if reduction == "max":
        return [torch.maximum(*pair) for pair in zip(of_window, of_draft, strict=True)]
    drafted = real.sum(dim=1)[:, None, None]
    return [
        (window * rows + draft * drafted) / (rows + drafted) for window, draft in zip(of_window, of_draft, strict=True)
    ]


def held_rows(state: State, wanted: int) -> int:
    """How many of the last `wanted` queries there are to observe from.

    Raises:
        UserError: none were recorded, or the entries of all of them may have been evicted.
    """
    held = state.trace.window[0].shape[2] if state.trace.window else 0
    if not held:
        raise UserError(
            f"no query is left of the {wanted} that should observe: prefill with needs=method.needs(), and where an "
            "evicted cache is evicted again, let the method keep its window"
        )
    return min(wanted, held)


def window_attention(state: State, rows: int, reduction: str) -> list[Tensor]:
    """Attention of the last `rows` queries to all entries, for each layer [B, H, C] float32 (SnapKV, section 4)."""
    row_mask = None if state.tokens_mask is None else state.tokens_mask[:, -rows:]
    return [
        observed_attention(
            queries[:, :, -rows:],
            each.keys,
            scaling,
            each.keys.shape[2],
            key_mask=each.real,
            query_mask=row_mask,
            reduction=reduction,
        )
        for queries, each, scaling in zip(state.trace.window, state.entries(), state.trace.scaling, strict=True)
    ]


def greedy_draft(model: PreTrainedModel, state: State, tokens: int) -> Draft:
    """A greedy answer of at most `tokens` tokens, its end token included; the state's cache grows."""
    config = model.generation_config
    end = config.eos_token_id if config is not None else None
    ids = decode(model, state, stop_after(tokens, end), pad_token=0).ids
    return Draft(ids, None if end is None else until_end(ids, end))


def until_end(ids: Tensor, end: int | list[int]) -> Tensor | None:
    """[B, T] bool: True up to each row's first end token; None when all of it is."""
    ended = torch.isin(ids, torch.tensor(end, device=ids.device)).long()
    mask = (ended.cumsum(dim=1) - ended) == 0
    return None if bool(mask.all()) else mask
