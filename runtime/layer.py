"""A layer of a cache: its KV entries, room for more, and what was recorded of the queries that read it.

Layers store KV heads, never query heads. A layer's *logical* length counts the tokens seen and determines positions;
its *physical* length counts the entries in memory. KV heads with different numbers of entries are stored concatenated
(`RaggedLayer`), and padded on the left once they are read from.
"""

import copy
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional
from transformers import PreTrainedModel
from transformers.cache_utils import DynamicLayer
from typing_extensions import override

from keepsight.errors import UserError
from keepsight.runtime.attention import Softmax
from keepsight.runtime.query_statistics import QueryStatistics

Counts: TypeAlias = NDArray[np.int64]

ROOM = 64
"""Least room, in entries, that a cache adds when it grows; memory plans count it."""
GROWTH = 1 / 16
"""Room that it adds, as a share of the entries in memory, where that is more; memory plans count it."""


class LayerEntries(NamedTuple):
    """The entries of one layer.

    Attributes:
        keys: [B, K, C, d], as the model computed them: RoPE at the original positions.
        values: [B, K, C, d].
        real: [B, 1 or K, C] bool, False for padding on the left; None when all are real.
    """

    keys: Tensor
    values: Tensor
    real: Tensor | None


@dataclass(frozen=True)
class Recorded:
    """What was recorded of a layer while tokens were read.

    Attributes:
        softmax: The layer's.
        queries: [B, H, w, d] of the last w tokens, after RoPE; None where none were asked for.
        query_mask: [B, w] bool, False where one of these tokens is padding; None when none is.
        ahead: [B, w] int64, how many tokens after its own each of them sees; None where none does. See
            `keepsight.runtime.importance.seen_ahead`.
        accumulated: [B, H, C] float32, the attention that each entry has received from all queries; None where it was
            not asked for.
        scores: By trained scorer, its numbers for each entry, [B, K x numbers, C] float32.
        statistics: Of all queries; None where they were not asked for.
    """

    softmax: Softmax
    queries: Tensor | None = None
    query_mask: Tensor | None = None
    ahead: Tensor | None = None
    accumulated: Tensor | None = None
    scores: Mapping[Any, Tensor] = field(default_factory=dict)
    statistics: QueryStatistics | None = None

    def last(self, rows: int) -> "Recorded":
        """The same with the queries of the last `rows` tokens alone."""
        if self.queries is None:
            return self
        start = max(self.queries.shape[2] - rows, 0)
        query_mask = None if self.query_mask is None else self.query_mask[:, start:]
        ahead = None if self.ahead is None else self.ahead[:, start:]
        return replace(self, queries=self.queries[:, :, start:], query_mask=query_mask, ahead=ahead)


def spare(count: int, least: int = ROOM) -> int:
    """Entries to make room for beyond `count`: a share of them, so that they are not copied again and again."""
    return max(least, int(count * GROWTH))


def room_after(count: int, room: int, appended: Iterable[int]) -> int:
    """Entries that there is room for once so many more were appended, one number after another; see `_append`."""
    for more in appended:
        count += more
        if count > room:
            room = count + spare(count)
    return room


class KeptLayer(DynamicLayer):
    """The same number of entries in each KV head, and room for more.

    Args:
        keys: [B, K, C, d]; None for a layer that has read nothing.
        values: [B, K, C, d]; None likewise.
        seen: Logical length: tokens seen so far, evicted ones included.
        real: [B, K, C] bool, False for keys returned by `update` that were padded to one length; attention then heeds
            it, and no mask of the model. None otherwise.

    Attributes:
        token_mask: [B, M] bool, False for left padding among the first tokens of a batch from which nothing was
            evicted; None for none. Attention takes it from the model's mask.
        expansion: Makes every head's keys and values of cached latents; None where the cache holds keys and values.
        origin: The model, and the index of the decoder layer that it belongs to; None for a layer without a model.
        recorded: What was recorded while tokens were read; None for nothing.
    """

    keys: Tensor
    values: Tensor
    token_mask: Tensor | None = None
    expansion: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]] | None = None
    origin: tuple[PreTrainedModel, int] | None = None
    recorded: Recorded | None = None

    def __init__(
        self, keys: Tensor | None = None, values: Tensor | None = None, seen: int = 0, real: Tensor | None = None
    ) -> None:
        super().__init__()
        if keys is not None and values is not None:
            self.lazy_initialization(keys, values)
            self.keys, self.values = keys, values
        self.seen, self.real = seen, real
        self._room: tuple[Tensor, Tensor] | None = None
        self._real_room: Tensor | None = None
        self._shared = 0  # number of first entries that other layers may hold too

    @override
    def update(self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object) -> Any:
        self.seen += key_states.shape[-2]
        if self.is_initialized:
            self._append(key_states, value_states)
        else:
            self.lazy_initialization(key_states, value_states)
            self.keys, self.values = key_states.contiguous(), value_states.contiguous()
        return self.keys, self.values

    @property
    def softmax(self) -> Softmax:
        """How the layer turns dot products into weights.

        Raises:
            UserError: nothing was recorded when its entries were read.
        """
        if self.recorded is None:
            raise UserError("nothing was recorded of the tokens read: prefill with needs=method.needs()")
        return self.recorded.softmax

    def _append(self, keys: Tensor, values: Tensor) -> None:
        """Append in place where there is room: copying all entries for every token would cost more than attention.

        The room belongs to this layer alone; memory shared with other layers is never written.
        """
        before, after = self.keys.shape[2], self.keys.shape[2] + keys.shape[2]
        if self._room is None or after > self._room[0].shape[2]:
            grown = 0, 0, 0, after + spare(after) - before
            keys_room = functional.pad(self.keys, grown)
            if self.values.shape[3]:
                values_room = functional.pad(self.values, grown)
            else:  # a retrieval head's, which torch 2.7 cannot pad
                values_room = self.values.new_empty(*keys_room.shape[:3], 0)
            self._room, self._shared = (keys_room, values_room), 0
            if self.real is not None:
                self._real_room = functional.pad(self.real, grown[2:], value=True)
        for room, new in zip(self._room, (keys, values), strict=True):
            room[:, :, before:after] = new
        self.keys, self.values = self._room[0][:, :, :after], self._room[1][:, :, :after]
        if self._real_room is not None:
            self.real = self._real_room[..., :after]

    @override
    def get_seq_length(self) -> int:
        return self.seen

    @override
    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        physical = self.keys.shape[-2] if self.is_initialized else 0
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
        """All entries, as they are stored."""
        real, count = self.real, self.keys.shape[2]
        if real is None and self.token_mask is not None:
            real = self.token_mask[:, None, :count].to(self.keys.device)
            real = functional.pad(real, (0, count - real.shape[2]), value=True)
        return LayerEntries(self.keys, self.values, real)

    def attended(self, stored: LayerEntries | None = None) -> LayerEntries:
        """All entries, or some of them, as queries see them: of latents, every head's keys and values.

        Those take far more memory.
        """
        keys, values, real = self.entries() if stored is None else stored
        return LayerEntries(*((keys, values) if self.expansion is None else self.expansion(keys, values)), real)

    @property
    def nbytes(self) -> int:
        """Bytes of the keys and values, without padding of ragged heads and room for more."""
        return self.keys.nbytes + self.values.nbytes if self.is_initialized else 0

    def held_bytes(self, appended: Iterable[int]) -> int:
        """Bytes of its tensors, marks and room included, once more was appended; see `room_after`."""
        if not self.is_initialized:
            return 0
        count = self.keys.shape[2]
        room = room_after(count, count if self._room is None else self._room[0].shape[2], appended)
        marks = 0 if self.real is None else self.real.shape[0] * self.real.shape[1] * self.real.element_size()
        return room * (_entry_bytes(self.keys) + _entry_bytes(self.values) + marks)

    def share(self) -> "KeptLayer":
        """An independent layer over the same tensors."""
        self._shared = self.keys.shape[2]
        twin = KeptLayer(self.keys, self.values, self.seen, self.real)
        twin.recorded, twin.token_mask, twin.expansion = self.recorded, self.token_mask, self.expansion
        twin.origin = self.origin
        return twin

    def keep(
        self, mask: Tensor, counts: Counts, *, window: int = 0, ragged: bool = False, marked: bool = False
    ) -> "KeptLayer":
        """A layer of some of the entries, copied, so that the memory of the others can be freed.

        Args:
            mask: [B, K, C] bool, the entries that stay.
            counts: [B, K], how many of them each head keeps.
            window: Number of last tokens whose entries all stay; the recorded queries of others are dropped.
            ragged: Whether the layer is ragged though all heads keep the same number.
            marked: Whether a dense layer marks its entries as real, so that it heeds no mask of the model.
        """
        keys, values, _ = self.entries()
        count = None if ragged or counts.min() != counts.max() else int(counts.min())
        rows = torch.nonzero_static(mask.flatten(), size=int(counts.sum()))[:, 0]  # the CPU does not wait for it
        # Whole rows are copied: indexing by the mask itself would copy number by number.
        keys = keys.reshape(-1, keys.shape[-1]).index_select(0, rows)
        values = values.reshape(-1, values.shape[-1]).index_select(0, rows)
        if count is None:
            kept: KeptLayer = RaggedLayer(keys, values, counts, self.seen)
        else:
            shape = *mask.shape[:2], count
            real = mask.new_ones(shape) if marked else None
            kept = KeptLayer(keys.view(*shape, -1), values.view(*shape, -1), self.seen, real)
        recorded = self.recorded and self.recorded.last(window)
        if recorded and recorded.accumulated is not None:
            recorded = replace(recorded, accumulated=_at(recorded.accumulated, mask, counts))
        if recorded and recorded.scores:
            scores = {scorer: _at(each, mask, counts) for scorer, each in recorded.scores.items()}
            recorded = replace(recorded, scores=scores)
        kept.recorded, kept.expansion, kept.origin = recorded, self.expansion, self.origin
        return kept


class RaggedLayer(KeptLayer):
    """Different numbers of entries per KV head, stored without padding; entries appended later have one length.

    From the first update on all entries are in one padded form, to which tokens are appended in place. How many each
    head has is known without waiting for the device.

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
        # Packed, or a padded layer of the kept entries and those appended since.
        self._stored: tuple[Tensor, Tensor] | KeptLayer = kept_keys, kept_values

    @property
    def kept_keys(self) -> Tensor:
        """[total, d], concatenated over heads, then rows."""
        return self._packed(0)

    @property
    def kept_values(self) -> Tensor:
        """[total, d]."""
        return self._packed(1)

    def _packed(self, part: int) -> Tensor:
        if not isinstance(self._stored, KeptLayer):
            return self._stored[part]
        entries = self._stored.entries()
        kept = slice(None, entries.keys.shape[2] - self.keys.shape[2])
        assert entries.real is not None
        return (entries.keys, entries.values)[part][:, :, kept][entries.real[..., kept]]

    @property
    @override
    def nbytes(self) -> int:
        row = self.keys.shape[-1] * self.keys.element_size() + self.values.shape[-1] * self.values.element_size()
        return int(self.counts.sum()) * row + self.keys.nbytes + self.values.nbytes

    @override
    def held_bytes(self, appended: Iterable[int]) -> int:
        if isinstance(self._stored, KeptLayer):
            return self._stored.held_bytes(appended)
        if not (steps := [*appended]):
            return self.nbytes
        count = int(self.counts.max()) + self.keys.shape[2]
        return room_after(count, count, steps) * (
            _entry_bytes(self.keys) + _entry_bytes(self.values) + math.prod(self.counts.shape)
        )

    @override
    def _append(self, keys: Tensor, values: Tensor) -> None:
        if not isinstance(self._stored, KeptLayer):
            padded, of_values, real = self.entries()
            self._stored = KeptLayer(padded, of_values, self.seen, real)
        longest = self._stored.keys.shape[2] - self.keys.shape[2]
        self._stored._append(keys, values)
        self.keys, self.values = self._stored.keys[:, :, longest:], self._stored.values[:, :, longest:]
        self.real = self._stored.real

    @override
    def update(self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object) -> Any:
        super().update(key_states, value_states)
        keys, values, _ = self.entries()
        return keys, values

    @override
    def entries(self) -> LayerEntries:
        """All entries, padded on the left to the longest head."""
        if isinstance(self._stored, KeptLayer):
            return self._stored.entries()
        longest, device = int(self.counts.max()), self.keys.device
        marks = np.arange(longest) >= longest - self.counts[..., None]
        places = torch.from_numpy(np.flatnonzero(marks)).to(device, non_blocking=True)
        keys, values = (
            torch.cat([_unpack(kept, places, marks.shape), appended], dim=2)
            for kept, appended in zip(self._stored, (self.keys, self.values), strict=True)
        )
        real = torch.from_numpy(marks).to(device, non_blocking=True)
        return LayerEntries(keys, values, functional.pad(real, (0, self.keys.shape[2]), value=True))

    @override
    def crop(self, tokens_to_remove: int) -> None:
        if -tokens_to_remove > (appended := self.keys.shape[2]):
            raise UserError(
                f"crop: cannot remove {-tokens_to_remove} tokens, only the {appended} that were read since the last "
                "eviction; keep a copy of the state from before instead"
            )
        super().crop(tokens_to_remove)
        if isinstance(self._stored, KeptLayer):
            self._stored.crop(tokens_to_remove)
            self.real = self._stored.real

    @override
    def share(self) -> "RaggedLayer":
        twin = copy.copy(self)
        if isinstance(self._stored, KeptLayer):
            twin._stored = self._stored.share()
        return twin


def _entry_bytes(entries: Tensor) -> int:
    """Bytes of one place of entries [B, K, C, d], in all rows and KV heads."""
    return entries.shape[0] * entries.shape[1] * entries.shape[3] * entries.element_size()


def _unpack(packed: Tensor, places: Tensor, shape: tuple[int, ...]) -> Tensor:
    """[total, d] -> [B, K, C, d] of the shape [B, K, C], zeros but at the places [total] int64 of all B x K x C."""
    padded = packed.new_zeros(math.prod(shape), packed.shape[1])
    return padded.index_copy_(0, places, packed).view(*shape, packed.shape[1])


def _at(recorded: Tensor, mask: Tensor, counts: Counts) -> Tensor:
    """[B, H, C] at the entries [B, K, C] bool that a query head's KV head keeps, padded on the left if heads differ."""
    group, length = recorded.shape[1] // mask.shape[1], mask.shape[2]
    if counts.min() == counts.max():
        places = torch.nonzero_static(mask, size=int(counts.sum()))[:, -1].view(*counts.shape, -1)
        return recorded.gather(2, places.repeat_interleave(group, dim=1))
    places = (mask * torch.arange(1, length + 1, device=mask.device)).topk(int(counts.max()), dim=-1).values.flip(-1)
    places = places.repeat_interleave(group, dim=1)  # from 1 on; 0 where a head keeps fewer than others
    return recorded.gather(2, (places - 1).clamp(min=0)).masked_fill(places == 0, 0.0)
