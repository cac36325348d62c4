"""A layer whose entries are seen through gates: a soft selection, through which gradients flow."""

import torch
from torch import Tensor
from typing_extensions import override

from keepsight.runtime.attention import OwnAttention
from keepsight.runtime.importance import later
from keepsight.runtime.softmax import Softmax, grouped_attention
from keepsight.runtime.viewed_layers import ViewedLayer


class GatedLayer(OwnAttention, ViewedLayer):
    """Stored entries whose attention weights are multiplied by gates before they are normalised.

    What is new is seen too, causally and whole, and not stored.

    Args:
        keys: [B, K, N, d].
        values: [B, K, N, d].
        gates: [B, K, N], logarithms of the gates: 0 for an entry that is kept, very low for one that is evicted, and
            for padding: the model's own mask is not looked at.
    """

    def __init__(self, keys: Tensor, values: Tensor, gates: Tensor) -> None:
        super().__init__(keys, values)
        self.gates = gates

    @override
    def attend(self, query: Tensor, key: Tensor, value: Tensor, softmax: Softmax) -> Tensor:
        rows = query.shape[2]
        least = torch.finfo(query.dtype).min
        stored = self.gates.clamp(min=least).to(query.dtype)[:, :, None].expand(-1, -1, rows, -1)
        own = torch.zeros(rows, rows, dtype=query.dtype, device=query.device)
        own = own.masked_fill(later(rows, query.device), least)
        mask = torch.cat([stored, own.expand(*stored.shape[:2], -1, -1)], dim=-1)
        return grouped_attention(
            query, torch.cat([self.keys, key], dim=-2), torch.cat([self.values, value], dim=-2), mask, softmax
        )
