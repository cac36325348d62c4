"""From dot products to attention: a layer's scaling, soft-capping and sinks, and attention that repeats no key.

Shapes: B batch, H query heads, K KV heads (query head h reads KV head h // (H / K)), q queries, S keys, d head
dimension. Queries are grouped by KV head: [B, K, (H / K) x q, d], the rows of a query head side by side.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional


class Softmax(NamedTuple):
    """How a layer makes attention weights of dot products.

    Attributes:
        scaling: Factor of the dot products.
        softcap: Logits are bent to between -softcap and softcap by tanh (Gemma 2); None for none.
        sinks: [H], for each query head a logit that takes its share of the weights and has no value (GPT-OSS); None
            for none.
    """

    scaling: float
    softcap: float | None = None
    sinks: Tensor | None = None

    def logits(self, grouped: Tensor, keys: Tensor) -> Tensor:
        """Queries [..., r, d] and keys [..., S, d] -> [..., r, S] float32."""
        return self.capped(products(grouped * self.scaling, keys).float())

    def capped(self, logits: Tensor) -> Tensor:
        """Scaled dot products -> logits."""
        return logits if self.softcap is None else (logits / self.softcap).tanh() * self.softcap

    def sinks_of(self, kv_heads: int, rows: int) -> Tensor | None:
        """[K, (H / K) x q, 1] float32: the sink of each grouped row; None for none."""
        if self.sinks is None:
            return None
        return self.sinks.float().view(kv_heads, -1).repeat_interleave(rows, dim=1)[..., None]

    def normalised(self, logits: Tensor) -> Tensor:
        """The weights of grouped logits [B, K, H / K, q, S], masked ones very low or -inf; the logits are lost."""
        if self.sinks is None:
            # In place: a CPU gives the memory of another tensor of that size back, and pays for it, in each layer.
            in_place = logits.is_cpu and not torch.is_grad_enabled()
            return torch.softmax(logits, dim=-1, out=logits) if in_place else logits.softmax(dim=-1)
        sinks = self.sinks.float().view(1, logits.shape[1], -1, 1, 1).expand(*logits.shape[:-1], 1)
        return torch.cat([logits, sinks], dim=-1).softmax(dim=-1)[..., :-1]


def products(rows: Tensor, keys: Tensor) -> Tensor:
    """Dot products [..., r, S] of rows [..., r, d] and keys [..., S, d]."""
    if keys.is_cpu and keys.element_size() == 2 and not keys.is_contiguous():
        # All heads at once, oneDNN makes a transposed copy of keys that have room behind them, which takes far longer.
        by_head = zip(rows.flatten(0, -3), keys.flatten(0, -3), strict=True)
        return torch.stack([row @ key.t() for row, key in by_head]).view(*rows.shape[:-1], keys.shape[-2])
    return rows @ keys.transpose(-1, -2)


def grouped_attention(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, softmax: Softmax) -> Tensor:
    """Attention in which the query heads of a KV head are rows of one head, so that no key or value is repeated.

    Args:
        query: [B, H, q, d].
        key: [B, K, S, d].
        value: [B, K, S, d].
        mask: [B, 1 or K, q, S]: bool (True where a query may look), or what is added to the logits; None where every
            query sees every key.
        softmax: The layer's.

    Returns:
        [B, q, H, d], contiguous.
    """
    batch, heads, rows, width = query.shape
    kv_heads = key.shape[1]
    if mask is not None:
        mask = mask[:, :, None].expand(-1, -1, heads // kv_heads, -1, -1).flatten(2, 3)
    output = attend_grouped(query.reshape(batch, kv_heads, -1, width), key, value, mask, softmax)
    return output.view(batch, heads, rows, -1).transpose(1, 2).contiguous()


def attend_grouped(grouped: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, softmax: Softmax) -> Tensor:
    """`grouped_attention` of grouped queries [B, K, r, d] under a mask [B, 1 or K, r, S] -> [B, K, r, d]."""
    if softmax.softcap is None and softmax.sinks is None:
        return functional.scaled_dot_product_attention(grouped, key, value, attn_mask=mask, scale=softmax.scaling)
    logits = softmax.logits(grouped, key)
    if mask is not None:
        logits = logits.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else logits + mask
    share = 1 if softmax.sinks is None else len(softmax.sinks) // key.shape[1]
    weights = softmax.normalised(logits.unflatten(2, (share, -1))).flatten(2, 3)
    return weights.to(value.dtype) @ value


def visible(rows: int, real: Tensor) -> Tensor:
    """Causal mask [B, K, q, S] bool of the last q of S positions, which `real` [B, K, S] bool marks."""
    if rows == 1:
        return real[:, :, None]
    keys = real.shape[2]
    positions = torch.arange(keys, device=real.device)
    return real[:, :, None] & (positions <= positions[keys - rows :, None])
