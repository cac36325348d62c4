"""Batches: several states joined into one, padded on the left."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from transformers.cache_utils import Cache

from keepsight.runtime.state import entries
from keepsight.runtime.layer import KeptLayer, LayerEntries
from keepsight.runtime.state import State


def join(states: list[State]) -> State:
    """Several states, such as those of one prompt under several methods, as one batch.

    The joined state has no trace: it is for decoding.
    """
    cache, mask = stack([state.cache for state in states], [state.mask for state in states])
    return State(
        cache,
        mask,
        torch.cat([state.logits for state in states]),
        torch.cat([_padded_tokens(state, max(each.tokens.shape[1] for each in states)) for state in states]),
        torch.cat([state.lengths for state in states]),
    )


def _padded_tokens(state: State, longest: int) -> Tensor:
    return functional.pad(state.tokens, (longest - state.tokens.shape[1], 0))


def stack(caches: Sequence[Cache], masks: Sequence[Tensor | None]) -> tuple[Cache, Tensor | None]:
    """Join caches along the batch, padded on the left to the longest; the logical length is that of the longest.

    Args:
        caches: Of the same number of layers.
        masks: For each cache, [B, C] bool, False for padding; None when nothing is, or when its layers know it.

    Returns:
        The joined cache, and the mask [sum of batches, C] bool that is False for padding; None when nothing is padded,
        or when padding differs by head and the layers know it.
    """
    parts = [entries(cache) for cache in caches]
    if any(layer.real is not None for part in parts for layer in part):
        return _stack_by_head(caches, masks, parts), None
    longest = max(part[0].keys.shape[2] for part in parts)
    layers: list[Any] = [
        KeptLayer(
            torch.cat([_pad(each.keys, longest) for each in column]),
            torch.cat([_pad(each.values, longest) for each in column]),
            _seen(caches),
        )
        for column in zip(*parts, strict=True)
    ]
    mask = torch.cat([_real(part[0], mask, longest)[:, 0] for part, mask in zip(parts, masks, strict=True)])
    return Cache(layers=layers), None if bool(mask.all()) else mask


def _stack_by_head(
    caches: Sequence[Cache], masks: Sequence[Tensor | None], parts: Sequence[Sequence[LayerEntries]]
) -> Cache:
    layers: list[Any] = []
    for column in zip(*parts, strict=True):
        longest = max(each.keys.shape[2] for each in column)
        layers.append(
            KeptLayer(
                torch.cat([_pad(each.keys, longest) for each in column]),
                torch.cat([_pad(each.values, longest) for each in column]),
                _seen(caches),
                torch.cat([_real(each, mask, longest) for each, mask in zip(column, masks, strict=True)]),
            )
        )
    return Cache(layers=layers)


def _real(layer: LayerEntries, mask: Tensor | None, longest: int) -> Tensor:
    """[B, K, longest] bool: which entries are real once they are padded on the left; `mask` as for `stack`."""
    real = layer.real
    if real is None:
        real = layer.keys.new_ones(layer.keys.shape[:3], dtype=torch.bool)
        real = real if mask is None else real & mask[:, None]
    return functional.pad(real, (longest - real.shape[2], 0))


def _pad(tensor: Tensor, length: int) -> Tensor:
    return functional.pad(tensor, (0, 0, length - tensor.shape[2], 0))


def _seen(caches: Sequence[Cache]) -> int:
    return max(cache.get_seq_length() for cache in caches)
