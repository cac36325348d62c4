"""The observation window: the last prompt tokens observe, with the queries kept when they were read."""

import torch
from torch import Tensor
from transformers import PreTrainedModel

from keepsight.errors import UserError
from keepsight.runtime.importance import observed_attention
from keepsight.runtime.latents import attended_entries
from keepsight.runtime.state import State


def window_attention(model: PreTrainedModel, state: State, rows: int, reduction: str) -> list[Tensor]:
    """Attention of the last `rows` queries to all entries, for each layer [B, H, C] float32 (SnapKV, section 4)."""
    row_mask = None if state.tokens_mask is None else state.tokens_mask[:, -rows:]
    return [
        observed_attention(
            queries[:, :, -rows:],
            each.keys,
            softmax,
            each.keys.shape[2],
            key_mask=each.real,
            query_mask=row_mask,
            reduction=reduction,
        )
        for queries, each, softmax in zip(
            state.trace.queries, attended_entries(model, state), state.trace.softmax, strict=True
        )
    ]


def held_rows(state: State, wanted: int) -> int:
    """How many of the last `wanted` queries are there to observe with.

    Raises:
        UserError: none were recorded, or all of their entries may have been evicted.
    """
    held = state.trace.queries[0].shape[2] if state.trace.queries else 0
    if not held:
        raise UserError(
            f"no query is left of the {wanted} that should observe: prefill with needs=method.needs(), and where an "
            "evicted cache is evicted again, let the method keep its window"
        )
    return min(wanted, held)


def combine(of_window: list[Tensor], of_draft: list[Tensor], rows: int, real: Tensor, reduction: str) -> list[Tensor]:
    """Combine what a prompt's last queries and a draft observe.

    Args:
        of_window: For each layer, [B, H, C] float32, reduced over the window's queries.
        of_draft: The same, reduced over the draft's queries.
        rows: Number of the window's queries.
        real: [B, T] bool, False where the draft is padding.
        reduction: `mean` or `max`, as both were reduced.
    """
    if reduction == "max":
        return [torch.maximum(*pair) for pair in zip(of_window, of_draft, strict=True)]
    drafted = real.sum(dim=1)[:, None, None]
    return [
        (window * rows + draft * drafted) / (rows + drafted) for window, draft in zip(of_window, of_draft, strict=True)
    ]
