"""KV entries in CPU memory, and asynchronous copies of some of them back to the device.

A background thread gathers the requested rows and, on a GPU, sends them on a side CUDA stream while the model computes.
Without a GPU nothing differs but the device.
"""

import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from typing import NamedTuple, TypeVar

import psutil
import torch
from torch import Tensor

from keepsight.errors import UserError

Result = TypeVar("Result")

_SPARE = 256
"""Spare tokens in a new buffer."""


class QueuedWork:
    """All work that a device's current stream has been given so far; on a CPU there is nothing to wait for."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._event = torch.cuda.Event() if device.type == "cuda" else None
        if self._event is not None:
            self._event.record(torch.cuda.current_stream(device))

    def wait(self) -> None:
        """Block the calling thread until the work is done."""
        if self._event is not None:
            self._event.synchronize()

    def precede(self) -> None:
        """Let later work of the current stream wait for it; the calling thread goes on."""
        if self._event is not None:
            torch.cuda.current_stream(self._device).wait_event(self._event)


class CpuCopy:
    """An asynchronous copy of a tensor to the CPU; `get` waits for it in whatever thread calls it."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor.to("cpu", non_blocking=True)
        self._copying = QueuedWork(tensor.device)

    def get(self) -> Tensor:
        """The copy, once it and all device work queued before it are done."""
        self._copying.wait()
        return self._tensor


@contextmanager
def on_side_stream(device: torch.device) -> Iterator[None]:
    """Queue work on a side CUDA stream, beside the model's."""
    if device.type != "cuda":
        yield
        return
    with torch.cuda.stream(_side_stream(device)):
        yield


def in_background(function: Callable[..., Result], *arguments: object) -> "Future[Result]":
    """Call a function in the background thread, after the earlier calls."""
    return _worker().submit(function, *arguments)


@cache
def _worker() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(max_workers=1, thread_name_prefix="keepsight-fetch")


@cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


@dataclass
class Traffic:
    """Counts of what moved between CPU and device, over all layers of a cache.

    Attributes:
        offloaded: Bytes sent to the CPU.
        fetched: Bytes sent back to the device.
        asked: Bytes that would have been sent back had no entry been on the device already.
        reused: Entries that were on the device already.
        selections: Number of selections fetched, one per layer and step.
        fetching: Seconds spent gathering.
        waited: Seconds that the model waited for entries.
    """

    offloaded: int = 0
    fetched: int = 0
    asked: int = 0
    reused: int = 0
    selections: int = 0
    fetching: float = 0.0
    waited: float = 0.0

    @property
    def overlap(self) -> float:
        """Share of the requested entries that were on the device already."""
        return 1 - self.fetched / self.asked if self.asked else 0.0

    def wait_for(self, coming: "Future[Result]") -> Result:
        """A future's result; the time spent waiting is counted."""
        start = time.perf_counter()
        result = coming.result()
        self.waited += time.perf_counter() - start
        return result


class FetchedEntries(NamedTuple):
    """Full-precision entries on the device.

    Attributes:
        indices: [B, K, k] int64, which entries; distinct in each head.
        keys: [B, K, k, d].
        values: [B, K, k, d].
    """

    indices: Tensor
    keys: Tensor
    values: Tensor


@dataclass
class _Buffer:
    """Rows [S, B, K, 2d], keys beside values, of which the first `filled` tokens are used.

    An appended token is contiguous, so that a GPU can write it asynchronously.
    """

    rows: Tensor
    filled: int


@dataclass(frozen=True)
class Fetch:
    """Entries [B, K, k] int64 on their way to the device, as rows [B, K, k, 2d]."""

    indices: Tensor
    _coming: "Future[tuple[Tensor, QueuedWork]]"
    _traffic: Traffic

    def wait(self) -> FetchedEntries:
        """The entries, for which later device work waits; may be called again."""
        rows, sending = self._traffic.wait_for(self._coming)
        sending.precede()
        if rows.is_cuda:
            rows.record_stream(torch.cuda.current_stream(rows.device))
        return FetchedEntries(self.indices, *rows.chunk(2, dim=3))


@dataclass(frozen=True)
class OffloadedEntries:
    """The entries of one layer in CPU memory, pinned where there is a GPU.

    Immutable: appending returns another view, which shares memory with this one.

    Attributes:
        length: Number of entries per KV head.
        traffic: Counts what moves.
    """

    length: int
    traffic: Traffic
    _buffer: _Buffer

    @classmethod
    def offload(cls, keys: Tensor, values: Tensor, traffic: Traffic) -> "OffloadedEntries":
        """Offload entries [B, K, T, d]."""
        dtype = torch.promote_types(keys.dtype, values.dtype)  # they differ under autocast
        shape = 0, *keys.shape[:2], keys.shape[3] + values.shape[3]
        return cls(0, traffic, _Buffer(torch.empty(shape, dtype=dtype, device="cpu"), 0)).append(keys, values)

    def append(self, keys: Tensor, values: Tensor) -> "OffloadedEntries":
        """These entries and more [B, K, q, d]; a GPU may still be writing the new ones when this returns."""
        buffer, end, on_gpu = self._buffer, self.length + keys.shape[2], keys.device.type == "cuda"
        # Move to a new buffer where another view has appended already, or no room is left.
        if buffer.filled != self.length or end > len(buffer.rows):
            shape = end + max(_SPARE, end // 8), *buffer.rows.shape[1:]
            rows = torch.empty(shape, dtype=buffer.rows.dtype, device="cpu", pin_memory=torch.cuda.is_available())
            if on_gpu:
                torch.cuda.current_stream(keys.device).synchronize()  # earlier entries may be on their way
            rows[: self.length] = buffer.rows[: self.length]
            buffer = _Buffer(rows, self.length)
        new = torch.cat([keys.to(buffer.rows.dtype), values.to(buffer.rows.dtype)], dim=3)
        buffer.rows[self.length : end].copy_(new.permute(2, 0, 1, 3).contiguous(), non_blocking=on_gpu)
        buffer.filled = end
        self.traffic.offloaded += new.nbytes
        return replace(self, length=end, _buffer=buffer)

    def cropped(self, length: int) -> "OffloadedEntries":
        """The first `length` entries."""
        return replace(self, length=length)

    def read(self, device: torch.device) -> Tensor:
        """All entries [B, K, S, 2d], keys beside values, copied to a device."""
        if device.type == "cuda":
            torch.cuda.current_stream(device).synchronize()  # the last entries may be on their way here
        return self._buffer.rows[: self.length].permute(1, 2, 0, 3).to(device, copy=True)

    def rows(self, flat: Tensor) -> Tensor:
        """Rows [n, 2d], keys beside values, at [n] int64 flat indices into [S, B, K]; pinned if the entries are."""
        stored = self._buffer.rows.flatten(0, 2)
        out = torch.empty(len(flat), stored.shape[1], dtype=stored.dtype, pin_memory=stored.is_pinned())
        return torch.index_select(stored, 0, flat, out=out)

    def fetch(self, indices: Tensor) -> Fetch:
        """Start to copy the entries [B, K, k] int64 to the device of the indices."""
        return Fetch(indices, in_background(self._gather, CpuCopy(indices), indices.device), self.traffic)

    def _gather(self, wanted: CpuCopy, device: torch.device) -> tuple[Tensor, QueuedWork]:
        indices = wanted.get()
        start = time.perf_counter()
        gathered = self.rows(flat_rows(indices).flatten()).view(*indices.shape, -1)
        with on_side_stream(device):
            gathered, sending = gathered.to(device, non_blocking=True), QueuedWork(device)
        self.traffic.fetched += gathered.nbytes
        self.traffic.fetching += time.perf_counter() - start
        return gathered, sending


def flat_rows(indices: Tensor) -> Tensor:
    """Entries [B, K, k] int64 of each row and head -> flat indices into [S, B, K]."""
    batch, kv_heads, _ = indices.shape
    heads = torch.arange(batch * kv_heads, device=indices.device).view(batch, kv_heads, 1)
    return indices * (batch * kv_heads) + heads


def require_memory(rows: int, tokens: int, layers: int, kv_heads: int, width: int, item: int) -> None:
    """Raise a UserError that shows the arithmetic where the full cache does not fit into free CPU memory."""
    needed, free = rows * tokens * layers * kv_heads * width * 2 * item, psutil.virtual_memory().available
    if needed > free:
        raise UserError(
            f"the full cache does not fit into the CPU's memory: {rows} rows x {tokens} tokens x {layers} layers x "
            f"{kv_heads} KV heads x {width} dimensions x 2 (keys, values) x {item} bytes = {needed / 1e9:.1f} GB, and "
            f"{free / 1e9:.1f} GB are free; give fewer rows or shorter prompts"
        )
