"""Methods that look at positions, or from the prompt's own last tokens: StreamingLLM and SnapKV."""

from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel

from keepsight.errors import UserError
from keepsight.runtime.cache import entries
from keepsight.runtime.evict import Evict, Observer
from keepsight.runtime.importance import observed_attention
from keepsight.runtime.prefill import Prefilled


@dataclass(frozen=True)
class Recency:
    """Nobody observes: later entries count more."""

    def __call__(self, model: PreTrainedModel, prefilled: Prefilled) -> list[Tensor]:
        """Observe; see `keepsight.runtime.evict.Observer`."""
        first = entries(prefilled.cache)[0][0]
        order = torch.arange(prefilled.length, dtype=torch.float32, device=first.device)
        return [order.expand(*first.shape[:2], -1)] * len(prefilled.cache.layers)


@dataclass(frozen=True)
class PromptWindow:
    """The last `size` prompt tokens observe (SnapKV, section 4). Their queries were kept by the prefill."""

    size: int = 32

    def __call__(self, model: PreTrainedModel, prefilled: Prefilled) -> list[Tensor]:
        """Observe; see `keepsight.runtime.evict.Observer`."""
        kept = prefilled.window[0].shape[2]
        if self.size > kept and kept < prefilled.length:
            raise UserError(f"an observing window of {self.size} needs prefill(window={self.size}), which kept {kept}")
        rows = min(self.size, kept)
        row_mask = None if prefilled.mask is None else prefilled.mask[:, -rows:]
        return [
            observed_attention(
                queries[:, :, -rows:], keys, scaling, prefilled.length, key_mask=prefilled.mask, query_mask=row_mask
            )
            for queries, (keys, _), scaling in zip(
                prefilled.window, entries(prefilled.cache), prefilled.scaling, strict=True
            )
        ]


@dataclass(frozen=True)
class StreamingLLM(Evict):
    """The first 4 entries (sinks) and the most recent ones (StreamingLLM; the draft of SpecKV's baselines)."""

    observer: Observer = Recency()
    kernel: int = 1
    sinks: int = 4


@dataclass(frozen=True)
class SnapKV(Evict):
    """The last 32 prompt tokens observe and are kept, with what they attend to (window 32, max-pool 7)."""

    observer: Observer = PromptWindow(32)
    window: int = 32
