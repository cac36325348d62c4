"""Methods that score entries by the attention of the prompt's own tokens: SnapKV, PyramidKV, AdaKV, TOVA and H2O.

The last tokens, or all of them, observe when they are read; nothing is run after the prefill.
"""

from dataclasses import dataclass

from torch import Tensor
from typing_extensions import override

from keepsight.errors import UserError
from keepsight.runtime import registry
from keepsight.runtime.allocate import Adaptive, Allocation, Pyramid
from keepsight.runtime.evict import Evict
from keepsight.runtime.importance import NO_POOL, Pool, Reduce
from keepsight.runtime.layer import KeptLayer
from keepsight.runtime.observe import LayerObserver, Observer, PromptWindow
from keepsight.runtime.state import Needs


@registry.method("snapkv", colour="#D55E00", marker="s")
@dataclass(frozen=True)
class SnapKV(Evict):
    """Keeps the last 32 prompt tokens, which observe, and what they attend to most (arXiv 2404.14469, section 4)."""

    observer: Observer = PromptWindow()
    window: int = 32


@registry.method("pyramidkv")
@dataclass(frozen=True)
class PyramidKV(SnapKV):
    """SnapKV in which early layers keep more than late ones (PyramidKV, arXiv 2406.02069, section 4)."""

    allocate: Allocation = Pyramid()


@registry.method("adakv")
@dataclass(frozen=True)
class AdaKV(SnapKV):
    """SnapKV whose heads share their layer's budget (AdaKV, arXiv 2407.11550, algorithm 1)."""

    allocate: Allocation = Adaptive()


@registry.method("tova")
@dataclass(frozen=True)
class TOVA(Evict):
    """Keeps what the last token attends to, averaged over a layer's heads, and that token.

    TOVA (arXiv 2401.06104), section 4. The heads of a layer keep the same entries. Evicts once after the prompt;
    `every=1` evicts at every token, as the paper does.
    """

    observer: Observer = PromptWindow(1)
    reduce: Reduce = Reduce(heads="mean of layer")
    pool: Pool = NO_POOL
    window: int = 1


@registry.observer("accumulated_attention")
@dataclass(frozen=True)
class AccumulatedAttention(LayerObserver):
    """Accumulated attention: the sum of all queries' attention to an entry (H2O, arXiv 2306.14048, section 4).

    It is summed while the tokens are read, in blocks of queries, and not divided by the number of queries that could
    see an entry, so that early entries have an advantage.
    """

    signed = False

    @override
    def score(self, layer: KeptLayer, reduction: str) -> Tensor:
        recorded = layer.recorded
        if recorded is None or recorded.accumulated is None:
            raise UserError(
                "h2o: accumulated attention was not recorded when the prompt was read; read it with this method, or "
                "prefill with needs=method.needs()",
                field="needs",
                code="state",
            )
        return recorded.accumulated

    @override
    def needs(self) -> Needs:
        return Needs(accumulated=True)


@registry.method("h2o")
@dataclass(frozen=True)
class H2O(Evict):
    """Keeps the entries of most accumulated attention, and the last 32 entries (H2O, arXiv 2306.14048, algorithm 1).

    Evicts once after the prompt, as KVCache-Factory does; `every` evicts while decoding too, as the paper does.
    """

    observer: Observer = AccumulatedAttention()
    pool: Pool = NO_POOL
    window: int = 32
