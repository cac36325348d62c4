"""The oracle: the full cache's own answer observes the prompt; what lookahead modules learn to predict."""

from dataclasses import dataclass

from transformers import PreTrainedModel
from typing_extensions import override

from keepsight.errors import require_whole
from keepsight.runtime.drafting.observer import Drafter, DraftIds, DraftObserver, greedy_draft
from keepsight.runtime.evict import Evict
from keepsight.runtime.observe import Observer
from keepsight.runtime.state import State


@dataclass(frozen=True)
class OwnAnswer(Drafter):
    """The target's greedy answer from the whole state (LookaheadKV, arXiv 2603.10899, section 2, equation 1).

    Attributes:
        max_new_tokens: Maximum length of the answer in tokens.
    """

    max_new_tokens: int = 64

    def __post_init__(self) -> None:
        require_whole("oracle", 1, max_new_tokens=self.max_new_tokens)

    @override
    def __call__(self, model: PreTrainedModel, state: State) -> DraftIds:
        return greedy_draft(model, state.copy(), self.max_new_tokens)

    @override
    def longest(self) -> int:
        return 0  # it takes the positions of the answer itself, which has to fit anyway


@dataclass(frozen=True)
class Oracle(Evict):
    """Keeps what the full cache's own answer attends to."""

    observer: Observer = DraftObserver(OwnAnswer())
