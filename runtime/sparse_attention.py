"""Exact attention under SpecKV's sparse mask: a local band and, per KV head, some vertical columns.

Query i sees key t <= i when t is in the band, t >= 64 * floor(i / 64) - band, or one of the columns of its KV head
(SpecKV, arXiv 2506.08373, section 4.2; the mask of the 64 x 64 kernel in its code). The band starts at a multiple of
64, so it holds between band + 1 and band + 64 keys.
"""

from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from keepsight.runtime.attention import Softmax, grouped_attention

BLOCK = 64
_FLEX_BLOCK = 128
_FLEX_LEAST_WIDTH = 16  # FlexAttention's kernels take no smaller head dimension


def sparse_attention(query: Tensor, key: Tensor, value: Tensor, columns: Tensor, band: int, softmax: Softmax) -> Tensor:
    """Attention of N queries to N keys under the module's mask; no N x N tensor is made.

    On CUDA FlexAttention computes it, which has not been run on a GPU.

    Args:
        query: [B, H, N, d].
        key: [B, K, N, d].
        value: [B, K, N, d].
        columns: [B, K, V] int64, ascending: each KV head's vertical columns.
        band: Multiple of 64.
        softmax: The layer's.

    Returns:
        [B, N, H, d], contiguous.
    """
    plain = softmax.softcap is None and softmax.sinks is None
    if plain and query.is_cuda and query.shape[-1] >= _FLEX_LEAST_WIDTH:
        return by_flex(query, key, value, columns, band, softmax.scaling, _compiled())
    return by_blocks(query, key, value, columns, band, softmax)


def by_blocks(query: Tensor, key: Tensor, value: Tensor, columns: Tensor, band: int, softmax: Softmax) -> Tensor:
    """`sparse_attention`, 64 queries at a time over nothing but their band and the columns before it."""
    length = query.shape[2]
    first_keys, first_values = _at_columns(key, columns), _at_columns(value, columns)
    later = torch.ones(BLOCK, BLOCK, dtype=torch.bool, device=query.device).triu(1)
    blocks = []
    for start in range(0, length, BLOCK):
        end, left = min(start + BLOCK, length), max(start - band, 0)
        before = columns < left  # [B, K, V]; columns ascend, so these come first
        count = int(before.sum(dim=-1).max())
        keys, values = (
            torch.cat([each[:, :, :count], every[:, :, left:end]], dim=2)
            for each, every in ((first_keys, key), (first_values, value))
        )
        # Added to the logits, not a bool mask: sdpa on a CPU takes twice as long with one.
        hidden = query.new_zeros(*columns.shape[:2], end - start, keys.shape[2])
        hidden[..., :count].masked_fill_(~before[:, :, None, :count], -torch.inf)
        hidden[..., count + start - left :].masked_fill_(later[: end - start, : end - start], -torch.inf)
        blocks.append(grouped_attention(query[:, :, start:end], keys, values, hidden, softmax))
    return torch.cat(blocks, dim=1)


def by_flex(
    query: Tensor, key: Tensor, value: Tensor, columns: Tensor, band: int, scaling: float, flex: Any = flex_attention
) -> Tensor:
    """`sparse_attention` as one FlexAttention over the columns' keys followed by all keys.

    Gathered and ascending, the columns that a query block sees are the first ones, so that whole blocks of them can be
    skipped; left among the other keys, hardly any block of the prompt would be without one.
    """
    mask = block_mask(columns, query.shape[1], query.shape[2], band)
    keys, values = (torch.cat([_at_columns(each, columns), each], dim=2) for each in (key, value))
    output: Tensor = flex(query, keys, values, block_mask=mask, scale=scaling, enable_gqa=True)
    return output.transpose(1, 2).contiguous()


def block_mask(columns: Tensor, heads: int, length: int, band: int) -> BlockMask:
    """The mask of `by_flex`, made from the columns alone: neither N x N nor slow to build.

    Args:
        columns: See `sparse_attention`.
        heads: H.
        length: N.
        band: See `sparse_attention`.
    """
    count, group = columns.shape[-1], heads // columns.shape[1]
    keys = count + length

    def seen(batch: Tensor, head: Tensor, row: Tensor, place: Tensor) -> Tensor:
        left = row // BLOCK * BLOCK - band
        position = place - count
        vertical = columns[batch, head // group, place.clamp(max=count - 1)] < left
        return torch.where(place < count, vertical, (position >= left) & (position <= row))

    first_row = torch.arange(0, length, _FLEX_BLOCK, device=columns.device)[:, None]
    last_row = (first_row + _FLEX_BLOCK - 1).clamp(max=length - 1)
    first_place = torch.arange(0, keys, _FLEX_BLOCK, device=columns.device)
    last_place = (first_place + _FLEX_BLOCK - 1).clamp(max=keys - 1)
    local = (first_place - count <= last_row) & (last_place - count >= first_row // BLOCK * BLOCK - band)
    local = local & (last_place >= count)
    smallest = columns[..., first_place.clamp(max=count - 1)][..., None, :]  # [B, K, 1, key blocks]
    vertical = (smallest < last_row // BLOCK * BLOCK - band) & (first_place < count)
    needed = (local | vertical).repeat_interleave(group, dim=1)
    return BlockMask.from_kv_blocks(
        needed.sum(dim=-1, dtype=torch.int32),
        needed.int().argsort(dim=-1, descending=True, stable=True).int(),
        BLOCK_SIZE=_FLEX_BLOCK,
        mask_mod=seen,
        seq_lengths=(length, keys),
    )


def _at_columns(tensor: Tensor, columns: Tensor) -> Tensor:
    return tensor.gather(2, columns[..., None].expand(-1, -1, -1, tensor.shape[-1]))


@cache
def _compiled() -> Any:
    return torch.compile(flex_attention)
