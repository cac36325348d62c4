"""ChunkKV: whole chunks stay; gated by entropy, their best entries alone where a few of them hold what counts."""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from typing_extensions import override

from keepsight.errors import Positive, UserError
from keepsight.runtime import registry
from keepsight.runtime.importance import best_in_chunks, in_chunks, top_mask
from keepsight.runtime.methods.window import SnapKV
from keepsight.runtime.state import State

_EPSILON = 1e-8


@registry.method("chunkkv", label="ChunkKV")
@dataclass(frozen=True)
class ChunkKV(SnapKV):
    """SnapKV that keeps whole chunks of 10 entries, by their mean score (ChunkKV, arXiv 2502.00299, section 3).

    All heads of a layer keep the same entries, by the sum of their scores. Of the last chunk that the budget reaches
    the best entries stay, so that it is met exactly; kvpress rounds down to whole chunks of 20. Chunks begin after the
    sinks and end before the window, which kvpress divides into chunks too. Any observer can take the place of SnapKV's.
    The paper's reuse of one layer's chunks in the next is left out: it saves scoring, not memory.

    Attributes:
        chunk: Entries of a chunk; the last one may be shorter.
    """

    chunk: Positive = 10
    evicts_after_prefill = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.allocate.reads_scores:
            raise UserError(
                f"{type(self).__name__}: all heads of a layer keep the same entries, and "
                f"{type(self.allocate).__name__} gives them different numbers; choose uniform or pyramidkv",
                field="allocate",
                code="conflict",
            )

    @override
    def select(self, state: State, importance: list[Tensor]) -> list[Tensor]:
        counts = self.counts(state, importance)
        selected = []
        for layer_importance, layer_counts in zip(importance, counts, strict=True):
            rows = []
            for row_importance, row_counts in zip(layer_importance, layer_counts, strict=True):
                rows.append(self._select_row(row_importance, int(row_counts.min())))
            selected.append(torch.stack(rows))
        return selected

    def _select_row(self, importance: Tensor, count: int) -> Tensor:
        """The `count` entries [K, C] bool that all heads of a layer keep of a row, from their importance [K, C]."""
        mask = importance == torch.inf
        is_free = importance[0].isfinite()
        if bool((importance.isfinite() != is_free).any()):
            raise UserError(
                f"{type(self).__name__}: the heads of a layer hold different entries, as another method left them; "
                "apply it to the whole prompt",
                field="state",
                code="state",
            )
        scores = importance[:, is_free].sum(dim=0)
        mask[:, is_free] = self._kept_of(scores, count - int(mask[0].sum()))
        return mask

    def _kept_of(self, scores: Tensor, budget: int) -> Tensor:
        """[n] bool: the `budget` entries that stay of n with scores [n]."""
        return chunks_kept(scores, budget, self.chunk, self.chunk)


@registry.method("eg_chunkkv", label="EG-ChunkKV")
@dataclass(frozen=True)
class EntropyGatedChunkKV(ChunkKV):
    """ChunkKV that keeps only the best 4 entries of chunks with uneven scores (ChunkKV, arXiv 2502.00299).

    The gate is kvpress's EntropyGatedChunkKVPress. A chunk is uneven if the entropy of its scores, relative to the
    largest possible, is below the median, and is cut if its mean score is not below the median too. Chunks are taken by
    their mean score until the budget is spent; what cutting leaves of it goes to the best entries left.

    Attributes:
        cut: Entries that stay of an uneven chunk, fewer than `chunk`.
    """

    cut: Positive = 4

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.cut >= self.chunk:
            raise UserError(
                f"{type(self).__name__}: cut {self.cut} must be below chunk {self.chunk}", field="cut", code="range"
            )

    @override
    def _kept_of(self, scores: Tensor, budget: int) -> Tensor:
        return chunks_kept(scores, budget, self.chunk, self.cut)


def chunks_kept(scores: Tensor, budget: int, chunk: int, cut: int) -> Tensor:
    """[n] bool: the `budget` entries that stay of n with scores [n], as `EntropyGatedChunkKV` selects them.

    With a `cut` of `chunk` no chunk is cut.
    """
    entries = len(scores)
    budget = min(budget, entries)
    if budget <= 0:
        return torch.zeros_like(scores, dtype=torch.bool)
    chunks = _ChunkStatistics.of(scores, chunk)
    counts = _filled_in_order(_quotas(chunks, cut), chunks.means, budget)
    kept = best_in_chunks(scores, chunk, counts)
    left = budget - int(counts.sum())
    if left:
        kept = kept | top_mask(scores.masked_fill(kept, -torch.inf), left)
    return kept


class _ChunkStatistics(NamedTuple):
    """Statistics of c chunks.

    Attributes:
        lengths: [c] int64, their numbers of entries.
        means: [c], of their scores.
        evenness: [c], from 0 to 1: the entropy of their scores (less the least one where that is negative), relative to
            the largest possible. 0 for a chunk of one entry.
    """

    lengths: Tensor
    means: Tensor
    evenness: Tensor

    @classmethod
    def of(cls, scores: Tensor, chunk: int) -> "_ChunkStatistics":
        """The statistics of chunks of `chunk` entries with scores [n]."""
        padded = in_chunks(scores, chunk)
        real = padded.isfinite()
        lengths = real.sum(dim=1)
        plain = padded.masked_fill(~real, 0.0)
        means = plain.sum(dim=1) / lengths

        positive = (plain - plain.amin(dim=1, keepdim=True).clamp(max=0)) * real
        shares = positive / (positive.sum(dim=1, keepdim=True) + _EPSILON)
        entropies = -(shares * (shares + _EPSILON).log()).sum(dim=1)
        largest_entropies = lengths.clamp(min=2).to(scores.dtype).log()
        evenness = torch.where(lengths > 1, entropies / largest_entropies, 0.0).clamp(0, 1)
        return cls(lengths, means, evenness)


def _quotas(chunks: _ChunkStatistics, cut: int) -> Tensor:
    """[c] int64: the most entries that each chunk keeps: `cut` in a chunk that is cut, all of them in the others."""
    is_cut = (chunks.means >= chunks.means.median()) & (chunks.evenness < chunks.evenness.median())
    return torch.where(is_cut, chunks.lengths.clamp(max=cut), chunks.lengths)


def _filled_in_order(quotas: Tensor, means: Tensor, budget: int) -> Tensor:
    """[c] int64: what each chunk gets of its quota [c] if chunks take theirs by their means until a budget is spent."""
    order = means.argsort(descending=True, stable=True)
    ordered_quotas = quotas[order]
    spent_before = ordered_quotas.cumsum(dim=0) - ordered_quotas
    counts = torch.zeros_like(quotas)
    counts[order] = torch.minimum((budget - spent_before).clamp(min=0), ordered_quotas)
    return counts
