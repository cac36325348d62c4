"""The layers of a cache: the entries that are kept, and room for more.

Layers store KV heads, never query heads. A layer's *logical* length counts the tokens seen and determines positions;
its *physical* length counts the entries held. KV heads with different numbers of entries are stored concatenated
(`RaggedLayer`), and padded on the left once they are read from.
"""

import copy
import math
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional
from transformers.cache_utils import DynamicLayer
from typing_extensions import override

from keepsight.errors import UserError
from keepsight.runtime.rounding import Counts

ROOM = 64
"""Least room, in entries, that a cache adds when it grows; memory plans count it."""
GROWTH = 1 / 16
"""Room that it adds, as a share of the entries held, where that is more; memory plans count it."""


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


def spare(count: int) -> int:
    """Entries to make room for beyond `count`: a share of them, so that they are not copied again and again."""
    return max(ROOM, int(count * GROWTH))


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
        self._real_room: Tensor | None = None
        self._shared = 0  # number of first entries that other layers may hold too

    @override
    def update(self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object) -> Any:
        self.seen += key_states.shape[-2]
        self._append(key_states, value_states)
        return self.keys, self.values

    @property
    def returned(self) -> Tensor | None:
        """[B, K, S] bool: which of the keys that `update` has returned are real; None for all that a mask shows."""
        return self.real

    def _append(self, keys: Tensor, values: Tensor) -> None:
        """Append in place where there is room: copying all entries for every token would cost more than attention.

        The room belongs to this layer alone; memory shared with other layers is never written.
        """
        before, after = self.keys.shape[2], self.keys.shape[2] + keys.shape[2]
        if self._room is None or after > self._room[0].shape[2]:
            grown = 0, 0, 0, after + spare(after) - before
            self._room, self._shared = (functional.pad(self.keys, grown), functional.pad(self.values, grown)), 0
            if self.real is not None:
                self._real_room = functional.pad(self.real, grown[2:], value=True)
        for room, new in zip(self._room, (keys, values), strict=True):
            room[:, :, before:after] = new
        self.keys, self.values = (room[:, :, :after] for room in self._room)
        if self._real_room is not None:
            self.real = self._real_room[..., :after]

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

    From the first update on all entries are held in one padded form, to which tokens are appended in place. How many
    each head has is known without waiting for the device.

    Args:
        kept_keys: [total, d], concatenated over heads, then rows.
        kept_values: [total, d].
        counts: [B, K], entries of each head; they sum up to `total`.
        seen: Logical length.
        appended: Keys and values [B, K, T, d] appended since; none by default.
    """

    def __init__(
        self,
        kept_keys: Tensor,
        kept_values: Tensor,
        counts: Counts,
        seen: int,
        appended: tuple[Tensor, Tensor] | None = None,
    ) -> None:
        keys, values = (kept.new_empty(*counts.shape, 0, kept.shape[-1]) for kept in (kept_keys, kept_values))
        super().__init__(*(appended or (keys, values)), seen)
        self.counts = counts
        self._held: tuple[Tensor, Tensor] | KeptLayer = kept_keys, kept_values  # packed, or padded with what came since

    @property
    def kept_keys(self) -> Tensor:
        """[total, d], concatenated over heads, then rows."""
        return self._packed(0)

    @property
    def kept_values(self) -> Tensor:
        """[total, d]."""
        return self._packed(1)

    def _packed(self, part: int) -> Tensor:
        if not isinstance(self._held, KeptLayer):
            return self._held[part]
        entries = self._held.entries()
        kept = slice(None, entries.keys.shape[2] - self.keys.shape[2])
        assert entries.real is not None
        return (entries.keys, entries.values)[part][:, :, kept][entries.real[..., kept]]

    @property
    def kept_bytes(self) -> int:
        """Bytes of the kept keys and values, without padding."""
        if not isinstance(self._held, KeptLayer):
            return sum(each.nbytes for each in self._held)
        row = self.keys.shape[-1] * self.keys.element_size() + self.values.shape[-1] * self.values.element_size()
        return int(self.counts.sum()) * row

    @override
    def _append(self, keys: Tensor, values: Tensor) -> None:
        if not isinstance(self._held, KeptLayer):
            padded, of_values, real = self.entries()
            self._held = KeptLayer(padded, of_values, self.seen, real)
        longest = self._held.keys.shape[2] - self.keys.shape[2]
        self._held._append(keys, values)
        self.keys, self.values = (each[:, :, longest:] for each in (self._held.keys, self._held.values))

    @override
    def update(self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object) -> Any:
        super().update(key_states, value_states)
        keys, values, _ = self.entries()
        return keys, values

    @property
    @override
    def returned(self) -> Tensor | None:
        return self._held.real if isinstance(self._held, KeptLayer) else None

    @override
    def entries(self) -> LayerEntries:
        """All entries, padded on the left to the longest head."""
        if isinstance(self._held, KeptLayer):
            return self._held.entries()
        real, device = _padded(self.counts), self.keys.device
        places = torch.from_numpy(np.flatnonzero(real)).to(device, non_blocking=True)
        keys, values = (
            torch.cat([_unpack(kept, places, real.shape), appended], dim=2)
            for kept, appended in zip(self._held, (self.keys, self.values), strict=True)
        )
        marks = torch.from_numpy(real).to(device, non_blocking=True)
        return LayerEntries(keys, values, functional.pad(marks, (0, self.keys.shape[2]), value=True))

    @override
    def crop(self, tokens_to_remove: int) -> None:
        if -tokens_to_remove > (appended := self.keys.shape[2]):
            raise UserError(
                f"crop: cannot remove {-tokens_to_remove} tokens, only the {appended} that were read since the last "
                "eviction; keep a copy of the state from before instead"
            )
        super().crop(tokens_to_remove)
        if isinstance(self._held, KeptLayer):
            self._held.crop(tokens_to_remove)

    @override
    def share(self) -> "RaggedLayer":
        twin = copy.copy(self)
        if isinstance(self._held, KeptLayer):
            twin._held = self._held.share()
        return twin


def _unpack(packed: Tensor, places: Tensor, shape: tuple[int, ...]) -> Tensor:
    """[total, d] -> [B, K, C, d] of the shape [B, K, C], zeros but at the places [total] int64 of all B x K x C."""
    padded = packed.new_zeros(math.prod(shape), packed.shape[1])
    return padded.index_copy_(0, places, packed).view(*shape, packed.shape[1])


def _padded(counts: Counts) -> NDArray[np.bool_]:
    """[B, K, C] bool, C being the largest of the counts [B, K]: False for padding on the left."""
    longest = counts.max()
    return np.arange(longest) >= longest - counts[..., None]
