"""Elastic loading (SpeContext, arXiv 2512.00722, section 5): selected entries on the device, all of them on the CPU."""

import time
import weakref
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

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
from keepsight.runtime.sparse_read.cache import SelectedLayer, Selection, real_mask

_NONE, _STAYS = -1, -2


class Moves(NamedTuple):
    """What a change copies.

    Attributes:
        entries: [n] int64 on the CPU: flat indices into the entries [S, B, K] of a layer.
        slots: [n] int64 on the CPU: flat indices into slots [B, K, budget].
        reused: Number of entries that stay in their slots.
    """

    entries: Tensor
    slots: Tensor
    reused: int


class Change:
    """The change from what the slots hold to what a step selects, the same for all layers.

    Args:
        after: What the slots hold after it.
        arriving: [B, K, budget] int64: the entry to be copied into each slot, -1 where none is held, -2 where it stays.
    """

    def __init__(self, after: "Arrangement", arriving: Tensor) -> None:
        self.after, self._arriving = after, FromDevice(arriving)

    @cached_property
    def moves(self) -> Moves:
        """What it copies; for the fetching thread, because it waits for the device."""
        arriving = self._arriving.get()
        slots = (arriving.flatten() >= 0).nonzero()[:, 0]
        return Moves(flat_rows(arriving).flatten()[slots], slots, int((arriving == _STAYS).sum()))


class Arrangement:
    """Which entry each slot of a layer holds; immutable, and shared by the layers that hold the same.

    Args:
        held: [B, K, budget] int64, -1 for none.
    """

    def __init__(self, held: Tensor) -> None:
        self.held = held
        self._asked: Selection | None = None
        self._answered: weakref.ref[Change] | None = None  # an old state would keep all later ones alive

    @classmethod
    def empty(cls, batch: int, kv_heads: int, budget: int, device: torch.device) -> "Arrangement":
        """Empty slots."""
        return cls(torch.full((batch, kv_heads, budget), _NONE, device=device))

    def to(self, chosen: Selection, length: int) -> Change:
        """The change to what a step selects among `length` entries, which the first slots then hold.

        It is computed once for all layers of a step, as long as one of them keeps it.

        Raises:
            UserError: more is selected than there are slots.
        """
        known = self._answered() if self._answered is not None and self._asked is chosen else None
        if known is None:
            known = self._change(chosen, length)
            self._asked, self._answered = chosen, weakref.ref(known)
        return known

    def cropped(self, length: int) -> "Arrangement":
        """The arrangement without entries from `length` on: other tokens will take their places."""
        gone = self.held >= length
        return Arrangement(self.held.masked_fill(gone, _NONE)) if bool(gone.any()) else self

    def _change(self, chosen: Selection, length: int) -> Change:
        now, budget = chosen.indices, self.held.shape[2]
        if now.shape[2] > budget:
            raise UserError(f"{now.shape[2]} entries are selected, and a layer on the CPU has slots for {budget}")
        if chosen.real is not None:
            now = now.masked_fill(~chosen.real, _NONE)
        held = self.held[:, :, : now.shape[2]]
        stays = _is_among(held, now, length)
        lacking = ~_is_among(now, held, length) & (now != _NONE)
        # Per head, the first lacking entry goes into the first free slot, and so on.
        queue = now.new_full((*now.shape[:2], now.shape[2] + 1), _NONE)
        queue.scatter_(2, torch.where(lacking, lacking.cumsum(dim=2) - 1, now.shape[2]), now)
        queue[:, :, -1] = _NONE
        incoming = queue.gather(2, ((~stays).cumsum(dim=2) - 1).clamp(min=0))
        after = torch.where(stays, held, incoming)
        free = 0, budget - now.shape[2]
        arriving = functional.pad(incoming.masked_fill(stays, _STAYS), free, value=_NONE)
        return Change(Arrangement(functional.pad(after, free, value=_NONE)), arriving)


def _is_among(wanted: Tensor, given: Tensor, length: int) -> Tensor:
    """[B, K, n] bool: which of `wanted` [B, K, n] are among their head's `given` [B, K, m]; -1 never is."""
    marks = torch.zeros(*given.shape[:2], length + 1, dtype=torch.bool, device=given.device)
    marks.scatter_(2, torch.where(given < 0, length, given), True)
    marks[:, :, -1] = False  # where -1 was marked
    return marks.gather(2, torch.where(wanted < 0, length, wanted))


@dataclass
class Slots:
    """The device memory of a layer on the CPU.

    Attributes:
        arrangement: Which entries are in the slots, or on their way there.
        rows: [B, K, budget + 1, 2d], keys beside values. The newest token's row follows those that a step selected.
        key_width: Dimensions of a key.
    """

    arrangement: Arrangement
    rows: Tensor
    key_width: int

    def first(self, count: int) -> tuple[Tensor, Tensor]:
        """Keys and values [B, K, count, d] of the first slots."""
        return self.split(self.rows[:, :, :count])

    def split(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Rows [..., 2d] -> keys and values [..., d]."""
        return rows[..., : self.key_width], rows[..., self.key_width :]

    def copy(self) -> "Slots":
        """A copy that shares no memory."""
        return replace(self, rows=self.rows.clone())


class ElasticLayer(SelectedLayer):
    """A cache layer whose entries are in CPU memory.

    Args:
        full: All entries.
        slots: Those of them that are on the device.
        seen: Logical length.
        padding: See `SelectedLayer`.
    """

    def __init__(self, full: FullEntries, slots: Slots, seen: int, padding: Tensor | None = None) -> None:
        super().__init__(*slots.first(0), seen, padding)
        self.full, self.slots = full, slots
        self._newest: Tensor | None = None
        self._prepared: Selection | None = None
        self._change: Change | None = None
        self._loading: Future[Begun] | None = None

    @classmethod
    def from_layer(cls, layer: SelectedLayer, arrangement: Arrangement, traffic: Traffic) -> "ElasticLayer":
        """Move a layer to the CPU.

        Args:
            layer: The layer; it stays unchanged.
            arrangement: What the slots of the other layers on the CPU hold; these are filled alike.
            traffic: Counts what moves from step to step.
        """
        keys, values, held = layer.keys, layer.values, arrangement.held
        rows = torch.zeros(
            *held.shape[:2],
            held.shape[2] + 1,
            keys.shape[3] + values.shape[3],
            dtype=keys.dtype,
            device=held.device,
        )
        slots = Slots(arrangement, rows, keys.shape[3])
        places = held.clamp(min=0).to(keys.device)[..., None]
        for part, own in zip(slots.first(held.shape[2]), (keys, values), strict=True):
            part.copy_(own.gather(2, places.expand(-1, -1, -1, own.shape[3])))
        return cls(FullEntries.offload(keys, values, traffic), slots, layer.seen, layer.padding)

    @property
    @override
    def bytes(self) -> int:
        """Bytes of the slots, without the list of what they hold, which all layers share."""
        return self.slots.rows.nbytes

    @override
    def prepare(self, chosen: Selection) -> None:
        super().prepare(chosen)
        self._prepared = chosen
        self._change = self.slots.arrangement.to(chosen, self.full.length)
        self.slots.arrangement = self._change.after
        self._loading = in_background(_load, self.full, self.slots.rows, self._change, Begun(self.slots.rows.device))

    @override
    def gather(self, chosen: Selection) -> LayerEntries:
        if self._prepared is not chosen:
            self.prepare(chosen)
        self._settle()
        count, rows = chosen.indices.shape[2], self.slots.rows
        assert self._newest is not None
        rows[:, :, count : count + 1] = self._newest
        real = None
        if chosen.real is not None:
            assert self.padding is not None
            real = self.slots.arrangement.held[:, :, :count] >= self.padding[:, None, None]
            real = functional.pad(real, (0, 1), value=True)
        return LayerEntries(*self.slots.first(count + 1), real)

    def _settle(self) -> None:
        """Let the device's work from here on wait until the slots hold what the arrangement says."""
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
        self._settle()
        self.full, self.seen = self.full.cropped(self.full.length + tokens_to_remove), self.seen + tokens_to_remove
        self.slots.arrangement = self.slots.arrangement.cropped(self.full.length)

    @override
    def entries(self) -> LayerEntries:
        """All entries, copied to the device."""
        keys, values = self.slots.split(self.full.read(self.slots.rows.device))
        real = None
        if self.padding is not None:
            real = real_mask(self.padding, keys.shape[2])[:, None].expand(-1, keys.shape[1], -1)
        return LayerEntries(keys, values, real)

    @override
    def share(self) -> "ElasticLayer":
        self._settle()
        return ElasticLayer(self.full, self.slots.copy(), self.seen, self.padding)


def _load(full: FullEntries, rows: Tensor, change: Change, begun: Begun) -> Begun:
    """Copy what a change brings into the slots' rows [B, K, budget + 1, 2d], after the device's earlier work.

    Returns:
        The copying, which a GPU may still be at.
    """
    begun.wait()
    entries, slots, reused = change.moves
    start, traffic = time.perf_counter(), full.traffic
    coming = full.rows(entries)
    size = coming.shape[1] * coming.element_size()
    slots = slots + slots // (rows.shape[2] - 1)  # each head has a row more, the newest token's
    with on_side_stream(rows.device):
        rows.flatten(0, 2).index_copy_(0, slots.to(rows.device), coming.to(rows.device, non_blocking=True))
        if rows.is_cuda:
            rows.record_stream(torch.cuda.current_stream(rows.device))  # a layer may be gone before it is done
        copying = Begun(rows.device)
    traffic.fetched += len(entries) * size
    traffic.asked += (len(entries) + reused) * size
    traffic.reused += reused
    traffic.selections += 1
    traffic.fetching += time.perf_counter() - start
    return copying


@dataclass(frozen=True)
class Placement:
    """Which layers are on the CPU at which length.

    Attributes:
        budget: Slots per KV head and row of each layer on the CPU.
        device: The model's device.
        least: Number of last layers that are on the CPU at any length.
        plan: The plan that moves further layers; None without a memory limit.
    """

    budget: int
    device: torch.device
    least: int = 0
    plan: MemoryPlan | None = None

    def on_cpu(self, rows: int, length: int) -> int:
        """Number of layers on the CPU when each of `rows` rows has `length` entries, padding included.

        Raises:
            UserError: they do not fit at all.
        """
        return max(self.least, self.plan.layers_on_cpu(rows * length) if self.plan is not None else 0)

    def place(self, layers: list[Any], length: int) -> None:
        """Move layers with full attention to the CPU, in place in their list, before a step.

        Args:
            layers: Layers of a cache, on the device or on the CPU.
            length: Entries per row after the step.

        Raises:
            UserError: they do not fit with all layers on the CPU either, or a layer selects for itself.
        """
        places = [index for index, layer in enumerate(layers) if not is_bounded(layer)]
        moving = self.on_cpu(len(layers[places[0]].keys), length) if places else 0
        for index in reversed(places[max(len(places) - moving, 0) :]):
            if not isinstance(layers[index], ElasticLayer):
                layers[index] = self._moved(layers[index], next(iter(elastic_layers(layers)), None))

    def _moved(self, layer: SelectedLayer, other: ElasticLayer | None) -> ElasticLayer:
        """The layer on the CPU, with the same entries in its slots as another one."""
        if layer.selector is not None:
            raise UserError("a layer that reads its own keys to select has to have them on the device; offload none")
        if other is not None:
            return ElasticLayer.from_layer(layer, other.slots.arrangement, other.full.traffic)
        batch, kv_heads, _, _ = layer.keys.shape
        return ElasticLayer.from_layer(layer, Arrangement.empty(batch, kv_heads, self.budget, self.device), Traffic())


def elastic_layers(layers: list[Any]) -> list[ElasticLayer]:
    """The layers whose entries are in CPU memory."""
    return [layer for layer in layers if isinstance(layer, ElasticLayer)]
