"""Top-k: select the entries with the most attention (SpeContext, arXiv 2512.00722, section 4.3).

Weights are normalised per query head (softmax over all entries and the token's own) and reduced over a group by their
maximum: heads of one group may attend to different entries, and logits of two heads do not compare.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from typing_extensions import override

from keepsight.runtime.attention import Softmax
from keepsight.runtime.importance import attention_weights, reduce_group
from keepsight.runtime.sparse_read.cache import LayerSelector, Selection, real_mask


@dataclass(frozen=True)
class StepBudget:
    """How many entries a KV head reads per step, beside the token's own.

    Attributes:
        entries: Entries to read; all where there are fewer. One number, or one for each row.
        sinks: Number of first entries that are always read, within the budget.
        window: Number of last entries that are always read, within the budget.
    """

    entries: int | tuple[int, ...]
    sinks: int = 0
    window: int = 0

    def top(self, importance: Tensor, padding: Tensor | None) -> Selection:
        """The most important of C entries.

        Args:
            importance: [B, K, C] float, at least 0; it may be written to.
            padding: [B] int64, number of padding entries on the left; None for none.

        Returns:
            k = min(entries, C) different entries per head, of the row that reads most; rows that read fewer, or have
            fewer real ones, are filled up with what is not real.
        """
        length = importance.shape[2]
        importance[..., max(length - self.window, 0) :] = torch.inf
        if padding is None:
            importance[..., : self.sinks] = torch.inf
        else:
            real = real_mask(padding, length)[:, None]
            first = ~real_mask(padding + self.sinks, length)[:, None]
            importance = importance.masked_fill(first, torch.inf).masked_fill(~real, -1.0)
        counts = self.entries if isinstance(self.entries, tuple) else (self.entries,)
        alike = min(counts) == max(counts)
        indices = importance.topk(min(max(counts), length), dim=-1, sorted=not alike).indices
        if padding is None:
            return Selection(indices, None)
        real = indices >= padding[:, None, None]
        if not alike:
            real &= torch.arange(indices.shape[2], device=indices.device) < indices.new_tensor(counts)[:, None, None]
        return Selection(indices, real)


def most_attended(
    query: Tensor, keys: Tensor, softmax: Softmax, padding: Tensor | None, budget: StepBudget
) -> Selection:
    """Select the entries that one token attends to most.

    Args:
        query: [B, H, 1, d] after RoPE.
        keys: [B, K, C + 1, d] after RoPE, the token's own key last.
        softmax: The layer's.
        padding: [B] int64, number of padding entries on the left; None for none.
        budget: How many entries to select.
    """
    mask = None if padding is None else real_mask(padding, keys.shape[2])
    weights = attention_weights(query, keys, softmax, mask)[:, :, 0, :-1]
    return budget.top(reduce_group(weights, keys.shape[1], "max"), padding)


@dataclass(frozen=True)
class TopAttention(LayerSelector):
    """Selects what a layer's own attention weighs most, an upper bound: all keys are read to select.

    Attributes:
        budget: How many entries to select.
    """

    budget: StepBudget

    @override
    def select(self, query: Tensor, softmax: Softmax, keys: Tensor, padding: Tensor | None) -> Selection:
        return most_attended(query, keys, softmax, padding, self.budget)
