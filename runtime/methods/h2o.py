"""H2O (arXiv 2306.14048): the entries that all queries together attend to most."""

from dataclasses import dataclass

from torch import Tensor
from typing_extensions import override

from keepsight.errors import UserError
from keepsight.runtime.evict import Evict
from keepsight.runtime.importance import NO_POOL, Pool
from keepsight.runtime.observe import LayerObserver, Observer
from keepsight.runtime.read_layer import ReadLayer
from keepsight.runtime.state import Needs


@dataclass(frozen=True)
class ReceivedAttention(LayerObserver):
    """The attention that each entry received, summed over all queries (H2O, arXiv 2306.14048, section 4).

    It is summed while the tokens are read, in blocks of queries, and not divided by the number of queries that could
    see an entry, so that early entries have an advantage.
    """

    @override
    def score(self, layer: ReadLayer, reduction: str) -> Tensor:
        if layer.received is None:
            raise UserError(
                "h2o: the attention that entries received was not recorded when they were read; read the prompt with "
                "this method, or prefill with needs=method.needs()"
            )
        return layer.received

    @override
    def needs(self) -> Needs:
        return Needs(received=True)


@dataclass(frozen=True)
class H2O(Evict):
    """Keeps what has received most attention, and the last 32 entries (H2O, arXiv 2306.14048, algorithm 1).

    Evicts once after the prompt, as KVCache-Factory does; `every` evicts while decoding too, as the paper does.
    """

    observer: Observer = ReceivedAttention()
    pool: Pool = NO_POOL
    window: int = 32
