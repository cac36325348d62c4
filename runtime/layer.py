"""A layer of a cache: its KV entries, room for more, and what was recorded of the queries that read it.

Layers store KV heads, never query heads. A layer's *logical* length counts the tokens seen and determines positions;
its *physical* length counts the entries in memory. KV heads with different numbers of entries are stored and read
without padding (`RaggedLayer`), except in batches that `keepsight.runtime.join` pads.
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
from transformers.cache_utils import DynamicLayer, LinearAttentionLayer
from typing_extensions import Self, override

from keepsight.errors import UserError
from keepsight.runtime import ragged_kernel
from keepsight.runtime.attention import OwnAttention, Softmax, attend_grouped, visible
from keepsight.runtime.distance_bias import without_positions
from keepsight.runtime.rotary import QueryStatistics

Counts: TypeAlias = NDArray[np.int64]

ROOM = 64
"""Least room, in entries, that a cache adds when it grows; memory plans count it."""
GROWTH = 1 / 16
"""Room that a growing cache adds, as a share of its entries, if that is more than `ROOM`; memory plans count it."""
RECENT = 64
"""Number of last tokens before an eviction of which a layer remembers the entries that each head kept."""


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

    @property
    def marks(self) -> Tensor:
        """[B, K, C] bool, which of them are real."""
        every = self.keys.new_ones(self.keys.shape[:3], dtype=torch.bool)
        return every if self.real is None else every & self.real


@dataclass(frozen=True)
class Recorded:
    """The recordings of a layer, made while tokens were read.

    Attributes:
        softmax: The layer's.
        queries: [B, H, w, d] of the last w tokens, after RoPE; None where none were asked for.
        query_mask: [B, w] bool, False where one of these tokens is padding; None when none is.
        ahead: [B, w] int64, how many tokens after its own each of them sees; None where none does. See
            `keepsight.runtime.importance.seen_ahead`.
        accumulated: [B, H, C] float32, accumulated attention: the sum over all queries; None where it was not asked
            for.
        scores: For each trained scorer, its `outputs_per_head` outputs per entry, [B, K x outputs_per_head, C] float32.
        statistics: Statistics of all queries; None where they were not asked for.
        observed: [B, K, C] float32, scores by observers that were read with the prompt (`keepsight.runtime.tail`); None
            where there were none. Eviction drops them.
        scored: [B, K, c] float32, for methods that score tokens once, the scores of the c entries that the last
            eviction kept, NaN where another method kept them; None for none.
    """

    softmax: Softmax
    queries: Tensor | None = None
    query_mask: Tensor | None = None
    ahead: Tensor | None = None
    accumulated: Tensor | None = None
    scores: Mapping[Any, Tensor] = field(default_factory=dict)
    statistics: QueryStatistics | None = None
    observed: Tensor | None = None
    scored: Tensor | None = None

    def last(self, rows: int) -> "Recorded":
        """The same with the queries of the last `rows` tokens alone."""
        if self.queries is None:
            return self
        start = max(self.queries.shape[2] - rows, 0)
        query_mask = None if self.query_mask is None else self.query_mask[:, start:]
        ahead = None if self.ahead is None else self.ahead[:, start:]
        return replace(self, queries=self.queries[:, :, start:], query_mask=query_mask, ahead=ahead)

    def without_last(self, count: int) -> "Recorded":
        """The same as it was before the last `count` tokens, of which every head holds the entry.

        Raises:
            UserError: as `without_last_queries`.
        """
        scores = {}
        for scorer, entry_scores in self.scores.items():
            scores[scorer] = entry_scores[..., : entry_scores.shape[-1] - count]
        return replace(self.without_last_queries(count), scores=scores)

    def without_last_queries(self, count: int) -> "Recorded":
        """The same with the queries of before the last `count` tokens; the scores of their entries are still there.

        Raises:
            UserError: attention or statistics were summed over all queries.
        """
        if self.accumulated is not None or self.statistics is not None:
            raise UserError(
                "crop: attention was summed over all tokens, and the last ones cannot be taken off again",
                field="crop",
                code="state",
            )
        if self.queries is None:
            return replace(self, observed=None)
        end = max(self.queries.shape[2] - count, 0)
        query_mask = None if self.query_mask is None else self.query_mask[:, :end]
        ahead = None if self.ahead is None else self.ahead[:, :end]
        queries = self.queries[:, :, :end]
        return replace(self, queries=queries, query_mask=query_mask, ahead=ahead, observed=None)

    def keep(self, mask: Tensor, counts: Counts) -> "Recorded":
        """The same for the entries alone that `mask` [B, K, C] bool marks, `counts` [B, K] of each head."""
        accumulated = self.accumulated
        if accumulated is not None:
            accumulated = kept_columns(accumulated, mask, counts)
        scores = {}
        for scorer, entry_scores in self.scores.items():
            scores[scorer] = kept_columns(entry_scores, mask, counts)
        scored = self.scored
        if scored is not None:
            unscored = mask.shape[2] - scored.shape[2]
            scored = kept_columns(functional.pad(scored, (0, unscored), value=torch.nan), mask, counts)
        return replace(self, accumulated=accumulated, scores=scores, observed=None, scored=scored)


def spare(count: int, least: int = ROOM) -> int:
    """Entries to make room for beyond `count`: a share of them, so that they are not copied again and again."""
    return max(least, int(count * GROWTH))


def room_after_appending(count: int, room: int, appended: Iterable[int]) -> int:
    """Capacity in entries after `appended` entries, one number after another, were added to `count` of `room`."""
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
        real: [B, K, C] bool, False for keys returned by `update` that were padded to one length; attention then uses it
            in place of the model's mask. None otherwise.

    Attributes:
        token_mask: [B, M] bool, False for left padding among the first tokens of a batch from which nothing was
            evicted; None for none. Attention takes it from the model's mask.
        expansion: Computes every head's keys and values from cached latents; None where the cache holds keys and
            values.
        origin: The model, and the index of the decoder layer that it belongs to; None for a layer without a model.
        recorded: What was recorded while tokens were read; None for nothing.
        recent: [B, K, r] bool, which entries of the last r tokens before the last eviction each head kept; None where
            nothing was evicted, or it is not known.
        added: Number of entries after the last eviction that are no tokens, such as learned ones.
        recurrent: The recurrent state that the layer keeps beside its entries; None for none.
        readers: Number of decoder layers that attend to the entries: 1, but for entries that later layers share.
        indexed: Width of the indexer's key, which is stored after each value (`keepsight.runtime.indexer`), so that it
            shares the fate of its entry; 0 without an indexer.
        reads: Upper bound on the number of entries a token reads from the indexer's selection; None for all of it.
        has_positions: Whether keys are followed by their positions (`keepsight.runtime.distance_bias`).
    """

    keys: Tensor
    values: Tensor
    token_mask: Tensor | None = None
    expansion: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]] | None = None
    origin: tuple[PreTrainedModel, int] | None = None
    recorded: Recorded | None = None
    recent: Tensor | None = None
    added: int = 0
    recurrent: LinearAttentionLayer | None = None
    readers: int = 1
    indexed: int = 0
    reads: int | None = None
    has_positions: bool = False

    def __init__(
        self, keys: Tensor | None = None, values: Tensor | None = None, seen: int = 0, real: Tensor | None = None
    ) -> None:
        super().__init__()
        if keys is not None and values is not None:
            self.lazy_initialization(keys, values)
            self.keys = keys
            self.values = values
        self.seen = seen
        self.real = real
        self._room: tuple[Tensor, Tensor] | None = None
        self._real_room: Tensor | None = None
        self._shared = 0  # number of first entries that other layers may hold too
        is_evicted = keys is not None and keys.shape[2] != seen
        self._evicted_to = keys.shape[2] if is_evicted and keys is not None else 0  # entries after the last eviction

    @override
    def update(self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object) -> Any:
        """Append in place where there is room: copying all entries for every token would cost more than attention.

        The room belongs to this layer alone; memory shared with other layers is never written.
        """
        if self.indexed:
            self._append(key_states, functional.pad(value_states, (0, self.indexed)))
            return self.keys, self.values[..., : -self.indexed]
        return self._append(key_states, value_states)

    def update_indexer(self, index_keys: Tensor) -> Tensor:
        """Append `index_keys` [B, q, D], of the tokens that `update` has just stored; returns all, [B, C, D]."""
        count = index_keys.shape[1]
        self.values[:, 0, -count:, -self.indexed :] = index_keys
        return self.values[:, 0, :, -self.indexed :]

    def _append(self, key_states: Tensor, value_states: Tensor) -> tuple[Tensor, Tensor]:
        self.seen += key_states.shape[-2]
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
            self.keys = key_states.contiguous()
            self.values = value_states.contiguous()
            return self.keys, self.values

        before = self.keys.shape[2]
        after = before + key_states.shape[2]
        if self._room is None or after > self._room[0].shape[2]:
            added_room = after + spare(after) - before
            keys_room = functional.pad(self.keys, (0, 0, 0, added_room))
            if self.values.shape[3]:
                values_room = functional.pad(self.values, (0, 0, 0, added_room))
            else:  # a retrieval head's, which torch 2.7 cannot pad
                values_room = self.values.new_empty(*keys_room.shape[:3], 0)
            self._room = (keys_room, values_room)
            self._shared = 0
            if self.real is not None:
                self._real_room = functional.pad(self.real, (0, added_room), value=True)

        keys_room, values_room = self._room
        keys_room[:, :, before:after] = key_states
        values_room[:, :, before:after] = value_states
        self.keys = keys_room[:, :, :after]
        self.values = values_room[:, :, :after]
        if self._real_room is not None:
            self.real = self._real_room[..., :after]
        return self.keys, self.values

    @property
    def softmax(self) -> Softmax:
        """How the layer turns dot products into weights.

        Raises:
            UserError: nothing was recorded when its entries were read.
        """
        if self.recorded is None:
            raise UserError(
                "nothing was recorded of the tokens read: prefill with needs=method.needs()",
                field="needs",
                code="state",
            )
        return self.recorded.softmax

    @override
    def get_seq_length(self) -> int:
        return self.seen

    @override
    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        physical = self.keys.shape[-2] if self.is_initialized else 0
        return physical + query_length, self.seen - physical

    @property
    def croppable(self) -> int:
        """Number of last tokens of which every head holds the entry: those read since the last eviction, or all."""
        return self.keys.shape[2] - self._evicted_to - self.added if self.is_initialized else 0

    @override
    def crop(self, tokens_to_remove: int) -> None:
        if self.is_initialized:
            self._require_croppable(-tokens_to_remove)
        super().crop(tokens_to_remove)
        self.seen += tokens_to_remove
        if self.keys.shape[2] < self._shared:
            self._room = None  # appending in place would overwrite entries that other layers share
        if self.real is not None:
            self.real = self.real[..., : self.keys.shape[-2]]

    def _require_croppable(self, count: int) -> None:
        if count > self.croppable:
            raise UserError(
                f"crop: cannot remove {count} tokens, only the {self.croppable} that were read since the last "
                "eviction; keep a copy of the state from before instead",
                field="crop",
                code="state",
            )

    def without_last(self, count: int) -> "KeptLayer":
        """An independent copy as it was before the last `count` tokens, even where an eviction came in between.

        Raises:
            UserError: which of them an eviction has kept is no longer known, or attention was summed over them.
        """
        if count > self.croppable:
            return self._without_recent(count)
        return self._cropped(count)

    def _cropped(self, count: int) -> "KeptLayer":
        """`without_last` of tokens that were read since the last eviction."""
        recorded = self.recorded and self.recorded.without_last(count)
        twin = self.share()
        twin.crop(-count)
        twin.recorded = recorded
        return twin

    def _without_recent(self, count: int) -> "KeptLayer":
        """`without_last` of tokens some of which were read before the last eviction."""
        recorded = self.recorded and self.recorded.without_last_queries(count)
        before = count - self.croppable
        if self.recent is None or before > self.recent.shape[2]:
            self._require_croppable(count)
        assert self.recent is not None
        remembered = self.recent.shape[2] - before
        dropped = self.croppable + self.recent[..., remembered:].sum(dim=-1)
        marks = self.entries().marks
        entry_indices = torch.arange(marks.shape[2], device=marks.device)
        marks &= entry_indices < marks.shape[2] - dropped[..., None]
        counts = marks.sum(dim=-1).cpu().numpy()
        twin = self.keep(marks, counts, ragged=True)  # no mask of the model's fits layers of other lengths
        twin.seen = self.seen - count
        twin.recent = self.recent[..., :remembered]
        if recorded is not None and twin.recorded is not None:
            twin.recorded = replace(recorded, scores=twin.recorded.scores, scored=twin.recorded.scored)
        return twin

    def entries(self) -> LayerEntries:
        """All entries, as they are stored."""
        real = self.real
        if real is None and self.token_mask is not None:
            count = self.keys.shape[2]
            real = self.token_mask[:, None, :count].to(self.keys.device)
            real = functional.pad(real, (0, count - real.shape[2]), value=True)
        return LayerEntries(self.keys, self.values, real)

    def attended(self, stored: LayerEntries | None = None) -> LayerEntries:
        """All entries, or the `stored` ones, as attention reads them: latents are expanded to every head.

        Expanded entries take far more memory.
        """
        entries = self.entries() if stored is None else stored
        if self.expansion is None:
            return entries
        values_alone = entries.values[..., : -self.indexed] if self.indexed else entries.values
        keys, values = self.expansion(entries.keys, values_alone)
        return LayerEntries(keys, values, entries.real)

    def contents(self) -> LayerEntries:
        """As `attended`, with keys that hold nothing but what is multiplied by queries."""
        entries = self.attended()
        if not self.has_positions:
            return entries
        return entries._replace(keys=without_positions(entries.keys))

    @property
    def kv_heads(self) -> int:
        """Number of KV heads, K."""
        return self.keys.shape[1]

    @property
    def longest(self) -> int:
        """Number of entries of the longest KV head, padding included."""
        return self.entries().keys.shape[2]

    def head_sizes(self) -> Counts | Tensor:
        """[B, K] int64: number of real entries; a tensor where the device would have to be waited for."""
        keys, _, real = self.entries()
        return np.full(keys.shape[:2], keys.shape[2]) if real is None else real.sum(-1).expand(-1, keys.shape[1])

    @property
    def nbytes(self) -> int:
        """Bytes of the keys and values, without room for more."""
        return self.keys.nbytes + self.values.nbytes if self.is_initialized else 0

    def memory_bytes(self, appended: Iterable[int]) -> int:
        """Bytes of its tensors, marks and room included, after the tokens `appended`; see `room_after_appending`."""
        if not self.is_initialized:
            return 0
        count = self.keys.shape[2]
        room = count if self._room is None else self._room[0].shape[2]
        entry_bytes = _entry_bytes(self.keys) + _entry_bytes(self.values)
        if self.real is not None:
            entry_bytes += self.real.shape[0] * self.real.shape[1] * self.real.element_size()
        return room_after_appending(count, room, appended) * entry_bytes

    def share(self) -> Self:
        """An independent layer over the same tensors."""
        self._shared = self.keys.shape[2]
        twin = copy.copy(self)
        twin._room = None
        twin._real_room = None
        return twin

    def __deepcopy__(self, memo: object) -> Self:
        """As `share`: its entries are never overwritten, and `origin` is the model itself."""
        return self.share()

    def keep(
        self,
        mask: Tensor,
        counts: Counts,
        *,
        window: int = 0,
        ragged: bool = False,
        marked: bool = False,
        renumber: Callable[[Tensor, Tensor], Tensor] | None = None,
    ) -> "KeptLayer":
        """A layer of the entries that `mask` [B, K, C] bool marks, `counts` [B, K] of each head.

        They are copied, so that the memory of the others can be freed. The last `window` tokens' entries all stay; the
        recorded queries of others are dropped. The layer is ragged where heads differ, or if `ragged`; with `marked`, a
        dense layer marks its entries as real, and attention ignores the model's mask. `renumber` gives the keys other
        positions (`keepsight.runtime.renumber.Renumber`).
        """
        keys, values, _ = self.entries()
        count = None if ragged or counts.min() != counts.max() else int(counts.min())
        rows = torch.nonzero_static(mask.flatten(), size=int(counts.sum()))[:, 0]  # the CPU does not wait for it
        # Whole rows are copied: indexing by the mask itself would copy number by number.
        keys = keys.reshape(-1, keys.shape[-1]).index_select(0, rows)
        values = values.reshape(-1, values.shape[-1]).index_select(0, rows)
        if renumber is not None:
            keys = renumber(keys, rows)
        if count is None:
            kept: KeptLayer = RaggedLayer(keys, values, counts, self.seen)
            if self.indexed:  # an indexer reads rows of one length
                padded = kept.entries()
                kept = KeptLayer(padded.keys, padded.values, self.seen, padded.real)
        else:
            shape = *mask.shape[:2], count
            real = mask.new_ones(shape) if marked else None
            kept = KeptLayer(keys.view(*shape, -1), values.view(*shape, -1), self.seen, real)

        if self.recorded is not None:
            kept.recorded = self.recorded.last(window).keep(mask, counts)
        tokens = min(self.croppable, RECENT)
        kept.recent = mask[..., mask.shape[2] - tokens :].clone()  # a slice would keep the whole mask alive
        kept.take_over_from(self)
        return kept

    def take_over_from(self, layer: "KeptLayer") -> None:
        """Take over what does not depend on entries from the layer that this one follows."""
        self.expansion = layer.expansion
        self.origin = layer.origin
        self.recurrent = layer.recurrent
        self.readers = layer.readers
        self.indexed = layer.indexed
        self.reads = layer.reads
        self.has_positions = layer.has_positions


class RaggedLayer(OwnAttention, KeptLayer):
    """Different numbers of entries per KV head, stored without padding, one head after the other.

    From the first update on each head has the same room behind its entries, to which tokens are appended in place. How
    many entries each has is known without waiting for the device. Each head is attended to by itself; a GPU can attend
    to all of them in one kernel (`keepsight.runtime.ragged_kernel`).

    The constructor takes keys and values [total, d], concatenated over heads, then rows. They are stored as
    [1, 1, total, d]; the first update makes room after each head. `counts` [B, K] is the number of entries per head
    before any token was appended.
    """

    can_be_shared = True

    def __init__(self, keys: Tensor, values: Tensor, counts: Counts, seen: int) -> None:
        super().__init__(keys[None, None], values[None, None], seen)
        self.counts = counts
        self.appended = 0
        self._kept = head_spans(counts, 0)
        self._writable = 0  # how many tokens each head's room takes; 0 while the memory is another layer's
        self._starts: Tensor | None = None  # [B x K] int64: where each head's entries begin
        self._ends: Tensor | None = None  # [B x K] int64: where its appended tokens begin

    @property
    @override
    def kv_heads(self) -> int:
        return self.counts.shape[1]

    @property
    @override
    def longest(self) -> int:
        return int(self.counts.max()) + self.appended

    @override
    def head_sizes(self) -> Counts:
        return self.counts + self.appended

    def _spans(self) -> list[tuple[int, int]]:
        """Where each head's entries begin, and how many there are."""
        return [(first, count + self.appended) for first, count in self._kept]

    def packed(self) -> tuple[Tensor, Tensor]:
        """Keys and values [total, d] without room."""
        if self.appended == 0 and self.keys.shape[2] == self.counts.sum():  # there is no room
            return self.keys[0, 0], self.values[0, 0]
        spans = self._spans()
        keys = torch.cat([self.keys[0, 0].narrow(0, *span) for span in spans])
        values = torch.cat([self.values[0, 0].narrow(0, *span) for span in spans])
        return keys, values

    def last_of_row(self, row: int, count: int) -> tuple[Tensor, Tensor]:
        """Copies of a row's last `count` entries in each head: keys and values [1, K, count, d]."""
        spans = self._spans()[row * self.kv_heads : (row + 1) * self.kv_heads]
        keys = [self.keys[0, 0].narrow(0, first + size - count, count) for first, size in spans]
        values = [self.values[0, 0].narrow(0, first + size - count, count) for first, size in spans]
        return torch.stack(keys)[None], torch.stack(values)[None]

    @property
    @override
    def nbytes(self) -> int:
        return (int(self.counts.sum()) + self.appended * self.counts.size) * self._row_bytes

    @property
    def _row_bytes(self) -> int:
        return _entry_bytes(self.keys) + _entry_bytes(self.values)

    @override
    def memory_bytes(self, appended: Iterable[int]) -> int:
        entries = int(self.counts.sum())
        heads = self.counts.size
        mean = entries // heads
        room = room_after_appending(mean + self.appended, mean + max(self._writable, self.appended), appended) - mean
        bytes_of_entries = (entries + heads * room) * self._row_bytes
        if not room:
            return bytes_of_entries
        return bytes_of_entries + 16 * heads  # _starts and _ends

    @override
    def update(self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object) -> Any:
        tokens = key_states.shape[2]
        after = self.appended + tokens
        if after > self._writable:
            self._make_room(after + spare(int(self.counts.mean()) + after))
        assert self._ends is not None
        positions = self._ends + self.appended
        if tokens > 1:
            positions = (positions[:, None] + torch.arange(tokens, device=positions.device)).flatten()
        self.keys.index_copy_(2, positions, key_states.reshape(1, 1, -1, key_states.shape[3]))
        self.values.index_copy_(2, positions, value_states.reshape(1, 1, -1, value_states.shape[3]))
        self.appended = after
        self.seen += tokens
        return key_states, value_states

    def _make_room(self, room: int) -> None:
        """Copy all entries to new memory with room for `room` tokens after each head's."""
        old_spans = self._spans()
        new_spans = head_spans(self.counts, room)
        total = int(self.counts.sum()) + room * self.counts.size
        keys = self.keys.new_empty(1, 1, total, self.keys.shape[3])
        values = self.values.new_empty(1, 1, total, self.values.shape[3])
        for (start, _), (old_start, count) in zip(new_spans, old_spans, strict=True):
            keys.narrow(2, start, count).copy_(self.keys.narrow(2, old_start, count))
            values.narrow(2, start, count).copy_(self.values.narrow(2, old_start, count))

        self.keys = keys
        self.values = values
        self._kept = new_spans
        self._writable = room
        self._shared = 0
        starts = [start for start, _ in new_spans]
        ends = [start + count for start, count in new_spans]
        bounds = torch.tensor([starts, ends]).to(self.keys.device, non_blocking=True)
        self._starts, self._ends = bounds.unbind()

    @property
    def in_kernel(self) -> bool:
        """Whether one kernel attends to all heads."""
        return self.expansion is None and ragged_kernel.usable(self.keys, self.values)

    @override
    def attend(self, query: Tensor, key: Tensor, value: Tensor, softmax: Softmax) -> Tensor:
        """See `OwnAttention`; the new keys and values have been appended."""
        batch, heads, queries, width = query.shape
        if self.in_kernel:
            assert self._starts is not None and self._ends is not None
            ends = self._ends + self.appended
            return ragged_kernel.attend_ragged(
                query, self.keys[0, 0], self.values[0, 0], self._starts, ends, self.longest, softmax
            )

        outputs = []
        groups = query.reshape(self.counts.size, 1, -1, queries, width).unbind()
        for index, (group, (start, count)) in enumerate(zip(groups, self._spans(), strict=True)):
            keys = self.keys.narrow(2, start, count)
            values = self.values.narrow(2, start, count)
            if self.expansion is not None:
                keys, values = self.expansion(keys, values)
            else:  # query heads are divided over threads
                keys = keys.expand(-1, group.shape[1], -1, -1)
                values = values.expand(-1, group.shape[1], -1, -1)
            mask = None
            if queries > 1:
                mask = visible(queries, keys.new_ones(1, 1, count, dtype=torch.bool))
            head_softmax = softmax.of_head(index % self.kv_heads, self.kv_heads)
            outputs.append(attend_grouped(group, keys, values, mask, head_softmax))
        return torch.cat(outputs).view(batch, heads, queries, -1).transpose(1, 2).contiguous()

    @override
    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.appended + query_length, self.seen - self.appended

    @override
    def entries(self) -> LayerEntries:
        """All entries, copied and padded on the left to the longest head."""
        device = self.keys.device
        marks = np.arange(self.longest) >= int(self.counts.max()) - self.counts[..., None]
        rows = torch.from_numpy(np.flatnonzero(marks)).to(device, non_blocking=True)
        real = torch.from_numpy(marks).to(device, non_blocking=True)
        keys, values = self.packed()
        return LayerEntries(_unpack(keys, rows, marks.shape), _unpack(values, rows, marks.shape), real)

    @property
    @override
    def croppable(self) -> int:
        return self.appended - self.added

    @override
    def crop(self, tokens_to_remove: int) -> None:
        self._require_croppable(-tokens_to_remove)
        self.seen += tokens_to_remove
        self.appended += tokens_to_remove
        if self.appended < self._shared:
            self._writable = 0  # appending in place would overwrite entries that other layers share

    @override
    def share(self) -> Self:
        self._shared = self.appended
        twin = copy.copy(self)
        twin._writable = 0
        return twin


def head_spans(counts: Counts, room: int, start: int = 0) -> list[tuple[int, int]]:
    """(start, count) of each head's entries, from `start` on, with `room` free positions behind each head's."""
    spans = []
    for count in counts.ravel().tolist():
        spans.append((start, count))
        start += count + room
    return spans


def _entry_bytes(entries: Tensor) -> int:
    """Bytes of one column of entries [B, K, C, d], in all rows and KV heads."""
    return entries.shape[0] * entries.shape[1] * entries.shape[3] * entries.element_size()


def _unpack(packed: Tensor, rows: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Entries [total, d] as the `rows` [total] int64 of B x K x C, the others zero: [B, K, C, d], `shape` [B, K, C]."""
    padded = packed.new_zeros(math.prod(shape), packed.shape[1])
    return padded.index_copy_(0, rows, packed).view(*shape, packed.shape[1])


def kept_columns(recorded: Tensor, mask: Tensor, counts: Counts) -> Tensor:
    """The columns of [B, H, C] that each query head's KV head keeps ([B, K, C] bool), left-padded if heads differ."""
    group = recorded.shape[1] // mask.shape[1]
    if counts.min() == counts.max():
        columns = torch.nonzero_static(mask, size=int(counts.sum()))[:, -1].view(*counts.shape, -1)
        return recorded.gather(2, columns.repeat_interleave(group, dim=1))

    # Columns are counted from 1; 0 fills where a head keeps fewer than others.
    numbered = mask * torch.arange(1, mask.shape[2] + 1, device=mask.device)
    columns = numbered.topk(int(counts.max()), dim=-1).values.flip(-1)
    columns = columns.repeat_interleave(group, dim=1)
    return recorded.gather(2, (columns - 1).clamp(min=0)).masked_fill(columns == 0, 0.0)
