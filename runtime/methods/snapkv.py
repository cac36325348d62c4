"""SnapKV (arXiv 2404.14469): the prompt's own last tokens, the observation window, score its entries.

The way to the kept entries: this file -> `runtime/window.py` (the window's attention) -> `runtime/importance.py`
(softmax, reduce, pool) -> `runtime/evict.py` (select within the budget) -> `runtime/gather.py` (gather what is kept).
"""

from dataclasses import dataclass

from torch import Tensor
from typing_extensions import override

from keepsight.errors import UserError
from keepsight.runtime.evict import Evict
from keepsight.runtime.observe import LayerObserver, Observer
from keepsight.runtime.read_layer import ReadLayer
from keepsight.runtime.state import Needs
from keepsight.runtime.observe import window_attention


@dataclass(frozen=True)
class PromptWindow(LayerObserver):
    """The last tokens observe (SnapKV, arXiv 2404.14469, section 4); their queries were kept when they were read.

    Attributes:
        size: Number of observing tokens; None for the method's window.
    """

    size: int | None = None

    def __post_init__(self) -> None:
        if self.size is not None and (type(self.size) is not int or self.size < 1):
            raise UserError(f"SnapKV: a window of {self.size!r} cannot observe; give a whole number of at least 1")

    @override
    def score(self, layer: ReadLayer, reduction: str) -> Tensor:
        assert self.size is not None
        return window_attention(layer, self.size, reduction)

    @override
    def needs(self) -> Needs:
        return Needs(window=self.size or 0)

    @override
    def bound(self, budget: int | float, sinks: int, window: int) -> Observer:
        return PromptWindow(window) if self.size is None else self


@dataclass(frozen=True)
class SnapKV(Evict):
    """The last 32 prompt tokens observe and are kept, with what they attend to (arXiv 2404.14469, section 4)."""

    observer: Observer = PromptWindow()
    window: int = 32
