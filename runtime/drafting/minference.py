"""MInference's vertical-slash pattern (arXiv 2407.02490, section 3) as SpecKV's sparse prefill.

Each query head sees *columns*, keys that all later queries see, and *slashes*, diagonals of keys that are equally far
behind their queries. Both are estimated from the attention of the prompt's last 64 queries.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional
from typing_extensions import override

from keepsight.errors import as_options, require_whole
from keepsight.runtime.attention import Softmax, grouped_attention
from keepsight.runtime.drafting.speckv import BLOCK, SparsePattern, at_columns
from keepsight.runtime.importance import attention_weights, top_indices

_LAST = 64
_SINKS, _LOCAL = 30, 100
"""First columns and nearest diagonals that the authors' code always takes."""
_LEAST_SLASHES = 50


@as_options
@dataclass(frozen=True)
class MInference(SparsePattern):
    """One pattern for all heads, where the paper searches one for each head offline.

    Attributes:
        vertical: Number of columns of a query head (at least 30: the first ones are always among them).
        slash: Number of diagonals of a query head (at least 50, the nearest ones), which are widened to blocks: a query
            sees what any query of its block of 64 would. Prompts of no more tokens are read densely.
    """

    vertical: int = 1000
    slash: int = 6096

    def __post_init__(self) -> None:
        require_whole("minference", 1, vertical=self.vertical, slash=self.slash)

    @property
    @override
    def longest_dense(self) -> int:
        return max(self.vertical, self.slash)

    @override
    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, softmax: Softmax, *, length: int, importance: Tensor
    ) -> Tensor:
        columns, slashes = self.estimate(query[:, :, max(length - _LAST, 0) : length], key[:, :, :length], softmax)
        return by_marks(query, key, value, columns, slashes, softmax)

    def estimate(self, query: Tensor, key: Tensor, softmax: Softmax) -> tuple[Tensor, Tensor]:
        """From the last queries [B, H, r, d] of N keys [B, K, N, d]: columns and slashes, [B, H, N] bool both.

        A slash is marked at its distance from query to key.
        """
        weights = attention_weights(query, key, softmax)
        rows, length = weights.shape[2:]
        distances = torch.arange(length, device=query.device)
        keys = torch.arange(length - rows, length, device=query.device)[:, None] - distances
        by_slash = weights.gather(3, keys.clamp(min=0).expand_as(weights)).masked_fill(keys < 0, 0.0).sum(dim=2)
        by_column = weights.sum(dim=2)
        by_column[..., :_SINKS] = by_slash[..., :_LOCAL] = torch.inf
        counts = max(self.vertical, _SINKS), max(self.slash, _LEAST_SLASHES)
        columns, slashes = (
            torch.zeros_like(sums, dtype=torch.bool).scatter_(2, top_indices(sums, min(count, length)), True)
            for sums, count in zip((by_column, by_slash), counts, strict=True)
        )
        return columns, slashes


def by_marks(query: Tensor, key: Tensor, value: Tensor, columns: Tensor, slashes: Tensor, softmax: Softmax) -> Tensor:
    """Attention [B, n, H, d] of n queries to n keys, 64 queries at a time over no more keys than their heads see.

    Args:
        query: [B, H, n, d].
        key: [B, K, n, d].
        value: [B, K, n, d].
        columns: [B, H, N] bool, N at most n: the columns that each query head sees.
        slashes: [B, H, N] bool: the distances from query to key at which it sees keys.
        softmax: The layer's.
    """
    length, group = query.shape[2], query.shape[1] // key.shape[1]
    columns, slashes = (functional.pad(each, (0, length - each.shape[2])) for each in (columns, slashes))
    before = functional.pad(slashes.cumsum(dim=2), (1, 0))  # number of slashes nearer than each distance
    positions, blocks = torch.arange(length, device=query.device), []
    for start in range(0, length, BLOCK):
        rows, keys = positions[start : start + BLOCK], positions[: start + BLOCK]
        nearest, farthest = (start - keys).clamp(min=0), (start + BLOCK - keys).clamp(max=length)
        seen = columns[..., : start + BLOCK] | (before[..., farthest] > before[..., nearest])
        places = top_indices(seen.float(), int(seen.sum(dim=2).max()))
        hidden = ~seen.gather(2, places)[:, :, None] | (places[:, :, None] > rows[:, None])
        own = places.unflatten(1, (-1, group)).flatten(2)
        read = [at_columns(each, own).unflatten(2, (group, -1)).flatten(1, 2) for each in (key, value)]
        mask = query.new_zeros(hidden.shape).masked_fill_(hidden, -torch.inf)
        blocks.append(grouped_attention(query[:, :, start : start + BLOCK], read[0], read[1], mask, softmax))
    return torch.cat(blocks, dim=1)
