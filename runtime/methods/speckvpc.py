"""SpecKV-PC (arXiv 2506.08373): SpecPC shortens the prompt, then SpecKV evicts from the KV cache of what is left.

The draft model runs once, on the whole prompt: its attention shortens the prompt, and what it generated observes the
short prompt in place of the answer. This is the cascade of the paper's released code.
"""

from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel
from typing_extensions import override

from keepsight.errors import require_whole
from keepsight.models.draft_sources import DraftHeadSource, DraftSource
from keepsight.runtime.allocate import Allocation, Uniform
from keepsight.runtime.allocate import Budget
from keepsight.runtime.drafting.observer import DraftIds, DraftObserver, GivenDraft
from keepsight.runtime.generate import Method
from keepsight.runtime.methods.speckv import SpecKV
from keepsight.runtime.methods.specpc import SpecPC, require_room
from keepsight.runtime.state import context_of, prefill
from keepsight.runtime.prompt_compression.method import pad_left, unpadded
from keepsight.runtime.state import State


@dataclass(frozen=True)
class SpecKVPC(Method):
    """Shortens the prompt by a draft model's attention, then evicts by the draft model's answer (arXiv 2506.08373).

    Attributes:
        budget: Entries per layer and KV head, or a ratio of the whole prompt; see `keepsight.runtime.evict`.
        draft: Source of the draft model, or a draft head.
        prompt_budget: Tokens that SpecPC keeps; never fewer than `budget`, so that the budget is always used.
        lookahead: Maximum length of the draft in tokens, its end token included; all of them observe.
        kernel: SpecPC's pooling and neighbourhood, in tokens (as published, for every model).
        first_layer: SpecPC's first scoring layer; see `SpecPC`.
        prompt_window: SpecPC's window: the last prompt tokens that are kept and that the draft observes with.
        window: Last tokens of the short prompt that are kept and observe too. The published window of 32 does not
            count the last prompt token, which is here an entry like any other: 33.
        allocate: Divides the budget over layers and KV heads.

    Raises:
        UserError: a value is out of range; one line names it.
    """

    budget: int | float
    draft: DraftSource | DraftHeadSource = field(kw_only=True)
    prompt_budget: int = 2048
    lookahead: int = 20
    kernel: int = 32
    first_layer: int | None = None
    prompt_window: int = 64
    window: int = 33
    allocate: Allocation = Uniform()

    def __post_init__(self) -> None:
        require_whole(type(self).__name__, 1, prompt_budget=self.prompt_budget)
        self._evict(DraftIds(torch.empty(1, 0, dtype=torch.long)))
        self._shorten(0)

    @override
    def check(self, length: int, context: int) -> None:
        self._shorten(0).check(length, context)
        require_room(type(self).__name__, length, self.lookahead, context)

    @override
    @torch.no_grad()
    def start(
        self, model: PreTrainedModel, input_ids: Tensor, mask: Tensor | None = None, *, chunk: int | None = None
    ) -> State:
        prompts = unpadded(input_ids, mask)
        short, drafted = [], []
        for prompt in prompts:
            self.check(len(prompt), context_of(model))
            shorten = self._shorten(self.budget_for(len(prompt)))
            scores, generated = shorten.look(model, prompt)
            short.append(prompt[shorten.select_by(scores)])
            drafted.append(generated)
        evict = self._evict(_pad_right(drafted), tuple(len(prompt) for prompt in prompts))
        state = prefill(model, *pad_left(short), chunk=chunk, needs=evict.needs())
        return evict.compress(model, state)

    @override
    def budget_for(self, length: int) -> int:
        return Budget(self.budget).entries(length)

    def _shorten(self, entries: int) -> SpecPC:
        return SpecPC(
            max(self.prompt_budget, entries),
            self.prompt_window,
            draft=self.draft,
            lookahead=self.lookahead,
            kernel=self.kernel,
            first_layer=self.first_layer,
        )

    def _evict(self, draft: DraftIds, lengths: tuple[int, ...] = ()) -> SpecKV:
        observer = DraftObserver(GivenDraft(draft), self.window)
        return _OfWholePrompt(self.budget, observer, allocate=self.allocate, window=self.window, lengths=lengths)


@dataclass(frozen=True)
class _OfWholePrompt(SpecKV):
    """SpecKV on shortened prompts, whose budgets are those for prompts of `lengths` tokens."""

    lengths: tuple[int, ...] = ()

    @override
    def budgets(self, state: State) -> list[int]:
        return [self.budget_for(length) for length in self.lengths]


def _pad_right(drafted: list[Tensor]) -> DraftIds:
    ids = pad_sequence(drafted, batch_first=True)
    lengths = torch.tensor([len(each) for each in drafted], device=ids.device)
    mask = torch.arange(ids.shape[1], device=ids.device) < lengths[:, None]
    return DraftIds(ids, None if bool(mask.all()) else mask)
