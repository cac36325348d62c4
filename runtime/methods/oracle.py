"""The oracle: the full cache's own answer observes the prompt. The upper bound, and what lookahead modules learn."""

from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel

from keepsight.runtime.decode import decode, stop_after
from keepsight.runtime.evict import Evict, FullCache, Observer
from keepsight.runtime.observe import observe
from keepsight.runtime.prefill import Prefilled


@dataclass(frozen=True)
class OwnAnswer:
    """The target's greedy answer under the full cache observes (LookaheadKV, section 2, equation 1).

    Attributes:
        max_new_tokens: Length limit of the answer, in tokens.
        known: [B, T] int64, when the answer has been generated already; all its tokens are real.
    """

    max_new_tokens: int = 64
    known: Tensor | None = None

    def __call__(self, model: PreTrainedModel, prefilled: Prefilled) -> list[Tensor]:
        """Observe; see `keepsight.runtime.evict.Observer`."""
        answer, mask = self.known, None
        if answer is None:
            answer, mask = self._decode(model, prefilled)
        embeddings = model.get_input_embeddings()(answer)
        return observe(model, prefilled.cache, prefilled.mask, embeddings, observer_mask=mask)

    def _decode(self, model: PreTrainedModel, prefilled: Prefilled) -> tuple[Tensor, Tensor]:
        config = model.generation_config
        end = config.eos_token_id if config is not None else None
        criteria = stop_after(self.max_new_tokens, end)
        answer = decode(model, FullCache().compress(model, prefilled), criteria, pad_token=0)
        if end is None:
            return answer, torch.ones_like(answer, dtype=torch.bool)
        ended = torch.isin(answer, torch.tensor(end, device=answer.device)).long()
        return answer, (ended.cumsum(dim=1) - ended) == 0


@dataclass(frozen=True)
class Oracle(Evict):
    """Keeps what the full cache's own answer attends to."""

    observer: Observer = OwnAnswer()
