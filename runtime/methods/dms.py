"""DMS: entries are evicted by a trained decision of each KV head, some tokens after it was made."""

from dataclasses import dataclass

from typing_extensions import override

from keepsight.errors import UserError
from keepsight.models.scorers import DMSScorer
from keepsight.runtime import registry
from keepsight.runtime.allocate import Allocation, Global
from keepsight.runtime.methods.scored import ScoredEvict


@registry.method("dms", label="DMS")
@dataclass(frozen=True)
class DMS(ScoredEvict):
    """Keeps the entries that each head's trained eviction decision is furthest from evicting (DMS, arXiv 2506.05345).

    The weights name how a logit is read (section 3.2; `DMSScorer` has both published forms), its scale and its offset.
    By default one budget for the heads of all layers ranks all entries by that logit. `allocate=Threshold()` evicts
    where it says so, as DMS does, and keeps at most the budget.

    Eviction is delayed: an entry in the window is never evicted, whatever was decided about it. The window is 512 in
    `nvidia/Qwen3-8B-DMS-8x`, and 32 here, for small budgets. `every` evicts while decoding too: an entry goes at the
    first eviction after it has left the window. As in kvpress, the prompt is read with full attention first; in DMS the
    tokens that come more than a window after an evicted entry do not see it there either.
    """

    scorer = DMSScorer
    allocate: Allocation = Global(floor=0.0)
    window: int = 32

    @override
    def __post_init__(self) -> None:
        if not self.window:
            raise UserError(
                "DMS: window 0 must be at least 1: the newest entry has no decision yet", field="window", code="range"
            )
        super().__post_init__()
