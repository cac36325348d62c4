"""Observers after stored entries: their attention is computed without copying the entries beside their own."""

from dataclasses import dataclass

import torch
from torch import Tensor

from keepsight.runtime.importance import later
from keepsight.runtime.softmax import Softmax


@dataclass(frozen=True)
class LookAfter:
    """The attention of observers to stored entries and to each other, before it is divided by its sum.

    Differentiable. Entries are multiplied in parts: few matrices parallelise badly over the cores of a CPU.

    Attributes:
        stored: [B, K, parts, (H / K) x q, N / parts] float32, to the stored entries.
        own: [B, K, (H / K) x q, q] float32, to the observers themselves, causal.
        total: [B, K, (H / K) x q, 1] float32, the sum of both, sinks included.
        rows: q, number of observers.
    """

    stored: Tensor
    own: Tensor
    total: Tensor
    rows: int

    @classmethod
    def of(
        cls, query: Tensor, keys: Tensor, own_keys: Tensor, softmax: Softmax, real: Tensor | None = None
    ) -> "LookAfter":
        """Let observers look.

        Args:
            query: [B, H, q, d], the observers' queries, causal among themselves.
            keys: [B, K, N, d], before every observer.
            own_keys: [B, K, q, d] of the observers.
            softmax: The layer's.
            real: [B, 1 or K, N] bool, False for padding among the entries; None when there is none.
        """
        batch, _, rows, width = query.shape
        kv_heads, parts = keys.shape[1], _parts(keys)
        keys, grouped = keys.unflatten(2, (parts, -1)), (query * softmax.scaling).reshape(batch, kv_heads, -1, width)
        logits = softmax.capped((grouped[:, :, None].expand(-1, -1, parts, -1, -1) @ keys.transpose(-1, -2)).float())
        if real is not None:
            logits.masked_fill_(~real.unflatten(2, (parts, -1))[:, :, :, None], -torch.inf)
        between = softmax.capped((grouped @ own_keys.transpose(-1, -2)).float())
        between.unflatten(2, (-1, rows)).masked_fill_(later(rows, query.device), -torch.inf)
        # Softmax does not depend on what is subtracted, so that no gradient has to flow through the maximum.
        highest = torch.maximum(logits.detach().amax(dim=(2, 4)), between.detach().amax(dim=-1))[..., None]
        sinks = softmax.sinks_of(kv_heads, rows)
        highest = highest if sinks is None else torch.maximum(highest, sinks.detach())
        weights, between = logits.sub_(highest[:, :, None]).exp_(), between.sub_(highest).exp_()
        total = (weights.sum(dim=(2, 4)) + between.sum(dim=-1))[..., None]
        return cls(weights, between, total if sinks is None else total + (sinks - highest).exp(), rows)

    def importance(self, reduction: str) -> Tensor:
        """[B, H, N] float32, as `observed_attention` returns it for the stored entries; by `mean` or `max`."""
        by_head = self.stored.unflatten(3, (-1, self.rows))
        share = self.total.reciprocal().view(*self.total.shape[:2], 1, -1, self.rows, 1)
        with torch.autocast(self.total.device.type, enabled=False):  # else the product would be in its dtype
            paid = (by_head * share).amax(4) if reduction == "max" else ((share / self.rows).mT @ by_head)[..., 0, :]
        return paid.transpose(2, 3).flatten(3).flatten(1, 2)

    def output(self, values: Tensor, own_values: Tensor) -> Tensor:
        """The output [B, q, H, d] of softmax attention, from values [B, K, N, d] and [B, K, q, d]."""
        by_part = self.stored.to(values.dtype) @ values.unflatten(2, (self.stored.shape[2], -1))
        of_stored = by_part.sum(dim=2) if by_part.shape[2] > 1 else by_part[:, :, 0]
        rows = (each.flatten(0, 1) for each in (of_stored, self.own.to(values.dtype), own_values))
        seen = torch.baddbmm(*rows).view_as(of_stored)
        by_head = (seen / self.total).to(values.dtype).unflatten(2, (-1, self.rows)).flatten(1, 2)
        return by_head.transpose(1, 2).contiguous()


def _parts(keys: Tensor) -> int:
    """Number of parts in which to multiply entries [B, K, N, d]: on a CPU, as many as are possible without a copy."""
    whole = keys.device.type == "cpu" and keys.is_contiguous()
    return next(parts for parts in (4, 2, 1) if parts == 1 or (whole and keys.shape[2] % parts == 0))
