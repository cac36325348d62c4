"""Selection of the entries of a step: exact top-k attention, and Quest (arXiv 2406.10774), which bounds it by page."""

from abc import abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils.weak import WeakTensorKeyDictionary
from transformers import PreTrainedModel
from typing_extensions import override

from keepsight.errors import Positive, Whole
from keepsight.runtime import registry
from keepsight.runtime.attention import Softmax
from keepsight.runtime.importance import attention_weights, reduce_group, top_indices
from keepsight.runtime.layer import KeptLayer, spare
from keepsight.runtime.sparse_read.cache import (
    DenseLayer,
    LayerSelector,
    SelectedLayer,
    Selection,
    SparseRead,
    consecutive,
    entries_of,
    on_device,
    real_mask,
)
from keepsight.runtime.state import State


@dataclass(frozen=True)
class TopAttention(LayerSelector):
    """Selects the entries with the largest attention weights, an upper bound: all keys are read to select.

    Attributes:
        budgets: For each row, the entries that a KV head reads per step, beside the token's own; all where there are
            fewer. Without padding all rows have the same.
        sinks: Number of first entries that are always read, within the budget.
        window: Number of last entries that are always read, within the budget.
        shared: Number of equal groups of KV heads within which all heads read the same entries, those with the largest
            mean weights; 0 where each head has its own.
    """

    budgets: tuple[int, ...]
    sinks: int = 0
    window: int = 0
    shared: int = 0

    @override
    def select(self, query: Tensor, softmax: Softmax, keys: Tensor, padding: Tensor | None) -> Selection:
        mask = None if padding is None else real_mask(padding, keys.shape[2])
        weights = attention_weights(query, keys, softmax, mask)[:, :, 0, :-1]
        importance = reduce_group(weights, keys.shape[1], "max")
        if self.shared:
            by_group = importance.unflatten(1, (self.shared, -1))
            importance = by_group.mean(dim=2, keepdim=True).expand_as(by_group).flatten(1, 2).clone()
        return self.top(importance, padding)

    def top(self, importance: Tensor, padding: Tensor | None) -> Selection:
        """The k most important of C entries; rows that read fewer, or have fewer real ones, are padded.

        Args:
            importance: [B, K, C] float32, at least 0; it may be written to.
            padding: [B] int64, number of padding entries on the left; None for none.
        """
        length = importance.shape[2]
        importance[..., max(length - self.window, 0) :] = torch.inf
        if padding is None:
            importance[..., : self.sinks] = torch.inf
        else:
            is_padding = ~real_mask(padding, length)[:, None]
            is_sink_or_padding = ~real_mask(padding + self.sinks, length)[:, None]
            importance = importance.masked_fill(is_sink_or_padding, torch.inf).masked_fill(is_padding, -1.0)

        indices = top_indices(importance, min(max(self.budgets), length))
        if padding is None:
            return Selection(indices, None)
        ranks = consecutive(0, indices.shape[2], indices.device)
        within_budget = ranks < on_device(self.budgets, indices.device)[:, None, None]
        return Selection(indices, within_budget & (indices >= padding[:, None, None]))


@registry.method("exact_topk", colour="#44AA99", marker="D", line=":")
@dataclass(frozen=True)
class ExactTopK(SparseRead):
    """Reads the entries with the largest attention weights: an upper bound, as selecting them takes all keys.

    Attributes:
        sinks: Number of first entries that are always read.
        window: Number of last entries that are always read.
    """

    sinks: Whole = 0
    window: Whole = 0

    @override
    def smallest_budget(self) -> tuple[int, str]:
        return self.sinks + self.window + 1, "sinks + window + one entry to choose"

    @override
    def layers_for(self, model: PreTrainedModel, state: State) -> list[SelectedLayer]:
        selector = TopAttention(tuple(self.budgets(state)), self.sinks, self.window)
        return [SelectedLayer(*entries, selector) for entries in entries_of(state)]


class Summaries(LayerSelector):
    """Selects by summaries of the keys, such as the extremes of each page."""

    @abstractmethod
    def summarise(self, keys: Tensor, padding: Tensor | None) -> None:
        """Summarise keys [B, K, S, d]; `padding` [B] counts the padding of each row."""


class SummaryRead(SparseRead):
    """Reads the entries that summaries of the keys select, in all layers but the first `dense_layers`."""

    dense_layers: int

    @abstractmethod
    def selector(self, budgets: tuple[int, ...]) -> Summaries:
        """A selector for one layer, with a budget for each row."""

    @override
    def layers_for(self, model: PreTrainedModel, state: State) -> list[KeptLayer]:
        budgets = tuple(self.budgets(state))
        layers: list[KeptLayer] = []
        for keys, values, seen, padding in entries_of(state):
            summaries = self.selector(budgets)
            layer = SelectedLayer(keys, values, seen, padding, summaries)
            if len(layers) < self.dense_layers:
                layers.append(DenseLayer(keys, values, seen, layer.entries().real))
            else:
                summaries.summarise(keys, padding)
                layers.append(layer)
        return layers


class TopPages(Summaries):
    """Selects the pages that can hold the largest dot products, and the entries that do not fill a page yet.

    A page is `page` consecutive entries, counted from a row's first real entry. Of its keys after RoPE each channel's
    maximum and minimum are kept; the sum over channels of the larger of query x minimum and query x maximum bounds the
    dot product with every key of the page (Quest, section 3.4). Query heads of a group vote with the largest of their
    bounds, which are not normalised: Quest has one query head per KV head, and no weights to normalise. Pages of
    generated tokens are made as they fill.

    The entries of the partial page are always read, within a row's budget, which does not count the token's own; the
    rest of it is rounded down to whole pages. `budgets` holds one number per row, the same one without padding.
    """

    def __init__(self, budgets: tuple[int, ...], page: int = 16) -> None:
        self.budgets = budgets
        self.page = page
        self._bounds: Tensor | None = None  # [B, K, P, 2d] of full pages, maxima before minima
        self._full_pages: list[int] = []  # number of pages in `_bounds` per row, or for all rows

    @property
    @override
    def nbytes(self) -> int:
        if self._bounds is None:
            return 0
        return self._bounds[:, :, : max(self._full_pages)].nbytes

    @override
    def share(self) -> "TopPages":
        twin = TopPages(self.budgets, self.page)
        if self._bounds is not None:
            bounds = self._bounds[:, :, : max(self._full_pages)]
            # Further pages are written behind these, but for rows that have fewer.
            if min(self._full_pages) != max(self._full_pages):
                bounds = bounds.clone()
            twin._bounds = bounds
            twin._full_pages = [*self._full_pages]
        return twin

    @override
    def select(self, query: Tensor, softmax: Softmax, keys: Tensor, padding: Tensor | None) -> Selection:
        length = keys.shape[2] - 1
        starts = row_starts(padding)
        self.summarise(keys[:, :, :length], padding)
        budgets = self.budgets[: len(starts)]

        # How many entries of the partial page, and how many full pages, each row reads.
        partial_entries = []
        page_counts = []
        for budget, start, full_pages in zip(budgets, starts, self._full_pages, strict=True):
            partial = (length - start) % self.page
            affordable_pages = max(budget - partial, 0) // self.page
            partial_entries.append(partial)
            page_counts.append(min(affordable_pages, full_pages))

        pages = top_indices(self.scores(query, length, padding), max(page_counts), signed=True)
        page_starts = pages[..., None] * self.page
        if padding is not None:
            page_starts = page_starts + padding.view(-1, 1, 1, 1)
        page_entries = (page_starts + consecutive(0, self.page, pages.device)).flatten(2)
        tail = consecutive(max(length - max(partial_entries), 0), length, pages.device)
        indices = torch.cat([page_entries, tail.expand(*page_entries.shape[:2], -1)], dim=2)
        if padding is None:
            return Selection(indices, None)

        # As above, on the device: copying numbers to it would wait for it.
        row_lengths = length - padding[:, None]
        row_partial = row_lengths % self.page
        affordable_entries = (on_device(budgets, pages.device)[:, None] - row_partial).clamp(min=0)
        row_entries = torch.minimum(affordable_entries, row_lengths - row_partial)  # in full pages
        columns = consecutive(0, page_entries.shape[2], pages.device)
        # A page that a row can only read a part of is not read.
        real = torch.cat([columns < row_entries // self.page * self.page, tail >= length - row_partial], dim=1)
        return Selection(indices.clamp(max=length - 1), real[:, None].expand_as(indices))

    def scores(self, query: Tensor, length: int, padding: Tensor | None) -> Tensor:
        """Query [B, H, 1, d] -> [B, K, P] float32, -inf for pages that a row of `length` entries does not have.

        In float32: bounds can exceed what float16 holds though no dot product does.
        """
        assert self._bounds is not None
        pages = max(self._full_pages)
        bounds = self._bounds[:, :, :pages]
        grouped = query.view(len(query), bounds.shape[1], -1, query.shape[3]).float()
        signed = torch.cat([grouped.clamp(min=0), grouped.clamp(max=0)], dim=3)
        with torch.autocast(query.device.type, enabled=False):
            scores = (signed @ bounds.float().mT).amax(dim=2)
        if padding is None or min(self._full_pages) == pages:
            return scores
        row_pages = (length - padding).view(-1, 1, 1) // self.page
        return scores.masked_fill(consecutive(0, pages, query.device) >= row_pages, -torch.inf)

    @override
    def summarise(self, keys: Tensor, padding: Tensor | None) -> None:
        """Make the pages of keys [B, K, C, d] that have filled since the last step; drop those of cropped entries."""
        starts = row_starts(padding)
        full_pages = [(keys.shape[2] - start) // self.page for start in starts]
        summarised = self._full_pages or [0] * len(starts)
        bounds = self._bounds
        if bounds is None:
            bounds = keys.new_empty(*keys.shape[:2], 0, 2 * keys.shape[3])

        remaining = [min(counts) for counts in zip(full_pages, summarised, strict=True)]
        if remaining != summarised:
            bounds = bounds[:, :, : max(remaining)].clone()  # others may share what is to be written again
        missing = max(full_pages) - bounds.shape[2]
        if missing > 0:
            bounds = functional.pad(bounds, (0, 0, 0, missing + spare(max(full_pages), least=16)))

        for row, (start, before, after) in enumerate(zip(starts, remaining, full_pages, strict=True)):
            if after == before:
                continue
            rows = slice(None) if len(starts) == 1 else slice(row, row + 1)
            entries = keys[rows, :, start + before * self.page : start + after * self.page]
            pages = entries.unflatten(2, (after - before, self.page))
            bounds[rows, :, before:after] = torch.cat([pages.amax(dim=3), pages.amin(dim=3)], dim=3)
        self._bounds = bounds
        self._full_pages = full_pages


_STARTS = WeakTensorKeyDictionary()
"""What `row_starts` returned, by the padding that all layers of a state share."""


def row_starts(padding: Tensor | None) -> list[int]:
    """First real entry of each row, or of all rows; the device is waited for once for each padding, not per step."""
    if padding is None:
        return [0]
    if padding not in _STARTS:
        _STARTS[padding] = padding.tolist()
    return _STARTS[padding]


@registry.method("quest", colour="#882255", marker="p")
@dataclass(frozen=True)
class Quest(SummaryRead):
    """Reads whole pages, selected by the channel-wise extremes of their keys (Quest, arXiv 2406.10774, section 3).

    Attributes:
        page: Entries per page.
        dense_layers: Number of first layers that read all entries (2 in the paper, section 4.1).
    """

    page: Positive = 16
    dense_layers: Whole = 2

    @override
    def smallest_budget(self) -> tuple[int, str]:
        return 2 * self.page - 1, "a page to choose and one that is not full"

    @override
    def selector(self, budgets: tuple[int, ...]) -> Summaries:
        return TopPages(budgets, self.page)
