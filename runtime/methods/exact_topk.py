"""Exact top-k: every layer reads the entries that its own attention weighs most, an upper bound for selectors."""

from dataclasses import dataclass

from torch import Tensor
from typing_extensions import override

from keepsight.errors import require_whole
from keepsight.runtime.layer import KeptLayer
from keepsight.runtime.sparse_read.cache import MakeLayer, SelectedLayer
from keepsight.runtime.sparse_read.method import SparseRead
from keepsight.runtime.sparse_read.top_k import StepBudget, TopAttention
from keepsight.runtime.state import State


@dataclass(frozen=True)
class ExactTopK(SparseRead):
    """The upper bound of methods that read a few entries per step: selecting them takes all keys.

    Attributes:
        sinks: Number of first entries that are always read.
        window: Number of last entries that are always read.
    """

    sinks: int = 0
    window: int = 0

    @override
    def __post_init__(self) -> None:
        require_whole("ExactTopK", sinks=self.sinks, window=self.window)
        super().__post_init__()

    @override
    def least(self) -> tuple[int, str]:
        return self.sinks + self.window + 1, "sinks + window + one entry to choose"

    @override
    def layers_for(self, state: State) -> MakeLayer:
        selection = TopAttention(StepBudget(tuple(self.budgets(state)), self.sinks, self.window))

        def make(index: int, keys: Tensor, values: Tensor, seen: int, padding: Tensor | None) -> KeptLayer:
            return SelectedLayer(keys, values, seen, padding, selection)

        return make
