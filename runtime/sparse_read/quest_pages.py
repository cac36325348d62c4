"""Select whole pages of entries by a bound on their dot products with a query (Quest, arXiv 2406.10774)."""

import torch
from torch import Tensor
from torch.nn import functional
from typing_extensions import override

from keepsight.runtime.attention import Softmax, products
from keepsight.runtime.layer import GROWTH
from keepsight.runtime.sparse_read.cache import LayerSelector, Selection

_ROOM = 16
"""Least room, in pages, that is added when more are made."""


class TopPages(LayerSelector):
    """Selects the pages that can hold the largest dot products, and the entries that do not fill a page yet.

    A page is `page` consecutive entries, counted from a row's first real entry. Of its keys after RoPE each channel's
    maximum and minimum are kept; the sum over channels of the larger of query x minimum and query x maximum bounds the
    dot product with every key of the page (Quest, section 3.4). Query heads of a group vote with the largest of their
    bounds, which are not normalised: Quest has one query head per KV head, and no weights to normalise. Pages of
    generated tokens are made as they fill.

    The entries of the partial page are always read, within the budget; the rest of it is rounded down to whole pages.

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
        if self._bounds is None:
            return 0
        known = self._bounds[:, :, : max(self._filled)]
        return known.nbytes

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
        self.summarise(keys[:, :, :length], padding)
        open_entries = [(length - start) % self.page for start in starts]
        budgets = self.budget if isinstance(self.budget, tuple) else [self.budget] * len(starts)
        room = [max(budget - each, 0) // self.page for budget, each in zip(budgets, open_entries, strict=False)]
        taken = [min(pair) for pair in zip(room, self._filled, strict=True)]
        pages = self.scores(query).topk(max(taken), dim=-1).indices
        first = pages.new_tensor(starts).view(-1, 1, 1, 1)
        within = torch.arange(self.page, device=pages.device)
        indices = (first + pages[..., None] * self.page + within).flatten(2)
        tail = torch.arange(max(length - max(open_entries), 0), length, device=pages.device)
        indices = torch.cat([indices, tail.expand(*indices.shape[:2], -1)], dim=2)
        if padding is None:
            return Selection(indices, None)
        whole, rest = pages.new_tensor([[self.page * count for count in taken], open_entries])[..., None]
        columns = torch.arange(self.page * max(taken), device=pages.device)
        real = torch.cat([columns < whole, tail >= length - rest], dim=1)
        return Selection(indices.clamp(max=length - 1), real[:, None].expand_as(indices))

    def scores(self, query: Tensor) -> Tensor:
        """Query [B, H, 1, d] -> [B, K, P] float32, -inf for pages that a row does not have."""
        assert self._bounds is not None
        pages = max(self._filled)
        bounds = self._bounds[:, :, :pages]
        grouped = query.view(len(query), bounds.shape[1], -1, query.shape[3])
        signed = torch.cat([grouped.clamp(min=0), grouped.clamp(max=0)], dim=3)
        scores = products(signed, bounds).amax(dim=2).float()
        if min(self._filled) == pages:
            return scores
        filled = torch.tensor(self._filled, device=query.device).view(-1, 1, 1)
        return scores.masked_fill(torch.arange(pages, device=query.device) >= filled, -torch.inf)

    def summarise(self, keys: Tensor, padding: Tensor | None) -> None:
        """Make the pages that have filled since the last step; drop those of cropped entries.

        Args:
            keys: [B, K, C, d] after RoPE.
            padding: See `select`.
        """
        starts = _starts(padding)
        wanted = [(keys.shape[2] - start) // self.page for start in starts]
        known = self._filled or [0] * len(starts)
        if self._bounds is None:
            self._bounds = keys.new_empty(*keys.shape[:2], 0, 2 * keys.shape[3])
        if any(now < before for now, before in zip(wanted, known, strict=True)):
            known = [min(pair) for pair in zip(wanted, known, strict=True)]
            self._bounds = self._bounds[:, :, : max(known)].clone()  # others may share what is to be written again
        if (missing := max(wanted) - self._bounds.shape[2]) > 0:
            more = max(_ROOM, int(max(wanted) * GROWTH))
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
