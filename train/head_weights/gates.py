"""Gates: the selection under one budget for the heads of all layers, softened so that gradients flow through it."""

import torch
from torch import Tensor

_HALVINGS = 40


def soft_gates(scores: Tensor, budget: int, floor: float, temperature: float) -> Tensor:
    """Logarithms of gates that keep as much as `Global` allocates.

    An entry's gate is sigmoid((score - threshold) / temperature), and 1 for those that `floor` guarantees their head.
    The threshold is where the gates of a row sum to the budget; gradients account for how it moves with the scores.

    Args:
        scores: [L, B, K, N] float32, logarithms of importance, very low for padding.
        budget: Entries per layer and KV head on average, fewer than N.
        floor: See `Global`.
        temperature: In nats; towards 0 the selection becomes hard.

    Returns:
        [L, B, K, N] float32.
    """
    promised = _promised(scores, int(budget * floor))
    wanted = budget * scores.shape[0] * scores.shape[2]
    with torch.no_grad():
        threshold = _threshold(scores, promised, wanted, temperature)
        free = torch.sigmoid((scores - threshold) / temperature).masked_fill(promised, 0.0)
        slope = _by_row(free * (1 - free)).clamp(min=1e-6) / temperature
    moved = _by_row(torch.sigmoid((scores - threshold) / temperature).masked_fill(promised, 0.0))
    threshold = threshold + (moved - moved.detach()) / slope
    return torch.nn.functional.logsigmoid((scores - threshold) / temperature).masked_fill(promised, 0.0)


def _promised(scores: Tensor, count: int) -> Tensor:
    """[L, B, K, N] bool: the `count` best of each head."""
    best = scores.topk(count, dim=-1).indices
    return torch.zeros_like(scores, dtype=torch.bool).scatter_(-1, best, True)


def _threshold(scores: Tensor, promised: Tensor, wanted: int, temperature: float) -> Tensor:
    """[1, B, 1, 1]: where the gates of each row sum to `wanted`."""
    low = scores.amin(dim=(0, 2, 3), keepdim=True) - 20 * temperature
    high = scores.amax(dim=(0, 2, 3), keepdim=True) + 20 * temperature
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        kept = _by_row(torch.sigmoid((scores - middle) / temperature).masked_fill(promised, 1.0))
        low, high = torch.where(kept > wanted, middle, low), torch.where(kept > wanted, high, middle)
    return (low + high) / 2


def _by_row(gates: Tensor) -> Tensor:
    """Sums over all heads, [1, B, 1, 1]."""
    return gates.sum(dim=(0, 2, 3), keepdim=True)
