"""Prompt compression: the model reads only some of a prompt's tokens.

The shortened prompt has positions 0..C-1 and KV entries in every layer and head, and the answer continues at position
C. No chat template is applied again: these methods keep the prompt's last tokens (question and assistant header).

The budget: tokens kept per prompt. A ratio (a float between 0 and 1) stands for `round(ratio * N)`, N being the
prompt's own length. A prompt no longer than the budget is left as it is.
"""

from abc import abstractmethod
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel
from typing_extensions import override

from keepsight.errors import Budget, UserError, Whole
from keepsight.models.decoder import context_of
from keepsight.runtime.generate import Method
from keepsight.runtime.images import Images
from keepsight.runtime.state import Needs, State, prefill


@dataclass(frozen=True)
class ShortenPrompt(Method):
    """Keeps some of the prompt's tokens and reads only those.

    Attributes:
        budget: Tokens to keep, or a ratio; see the module.
        window: Number of last tokens that are always kept; they count towards the budget.
    """

    section = "shorten"
    cost = "a text model that reads the prompt first; a shorter prefill"
    budget: Budget
    window: Whole = 0

    def __post_init__(self) -> None:
        # A window that fills the budget would make every method keep the end of the prompt alone.
        if isinstance(self.budget, int) and 0 < self.budget <= self.window:
            raise UserError(
                f"{type(self).__name__}: budget {self.budget} must be above the window of {self.window} tokens that "
                "are always kept; raise the budget, lower the window, or use truncation",
                field="budget",
                code="range",
            )

    @abstractmethod
    def select(self, model: PreTrainedModel, input_ids: Tensor, images: Images | None = None) -> Tensor:
        """The tokens of one prompt [N] int64, without padding and longer than the budget, that are kept.

        Their indices [C] int64, ascending, at most `self.budget_for(N)`. `images` are for methods that read them.
        """

    @override
    def budget_for(self, length: int) -> int:
        """Maximum number of tokens kept of a prompt of `length` tokens."""
        return min(super().budget_for(length), length)

    @override
    def least_budget(self) -> int:
        return self.window + 1

    @override
    def check(self, length: int, context: int) -> None:
        if length < self.window:
            raise UserError(
                f"{type(self).__name__}: a prompt of {length} tokens is shorter than the window of {self.window}; "
                "give a longer prompt or a smaller window",
                field="prompt",
                code="range",
            )

    @override
    @torch.no_grad()
    def tokens_to_read(self, model: PreTrainedModel, prompt: Tensor, images: Images | None = None) -> Tensor | None:
        if self.budget_for(len(prompt)) == len(prompt):
            return None
        return self.select(model, prompt, images)

    def shorten(self, model: PreTrainedModel, input_ids: Tensor, mask: Tensor | None = None) -> list[Tensor]:
        """The kept tokens [C] int64 of each prompt of a batch; arguments as for `start`."""
        prompts = unpadded(input_ids, mask)
        for prompt in prompts:
            self.check(len(prompt), context_of(model))
        shortened = []
        for prompt in prompts:
            kept_positions = self.tokens_to_read(model, prompt)
            if kept_positions is not None:
                prompt = prompt[kept_positions]
            shortened.append(prompt)
        return shortened

    @override
    def start(self, model: PreTrainedModel, input_ids: Tensor, mask: Tensor | None = None, **options: Any) -> State:
        ids, short_mask = pad_left(self.shorten(model, input_ids, mask))
        passes = {name: options.get(name) for name in ("chunk", "between")}
        return prefill(model, ids, short_mask, needs=Needs(), **passes)


def unpadded(input_ids: Tensor, mask: Tensor | None = None) -> list[Tensor]:
    """The prompts of a batch: [N] int64 each, without the padding of [B, N] that `mask` marks with 0."""
    if mask is None:
        return list(input_ids)
    return [row[real] for row, real in zip(input_ids, mask.bool(), strict=True)]


def pad_left(prompts: list[Tensor]) -> tuple[Tensor, Tensor | None]:
    """A batch [B, N] int64 of prompts, padded on the left with 0, and its mask [B, N] bool; None without padding."""
    marks = [torch.ones_like(prompt, dtype=torch.bool) for prompt in prompts]
    ids = pad_sequence(prompts, batch_first=True, padding_side="left")
    mask = pad_sequence(marks, batch_first=True, padding_side="left")
    if bool(mask.all()):
        return ids, None
    return ids, mask
