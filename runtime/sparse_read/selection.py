"""Selection of entries by a layer's own queries: exactly (ExactTopK), or by bounds for whole pages (Quest)."""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional
from typing_extensions import override

from keepsight.errors import require_whole
from keepsight.runtime.layer import GROWTH, KeptLayer
from keepsight.runtime.importance import attention_weights, reduce_group
from keepsight.runtime.attention import Softmax, products
from keepsight.runtime.sparse_read.cache import DenseLayer, LayerSelector, SelectedLayer, Selection, SparseRead, real_mask


@dataclass(frozen=True)
class StepBudget:
    """How many entries a KV head reads per step, beside the token's own.

    Attributes:
        entries: Entries to read, of all rows or of each row; all where there are fewer.
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
            k = min(entries, C) different entries per head, of the row that reads most; rows that read fewer are filled
            up with entries that are not real.
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
    """Select the entries that one token attends to most (SpeContext, arXiv 2512.00722, section 4.3).

    Weights are normalized per query head and reduced over a group by their maximum: heads of one group may attend to
    different entries, and logits of two heads do not compare. Arguments are those of `LayerSelector.select`.
    """
    mask = None if padding is None else real_mask(padding, keys.shape[2])
    weights = attention_weights(query, keys, softmax, mask)[:, :, 0, :-1]
    return budget.top(reduce_group(weights, keys.shape[1], "max"), padding)


@dataclass(frozen=True)
class TopAttention(LayerSelector):
    """Selects the entries with the most attention; reads all keys to do so."""

    budget: StepBudget

    @override
    def select(self, query: Tensor, softmax: Softmax, keys: Tensor, padding: Tensor | None) -> Selection:
        return most_attended(query, keys, softmax, padding, self.budget)


@dataclass(frozen=True)
class ExactTopK(SparseRead):
    """Reads the entries that a layer's own attention weighs most: an upper bound for methods that select per step.

    Attributes:
        sinks: Number of first entries that are always read.
        window: Number of last entries that are always read.
    """

    sinks: int = 0
    window: int = 0

    @override
    def __post_init__(self) -> None:
        require_whole("ExactTopK", sinks=self.sinks, window=self.window)
        super().__post_init__()

    @override
    def least(self) -> tuple[int, str]:
        return self.sinks + self.window + 1, "sinks + window + one entry to choose"

    @override
    def make_layer(
        self, index: int, budgets: tuple[int, ...], keys: Tensor, values: Tensor, seen: int, padding: Tensor | None
    ) -> KeptLayer:
        selector = TopAttention(StepBudget(budgets, self.sinks, self.window))
        return SelectedLayer(keys, values, seen, padding, selector)


_SPARE_PAGES = 16
"""Minimum number of pages added when more are needed."""


class TopPages(LayerSelector):
    """Selects the pages that can have the largest dot products, and the entries that do not fill a page yet.

    A page is `page` consecutive entries, counted from a row's first real entry. Of its keys each channel's maximum and
    minimum are stored; the sum over channels of the larger of query x minimum and query x maximum bounds the dot product
    with every key of the page (Quest, arXiv 2406.10774, section 3.4). A group of query heads takes the largest of their
    bounds, unnormalized: Quest has one query head per KV head. The entries of the partial page are always read, within
    the budget; the rest of it is rounded down to whole pages.

    Args:
        budget: Entries that a KV head reads per step, beside the token's own; one number, or one for each row.
        page: Entries per page.
        bounds: [B, K, P, 2d] of known pages, maxima before minima; none by default.
        filled: Number of known pages per row, or for all rows.
    """

    def __init__(
        self,
        budget: int | tuple[int, ...],
        page: int = 16,
        bounds: Tensor | None = None,
        filled: tuple[int, ...] = (),
    ) -> None:
        self.budget, self.page = budget, page
        self._bounds, self._filled = bounds, list(filled)

    @property
    @override
    def bytes(self) -> int:
        return 0 if self._bounds is None else self._bounds[:, :, : max(self._filled)].nbytes

    @override
    def share(self) -> "TopPages":
        if self._bounds is None:
            return TopPages(self.budget, self.page)
        bounds = self._bounds[:, :, : max(self._filled)]  # neither writes below it, unless rows differ
        alike = min(self._filled) == max(self._filled)
        return TopPages(self.budget, self.page, bounds if alike else bounds.clone(), tuple(self._filled))

    @override
    def select(self, query: Tensor, softmax: Softmax, keys: Tensor, padding: Tensor | None) -> Selection:
        length = keys.shape[2] - 1
        starts = _starts(padding)
        self.summarize(keys[:, :, :length], padding)
        partial = [(length - start) % self.page for start in starts]
        budgets = self.budget if isinstance(self.budget, tuple) else [self.budget] * len(starts)
        room = [max(budget - each, 0) // self.page for budget, each in zip(budgets, partial, strict=False)]
        taken = [min(pair) for pair in zip(room, self._filled, strict=True)]
        pages = self.scores(query, softmax.scaling).topk(max(taken), dim=-1).indices
        first = pages.new_tensor(starts).view(-1, 1, 1, 1)
        within = torch.arange(self.page, device=pages.device)
        indices = (first + pages[..., None] * self.page + within).flatten(2)
        tail = torch.arange(max(length - max(partial), 0), length, device=pages.device)
        indices = torch.cat([indices, tail.expand(*indices.shape[:2], -1)], dim=2)
        if padding is None:
            return Selection(indices, None)
        whole, rest = pages.new_tensor([[self.page * count for count in taken], partial])[..., None]
        columns = torch.arange(self.page * max(taken), device=pages.device)
        real = torch.cat([columns < whole, tail >= length - rest], dim=1)
        return Selection(indices.clamp(max=length - 1), real[:, None].expand_as(indices))

    def scores(self, query: Tensor, scaling: float = 1.0) -> Tensor:
        """Query [B, H, 1, d] -> bounds of its scaled dot products [B, K, P] float32, -inf for pages a row lacks."""
        assert self._bounds is not None
        pages = max(self._filled)
        bounds = self._bounds[:, :, :pages]
        grouped = query.view(len(query), bounds.shape[1], -1, query.shape[3]).float() * scaling
        signed = torch.cat([grouped.clamp(min=0), grouped.clamp(max=0)], dim=3)
        scores = products(signed, bounds.float()).amax(dim=2)
        if min(self._filled) == pages:
            return scores
        filled = torch.tensor(self._filled, device=query.device).view(-1, 1, 1)
        return scores.masked_fill(torch.arange(pages, device=query.device) >= filled, -torch.inf)

    def summarize(self, keys: Tensor, padding: Tensor | None) -> None:
        """Compute the bounds of pages that keys [B, K, C, d] have filled since the last step; drop those cropped."""
        starts = _starts(padding)
        wanted = [(keys.shape[2] - start) // self.page for start in starts]
        known = self._filled or [0] * len(starts)
        if self._bounds is None:
            self._bounds = keys.new_empty(*keys.shape[:2], 0, 2 * keys.shape[3])
        if any(now < before for now, before in zip(wanted, known, strict=True)):
            known = [min(pair) for pair in zip(wanted, known, strict=True)]
            self._bounds = self._bounds[:, :, : max(known)].clone()  # others may share what is to be written again
        if (missing := max(wanted) - self._bounds.shape[2]) > 0:
            more = max(_SPARE_PAGES, int(max(wanted) * GROWTH))
            self._bounds = functional.pad(self._bounds, (0, 0, 0, missing + more))
        for place, (start, now, before) in enumerate(zip(starts, wanted, known, strict=True)):
            if now > before:
                rows = slice(None) if len(starts) == 1 else slice(place, place + 1)
                entries = keys[rows, :, start + before * self.page : start + now * self.page]
                paged = entries.unflatten(2, (now - before, self.page))
                self._bounds[rows, :, before:now] = torch.cat([paged.amax(dim=3), paged.amin(dim=3)], dim=3)
        self._filled = wanted


def _starts(padding: Tensor | None) -> list[int]:
    """First real entry of each row, or of all rows."""
    return [0] if padding is None else padding.tolist()


@dataclass(frozen=True)
class Quest(SparseRead):
    """Reads whole pages, selected by the channel-wise extremes of their keys (Quest, arXiv 2406.10774, section 3).

    Attributes:
        page: Entries per page.
        dense_layers: Number of first layers that read all entries (2 in the paper, section 4.1).
    """

    page: int = 16
    dense_layers: int = 2

    @override
    def __post_init__(self) -> None:
        require_whole("Quest", 1, page=self.page)
        require_whole("Quest", dense_layers=self.dense_layers)
        super().__post_init__()

    @override
    def least(self) -> tuple[int, str]:
        return 2 * self.page - 1, "a page to choose and one that is not full"

    @override
    def make_layer(
        self, index: int, budgets: tuple[int, ...], keys: Tensor, values: Tensor, seen: int, padding: Tensor | None
    ) -> KeptLayer:
        pages = TopPages(budgets, self.page)
        layer = SelectedLayer(keys, values, seen, padding, pages)
        if index < self.dense_layers:
            return DenseLayer(keys, values, seen, layer.entries().real)
        pages.summarize(keys, padding)
        return layer
