"""Cross entropy against a teacher's probabilities over a large vocabulary, a few rows at a time.

Unrolled training asks for logits many times a token. Here a chunk of rows is taken through the lm_head once: its loss
and its gradients are made together, so that neither all logits are kept nor any are made twice.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

_ROWS = 1024
"""Rows that go through the lm_head at once: large enough for the matrix products to run at full speed."""
_CACHED = 1 << 21
"""Numbers that are worked on at once between the matrix products: on a CPU they stay in its cache."""


def chunked_loss(hidden: Tensor, weight: Tensor, teacher: Tensor, rows: Tensor, weights: Tensor) -> Tensor:
    """The weighted sum over rows of the cross entropy of softmax(hidden @ weight.T) against the teacher.

    Args:
        hidden: [R, h], what the lm_head reads.
        weight: [V, h], the lm_head.
        teacher: [N, V], probabilities; their dtype is that of the matrix products.
        rows: [R] int64, each row's teacher.
        weights: [R] float32.

    Returns:
        A scalar in nats, float32; gradients flow to `hidden` and `weight`.
    """
    loss: Any = _ChunkedLoss.apply(hidden, weight, teacher, rows, weights)
    return loss


class _ChunkedLoss(Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, teacher: Tensor, rows: Tensor, weights: Tensor) -> Tensor:
        dtype = teacher.dtype
        narrow, narrow_weight = hidden.to(dtype), weight.to(dtype)
        weighted = (narrow * weights[:, None]).to(dtype)
        total = weights.new_zeros(())
        for_hidden = torch.empty_like(narrow)
        for_weight = torch.zeros_like(weight, dtype=torch.float32)
        buffer = weight.new_empty(min(_ROWS, len(hidden)), len(weight), dtype=dtype)
        for start in range(0, len(hidden), _ROWS):
            chunk = slice(start, start + _ROWS)
            logits = torch.mm(narrow[chunk], narrow_weight.T, out=buffer[: len(narrow[chunk])])
            total += _losses_to_gradients(logits, teacher, rows[chunk]) @ weights[chunk]
            torch.mm(logits, narrow_weight, out=for_hidden[chunk])
            for_weight += logits.T @ weighted[chunk]
        ctx.save_for_backward(for_hidden * weights[:, None], for_weight)
        ctx.dtypes = hidden.dtype, weight.dtype
        return total

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        found = (saved * gradients[0] for saved in ctx.saved_tensors)
        for_hidden, for_weight = (value.to(dtype) for value, dtype in zip(found, ctx.dtypes, strict=True))
        return for_hidden, for_weight, None, None, None


def _losses_to_gradients(logits: Tensor, teacher: Tensor, rows: Tensor) -> Tensor:
    """Cross entropy of each row, float32; overwrites the logits with their gradients, softmax - teacher."""
    losses = torch.empty(len(logits), device=logits.device)
    part = len(logits) if logits.is_cuda else max(1, _CACHED // logits.shape[1])
    wide, other = torch.empty(2, min(part, len(logits)), logits.shape[1], device=logits.device)
    for start in range(0, len(logits), part):
        chunk = slice(start, start + part)
        count = len(logits[chunk])
        target = teacher[rows[chunk]]
        scores, share = wide[:count].copy_(logits[chunk]), other[:count]
        expected = torch.mul(scores, target, out=share).sum(-1)
        top = scores.amax(-1)
        torch.softmax(scores, -1, out=share)
        losses[chunk] = top - share.amax(-1).log() - expected  # the largest share is exp(top) over the sum of all
        logits[chunk] = share.sub_(target)
    return losses
