"""Cache layers of our own: entries after eviction, and a prompt's entries as observers see them.

Every layer stores KV heads, never query heads. A layer's *logical* length counts the tokens seen, from which positions
follow; its *physical* length counts the entries it holds.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from transformers.cache_utils import Cache, DynamicLayer
from typing_extensions import override


class KeptLayer(DynamicLayer):
    """Entries that survived an eviction, and those appended since.

    Args:
        keys: [B, K, C, d], as the model computed them: RoPE at the original positions.
        values: [B, K, C, d].
        seen: Logical length: tokens seen so far, evicted ones included.
    """

    keys: Tensor
    values: Tensor

    def __init__(self, keys: Tensor, values: Tensor, seen: int) -> None:
        super().__init__()
        self.lazy_initialization(keys, values)
        self.keys, self.values, self.seen = keys, values, seen

    @override
    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        self.seen += key_states.shape[-2]
        return super().update(key_states, value_states)

    @override
    def get_seq_length(self) -> int:
        return self.seen

    @override
    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        physical = self.keys.shape[-2]
        return physical + query_length, self.seen - physical

    @override
    def crop(self, tokens_to_remove: int) -> None:
        super().crop(tokens_to_remove)
        self.seen += tokens_to_remove


class ViewedLayer(DynamicLayer):
    """A prompt's entries as observers see them: what observers append is seen by them and never stored."""

    keys: Tensor
    values: Tensor

    def __init__(self, keys: Tensor, values: Tensor) -> None:
        super().__init__()
        self.lazy_initialization(keys, values)
        self.keys, self.values = keys, values

    @override
    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        return torch.cat([self.keys, key_states], dim=-2), torch.cat([self.values, value_states], dim=-2)


def entries(cache: Cache) -> list[tuple[Tensor, Tensor]]:
    """Keys and values [B, K, C, d] of each layer."""
    return [(layer.keys, layer.values) for layer in cache.layers]  # type: ignore[union-attr, misc]


def view(cache: Cache, length: int | None = None) -> Cache:
    """The first `length` entries of every layer (all by default), read-only, without a copy."""
    layers: list[Any] = [ViewedLayer(keys[..., :length, :], values[..., :length, :]) for keys, values in entries(cache)]
    return Cache(layers=layers)


def share(cache: Cache) -> Cache:
    """The same entries in a cache of its own, without copying tensors: appending to one leaves the other alone."""
    layers: list[Any] = [KeptLayer(keys, values, cache.get_seq_length()) for keys, values in entries(cache)]
    return Cache(layers=layers)


def keep(cache: Cache, kept: Sequence[Tensor]) -> Cache:
    """A new cache with only the kept entries; the given one is untouched.

    Args:
        cache: Of L layers.
        kept: L tensors [B, K, C] int64 of entry indices.
    """
    layers: list[Any] = []
    for (keys, values), indices in zip(entries(cache), kept, strict=True):
        index = indices[..., None].expand(-1, -1, -1, keys.shape[-1])
        layers.append(KeptLayer(keys.gather(2, index), values.gather(2, index), cache.get_seq_length()))
    return Cache(layers=layers)


def stack(caches: Sequence[Cache]) -> tuple[Cache, Tensor | None]:
    """Join caches of one logical length along the batch, padded on the left to the longest.

    Returns:
        The joined cache, and the mask [sum of batches, C] bool that is False for padding; None when nothing is padded.
    """
    lengths = [entries(cache)[0][0].shape[2] for cache in caches]
    longest = max(lengths)
    layers: list[Any] = []
    for parts in zip(*(entries(cache) for cache in caches), strict=True):
        padded = [
            [functional.pad(part, (0, 0, longest - length, 0)) for part, length in zip(column, lengths, strict=True)]
            for column in zip(*parts, strict=True)
        ]
        layers.append(KeptLayer(torch.cat(padded[0]), torch.cat(padded[1]), caches[0].get_seq_length()))
    joined = Cache(layers=layers)
    if min(lengths) == longest:
        return joined, None
    first = [longest - length for cache, length in zip(caches, lengths, strict=True) for _ in range(_batch(cache))]
    device = layers[0].keys.device
    return joined, torch.arange(longest, device=device) >= torch.tensor(first, device=device)[:, None]


def cache_bytes(cache: Cache) -> int:
    """Bytes of all keys and values: layers x batch x KV heads x entries x head dimension x 2 x item size."""
    return sum(tensor.numel() * tensor.element_size() for pair in entries(cache) for tensor in pair)


def _batch(cache: Cache) -> int:
    return entries(cache)[0][0].shape[0]
