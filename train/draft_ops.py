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
        expected_weight = (teacher @ narrow_weight).float()  # of each row of the teacher
        taught = torch.zeros_like(expected_weight)
        # Reused buffers: on a CPU, fresh pages cost as much as the arithmetic.
        logits_buffer, probabilities_buffer = teacher.new_empty(2, min(_ROWS, len(teacher)), len(weight))
        weight_gradient = torch.zeros_like(weight, dtype=torch.float32)
        product_buffer = torch.empty_like(weight, dtype=teacher.dtype)
        wide_buffer = torch.empty_like(weight_gradient)

        def add_to_weight_gradient(probabilities: Tensor, hidden: Tensor) -> None:
            """Add probabilities.T @ hidden, computed in the dtype of the matrix products, in float32."""
            torch.mm(probabilities.T, hidden.to(probabilities.dtype), out=product_buffer)
            weight_gradient.add_(wide_buffer.copy_(product_buffer))

        total = expected_weight.new_zeros(())
        step_gradients = []
        for step, row_weights in zip(steps, weights, strict=True):
            step_gradient = torch.empty_like(step, dtype=torch.float32)
            first_teacher_row = len(teacher) - len(step)
            for start in range(0, len(step), _ROWS):
                end = min(start + _ROWS, len(step))
                hidden = step[start:end].to(teacher.dtype)
                teacher_rows = slice(first_teacher_row + start, first_teacher_row + end)
                logits = logits_buffer[: len(hidden)]
                probabilities = probabilities_buffer[: len(hidden)]
                torch.mm(hidden, narrow_weight.T, out=logits)
                torch.softmax(logits, -1, out=probabilities)

                # The largest probability is exp(largest logit) over the sum of all.
                log_sum = logits.amax(-1).float() - probabilities.amax(-1).float().log()
                expected_logit = (hidden.float() * expected_weight[teacher_rows]).sum(-1)
                total += (log_sum - expected_logit) @ row_weights[start:end]

                column = row_weights[start:end, None]
                predicted_weight = (probabilities @ narrow_weight).float()
                step_gradient[start:end] = (predicted_weight - expected_weight[teacher_rows]) * column
                weighted_hidden = hidden.float() * column
                add_to_weight_gradient(probabilities, weighted_hidden)
                taught[teacher_rows] += weighted_hidden
            step_gradients.append(step_gradient)
        add_to_weight_gradient(teacher, -taught)
        ctx.save_for_backward(weight_gradient, *step_gradients)
        ctx.dtypes = [weight.dtype, *(step.dtype for step in steps)]
        return total

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        scaled = []
        for saved, dtype in zip(ctx.saved_tensors, ctx.dtypes, strict=True):
            scaled.append((saved * gradients[0]).to(dtype))
        weight_gradient, *step_gradients = scaled
        return weight_gradient, None, None, *step_gradients


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
        keys = [step_key[:, :, :rows] for step_key in self._keys]
        values = [step_value[:, :, :rows] for step_value in self._values]
        return merged_attention(query.to(value.dtype), keys, values).transpose(1, 2)


def merged_attention(query: Tensor, keys: list[Tensor], values: list[Tensor]) -> Tensor:
    """Causal attention over the first step's keys and, of each later step, the same row's key, in one softmax.

    Queries [B, H, q, d], and for each step keys and values [B, K, q, d], K dividing H -> [B, H, q, d]; gradients flow
    to everything.
    """
    group = query.shape[1] // keys[0].shape[1]
    first_key = keys[0].repeat_interleave(group, dim=1)
    first_value = values[0].repeat_interleave(group, dim=1)
    if len(keys) == 1:
        later_keys = query.new_zeros(0, *keys[0].shape)
        later_values = later_keys
    else:
        later_keys = torch.stack(keys[1:])
        later_values = torch.stack(values[1:])
    output: Any = _MergedAttention.apply(query, first_key, first_value, later_keys, later_values)
    return output


class _MergedAttention(Function):
    """Flash attention over the first keys; the other steps are merged into it by log-sum-exp, in float32.

    On CUDA torch's memory-efficient kernel replaces the CPU's flash kernel.

    The flash kernel's backward rebuilds the probabilities of its keys from each row's output and log-sum-exp. From the
    merged ones it yields the merged softmax's gradients for these keys; those of the few other keys are added here.
    """

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, later_keys: Tensor, later_values: Tensor
    ) -> Tensor:
        output, log_sum = _flash(query, key, value)
        if len(later_keys):
            rows = query.shape[2]
            scores = _same_row_scores(query, later_keys)
            merged = torch.logsumexp(torch.cat([log_sum[None, ..., :rows], scores]), dim=0)
            from_first = (log_sum[..., :rows] - merged).exp()[..., None] * output
            weights = _grouped((scores - merged).exp(), later_keys)
            from_later = torch.einsum("ibkgq,ibkqd->bkgqd", weights, _wide(later_values))
            output = (from_first + from_later.flatten(1, 2)).to(query.dtype)
            log_sum = log_sum.clone()
            log_sum[..., :rows] = merged
        ctx.save_for_backward(query, key, value, later_keys, later_values, output, log_sum)
        return output

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        query, key, value, later_keys, later_values, output, log_sum = ctx.saved_tensors
        gradient = gradients[0].to(query.dtype)
        query_gradient, key_gradient, value_gradient = _flash_backward(gradient, query, key, value, output, log_sum)
        if not len(later_keys):
            return query_gradient, key_gradient, value_gradient, None, None

        scale = 1 / math.sqrt(query.shape[-1])
        kv_heads = later_keys.shape[2]
        scores = _same_row_scores(query, later_keys)
        weights = _grouped((scores - log_sum[..., : query.shape[2]]).exp(), later_keys)
        output_gradient = _wide(gradient).unflatten(1, (kv_heads, -1))
        level = (output_gradient * _wide(output).unflatten(1, (kv_heads, -1))).sum(-1)
        weight_gradient = torch.einsum("bkgqd,ibkqd->ibkgq", output_gradient, _wide(later_values))
        score_gradient = weights * (weight_gradient - level) * scale

        from_later = torch.einsum("ibkgq,ibkqd->bkgqd", score_gradient, _wide(later_keys)).flatten(1, 2)
        query_gradient = query_gradient + from_later
        grouped_query = _wide(query).unflatten(1, (kv_heads, -1))
        later_key_gradient = torch.einsum("ibkgq,bkgqd->ibkqd", score_gradient, grouped_query)
        later_value_gradient = torch.einsum("ibkgq,bkgqd->ibkqd", weights, output_gradient)
        return (
            query_gradient.to(query.dtype),
            key_gradient,
            value_gradient,
            later_key_gradient.to(query.dtype),
            later_value_gradient.to(query.dtype),
        )


def _wide(tensor: Tensor) -> Tensor:
    """In float32 at least."""
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


def _grouped(weights: Tensor, later_keys: Tensor) -> Tensor:
    """[steps, B, H, q] -> [steps, B, K, H // K, q]."""
    return weights.unflatten(2, (later_keys.shape[2], -1))


def _same_row_scores(query: Tensor, later_keys: Tensor) -> Tensor:
    """[B, H, q, d] and [steps, B, K, q, d] -> scaled scores of the same row, [steps, B, H, q]."""
    grouped = _wide(query).unflatten(1, (later_keys.shape[2], -1)) / math.sqrt(query.shape[-1])
    return torch.einsum("bkgqd,ibkqd->ibkgq", grouped, _wide(later_keys)).flatten(2, 3)


def _flash(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """Causal attention and its log-sum-exp [B, H, >= q], which GPU kernels pad."""
    if query.is_cuda:
        output, log_sum, *_ = _ATEN._scaled_dot_product_efficient_attention(query, key, value, None, True, 0.0, True)
    else:
        output, log_sum = _ATEN._scaled_dot_product_flash_attention_for_cpu(query, key, value, 0.0, True)
    return output, log_sum


def _flash_backward(
    gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, output: Tensor, log_sum: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    if query.is_cuda:
        # In 16 bits the kernel reads the output as [B, q, H, d] in memory, whatever its strides say.
        output = output.transpose(1, 2).contiguous().transpose(1, 2)
        unused = torch.zeros((), dtype=torch.long)
        gradients_needed = [True, True, True, False]
        return _ATEN._scaled_dot_product_efficient_attention_backward(
            gradient, query, key, value, None, output, log_sum, unused, unused, 0.0, gradients_needed, True
        )[:3]
    return _ATEN._scaled_dot_product_flash_attention_for_cpu_backward(
        gradient, query, key, value, output, log_sum, 0.0, True
    )
