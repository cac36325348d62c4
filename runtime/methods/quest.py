"""Quest (arXiv 2406.10774): every layer reads the pages whose keys could have the largest dot products."""

from dataclasses import dataclass

from torch import Tensor
from typing_extensions import override

from keepsight.errors import require_whole
from keepsight.runtime.layer import KeptLayer
from keepsight.runtime.sparse_read.cache import DenseLayer, MakeLayer, SelectedLayer
from keepsight.runtime.sparse_read.method import SparseRead
from keepsight.runtime.sparse_read.quest_pages import TopPages
from keepsight.runtime.state import State


@dataclass(frozen=True)
class Quest(SparseRead):
    """Reads whole pages, selected by the channel-wise extremes of their keys (Quest, arXiv 2406.10774, section 3).

    Attributes:
        page: Entries per page.
        dense_layers: Number of first layers that read all entries (2 in the paper, section 4.1).
    """

    page: int = 16
    dense_layers: int = 2

    @override
    def __post_init__(self) -> None:
        require_whole("Quest", 1, page=self.page)
        require_whole("Quest", dense_layers=self.dense_layers)
        super().__post_init__()

    @override
    def least(self) -> tuple[int, str]:
        return 2 * self.page - 1, "a page to choose and one that is not full"

    @override
    def layers_for(self, state: State) -> MakeLayer:
        budget = tuple(self.budgets(state))

        def make(index: int, keys: Tensor, values: Tensor, seen: int, padding: Tensor | None) -> KeptLayer:
            pages = TopPages(budget, self.page)
            layer = SelectedLayer(keys, values, seen, padding, pages)
            if index < self.dense_layers:
                return DenseLayer(keys, values, seen, layer.entries().real)
            pages.summarise(keys, padding)
            return layer

        return make
