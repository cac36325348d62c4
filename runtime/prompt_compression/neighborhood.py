"""Selecting tokens with their neighbours (SpecPC, arXiv 2506.08373, algorithm 2)."""

import torch
from torch import Tensor
from torch.nn import functional


def select_tokens(
    scores: Tensor, budget: int, window: int, kernel: int, neighbors: int, pooling: str = "max"
) -> Tensor:
    """Select tokens by their scores.

    The last tokens come first; then the tokens by their pooled scores, the highest first, each followed by its
    neighbours, the nearest first; until the budget is full. Ties go to the lowest index.

    Args:
        scores: [N] float, of all tokens, those of the window included; not negative.
        budget: Tokens to keep.
        window: Last tokens that are always kept; at most `budget`.
        kernel: Tokens pooled: of an even number one more follows a token than precedes it. Zeros pad both ends.
        neighbors: Size of a token's neighbourhood, itself included, of the same shape as the kernel; 0 for none.
        pooling: `max`, or `avg` that always divides by `kernel`.

    Returns:
        [min(budget, N)] int64, ascending.
    """
    length = len(scores)
    if budget >= length:
        return torch.arange(length, device=scores.device)
    ranked = _pool(scores, kernel, pooling).argsort(descending=True, stable=True)[:budget]
    wanted = (ranked[:, None] + _nearest_first(neighbors).to(scores.device)).clamp(0, length - 1).flatten()
    wanted = torch.cat([torch.arange(length - window, length, device=scores.device), wanted])
    place = torch.arange(len(wanted), device=scores.device)
    first_place = torch.full_like(scores, len(wanted), dtype=torch.long).scatter_reduce(0, wanted, place, "amin")
    return first_place.argsort(stable=True)[:budget].sort().values


def _pool(scores: Tensor, kernel: int, pooling: str) -> Tensor:
    before = (kernel - 1) // 2
    padded = functional.pad(scores[None], (before, kernel - 1 - before))
    pool = functional.max_pool1d if pooling == "max" else functional.avg_pool1d
    return pool(padded, kernel, stride=1)[0]


def _nearest_first(neighbors: int) -> Tensor:
    """Offsets of a token's neighbours: 0, -1, 1, -2, 2, ..."""
    offsets = torch.arange(max(neighbors, 1)) - (max(neighbors, 1) - 1) // 2
    return offsets[offsets.abs().argsort(stable=True)]
