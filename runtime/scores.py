"""Scores of a layer's entries: what observers must return, and what is made of it before the top is taken."""

import torch
from torch import Tensor

from keepsight.errors import UserError
from keepsight.runtime.cache_layers import LayerEntries
from keepsight.runtime.importance import Pool, pool, reduce_group


def protected(importance: Tensor, real: Tensor | None, pooling: Pool, sinks: int, window: int) -> Tensor:
    """Pool importance, and mark what is always kept and what is padding.

    Args:
        importance: [B, K, C] float32.
        real: [B, 1 or K, C] bool, False for padding on the left; None for none.
        pooling: How to pool the entries before the window.
        sinks: Number of first entries that are always kept.
        window: Number of last entries that are always kept; they are not pooled with the others.

    Returns:
        [B, K, C] float32: +inf where protected, -inf for padding.
    """
    length, pooled = importance.shape[-1], importance.clone()
    free = max(length - window, 0)
    if real is not None:  # padding must not reach its neighbours
        importance = importance.masked_fill(~real, -torch.inf if pooling.kind == "max" else 0.0)
    if free:
        pooled[..., :free] = pool(importance[..., :free].contiguous(), pooling.kernel, pooling.kind)
    pooled[..., free:] = torch.inf
    if real is None:
        pooled[..., :sinks] = torch.inf
        return pooled
    order = real.long().cumsum(dim=-1)
    pooled.masked_fill_(order <= sinks, torch.inf)
    return pooled.masked_fill_(~real, -torch.inf)


def value_norms(values: Tensor, kv_heads: int) -> Tensor:
    """L2 norms [B, K, C] float32 of values [B, K, C, d]; of values [B, H, C, d] the mean over a KV head's group."""
    return reduce_group(torch.linalg.vector_norm(values, dim=-1, dtype=torch.float32), kv_heads)


def require_scores(name: str, scores: Tensor, place: int, held: LayerEntries) -> None:
    """Refuse scores that are not one for each entry of a layer.

    Raises:
        UserError: with one line that names the observer, the shape that it returned and the expected one.
    """
    batch, kv_heads, length, _ = held.keys.shape
    shape = [*scores.shape]
    if len(shape) != 3 or shape[::2] != [batch, length] or not shape[1] or shape[1] % kv_heads:
        raise UserError(
            f"{name} returned scores of shape {shape} for layer {place}; expected [{batch}, {kv_heads}, {length}] "
            f"by KV head, or a multiple of {kv_heads} by query head"
        )
