"""Slots for the rows of a running batch: a row that joins is copied to a free slot, and no row that stays is copied.

`keepsight.runtime.join` makes a batch of states by copying all of them. Here the layers of a batch have room for more
rows, and a new row is written there. When rows leave dense layers, the last rows move into their slots; in ragged
layers their memory becomes free. The whole batch is copied only when its room is used up. Its room then doubles, so
that each row is copied a bounded number of times on average.

Layers with a sliding window are joined as before: they hold no more than their window.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from typing_extensions import override

from keepsight.models.transformers_internals import DummyLayer
from keepsight.runtime.attention import StateCache, is_bounded
from keepsight.runtime.join import as_ragged, bounded_rows, join, join_bounded, joined_fields, joins_unpadded, rows_of
from keepsight.runtime.layer import KeptLayer, RaggedLayer, head_spans, spare
from keepsight.runtime.state import State


@dataclass
class Copied:
    """Numbers of rows that were copied: to join, to move to another slot, and because the room was used up."""

    joined: int = 0
    moved: int = 0
    regrown: int = 0


class BatchSlots:
    """A batch whose rows have slots.

    Args:
        most_rows: The most rows that the batch can have.

    Attributes:
        copied: How many rows were copied.
    """

    def __init__(self, most_rows: int) -> None:
        self.most_rows = most_rows
        self.copied = Copied()

    def join(self, batch: State | None, state: State, count: int) -> State:
        """The batch with `count` further rows of one state [1, M], which stays unchanged.

        The batch may grow in place. If memory runs out, it stays as it was.
        """
        self.copied.joined += count
        states = [state] * count if batch is None else [batch, *([state] * count)]
        if batch is not None and _all_admit(batch, state, count):
            try:
                return joined_fields(states, StateCache(layers=_admitted(batch, state, count)))
            except BaseException:
                for layer in _layers_with_slots(batch):
                    layer.keep_rows(range(len(batch.lengths)))
                    layer.seen = batch.tokens.shape[1]
                raise

        joined = join(states)
        rows = len(joined.lengths)
        if batch is not None:
            self.copied.regrown += len(batch.lengths)
        capacity = min(2 * rows, max(self.most_rows, rows))
        layers: list[Any] = []
        joined_layers: list[Any] = joined.cache.layers
        for layer in joined_layers:
            if isinstance(layer, RaggedLayer):
                layer = _RaggedSlots(layer, capacity)
            elif isinstance(layer, KeptLayer) and layer.is_initialized:
                layer = _DenseSlots(layer, capacity)
            layers.append(layer)
        return replace(joined, cache=StateCache(layers=layers))

    def keep(self, batch: State, rows: Sequence[int]) -> tuple[State, list[int]]:
        """The batch with some of its rows alone, at least one, and which of them they are in their new order."""
        batch_layers: list[Any] = batch.cache.layers
        order = _order_in_slots(len(batch.lengths), rows)
        if any(isinstance(layer, _DenseSlots) for layer in batch_layers):
            self.copied.moved += sum(slot != row for slot, row in enumerate(order))
        index = torch.tensor(order, device=batch.lengths.device)
        width = int(batch.lengths[index].max())
        layers: list[Any] = []
        for layer in batch_layers:
            if isinstance(layer, _DenseSlots | _RaggedSlots):
                layer.keep_rows(order)
                layer.seen = width
            elif not isinstance(layer, DummyLayer):
                layer = bounded_rows(layer, index, width)
            layers.append(layer)
        return rows_of(batch, index, width, StateCache(layers=layers)), order

    @staticmethod
    def has(batch: State) -> bool:
        """Whether the rows of a batch have slots."""
        layers: list[Any] = batch.cache.layers
        return all(isinstance(layer, _DenseSlots | _RaggedSlots) or is_bounded(layer) for layer in layers)


def _layers_with_slots(batch: State) -> list["_DenseSlots | _RaggedSlots"]:
    layers: list[Any] = batch.cache.layers
    return [layer for layer in layers if isinstance(layer, _DenseSlots | _RaggedSlots)]


def _admitted(batch: State, state: State, count: int) -> list[Any]:
    """The layers of a batch with so many more rows of a state, for which there is room."""
    width = max(batch.tokens.shape[1], state.tokens.shape[1])
    batch_layers: list[Any] = batch.cache.layers
    state_layers: list[Any] = state.cache.layers
    layers = []
    for layer, new_layer in zip(batch_layers, state_layers, strict=True):
        if isinstance(layer, _DenseSlots | _RaggedSlots):
            for _ in range(count):
                layer.admit(new_layer)
            layer.seen = width
        elif is_bounded(layer) and not isinstance(layer, DummyLayer):
            layer = join_bounded([layer, *([new_layer] * count)], width)
        layers.append(layer)
    return layers


def _all_admit(batch: State, state: State, count: int) -> bool:
    """Whether all layers have room for so many rows of a state."""
    if not BatchSlots.has(batch):
        return False
    unpadded = joins_unpadded(state)
    for layer, new_layer in zip(batch.layers, state.layers, strict=True):
        batch_layer: Any = layer
        if unpadded and isinstance(batch_layer, _DenseSlots):
            return False
        if not batch_layer.admits(new_layer, count):
            return False
    return True


def _order_in_slots(count: int, rows: Sequence[int]) -> list[int]:
    """The rows to keep of `count`, by slot: the last ones fill the slots of rows that leave, the others stay."""
    order = list(range(count))
    kept = {*rows}
    for row in reversed(range(count)):
        if row not in kept:
            last = order.pop()
            if last != row:
                order[row] = last
    return order


class _DenseSlots(KeptLayer):
    """A dense layer of a batch with room for more rows and entries; entries end at one column."""

    def __init__(self, layer: KeptLayer, capacity: int) -> None:
        entries = layer.entries()
        super().__init__(entries.keys, entries.values, layer.seen)
        self.take_over_from(layer)
        self._capacity = capacity
        marks = entries.marks
        self._widths: list[int] = marks.any(dim=1).sum(dim=-1).tolist()
        self._is_even: list[bool] = (marks.all(dim=1) == marks.any(dim=1)).all(dim=-1).tolist()
        self._allocate(entries.keys, entries.values, marks)

    def _allocate(self, keys: Tensor, values: Tensor, marks: Tensor) -> None:
        """Copy entries [B, K, C, d] and their marks [B, K, C] to new memory."""
        rows, heads, count, _ = keys.shape
        room = count + spare(count)
        # Zeros: what attention masks must still be finite.
        self._all_keys = keys.new_zeros(self._capacity, heads, room, keys.shape[3])
        self._all_values = values.new_zeros(self._capacity, heads, room, values.shape[3])
        self._marks = marks.new_zeros(self._capacity, heads, room)
        self._all_keys[:rows, :, :count] = keys
        self._all_values[:rows, :, :count] = values
        self._marks[:rows, :, :count] = marks
        self._end = count
        self._refresh_views()

    def _refresh_views(self) -> None:
        """Point keys, values and marks at the current rows, without columns that hold nothing but padding."""
        rows = len(self._widths)
        longest = max(self._widths)
        columns = slice(self._end - longest, self._end)
        self.keys = self._all_keys[:rows, :, columns]
        self.values = self._all_values[:rows, :, columns]
        is_full = all(self._is_even) and min(self._widths) == longest
        self.real = None if is_full else self._marks[:rows, :, columns]

    @override
    def _append(self, key_states: Tensor, value_states: Tensor) -> tuple[Tensor, Tensor]:
        rows = len(self._widths)
        count = key_states.shape[2]
        if self._end + count > self._all_keys.shape[2]:
            longest = max(self._widths)
            self._allocate(self.keys, self.values, self._marks[:rows, :, self._end - longest : self._end])
        columns = slice(self._end, self._end + count)
        self._all_keys[:rows, :, columns] = key_states
        self._all_values[:rows, :, columns] = value_states
        self._marks[:rows, :, columns] = True
        self._end += count
        self._widths = [width + count for width in self._widths]
        self.seen += count
        self._refresh_views()
        return self.keys, self.values

    def admits(self, layer: KeptLayer, count: int) -> bool:
        """Whether there is room for so many rows of a layer."""
        return len(self._widths) + count <= self._capacity and layer.longest <= self._end

    def admit(self, layer: KeptLayer) -> None:
        """Copy the one row of a layer to a free slot."""
        entries = layer.entries()
        marks = entries.marks[0]
        width = int(marks.any(dim=0).sum())
        row = len(self._widths)
        columns = slice(self._end - width, self._end)
        stored = slice(marks.shape[1] - width, None)
        self._all_keys[row, :, columns] = entries.keys[0, :, stored]
        self._all_values[row, :, columns] = entries.values[0, :, stored]
        self._marks[row] = False
        self._marks[row, :, columns] = marks[:, stored]
        self._widths.append(width)
        self._is_even.append(bool((marks.all(dim=0) == marks.any(dim=0)).all()))
        self._refresh_views()

    def keep_rows(self, order: Sequence[int]) -> None:
        """Keep these rows in this order; a row that moves comes from a later slot."""
        for slot, row in enumerate(order):
            if slot != row:
                self._all_keys[slot] = self._all_keys[row]
                self._all_values[slot] = self._all_values[row]
                self._marks[slot] = self._marks[row]
        self._widths = [self._widths[row] for row in order]
        self._is_even = [self._is_even[row] for row in order]
        self._refresh_views()


class _RaggedSlots(RaggedLayer):
    """A ragged layer of a batch with memory for more rows.

    `counts` of a row are its entries less `appended`, the tokens that the batch has read since its room was made: they
    are negative for a row that has joined with few.
    """

    def __init__(self, layer: RaggedLayer, capacity: int) -> None:
        keys, values = layer.packed()
        super().__init__(keys, values, layer.head_sizes(), layer.seen)
        self.take_over_from(layer)
        self._capacity = capacity
        self._segments: list[tuple[int, int]] = []
        self._free: list[tuple[int, int]] = []
        self._make_room(spare(int(self.counts.mean())))

    @override
    def update(self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object) -> Any:
        count = key_states.shape[2]
        if self.appended + count > self._writable:
            self._make_room(count + spare(int(self.head_sizes().mean())))
        return super().update(key_states, value_states)

    @override
    def _make_room(self, room: int) -> None:
        """Copy all entries to new memory, with room for `room` more tokens after each head's and for more rows."""
        old_spans = self._spans()
        counts = self.counts + self.appended
        rows, heads = counts.shape
        sizes = counts.sum(axis=1) + heads * room
        total = int(sizes.max()) * max(self._capacity - rows, 0) + int(sizes.sum())
        keys = self.keys.new_empty(1, 1, total, self.keys.shape[3])
        values = self.values.new_empty(1, 1, total, self.values.shape[3])
        self.counts = counts
        self.appended = 0
        self._writable = room
        self._segments = []
        self._kept = []
        start = 0
        for row in range(rows):
            self._segments.append((start, int(sizes[row])))
            self._kept += head_spans(counts[row], room, start)
            start += int(sizes[row])
        self._free = [(start, total - start)] if total > start else []
        for (new_start, count), (old_start, _) in zip(self._kept, old_spans, strict=True):
            keys.narrow(2, new_start, count).copy_(self.keys.narrow(2, old_start, count))
            values.narrow(2, new_start, count).copy_(self.values.narrow(2, old_start, count))
        self.keys = keys
        self.values = values
        self._shared = 0
        self._note_bounds()

    def _note_bounds(self) -> None:
        starts = [start for start, _ in self._kept]
        ends = [start + count for start, count in self._kept]
        bounds = torch.tensor([starts, ends]).to(self.keys.device, non_blocking=True)
        self._starts, self._ends = bounds.unbind()

    def _needed(self, layer: RaggedLayer) -> int:
        """Number of positions for a one-row layer's entries and for the tokens that the batch may still append."""
        return int(layer.head_sizes().sum()) + self.kv_heads * (self._writable - self.appended)

    def admits(self, layer: KeptLayer, count: int) -> bool:
        """Whether there is memory for so many rows of a layer."""
        free = [size for _, size in self._free]
        needed = self._needed(as_ragged(layer))
        return sum(size // needed for size in free) >= count

    def admit(self, layer: KeptLayer) -> None:
        """Copy the one row of a layer to free memory."""
        ragged = as_ragged(layer)
        needed = self._needed(ragged)
        number = next(number for number, (_, size) in enumerate(self._free) if size >= needed)
        start, size = self._free[number]
        sizes = ragged.head_sizes()[0]
        keys, values = ragged.packed()
        read = 0
        spans = []
        for head_start, count in head_spans(sizes, self._writable - self.appended, start):
            self.keys[0, 0, head_start : head_start + count] = keys[read : read + count]
            self.values[0, 0, head_start : head_start + count] = values[read : read + count]
            spans.append((head_start, count - self.appended))
            read += count
        del self._free[number]
        if size > needed:
            self._free.append((start + needed, size - needed))
        self._kept += spans
        self._segments.append((start, needed))
        self.counts = np.concatenate([self.counts, sizes[None] - self.appended])
        self._note_bounds()

    def keep_rows(self, order: Sequence[int]) -> None:
        """Keep rows in this order; the memory of the others is free."""
        kept = {*order}
        free = [*self._free]
        for row, segment in enumerate(self._segments):
            if row not in kept:
                free.append(segment)
        self._free = _merged(free)
        heads = self.kv_heads
        spans = self._kept
        self._kept = []
        for row in order:
            self._kept += spans[row * heads : (row + 1) * heads]
        self._segments = [self._segments[row] for row in order]
        self.counts = self.counts[[*order]]
        self._note_bounds()


def _merged(segments: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Free segments (start, size), neighbours joined."""
    merged: list[tuple[int, int]] = []
    for start, size in sorted(segments):
        if merged and sum(merged[-1]) == start:
            merged[-1] = (merged[-1][0], merged[-1][1] + size)
        else:
            merged.append((start, size))
    return merged
