"""Finch: each part of the context keeps what the question attends to, at consecutive positions."""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from typing_extensions import override

from keepsight.errors import Whole
from keepsight.runtime import registry
from keepsight.runtime.allocate import adjust_to_sum
from keepsight.runtime.importance import NO_POOL, Pool, best_in_chunks, observed_attention, recorded_queries
from keepsight.runtime.layer import KeptLayer
from keepsight.runtime.methods.window import SnapKV
from keepsight.runtime.observe import Observer, PromptWindow
from keepsight.runtime.state import State


@registry.observer("counted_window")
@dataclass(frozen=True)
class CountedWindow(PromptWindow):
    """The last tokens observe, each weighted by the number of entries before it: attention to more is spread thinner.

    As in Finch (arXiv 2408.00167).
    """

    @override
    def score(self, layer: KeptLayer, reduction: str) -> Tensor:
        assert self.window is not None
        recorded = recorded_queries(layer, self.window)
        keys, _, real = layer.attended()
        rows, _, length, _ = keys.shape
        observers = recorded.queries.shape[2]
        is_entry = keys.new_ones(rows, length, dtype=torch.bool) if real is None else real.any(dim=1)
        before = is_entry.long().cumsum(dim=1) - is_entry.long()
        weights = before[:, length - observers :].float()
        if recorded.query_mask is not None:
            weights = weights * recorded.query_mask.to(weights.device)
        return observed_attention(
            recorded.queries,
            keys,
            recorded.softmax,
            length,
            key_mask=real,
            query_mask=weights,
            ahead=recorded.ahead,
            reduction=reduction,
        )


@registry.method("finch")
@dataclass(frozen=True)
class Finch(SnapKV):
    """Keeps the question, the last 32 tokens, and what it attends to; keys are renumbered (Finch, arXiv 2408.00167).

    As kvpress has it: without pooling, from a prompt that was read with full attention. The authors read each part with
    the question behind it, and what stayed of the parts before. kvpress finds the question by a delimiter token; here
    `window` is its number of tokens, with those of the chat template after it. Each part keeps its share of the budget;
    kvpress rounds it down, and divides the question too.

    Attributes:
        chunk: Entries of a part; 0 for the whole context as one.
    """

    observer: Observer = CountedWindow()
    pool: Pool = NO_POOL
    rerotate: bool = True
    chunk: Whole = 0
    evicts_after_prefill = True
    reads_images = False  # whose positions are no consecutive numbers

    @override
    def select(self, state: State, importance: list[Tensor]) -> list[Tensor]:
        if not self.chunk:
            return super().select(state, importance)
        counts = self.counts(state, importance)
        selected = []
        for layer_importance, layer_counts in zip(importance, counts, strict=True):
            mask = layer_importance == torch.inf
            is_free = layer_importance.isfinite()
            for head in np.ndindex(*layer_counts.shape):
                scores = layer_importance[head][is_free[head]]
                budget = int(layer_counts[head]) - int(mask[head].sum())
                mask[head][is_free[head]] = best_of_parts(scores, budget, self.chunk)
            selected.append(mask)
        return selected


def best_of_parts(scores: Tensor, budget: int, chunk: int) -> Tensor:
    """[n] bool: the `budget` best of n entries with scores [n], each part of `chunk` entries by its share of them."""
    entries = len(scores)
    starts = np.arange(0, entries, chunk)
    sizes = np.minimum(entries - starts, chunk)
    ideal = sizes * (budget / max(entries, 1))
    shares = adjust_to_sum(ideal.astype(np.int64), ideal, min(budget, entries), sizes)
    return best_in_chunks(scores, chunk, torch.from_numpy(shares).to(scores.device))
