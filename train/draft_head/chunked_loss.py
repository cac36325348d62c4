"""Cross entropy of unrolled steps against a teacher's probabilities over a large vocabulary, a few rows at a time.

Unrolled training asks for logits many times a token. Here a chunk of rows is taken through the lm_head once: its loss
and its gradients are made together, so that neither all logits are kept nor any are made twice. What the teacher adds
to the gradients, -p, is the same in every step, so it takes part in matrix products only: p @ weight once, and p.T @
the sum over steps of what the lm_head reads.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

_ROWS = 1024
"""Rows that go through the lm_head at once: large enough for the matrix products to run at full speed."""


def chunked_loss(steps: Sequence[Tensor], weight: Tensor, teacher: Tensor, weights: Sequence[Tensor]) -> Tensor:
    """The weighted sum over steps and rows of the cross entropy of softmax(hidden @ weight.T) against the teacher.

    Args:
        steps: For each step, [n_i, h], what the lm_head reads. Its rows learn from the last n_i rows of the teacher.
        weight: [V, h], the lm_head.
        teacher: [n, V], probabilities; their dtype is that of the matrix products.
        weights: For each step, [n_i] float32.

    Returns:
        A scalar in nats, float32; gradients flow to `steps` and `weight`.
    """
    loss: Any = _ChunkedLoss.apply(weight, teacher, tuple(weights), *steps)
    return loss


class _ChunkedLoss(Function):
    @staticmethod
    def forward(ctx: Any, weight: Tensor, teacher: Tensor, weights: tuple[Tensor, ...], *steps: Tensor) -> Tensor:
        narrow_weight = weight.to(teacher.dtype)
        expected = (teacher @ narrow_weight).float()
        taught = torch.zeros_like(expected)
        for_weight = _WeightGradient(weight, teacher.dtype)
        # Memory that is used again and again: fresh pages cost a CPU as much as the arithmetic.
        logits, guessed = teacher.new_empty(2, min(_ROWS, len(teacher)), len(weight))
        total, for_steps = expected.new_zeros(()), []
        for step, counts in zip(steps, weights, strict=True):
            for_step = torch.empty_like(step, dtype=torch.float32)
            for start in range(0, len(step), _ROWS):
                chunk = slice(start, min(start + _ROWS, len(step)))
                hidden, count = step[chunk].to(teacher.dtype), counts[chunk, None]
                scores, shares = logits[: len(hidden)], guessed[: len(hidden)]
                rows = slice(chunk.start - len(step) + len(teacher), chunk.stop - len(step) + len(teacher))
                torch.mm(hidden, narrow_weight.T, out=scores)
                torch.softmax(scores, -1, out=shares)
                # The largest share is exp(largest score) over the sum of all.
                norm = scores.amax(-1).float() - shares.amax(-1).float().log()
                total += (norm - (hidden.float() * expected[rows]).sum(-1)) @ counts[chunk]
                for_step[chunk] = ((shares @ narrow_weight).float() - expected[rows]) * count
                weighted = hidden.float() * count
                for_weight.add(shares, weighted)
                taught[rows] += weighted
            for_steps.append(for_step)
        for_weight.add(teacher, -taught)
        ctx.save_for_backward(for_weight.total, *for_steps)
        ctx.dtypes = [weight.dtype, *(step.dtype for step in steps)]
        return total

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        found = (saved * gradients[0] for saved in ctx.saved_tensors)
        for_weight, *for_steps = (value.to(dtype) for value, dtype in zip(found, ctx.dtypes, strict=True))
        return for_weight, None, None, *for_steps


class _WeightGradient:
    """Sums outer products in float32, each made in the dtype of the matrix products."""

    def __init__(self, weight: Tensor, dtype: torch.dtype) -> None:
        self.total = torch.zeros_like(weight, dtype=torch.float32)
        self._product = torch.empty_like(weight, dtype=dtype)
        self._wide = torch.empty_like(self.total)

    def add(self, shares: Tensor, hidden: Tensor) -> None:
        """Add shares.T @ hidden, [r, V] and [r, h]."""
        torch.mm(shares.T, hidden.to(shares.dtype), out=self._product)
        self.total += self._wide.copy_(self._product)
