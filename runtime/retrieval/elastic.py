"""Elastic loading: a layer's entries are in CPU memory, those that a step selects in slots on the device.

SpeContext (arXiv 2512.00722), section 5.4: entries that consecutive steps both select stay in their slots; new ones are
copied into the freed slots while earlier layers still compute. Slots are unordered, as keys are stored after RoPE.
Section 6.2, algorithm 2: while an answer grows, layers move to the CPU one at a time, the last one first.
"""

import time
import weakref
from concurrent.futures import Future
from dataclasses import dataclass
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
    CpuCopy,
    OffloadedEntries,
    QueuedWork,
    Traffic,
    flat_rows,
    in_background,
    on_side_stream,
)
from keepsight.runtime.retrieval.memory_plan import MemoryPlan
from keepsight.runtime.sparse_read.cache import SelectedLayer, Selection

_EMPTY, _STAYS = -1, -2


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
    """The change from one step's slots to the next one's, the same for all layers.

    Args:
        after: The arrangement after it.
        arriving: [B, K, budget] int64: the entry to be copied into each slot, -1 for none, -2 where the entry stays.
    """

    def __init__(self, after: "Arrangement", arriving: Tensor) -> None:
        self.after, self._arriving = after, CpuCopy(arriving)

    @cached_property
    def moves(self) -> Moves:
        """What it copies; for the background thread, because it waits for the device."""
        arriving = self._arriving.get()
        slots = (arriving.flatten() >= 0).nonzero()[:, 0]
        return Moves(flat_rows(arriving).flatten()[slots], slots, int((arriving == _STAYS).sum()))


class Arrangement:
    """Which entry is in each slot of a layer; immutable, and shared by layers with the same slots.

    Args:
        entries: [B, K, budget] int64, -1 for none.
    """

    def __init__(self, entries: Tensor) -> None:
        self.entries = entries
        self._asked: Selection | None = None
        self._answered: weakref.ref[Change] | None = None  # an old state would keep all later ones alive

    def to(self, chosen: Selection, length: int) -> Change:
        """The change to a selection among `length` entries, after which the first slots have the selected entries.

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
        gone = self.entries >= length
        return Arrangement(self.entries.masked_fill(gone, _EMPTY)) if bool(gone.any()) else self

    def _change(self, chosen: Selection, length: int) -> Change:
        now, budget = chosen.indices, self.entries.shape[2]
        if now.shape[2] > budget:
            raise UserError(f"{now.shape[2]} entries are selected, and a layer on the CPU has slots for {budget}")
        if chosen.real is not None:
            now = now.masked_fill(~chosen.real, _EMPTY)
        before = self.entries[:, :, : now.shape[2]]
        stays = _is_among(before, now, length)
        missing = ~_is_among(now, before, length) & (now != _EMPTY)
        # Per head, the first missing entry goes into the first free slot, and so on.
        queue = now.new_full((*now.shape[:2], now.shape[2] + 1), _EMPTY)
        queue.scatter_(2, torch.where(missing, missing.cumsum(dim=2) - 1, now.shape[2]), now)
        queue[:, :, -1] = _EMPTY
        incoming = queue.gather(2, ((~stays).cumsum(dim=2) - 1).clamp(min=0))
        after = torch.where(stays, before, incoming)
        free = 0, budget - now.shape[2]
        arriving = functional.pad(incoming.masked_fill(stays, _STAYS), free, value=_EMPTY)
        return Change(Arrangement(functional.pad(after, free, value=_EMPTY)), arriving)


def _is_among(wanted: Tensor, others: Tensor, length: int) -> Tensor:
    """[B, K, n] bool: which of `wanted` [B, K, n] are among their head's `others` [B, K, m]; -1 never is."""
    marks = torch.zeros(*others.shape[:2], length + 1, dtype=torch.bool, device=others.device)
    marks.scatter_(2, torch.where(others < 0, length, others), True)
    marks[:, :, -1] = False  # where -1 was marked
    return marks.gather(2, torch.where(wanted < 0, length, wanted))


class ElasticLayer(SelectedLayer):
    """A cache layer whose entries are in CPU memory.

    Args:
        full: All entries.
        arrangement: Which of them are in the slots, or on their way there.
        slots: [B, K, budget + 1, 2d] on the device, keys beside values. The newest token's row follows the selected
            ones.
        key_width: Dimensions of a key.
        seen: Logical length.
        padding: See `SelectedLayer`.
    """

    def __init__(
        self,
        full: OffloadedEntries,
        arrangement: Arrangement,
        slots: Tensor,
        key_width: int,
        seen: int,
        padding: Tensor | None = None,
    ) -> None:
        self.full, self.arrangement, self.slots, self.key_width = full, arrangement, slots, key_width
        super().__init__(*self._split(slots[:, :, :0]), seen, padding)
        self._newest: Tensor | None = None
        self._prepared: Selection | None = None
        self._change: Change | None = None
        self._loading: Future[QueuedWork] | None = None

    @classmethod
    def from_layer(cls, layer: SelectedLayer, arrangement: Arrangement, traffic: Traffic) -> "ElasticLayer":
        """A layer moved to the CPU, with the entries of `arrangement` in its slots; `layer` stays unchanged."""
        keys, values, entries = layer.keys, layer.values, arrangement.entries
        batch, kv_heads, budget = entries.shape
        slots = torch.zeros(
            (batch, kv_heads, budget + 1, keys.shape[3] + values.shape[3]), dtype=keys.dtype, device=entries.device
        )
        full = OffloadedEntries.offload(keys, values, traffic)
        moved = cls(full, arrangement, slots, keys.shape[3], layer.seen, layer.padding)
        places = entries.clamp(min=0).to(keys.device)[..., None]
        for part, own in zip(moved._split(slots[:, :, :budget]), (keys, values), strict=True):
            part.copy_(own.gather(2, places.expand(-1, -1, -1, own.shape[3])))
        return moved

    @property
    @override
    def bytes(self) -> int:
        """Bytes of the slots, without the list of what is in them, which all layers share."""
        return self.slots.nbytes

    def _split(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Rows [..., 2d] -> keys and values [..., d]."""
        return rows[..., : self.key_width], rows[..., self.key_width :]

    @override
    def prepare(self, chosen: Selection) -> None:
        super().prepare(chosen)
        self._prepared = chosen
        self._change = self.arrangement.to(chosen, self.full.length)
        self.arrangement = self._change.after
        self._loading = in_background(_load, self.full, self.slots, self._change, QueuedWork(self.slots.device))

    @override
    def gather(self, chosen: Selection) -> LayerEntries:
        if self._prepared is not chosen:
            self.prepare(chosen)
        self._finish_loading()
        count = chosen.indices.shape[2]
        assert self._newest is not None
        self.slots[:, :, count : count + 1] = self._newest
        real = None
        if chosen.real is not None:
            assert self.padding is not None
            real = self.arrangement.entries[:, :, :count] >= self.padding[:, None, None]
            real = functional.pad(real, (0, 1), value=True)
        return LayerEntries(*self._split(self.slots[:, :, : count + 1]), real)

    def _finish_loading(self) -> None:
        """Let later device work wait until the slots agree with the arrangement."""
        if self._loading is not None:
            self.full.traffic.wait_for(self._loading).precede()
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
        self._finish_loading()
        self.full, self.seen = self.full.cropped(self.full.length + tokens_to_remove), self.seen + tokens_to_remove
        self.arrangement = self.arrangement.cropped(self.full.length)

    @override
    def entries(self) -> LayerEntries:
        """All entries, copied to the device."""
        keys, values = self._split(self.full.read(self.slots.device))
        return LayerEntries(keys, values, self.real_entries(keys))

    @override
    def share(self) -> "ElasticLayer":
        self._finish_loading()
        return ElasticLayer(
            self.full, self.arrangement, self.slots.clone(), self.key_width, self.seen, self.padding
        )


def _load(full: OffloadedEntries, rows: Tensor, change: Change, queued: QueuedWork) -> QueuedWork:
    """Copy a change's entries into slots [B, K, budget + 1, 2d], after work that was queued on the device before.

    Returns:
        The copying, which a GPU may still be at.
    """
    queued.wait()
    entries, slots, reused = change.moves
    start, traffic = time.perf_counter(), full.traffic
    coming = full.rows(entries)
    size = coming.shape[1] * coming.element_size()
    slots = slots + slots // (rows.shape[2] - 1)  # each head has a row more, the newest token's
    with on_side_stream(rows.device):
        moved = coming.to(rows.device, rows.dtype, non_blocking=True)
        rows.flatten(0, 2).index_copy_(0, slots.to(rows.device), moved)
        if rows.is_cuda:
            rows.record_stream(torch.cuda.current_stream(rows.device))  # a layer may be gone before it is done
        copying = QueuedWork(rows.device)
    traffic.fetched += len(entries) * size
    traffic.asked += (len(entries) + reused) * size
    traffic.reused += reused
    traffic.selections += 1
    traffic.fetching += time.perf_counter() - start
    return copying


@dataclass(frozen=True)
class Placement:
    """Decides which layers' entries are in CPU memory at which length: no more than a memory limit requires.

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
        """Move layers with full attention to the CPU, in place in the list of a cache's layers, before a step.

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
            raise UserError("a layer that reads its own keys to select needs them on the device; offload none")
        if other is not None:
            return ElasticLayer.from_layer(layer, other.arrangement, other.full.traffic)
        none = torch.full((*layer.keys.shape[:2], self.budget), _EMPTY, device=self.device)
        return ElasticLayer.from_layer(layer, Arrangement(none), Traffic())


def elastic_layers(layers: list[Any]) -> list[ElasticLayer]:
    """The layers whose entries are in CPU memory."""
    return [layer for layer in layers if isinstance(layer, ElasticLayer)]
