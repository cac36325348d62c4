"""Observers after stored entries: their attention is computed without copying the entries beside their own.

Several rows of observers may share the entries of one row, each seeing those that its own mask shows. They then attend
side by side, as further queries of that row: [R, H, q, d] is taken as [B, H, (R / B) x q, d], and no entry is repeated.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from typing_extensions import override

from keepsight.runtime.attention import OwnAttention
from keepsight.runtime.importance import later
from keepsight.runtime.softmax import Softmax
from keepsight.runtime.viewed_layers import ViewedLayer

RECOMPUTED = 2**24
"""Bytes of a layer's attention weights from which on they are computed again for their gradients."""


@dataclass(frozen=True)
class LookAfter:
    """The attention of observers to stored entries and to each other. Differentiable.

    Attributes:
        weights: [B, K, (H / K) x (R / B) x q, N + q] float32, to the stored entries and, causal, to the observers
            themselves.
        rows: q, number of observers in a row.
        sharing: R / B, number of rows of observers that share a row of entries.
    """

    weights: Tensor
    rows: int
    sharing: int = 1

    @classmethod
    def of(
        cls, query: Tensor, keys: Tensor, own_keys: Tensor, softmax: Softmax, real: Tensor | None = None
    ) -> "LookAfter":
        """Let observers look.

        Args:
            query: [R, H, q, d], the observers' queries, causal among themselves.
            keys: [B, K, N, d], before every observer; R / B rows of observers after one another share a row of them.
            own_keys: [R, K, q, d] of the observers.
            softmax: The layer's.
            real: [R, 1 or K, N] bool, False for entries that a row does not see, such as padding; None when there is
                none.
        """
        sharing, heads, rows = len(query) // len(keys), *query.shape[1:3]
        grouped = query.reshape(len(query), keys.shape[1], -1, query.shape[3])
        logits = _logits(grouped, keys, own_keys, softmax, None if real is None else ~real[:, :, None], sharing)
        by_head = logits.unflatten(2, (heads // keys.shape[1], -1))
        return cls(softmax.normalised(by_head).flatten(2, 3), rows, sharing)

    def importance(self, reduction: str) -> Tensor:
        """[R, H, N] float32, as `observed_attention` returns it for the stored entries; by `mean` or `max`."""
        by_head = self.weights[..., : -self.rows].unflatten(2, (-1, self.rows))
        reduced = (by_head.amax(3) if reduction == "max" else by_head.mean(3)).flatten(1, 2)
        return _apart(reduced, self.sharing, 1)

    def output(self, values: Tensor, own_values: Tensor) -> Tensor:
        """The output [R, q, H, d] of softmax attention, from values [B, K, N, d] and [R, K, q, d]."""
        stored, own = self.weights.to(values.dtype).tensor_split([-self.rows], dim=-1)
        of_stored, own = (_apart(each, self.sharing, self.rows) for each in (stored @ values, own))
        rows = (each.flatten(0, 1) for each in (of_stored, own, own_values))
        seen = torch.baddbmm(*rows).to(values.dtype).view_as(of_stored)
        by_head = seen.unflatten(2, (-1, self.rows)).flatten(1, 2)
        return by_head.transpose(1, 2).contiguous()


def _together(apart: Tensor, sharing: int, rows: int) -> Tensor:
    """[R, K, (H / K) x q, x] -> [R / sharing, K, (H / K) x sharing x q, x], q being `rows`."""
    if sharing == 1:
        return apart
    by_head = apart.unflatten(0, (-1, sharing)).unflatten(3, (-1, rows))
    return by_head.permute(0, 2, 3, 1, 4, 5).flatten(2, 4)


def _apart(together: Tensor, sharing: int, rows: int) -> Tensor:
    """`_together` undone."""
    if sharing == 1:
        return together
    by_head = together.unflatten(-2, (-1, sharing, rows))
    return by_head.movedim(-3, 1).flatten(0, 1).flatten(-3, -2)


def _logits(
    grouped: Tensor, keys: Tensor, own_keys: Tensor, softmax: Softmax, padding: Tensor | None, sharing: int
) -> Tensor:
    """Logits [B, K, r, N + q] float32 of queries [B, K, r, d] for [B, K, N, d] and, causal, for [B, K, q, d].

    Where rows share entries, what is given for [R, ...] comes out together.
    """
    count, rows = keys.shape[2], own_keys.shape[2]
    if torch.is_grad_enabled() or sharing > 1:
        stored = softmax.logits(_together(grouped, sharing, rows), keys)
        own = softmax.logits(grouped, own_keys)
        hidden = None if padding is None else _together(padding, sharing, 1)[:, :, None, :, None]
        _hide(stored.unflatten(2, (-1, sharing, rows)), own, hidden)
        return torch.cat([stored, _together(own, sharing, rows)], dim=-1)
    joined = grouped.new_empty(*grouped.shape[:3], count + rows)
    for products, each in zip(joined.flatten(0, 1).tensor_split([count], dim=-1), (keys, own_keys), strict=True):
        factors = grouped.flatten(0, 1), each.flatten(0, 1).mT.to(joined.dtype)
        torch.baddbmm(products, *factors, beta=0, alpha=softmax.scaling, out=products)
    logits = softmax.capped(joined.float())
    _hide(logits[..., :count], logits[..., count:], padding)
    return logits


def _hide(stored: Tensor, own: Tensor, padding: Tensor | None) -> None:
    """Hide, in place, padding among the stored entries, whose shape it must fit, and own ones that come later."""
    rows = own.shape[3]
    own.unflatten(2, (-1, rows)).masked_fill_(later(rows, own.device), -torch.inf)
    if padding is not None:
        stored.masked_fill_(padding, -torch.inf)


class WatchedLayer(OwnAttention, ViewedLayer):
    """A layer to which observers attend, without a copy of its entries; all that is new observes.

    Large attention weights are not kept for their gradients: of all layers together, they would take 2 GiB after 16K
    tokens, for 32 layers and heads and as many observers.

    Attributes:
        importance: What is kept of [B, H, N] float32, reduced over the observers; set once they have attended.
    """

    importance: Tensor

    def __init__(self, stored: ViewedLayer, reduction: str, keep: Callable[[Tensor], Tensor]) -> None:
        super().__init__(stored.keys, stored.values, stored.real)
        self.reduction, self.keep = reduction, keep

    def taken(self) -> Tensor:
        """What was kept, for the last time: a layer that runs again for its gradients must not hold on to them."""
        kept, self.keep = self.importance, no_entries
        del self.importance
        return kept

    @override
    def attend(self, query: Tensor, key: Tensor, value: Tensor, softmax: Softmax) -> Tensor:
        look = partial(self._look, softmax=softmax)
        weights = query.shape[:3].numel() * self.keys.shape[2] * torch.float32.itemsize
        if torch.is_grad_enabled() and weights >= RECOMPUTED:
            seen = checkpoint(look, query, key, value, use_reentrant=False, preserve_rng_state=False)
        else:
            seen = look(query, key, value)
        importance, output = seen
        self.importance = self.keep(importance)
        return output

    def _look(self, query: Tensor, key: Tensor, value: Tensor, softmax: Softmax) -> tuple[Tensor, Tensor]:
        seen = LookAfter.of(query, self.keys, key, softmax, self.real)
        return seen.importance(self.reduction), seen.output(self.values, value)


def no_entries(importance: Tensor) -> Tensor:
    """An importance of no entries."""
    return importance.new_empty(0)


class LastLayer(WatchedLayer):
    """The last layer that observers look back at; nothing is asked of the model after it."""

    @override
    def attend(self, query: Tensor, key: Tensor, value: Tensor, softmax: Softmax) -> Tensor:
        seen = LookAfter.of(query, self.keys, key, softmax, self.real)
        self.importance = self.keep(seen.importance(self.reduction))
        raise AllSeen


class AllSeen(Exception):
    """Ends a pass."""
