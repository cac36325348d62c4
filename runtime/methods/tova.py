"""TOVA (arXiv 2401.06104): what the last token attends to."""

from dataclasses import dataclass

from keepsight.runtime.evict import Evict
from keepsight.runtime.importance import NO_POOL, Pool, Reduce
from keepsight.runtime.methods.snapkv import PromptWindow
from keepsight.runtime.observe import Observer


@dataclass(frozen=True)
class TOVA(Evict):
    """Keeps what the last token attends to, averaged over a layer's heads, and that token (TOVA, section 4).

    The heads of a layer keep the same entries. Evicts once after the prompt; `every=1` evicts at every token, as the
    paper does.
    """

    observer: Observer = PromptWindow(1)
    reduce: Reduce = Reduce(heads="mean of layer")
    pool: Pool = NO_POOL
    window: int = 1
