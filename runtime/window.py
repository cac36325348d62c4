"""The observation window: the last prompt tokens observe, with the queries kept when they were read."""

import torch
from torch import Tensor

from keepsight.errors import UserError
from keepsight.runtime.importance import observed_attention
from keepsight.runtime.read_layer import ReadLayer


def window_attention(layer: ReadLayer, wanted: int, reduction: str) -> Tensor:
    """Attention of a layer's last queries to all its entries, [B, H, C] float32 (SnapKV, section 4).

    Args:
        layer: The layer.
        wanted: Number of observing queries; those held where they are fewer.
        reduction: Reduction over the queries; see `observed_attention`.

    Raises:
        UserError: no query is held.
    """
    rows, seen = held_rows(layer.queries, wanted), layer.attended
    assert layer.queries is not None and layer.softmax is not None
    return observed_attention(
        layer.queries[:, :, -rows:],
        seen.keys,
        layer.softmax,
        seen.keys.shape[2],
        key_mask=seen.real,
        query_mask=None if layer.real_tokens is None else layer.real_tokens[:, -rows:],
        ahead=None if layer.ahead is None else layer.ahead[:, -rows:],
        reduction=reduction,
    )


def held_rows(queries: Tensor | None, wanted: int) -> int:
    """How many of the last `wanted` tokens' queries [B, H, w, d] are there to observe with.

    Raises:
        UserError: none were recorded, or all of their entries may have been evicted.
    """
    held = 0 if queries is None else queries.shape[2]
    if not held:
        raise UserError(
            f"no query is left of the {wanted} that should observe: prefill with needs=method.needs(), and where an "
            "evicted cache is evicted again, let the method keep its window"
        )
    return min(wanted, held)


def combine(of_window: Tensor, of_draft: Tensor, rows: int, real: Tensor, reduction: str) -> Tensor:
    """Combine what a prompt's last queries and a draft observe in a layer.

    Args:
        of_window: [B, H, C] float32, reduced over the window's queries.
        of_draft: The same, reduced over the draft's queries.
        rows: Number of the window's queries.
        real: [B, T] bool, False where the draft is padding.
        reduction: `mean` or `max`, as both were reduced.
    """
    if reduction == "max":
        return torch.maximum(of_window, of_draft)
    drafted = real.sum(dim=1)[:, None, None].to(of_draft.device)
    return (of_window * rows + of_draft * drafted) / (rows + drafted)
