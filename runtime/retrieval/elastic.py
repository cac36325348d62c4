"""Elastic loading: a layer's entries are in CPU memory, those that a step selects in slots on the device.

SpeContext (arXiv 2512.00722), section 5.4. What is newly selected is copied into the slots of what no longer is
(`keepsight.runtime.retrieval.arrangement`), while earlier layers still compute.
"""

import time
from concurrent.futures import Future
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional
from typing_extensions import override

from keepsight.runtime.layer import LayerEntries
from keepsight.runtime.offload import FullEntries, Traffic, await_counted
from keepsight.runtime.retrieval.arrangement import Arrangement, Change
from keepsight.runtime.sparse_read.cache import SelectedLayer, Selection, real_mask
from keepsight.runtime.streams import Begun, in_background, on_side_stream


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
