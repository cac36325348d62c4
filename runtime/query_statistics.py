"""Statistics of all queries that a layer has seen: mean, second moments and norms, with their positions undone."""

from typing import NamedTuple

import torch
from torch import Tensor

from keepsight.runtime.rotary import Rotary

SINKS = 4
"""First tokens whose queries are left out: they are unlike all others."""


class QueryStatistics(NamedTuple):
    """Sums over queries whose positions, counted from the first column of a batch, are undone.

    Attributes:
        queries: [B] float32, how many there were.
        total: [B, H, d] float32.
        squares: [B, H, d, d] float32: of the outer products of queries with themselves.
        norms: [B, H, d] float32: of the norms of the pairs that RoPE turns, scaled as RoPE does.
    """

    queries: Tensor
    total: Tensor
    squares: Tensor
    norms: Tensor

    @property
    def mean(self) -> Tensor:
        """[B, H, d] float32."""
        return self.total / self._counted

    @property
    def covariance(self) -> Tensor:
        """[B, H, d, d] float32, divided by the number of queries."""
        mean = self.mean
        return self.squares / self._counted[..., None] - mean[..., None] * mean[..., None, :]

    @property
    def mean_norms(self) -> Tensor:
        """[B, H, d] float32."""
        return self.norms / self._counted

    @property
    def _counted(self) -> Tensor:
        return self.queries.clamp(min=1)[:, None, None]


def with_queries(
    before: QueryStatistics | None, rotary: Rotary, query: Tensor, first: int, mask: Tensor | None
) -> QueryStatistics:
    """Statistics with more queries in them.

    Args:
        before: The statistics so far; None for none.
        rotary: The layer's RoPE.
        query: [B, H, q, d], after RoPE.
        first: Column of the first of them.
        mask: [B, M] bool, False for padding, its last q columns those of the queries; None for none.
    """
    columns = torch.arange(first, first + query.shape[2], device=query.device)
    counted = (columns >= SINKS).expand(len(query), -1)
    if mask is not None:
        mask = mask.to(query.device)
        counted = (mask & (mask.long().cumsum(dim=1) > SINKS))[:, -query.shape[2] :]
    query = query.float()
    plain, norms = rotary.undone(query, columns[None]), rotary.pair_norms(query)
    weights = counted[:, None, :, None].float()
    weighted = plain * weights
    sums = [counted.sum(dim=1).float(), weighted.sum(dim=2), weighted.mT @ plain, (norms * weights).sum(dim=2)]
    return QueryStatistics(*sums if before is None else map(torch.add, before, sums))
