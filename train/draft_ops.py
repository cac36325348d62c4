"""Operations of unrolled draft head training that keep neither all logits nor N x N attention in memory."""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

_ROWS = 1024
"""Rows that go through the lm_head at once: large enough for the matrix products to run at full speed."""


def chunked_loss(steps: Sequence[Tensor], weight: Tensor, teacher: Tensor, weights: Sequence[Tensor]) -> Tensor:
    """The weighted sum over steps and rows of the cross entropy of softmax(hidden @ weight.T) against the teacher.

    `steps` [n_i, h] are inputs of the lm_head, `weight` [V, h]; the rows of a step learn from the last n_i rows of
    `teacher` [n, V], probabilities in the dtype of the matrix products, with `weights` [n_i] float32. A scalar in nats;
    gradients flow to `steps` and `weight`.
    """
    loss: Any = _ChunkedLoss.apply(weight, teacher, tuple(weights), *steps)
    return loss


class _ChunkedLoss(Function):
    @staticmethod
    def forward(ctx: Any, weight: Tensor, teacher: Tensor, weights: tuple[Tensor, ...], *steps: Tensor) -> Tensor:
        narrow_weight = weight.to(teacher.dtype)
        expected = (teacher @ narrow_weight).float()
        taught = torch.zeros_like(expected)
        # Reused buffers: on a CPU, fresh pages cost as much as the arithmetic.
        logits, probabilities = teacher.new_empty(2, min(_ROWS, len(teacher)), len(weight))
        for_weight = torch.zeros_like(weight, dtype=torch.float32)
        wide, product = torch.empty_like(for_weight), torch.empty_like(weight, dtype=teacher.dtype)

        def add(shares: Tensor, hidden: Tensor) -> None:
            """Add shares.T @ hidden, computed in the dtype of the matrix products, to the gradient in float32."""
            torch.mm(shares.T, hidden.to(shares.dtype), out=product)
            for_weight.add_(wide.copy_(product))

        total, for_steps = expected.new_zeros(()), []
        for step, counts in zip(steps, weights, strict=True):
            for_step = torch.empty_like(step, dtype=torch.float32)
            for start in range(0, len(step), _ROWS):
                chunk = slice(start, min(start + _ROWS, len(step)))
                hidden, count = step[chunk].to(teacher.dtype), counts[chunk, None]
                scores, shares = logits[: len(hidden)], probabilities[: len(hidden)]
                rows = slice(chunk.start - len(step) + len(teacher), chunk.stop - len(step) + len(teacher))
                torch.mm(hidden, narrow_weight.T, out=scores)
                torch.softmax(scores, -1, out=shares)
                # The largest share is exp(largest score) over the sum of all.
                norm = scores.amax(-1).float() - shares.amax(-1).float().log()
                total += (norm - (hidden.float() * expected[rows]).sum(-1)) @ counts[chunk]
                for_step[chunk] = ((shares @ narrow_weight).float() - expected[rows]) * count
                weighted = hidden.float() * count
                add(shares, weighted)
                taught[rows] += weighted
            for_steps.append(for_step)
        add(teacher, -taught)
        ctx.save_for_backward(for_weight, *for_steps)
        ctx.dtypes = [weight.dtype, *(step.dtype for step in steps)]
        return total

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        found = (saved * gradients[0] for saved in ctx.saved_tensors)
        for_weight, *for_steps = (value.to(dtype) for value, dtype in zip(found, ctx.dtypes, strict=True))
        return for_weight, None, None, *for_steps


_ATEN = torch.ops.aten


class UnrolledAttention:
    """`HeadAttend` of one step after the other; rows may be dropped at the end from step to step."""

    def __init__(self) -> None:
        self._keys: list[Tensor] = []
        self._values: list[Tensor] = []

    def __call__(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """One step: queries [B, H, q, d], keys and values [B, K, q, d] -> [B, q, H, d] in the values' dtype."""
        self._keys.append(key.to(value.dtype))
        self._values.append(value)
        rows = query.shape[2]
        keys = [each[:, :, :rows] for each in self._keys]
        values = [each[:, :, :rows] for each in self._values]
        return merged_attention(query.to(value.dtype), keys, values).transpose(1, 2)


def merged_attention(query: Tensor, keys: list[Tensor], values: list[Tensor]) -> Tensor:
    """Causal attention over the first step's keys and, of each later step, the same row's key, in one softmax.

    Queries [B, H, q, d], and for each step keys and values [B, K, q, d], K dividing H -> [B, H, q, d]; gradients flow
    to everything.
    """
    group = query.shape[1] // keys[0].shape[1]
    first_key, first_value = (each[0].repeat_interleave(group, dim=1) for each in (keys, values))
    if len(keys) == 1:
        own_key = own_value = query.new_zeros(0, *keys[0].shape)
    else:
        own_key, own_value = torch.stack(keys[1:]), torch.stack(values[1:])
    output: Any = _Merged.apply(query, first_key, first_value, own_key, own_value)
    return output


class _Merged(Function):
    """Flash attention over the first keys; the other steps are merged into it by log-sum-exp, in float32.

    On CUDA torch's memory-efficient kernel replaces the CPU's flash kernel.

    The flash kernel's backward rebuilds the probabilities of its keys from each row's output and log-sum-exp. From the
    merged ones it yields the merged softmax's gradients for these keys; those of the few other keys are added here.
    """

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, own_key: Tensor, own_value: Tensor) -> Tensor:
        output, total = _flash(query, key, value)
        if len(own_key):
            scores = _own_scores(query, own_key)
            rows = query.shape[2]
            merged = torch.logsumexp(torch.cat([total[None, ..., :rows], scores]), dim=0)
            first = (total[..., :rows] - merged).exp()[..., None] * output
            own = torch.einsum("ibkgq,ibkqd->bkgqd", _grouped((scores - merged).exp(), own_key), _wide(own_value))
            output = (first + own.flatten(1, 2)).to(query.dtype)
            total = total.clone()
            total[..., :rows] = merged
        ctx.save_for_backward(query, key, value, own_key, own_value, output, total)
        return output

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        query, key, value, own_key, own_value, output, total = ctx.saved_tensors
        gradient = gradients[0].to(query.dtype)
        for_query, for_key, for_value = _flash_backward(gradient, query, key, value, output, total)
        if not len(own_key):
            return for_query, for_key, for_value, None, None
        scale = 1 / math.sqrt(query.shape[-1])
        wide_key, wide_value = _wide(own_key), _wide(own_value)
        shares = _grouped((_own_scores(query, own_key) - total[..., : query.shape[2]]).exp(), own_key)
        wide = _wide(gradient).unflatten(1, (own_key.shape[2], -1))
        level = (wide * _wide(output).unflatten(1, wide.shape[1:3])).sum(-1)
        for_scores = shares * (torch.einsum("bkgqd,ibkqd->ibkgq", wide, wide_value) - level) * scale
        for_query = for_query + torch.einsum("ibkgq,ibkqd->bkgqd", for_scores, wide_key).flatten(1, 2)
        for_own_key = torch.einsum("ibkgq,bkgqd->ibkqd", for_scores, _wide(query).unflatten(1, wide.shape[1:3]))
        for_own_value = torch.einsum("ibkgq,bkgqd->ibkqd", shares, wide)
        narrow = query.dtype
        return for_query.to(narrow), for_key, for_value, for_own_key.to(narrow), for_own_value.to(narrow)


def _wide(tensor: Tensor) -> Tensor:
    """In float32 at least."""
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


def _grouped(shares: Tensor, own_key: Tensor) -> Tensor:
    """[steps, B, H, q] -> [steps, B, K, H // K, q]."""
    return shares.unflatten(2, (own_key.shape[2], -1))


def _own_scores(query: Tensor, own_key: Tensor) -> Tensor:
    """[B, H, q, d] and [steps, B, K, q, d] -> scaled scores of the same row, [steps, B, H, q]."""
    grouped = _wide(query).unflatten(1, (own_key.shape[2], -1)) / math.sqrt(query.shape[-1])
    return torch.einsum("bkgqd,ibkqd->ibkgq", grouped, _wide(own_key)).flatten(2, 3)


def _flash(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """Causal attention and its log-sum-exp [B, H, >= q], which GPU kernels pad."""
    if query.is_cuda:
        output, total, *_ = _ATEN._scaled_dot_product_efficient_attention(query, key, value, None, True, 0.0, True)
    else:
        output, total = _ATEN._scaled_dot_product_flash_attention_for_cpu(query, key, value, 0.0, True)
    return output, total


def _flash_backward(
    gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, output: Tensor, total: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    if query.is_cuda:
        # In 16 bits the kernel reads the output as [B, q, H, d] in memory, whatever its strides say.
        output = output.transpose(1, 2).contiguous().transpose(1, 2)
        unused = torch.zeros((), dtype=torch.long)
        needed = [True, True, True, False]
        return _ATEN._scaled_dot_product_efficient_attention_backward(
            gradient, query, key, value, None, output, total, unused, unused, 0.0, needed, True
        )[:3]
    return _ATEN._scaled_dot_product_flash_attention_for_cpu_backward(
        gradient, query, key, value, output, total, 0.0, True
    )
