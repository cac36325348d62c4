"""Gates: the selection under one budget for the heads of all layers, softened so that gradients flow through it."""

import torch
from torch import Tensor
from torch.nn import functional

from keepsight.runtime.importance import top_mask

_HALVINGS = 40


def soft_gates(scores: Tensor, real: Tensor, budget: int, floor: float, temperature: float) -> Tensor:
    """Logarithms of gates that keep as much as `Global` allocates.

    An entry's gate is sigmoid((score - threshold) / temperature), and 1 for the entries that `floor` guarantees their
    head: of equal ones the first, as in eviction, whatever the padding. The threshold is where the gates of a row sum
    to the budget; gradients account for how it moves with the scores. A row with no more real entries than its budget
    keeps them all.

    Args:
        scores: [L, B, K, N] float32, logarithms of importance.
        real: [L, B, K, N] bool, False for padding, whose gates are closed.
        budget: Entries per layer and KV head on average.
        floor: See `Global`.
        temperature: In nats; towards 0 the selection becomes hard.

    Returns:
        [L, B, K, N] float32.
    """
    least = torch.finfo(scores.dtype).min
    promised = top_mask(scores.detach().masked_fill(~real, least), min(int(budget * floor), scores.shape[-1])) & real
    free = real & ~promised
    wanted = budget * scores.shape[0] * scores.shape[2] - _by_row(promised)
    with torch.no_grad():
        threshold = _threshold(scores, free, wanted, temperature)
    opened = torch.sigmoid((scores - threshold) / temperature) * free
    slope = _by_row(opened * (1 - opened)).detach().clamp(min=1e-6) / temperature
    kept = _by_row(opened)
    threshold = threshold + (kept - kept.detach()) / slope  # its value stays; its gradient is that of the implicit one
    gates = functional.logsigmoid((scores - threshold) / temperature)
    whole = _by_row(free) <= wanted
    return gates.masked_fill(promised | whole, 0.0).masked_fill(~real, least)


def _threshold(scores: Tensor, free: Tensor, wanted: Tensor, temperature: float) -> Tensor:
    """[1, B, 1, 1]: where the gates of each row's free entries sum to `wanted`."""
    among = scores.masked_fill(~free, torch.nan)
    low = among.nan_to_num(nan=torch.inf).amin(dim=(0, 2, 3), keepdim=True) - 20 * temperature
    high = among.nan_to_num(nan=-torch.inf).amax(dim=(0, 2, 3), keepdim=True) + 20 * temperature
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        over = _by_row(torch.sigmoid((scores - middle) / temperature) * free) > wanted
        low, high = torch.where(over, middle, low), torch.where(over, high, middle)
    return ((low + high) / 2).nan_to_num()  # a row without free entries has none


def _by_row(gates: Tensor) -> Tensor:
    """Sums over all heads, [1, B, 1, 1]."""
    return gates.sum(dim=(0, 2, 3), keepdim=True)
