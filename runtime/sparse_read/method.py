"""Methods that keep every entry and read a few of them per step.

The budget: entries that each layer and KV head reads for a token, sinks and window included, beside the token's own
entry. A ratio (a float between 0 and 1) stands for `round(ratio * N)`, N being the prompt's own length, whatever the
batch. Generated tokens are selected like the prompt's. A budget that covers the cache gives full attention.
"""

from abc import abstractmethod
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel
from typing_extensions import override

from keepsight.errors import UserError
from keepsight.runtime.allocate import Budget
from keepsight.runtime.attention import Reader
from keepsight.runtime.generate import CacheMethod
from keepsight.runtime.sparse_read.cache import MakeLayer, SelectedState, selected_layers
from keepsight.runtime.sparse_read.mla import expanded
from keepsight.runtime.state import State, with_full_layers
from keepsight.runtime.turn import TurnReader


@dataclass(frozen=True)
class SparseRead(CacheMethod):
    """Reads `budget` entries of the cache for every token; see the module for what the budget counts.

    Attributes:
        budget: Entries per KV head and step, or a ratio.

    Raises:
        UserError: a value is out of range; one line names it.
    """

    budget: int | float
    selects_each_step = True

    def __post_init__(self) -> None:
        budget = Budget(self.budget)
        budget.check(self._name)
        if not budget.is_ratio:
            self._check_budget(budget.entries(0))

    @property
    def _name(self) -> str:
        return type(self).__name__

    def least(self) -> tuple[int, str]:
        """The smallest budget that leaves something to select, and why."""
        return 1, "one entry to choose"

    @override
    def budget_for(self, length: int) -> int:
        return Budget(self.budget).entries(length)

    @override
    def check(self, length: int, context: int) -> None:
        if length > context:
            raise UserError(
                f"{self._name}: a prompt of {length} tokens does not fit the context of {context}; shorten it"
            )
        if (budget := self.budget_for(length)) < length:
            self._check_budget(budget)

    @override
    @torch.no_grad()
    def compress(self, model: PreTrainedModel, state: State) -> State:
        state = expanded(model, state)
        cache = with_full_layers(state.cache, selected_layers(state, self.layers_for(state)))
        return state.as_kind(SelectedState, cache)

    @override
    def turn_reader(self, model: PreTrainedModel) -> Reader:
        return TurnReader(model)

    @abstractmethod
    def layers_for(self, state: State) -> MakeLayer:
        """What makes the layers of a state, in their order."""

    def _check_budget(self, budget: int) -> None:
        least, reason = self.least()
        if budget < least:
            given = "" if budget == self.budget else f" leaves {budget} entries, which"
            raise UserError(
                f"{self._name}: budget {self.budget}{given} is below {least} ({reason}); give a larger budget"
            )
