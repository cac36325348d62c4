"""Elastic loading (SpeContext, arXiv 2512.00722, section 5): selected entries on the device, all of them on the CPU."""

import time
import weakref
from concurrent.futures import Future
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from typing_extensions import override

from keepsight.errors import UserError
from keepsight.runtime.attention import is_bounded
from keepsight.runtime.layer import LayerEntries
from keepsight.runtime.offload import (
    Begun,
    FromDevice,
    FullEntries,
    Traffic,
    await_counted,
    flat_rows,
    in_background,
    on_side_stream,
)
from keepsight.runtime.retrieval.memory_plan import MemoryPlan
from keepsight.runtime.sparse_read.cache import SelectedLayer, Selection

_EMPTY = -1
_UNCHANGED = -2


class SlotChange:
    """The change of the slots from one selection to the next, the same for all layers; `after` are the new slots.

    `arriving` [B, K, budget] int64 is the entry to be copied into each slot, -1 for none, -2 where the entry stays.
    """

    def __init__(self, after: "SlotMap", arriving: Tensor) -> None:
        self.after = after
        self._arriving = FromDevice(arriving)

    @cached_property
    def moves(self) -> tuple[Tensor, Tensor, int]:
        """The copies to make; called in the fetching thread, because it waits for the device.

        Returns:
            Flat indices [n] int64 on the CPU into the entries [S, B, K] of a layer and into its slots [B, K, budget],
            and the number of entries that stay in their slots.
        """
        arriving = self._arriving.get()
        slots = (arriving.flatten() >= 0).nonzero()[:, 0]
        entries = flat_rows(arriving).flatten()[slots]
        unchanged = int((arriving == _UNCHANGED).sum())
        return entries, slots, unchanged


class SlotMap:
    """Which entry each slot of a layer holds; immutable, and shared by layers with the same entries.

    Args:
        entries: [B, K, budget] int64, -1 for an empty slot.
    """

    def __init__(self, entries: Tensor) -> None:
        self.entries = entries
        self._selection: Selection | None = None
        self._change: weakref.ref[SlotChange] | None = None  # an old state would keep all later ones alive

    @classmethod
    def empty(cls, batch: int, kv_heads: int, budget: int, device: torch.device) -> "SlotMap":
        """Empty slots."""
        return cls(torch.full((batch, kv_heads, budget), _EMPTY, device=device))

    @cached_property
    def emptied(self) -> "SlotMap":
        """A map of as many empty slots, the same for all layers that share this one."""
        return SlotMap(torch.full_like(self.entries, _EMPTY))

    def change_to(self, selection: Selection, length: int) -> SlotChange:
        """The change to a step's selection among `length` entries, which the first slots then hold.

        It is computed once for all layers of a step, as long as one of them keeps it.
        """
        change = None
        if self._change is not None and self._selection is selection:
            change = self._change()
        if change is None:
            change = self._computed_change(selection, length)
            self._selection = selection
            self._change = weakref.ref(change)
        return change

    def cropped(self, length: int) -> "SlotMap":
        """The map without entries from `length` on: other tokens will take their places."""
        dropped = self.entries >= length
        if not bool(dropped.any()):
            return self
        return SlotMap(self.entries.masked_fill(dropped, _EMPTY))

    def _computed_change(self, selection: Selection, length: int) -> SlotChange:
        selected = selection.indices
        count = selected.shape[2]
        budget = self.entries.shape[2]
        if count > budget:
            raise UserError(
                f"{count} entries are selected, and a layer on the CPU has slots for {budget}",
                field="budget",
                code="range",
            )
        if selection.real is not None:
            selected = selected.masked_fill(~selection.real, _EMPTY)

        before = self.entries[:, :, :count]
        stays = _is_among(before, selected, length)
        missing = ~_is_among(selected, before, length) & (selected != _EMPTY)

        # Per head, the first missing entry goes into the first free slot, and so on. All others are written behind
        # the queue, where they are emptied again.
        queue = selected.new_full((*selected.shape[:2], count + 1), _EMPTY)
        queue.scatter_(2, torch.where(missing, missing.cumsum(dim=2) - 1, count), selected)
        queue[:, :, -1] = _EMPTY
        incoming = queue.gather(2, ((~stays).cumsum(dim=2) - 1).clamp(min=0))

        unused = (0, budget - count)
        after = functional.pad(torch.where(stays, before, incoming), unused, value=_EMPTY)
        arriving = functional.pad(incoming.masked_fill(stays, _UNCHANGED), unused, value=_EMPTY)
        return SlotChange(SlotMap(after), arriving)


def _is_among(entries: Tensor, candidates: Tensor, length: int) -> Tensor:
    """[B, K, n] bool: which `entries` [B, K, n] are among their head's `candidates` [B, K, m]; -1 never is."""
    marks = torch.zeros(*candidates.shape[:2], length + 1, dtype=torch.bool, device=candidates.device)
    marks.scatter_(2, torch.where(candidates < 0, length, candidates), True)
    marks[:, :, -1] = False  # where -1 was marked
    return marks.gather(2, torch.where(entries < 0, length, entries))


class ElasticLayer(SelectedLayer):
    """A cache layer whose entries are in CPU memory: `full`; for `padding` see `SelectedLayer`.

    `slots` say which of them are on the device, or on their way there: in `rows` [B, K, budget + 1, 2d], keys beside
    values, in which the newest token's row follows the selected ones. Without `keeps_slots` nothing stays in its slot
    from step to step, and entries are loaded only when they are read.
    """

    def __init__(
        self,
        full: FullEntries,
        slots: SlotMap,
        rows: Tensor,
        key_width: int,
        seen: int,
        padding: Tensor | None = None,
        *,
        keeps_slots: bool = True,
    ) -> None:
        self.full = full
        self.keeps_slots = keeps_slots
        self.slots = slots
        self.rows = rows
        self.key_width = key_width
        no_keys, no_values = self._split(rows[:, :, :0])
        super().__init__(no_keys, no_values, seen, padding)
        self._newest: Tensor | None = None
        self._prepared: Selection | None = None
        self._change: SlotChange | None = None  # kept for the other layers of the step
        self._loading: Future[Begun] | None = None

    @classmethod
    def from_layer(
        cls, layer: SelectedLayer, slots: SlotMap, traffic: Traffic, *, keeps_slots: bool = True
    ) -> "ElasticLayer":
        """A layer on the CPU, whose slots are filled like those of the other layers there; `layer` stays unchanged."""
        keys = layer.keys
        values = layer.values
        index = slots.entries.clamp(min=0).to(keys.device)[..., None]
        slot_keys = keys.gather(2, index.expand(-1, -1, -1, keys.shape[3]))
        slot_values = values.gather(2, index.expand(-1, -1, -1, values.shape[3]))
        rows = torch.cat([slot_keys, slot_values], dim=3).to(slots.entries.device)
        rows = functional.pad(rows, (0, 0, 0, 1))  # the newest token's
        full = FullEntries.offload(keys, values, traffic)
        return cls(full, slots, rows, keys.shape[3], layer.seen, layer.padding, keeps_slots=keeps_slots)

    def _split(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Rows [..., 2d] -> keys and values [..., d]."""
        return rows[..., : self.key_width], rows[..., self.key_width :]

    @property
    @override
    def nbytes(self) -> int:
        """Bytes of the slots, without the map of their entries, which all layers share."""
        return self.rows.nbytes

    @override
    def prepare(self, selection: Selection) -> None:
        super().prepare(selection)
        if self.keeps_slots:
            self._begin_loading(selection)

    def _begin_loading(self, selection: Selection) -> None:
        self._prepared = selection
        before = self.slots if self.keeps_slots else self.slots.emptied
        self._change = before.change_to(selection, self.full.length)
        self.slots = self._change.after
        self._loading = in_background(_load, self.full, self.rows, self._change, Begun(self.rows.device))

    @override
    def gather(self, selection: Selection) -> LayerEntries:
        if self._prepared is not selection:
            self._begin_loading(selection)
        self._await_loading()
        assert self._newest is not None
        count = selection.indices.shape[2]
        self.rows[:, :, count : count + 1] = self._newest
        keys, values = self._split(self.rows[:, :, : count + 1])
        if selection.real is None:
            return LayerEntries(keys, values, None)

        assert self.padding is not None
        real = self.slots.entries[:, :, :count] >= self.padding[:, None, None]
        return LayerEntries(keys, values, functional.pad(real, (0, 1), value=True))

    def _await_loading(self) -> None:
        """Let the device's work from here on wait until the rows are those of the slots."""
        if self._loading is not None:
            await_counted(self._loading, self.full.traffic).precede()
            self._loading = None

    @override
    def append(self, keys: Tensor, values: Tensor) -> None:
        self.full = self.full.append(keys, values)
        self._newest = torch.cat([keys[:, :, -1:], values[:, :, -1:]], dim=3)
        self.seen += keys.shape[2]

    @override
    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.full.length + query_length, self.seen - self.full.length

    @override
    def crop(self, tokens_to_remove: int) -> None:
        self._await_loading()
        self.full = self.full.cropped(self.full.length + tokens_to_remove)
        self.seen += tokens_to_remove
        self.slots = self.slots.cropped(self.full.length)

    @override
    def entries(self) -> LayerEntries:
        """All entries, copied to the device."""
        keys, values = self._split(self.full.read(self.rows.device))
        return LayerEntries(keys, values, self.real_entries(self.full.length))

    @override
    def share(self) -> "ElasticLayer":
        self._await_loading()
        rows = self.rows.clone()
        return ElasticLayer(
            self.full, self.slots, rows, self.key_width, self.seen, self.padding, keeps_slots=self.keeps_slots
        )


def _load(full: FullEntries, rows: Tensor, change: SlotChange, begun: Begun) -> Begun:
    """Begin to copy a change's entries into the slots' rows [B, K, budget + 1, 2d], after the device's earlier work."""
    begun.wait()
    entries, slots, unchanged = change.moves
    start = time.perf_counter()
    entry_rows = full.rows(entries)
    slot_rows = slots + slots // (rows.shape[2] - 1)  # each head has a row more, the newest token's
    with on_side_stream(rows.device):
        rows.flatten(0, 2).index_copy_(0, slot_rows.to(rows.device), entry_rows.to(rows.device, non_blocking=True))
        if rows.is_cuda:
            rows.record_stream(torch.cuda.current_stream(rows.device))  # a layer may be gone before it is done
        copying = Begun(rows.device)

    row_bytes = entry_rows.shape[1] * entry_rows.element_size()
    traffic = full.traffic
    traffic.fetched += len(entries) * row_bytes
    traffic.asked += (len(entries) + unchanged) * row_bytes
    traffic.reused += unchanged
    traffic.selections += 1
    traffic.fetching += time.perf_counter() - start
    return copying


@dataclass(frozen=True)
class Placement:
    """Which layers are on the CPU at which length.

    Attributes:
        budget: Slots per KV head and row of each layer on the CPU.
        device: The model's device.
        least_on_cpu: Number of last layers that are on the CPU at any length.
        plan: The plan that moves further layers; None without a memory limit.
        is_elastic: Whether entries that two steps read in a row stay on the device, and others are loaded ahead.
    """

    budget: int
    device: torch.device
    least_on_cpu: int = 0
    plan: MemoryPlan | None = None
    is_elastic: bool = True

    def on_cpu(self, rows: int, length: int) -> int:
        """Number of layers on the CPU when each of `rows` rows has `length` entries, padding included."""
        if self.plan is None:
            return self.least_on_cpu
        return max(self.least_on_cpu, self.plan.layers_on_cpu(rows * length))

    def move_layers(self, layers: list[Any], length: int) -> None:
        """Move layers with full attention to the CPU, in place in their list, before a step to `length` entries a row.

        Raises:
            UserError: they do not fit even with all layers on the CPU, or a layer has its own selector.
        """
        full_attention = [index for index, layer in enumerate(layers) if not is_bounded(layer)]
        if not full_attention:
            return
        rows = len(layers[full_attention[0]].keys)
        first_on_cpu = max(len(full_attention) - self.on_cpu(rows, length), 0)
        for index in reversed(full_attention[first_on_cpu:]):
            layer: SelectedLayer = layers[index]
            if isinstance(layer, ElasticLayer):
                continue
            if layer.selector is not None:
                raise UserError(
                    "a layer that reads its own keys to select must have them on the device; offload none",
                    field="offload",
                    code="conflict",
                )

            layers_on_cpu = elastic_layers(layers)
            if layers_on_cpu:
                slots = layers_on_cpu[0].slots
                traffic = layers_on_cpu[0].full.traffic
            else:
                batch, kv_heads, _, _ = layer.keys.shape
                slots = SlotMap.empty(batch, kv_heads, self.budget, self.device)
                traffic = Traffic()
            layers[index] = ElasticLayer.from_layer(layer, slots, traffic, keeps_slots=self.is_elastic)


def elastic_layers(layers: list[Any]) -> list[ElasticLayer]:
    """The layers whose entries are in CPU memory."""
    return [layer for layer in layers if isinstance(layer, ElasticLayer)]
