"""Cache layers: entries after eviction, and entries as observers see them.

Layers store KV heads, never query heads. A layer's *logical* length counts the tokens seen and determines positions;
its *physical* length counts the entries held. KV heads with different numbers of entries are stored concatenated
(`RaggedLayer`), and padded on the left, one layer at a time, while they are attended to.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional
from transformers.cache_utils import Cache, DynamicLayer
from typing_extensions import override

from keepsight.errors import UserError

ROOM = 64
"""Entries for which layers, and the keys of a retrieval head, make room when they grow; memory plans count it."""


class PaddedKeys(NamedTuple):
    """Keys with padding that differs by head, as a layer hands them to the attention function.

    Attributes:
        keys: [B, K, S, d].
        real: [B, K, S] bool, False for padding.
    """

    keys: Tensor
    real: Tensor


class LayerEntries(NamedTuple):
    """The entries of one layer.

    Attributes:
        keys: [B, K, C, d], as the model computed them: RoPE at the original positions.
        values: [B, K, C, d].
        real: [B, K, C] bool, False for padding on the left; None when all are real, or a mask of the batch marks it.
    """

    keys: Tensor
    values: Tensor
    real: Tensor | None


class KeptLayer(DynamicLayer):
    """The same number of entries in each KV head, and room for more.

    Args:
        keys: [B, K, C, d].
        values: [B, K, C, d].
        seen: Logical length: tokens seen so far, evicted ones included.
        real: [B, K, C] bool, for entries that were padded to one length; None otherwise.
    """

    keys: Tensor
    values: Tensor

    def __init__(self, keys: Tensor, values: Tensor, seen: int, real: Tensor | None = None) -> None:
        super().__init__()
        self.lazy_initialization(keys, values)
        self.keys, self.values, self.seen, self.real = keys, values, seen, real
        self._room: tuple[Tensor, Tensor] | None = None
        self._shared = 0  # number of first entries that other layers may hold too

    @override
    def update(self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object) -> Any:
        self.seen += key_states.shape[-2]
        self._append(key_states, value_states)
        if self.real is None:
            return self.keys, self.values
        self.real = functional.pad(self.real, (0, key_states.shape[-2]), value=True)
        return PaddedKeys(self.keys, self.real), self.values

    def _append(self, keys: Tensor, values: Tensor) -> None:
        """Append in place where there is room: copying all entries for every token would cost more than attention.

        The room belongs to this layer alone; memory shared with other layers is never written.
        """
        before, after = self.keys.shape[2], self.keys.shape[2] + keys.shape[2]
        if self._room is None or after > self._room[0].shape[2]:
            grown = 0, 0, 0, after + ROOM - before
            self._room, self._shared = (functional.pad(self.keys, grown), functional.pad(self.values, grown)), 0
        for room, new in zip(self._room, (keys, values), strict=True):
            room[:, :, before:after] = new
        self.keys, self.values = (room[:, :, :after] for room in self._room)

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
        if self.keys.shape[2] < self._shared:
            self._room = None  # what comes next would overwrite what others hold
        if self.real is not None:
            self.real = self.real[..., : self.keys.shape[-2]]

    def entries(self) -> LayerEntries:
        """All entries."""
        return LayerEntries(self.keys, self.values, self.real)

    def share(self) -> "KeptLayer":
        """An independent layer over the same tensors."""
        self._shared = self.keys.shape[2]
        return KeptLayer(self.keys, self.values, self.seen, self.real)


class RaggedLayer(KeptLayer):
    """Different numbers of entries per KV head, stored without padding; entries appended later have one length.

    Args:
        kept_keys: [total, d], concatenated over heads, then rows.
        kept_values: [total, d].
        counts: [B, K] int64: entries of each head; they sum up to `total`.
        seen: Logical length.
        appended: Keys and values [B, K, T, d] appended since; none by default.
    """

    def __init__(
        self,
        kept_keys: Tensor,
        kept_values: Tensor,
        counts: Tensor,
        seen: int,
        appended: tuple[Tensor, Tensor] | None = None,
    ) -> None:
        empty = kept_keys.new_empty(*counts.shape, 0, kept_keys.shape[-1])
        super().__init__(*(appended or (empty, empty)), seen)
        self.kept_keys, self.kept_values, self.counts = kept_keys, kept_values, counts

    @override
    def update(self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object) -> Any:
        super().update(key_states, value_states)
        keys, values, real = self.entries()
        assert real is not None
        return PaddedKeys(keys, real), values

    @override
    def entries(self) -> LayerEntries:
        """All entries, padded on the left to the longest head."""
        longest = int(self.counts.max())
        real = torch.arange(longest, device=self.counts.device) >= longest - self.counts[..., None]
        keys, values = (
            torch.cat([_unpack(kept, real), appended], dim=2)
            for kept, appended in ((self.kept_keys, self.keys), (self.kept_values, self.values))
        )
        return LayerEntries(keys, values, functional.pad(real, (0, self.keys.shape[2]), value=True))

    @override
    def crop(self, tokens_to_remove: int) -> None:
        if -tokens_to_remove > (appended := self.keys.shape[2]):
            raise UserError(
                f"crop: cannot remove {-tokens_to_remove} tokens, only the {appended} that were read since the last "
                "eviction; keep a copy of the state from before instead"
            )
        super().crop(tokens_to_remove)

    @override
    def share(self) -> "RaggedLayer":
        self._shared = self.keys.shape[2]
        return RaggedLayer(self.kept_keys, self.kept_values, self.counts, self.seen, (self.keys, self.values))


class ViewedLayer(DynamicLayer):
    """Entries as observers see them: observers see what they append, but it is never stored."""

    keys: Tensor
    values: Tensor

    def __init__(self, keys: Tensor, values: Tensor, real: Tensor | None = None) -> None:
        super().__init__()
        self.lazy_initialization(keys, values)
        self.keys, self.values, self.real = keys, values, real

    @override
    def update(self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object) -> Any:
        keys = torch.cat([self.keys, key_states], dim=-2)
        values = torch.cat([self.values, value_states], dim=-2)
        if self.real is None:
            return keys, values
        return PaddedKeys(keys, functional.pad(self.real, (0, key_states.shape[-2]), value=True)), values


def _unpack(packed: Tensor, real: Tensor) -> Tensor:
    """[total, d] -> [B, K, C, d], zeros where `real` is False."""
    padded = packed.new_zeros(*real.shape, packed.shape[-1])
    padded[real] = packed
    return padded


def entries(cache: Cache) -> list[LayerEntries]:
    """The entries of each layer, padded where its heads differ."""
    return [
        layer.entries() if isinstance(layer, KeptLayer) else LayerEntries(layer.keys, layer.values, None)  # type: ignore[union-attr, arg-type]
        for layer in cache.layers
    ]


def view(cache: Cache, length: int | None = None) -> Cache:
    """The first `length` entries of every layer (all by default), read-only; only ragged layers are copied."""
    layers: list[Any] = [
        ViewedLayer(keys[..., :length, :], values[..., :length, :], None if real is None else real[..., :length])
        for keys, values, real in entries(cache)
    ]
    return Cache(layers=layers)


def share(cache: Cache) -> Cache:
    """An independent cache of the same entries, without copies: appending to one leaves the other unchanged."""
    seen = cache.get_seq_length()
    layers: list[Any] = [
        layer.share() if isinstance(layer, KeptLayer) else KeptLayer(layer.keys, layer.values, seen)  # type: ignore[union-attr, arg-type]
        for layer in cache.layers
    ]
    return Cache(layers=layers)


def keep(cache: Cache, kept: Sequence[Tensor]) -> Cache:
    """A new cache with only the kept entries; the given one is untouched.

    Args:
        cache: A cache of L layers.
        kept: L tensors [B, K, C] bool: which entries stay. Where their number is the same in all layers and heads the
            new layers are dense, otherwise all of them are ragged.
    """
    seen = cache.get_seq_length()
    counts = [mask.sum(dim=-1) for mask in kept]
    first = int(counts[0].flatten()[0])
    alike = all(bool((count == first).all()) for count in counts)
    layers: list[Any] = []
    for (keys, values, _), mask, count in zip(entries(cache), kept, counts, strict=True):
        rows = mask.flatten().nonzero()[:, 0]
        # Whole rows are copied: indexing by the mask itself would copy number by number.
        packed = [each.reshape(-1, each.shape[-1]).index_select(0, rows) for each in (keys, values)]
        if alike:
            shape = (*keys.shape[:2], first, -1)
            layers.append(KeptLayer(packed[0].view(shape), packed[1].view(shape), seen))
        else:
            layers.append(RaggedLayer(packed[0], packed[1], count, seen))
    return Cache(layers=layers)


def cache_bytes(cache: Cache) -> int:
    """Bytes of all keys and values: entries of all layers, rows and KV heads x head dimension x 2 x item size.

    The 8 bytes a head of a ragged layer's counts are not in it.
    """
    total = 0
    layers: list[Any] = cache.layers
    for layer in layers:
        held = [layer.keys, layer.values]
        if isinstance(layer, RaggedLayer):
            held += [layer.kept_keys, layer.kept_values]
        total += sum(tensor.numel() * tensor.element_size() for tensor in held)
    return total
