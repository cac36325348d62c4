"""The full cache in CPU memory, from which a background thread fetches entries.

The side stream is experimental, and off by default.
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
from keepsight.experimental import is_on

Result = TypeVar("Result")


class FromDevice:
    """A tensor that is being copied to the CPU; a thread can wait for it, and for all device work before it.

    Args:
        tensor: On any device.
    """

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor.to("cpu", non_blocking=True)
        self._begun = Begun(tensor.device)

    def get(self) -> Tensor:
        """Wait for the tensor."""
        self._begun.wait()
        return self._tensor


class Begun:
    """All work enqueued so far on a device's current stream.

    Args:
        device: The device; on a CPU there is nothing to wait for.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._event = torch.cuda.Event() if device.type == "cuda" else None
        if self._event is not None:
            self._event.record(torch.cuda.current_stream(device))

    def wait(self) -> None:
        """Block the calling thread until it is done."""
        if self._event is not None:
            self._event.synchronize()

    def precede(self) -> None:
        """Let work that is enqueued on the current stream from now on wait for it; the calling thread does not."""
        if self._event is not None:
            torch.cuda.current_stream(self._device).wait_event(self._event)


@contextmanager
def on_side_stream(device: torch.device) -> Iterator[None]:
    """Enqueue work on a side stream, beside the model (experimental); on the model's stream where streams are off."""
    if device.type != "cuda" or not is_on("streams"):
        yield
        return
    with torch.cuda.stream(_side_stream(device)):
        yield


def in_background(function: Callable[..., Result], *arguments: object) -> "Future[Result]":
    """Call a function in the fetching thread, after the earlier calls."""
    return _worker().submit(function, *arguments)


@cache
def _worker() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(max_workers=1, thread_name_prefix="keepsight-fetch")


@cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


_SPARE = 256
"""Spare tokens in a new buffer."""


@dataclass
class Traffic:
    """Traffic between CPU and device, counted over all layers of a cache.

    Attributes:
        offloaded: Bytes sent to the CPU.
        fetched: Bytes sent back to the device.
        asked: Bytes of all requested entries, those already on the device included.
        reused: Entries that were on the device already.
        selections: Number of selections that slots were filled with, one per layer and step.
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
        """Share of the requested entries (and of their bytes) that were on the device already."""
        return 1 - self.fetched / self.asked if self.asked else 0.0


class FetchedEntries(NamedTuple):
    """Entries [B, K, k, d] brought back in full precision, by their indices [B, K, k] int64; none twice in a head."""

    indices: Tensor
    keys: Tensor
    values: Tensor


@dataclass
class _Buffer:
    """Rows [S, B, K, 2d], keys beside values; the first `filled` tokens are taken.

    Appended rows are contiguous, so that a GPU can write them asynchronously.
    """

    rows: Tensor
    filled: int


class Fetch:
    """Entries [B, K, k] int64 on their way to the device, as rows [B, K, k, 2d]; the seconds waited are counted."""

    def __init__(self, indices: Tensor, coming: "Future[tuple[Tensor, Begun]]", traffic: Traffic) -> None:
        self._indices = indices
        self._coming = coming
        self._traffic = traffic

    def wait(self) -> FetchedEntries:
        """The entries. Device work enqueued from here on waits for them, the CPU does not; may be called again."""
        return FetchedEntries(self._indices, *self.rows().chunk(2, dim=3))

    def rows(self) -> Tensor:
        """As `wait`, but one tensor [B, K, k, 2d], keys beside values."""
        rows, sending = await_counted(self._coming, self._traffic)
        sending.precede()
        if rows.is_cuda:
            rows.record_stream(torch.cuda.current_stream(rows.device))
        return rows


@dataclass(frozen=True)
class FullEntries:
    """The entries of one layer in CPU memory, pinned where there is a GPU.

    Appending returns another view; both stay valid, and share memory.

    Attributes:
        length: Number of entries per KV head.
        traffic: Counts what moves.
    """

    length: int
    traffic: Traffic
    _buffer: _Buffer

    @classmethod
    def offload(cls, keys: Tensor, values: Tensor, traffic: Traffic) -> "FullEntries":
        """Offload the entries [B, K, T, d] of a prompt."""
        batch, kv_heads, _, width = keys.shape
        no_rows = keys.new_empty(0, batch, kv_heads, width + values.shape[3], device="cpu")
        return cls(0, traffic, _Buffer(no_rows, 0)).append(keys, values)

    def append(self, keys: Tensor, values: Tensor) -> "FullEntries":
        """The entries with more [B, K, q, d] behind them; a GPU may still be writing these when this returns."""
        buffer = self._buffer
        end = self.length + keys.shape[2]
        on_gpu = keys.device.type == "cuda"
        # Where another view has appended already, or there is no room left, this one moves to a new buffer.
        if buffer.filled != self.length or end > len(buffer.rows):
            shape = (end + max(_SPARE, end // 8), *buffer.rows.shape[1:])
            rows = torch.empty(shape, dtype=keys.dtype, device="cpu", pin_memory=torch.cuda.is_available())
            if on_gpu:
                torch.cuda.current_stream(keys.device).synchronize()  # earlier entries may be on their way
            rows[: self.length] = buffer.rows[: self.length]
            buffer = _Buffer(rows, self.length)
        new_rows = torch.cat([keys, values], dim=3).permute(2, 0, 1, 3).contiguous()
        buffer.rows[self.length : end].copy_(new_rows, non_blocking=on_gpu)
        buffer.filled = end
        self.traffic.offloaded += new_rows.nbytes
        return replace(self, length=end, _buffer=buffer)

    def cropped(self, length: int) -> "FullEntries":
        """The first `length` entries."""
        return replace(self, length=length)

    def read(self, device: torch.device) -> Tensor:
        """All entries [B, K, S, 2d], keys beside values, copied to a device."""
        if device.type == "cuda":
            torch.cuda.current_stream(device).synchronize()  # the last entries may be on their way here
        return self._buffer.rows[: self.length].permute(1, 2, 0, 3).to(device, copy=True)

    def rows(self, flat: Tensor) -> Tensor:
        """Rows [n, 2d], keys beside values, of [n] int64 flat indices into [S, B, K]; pinned if the entries are."""
        stored = self._buffer.rows.flatten(0, 2)
        out = torch.empty(len(flat), stored.shape[1], dtype=stored.dtype, pin_memory=stored.is_pinned())
        return torch.index_select(stored, 0, flat, out=out)

    def fetch(self, indices: Tensor) -> Fetch:
        """Start to fetch the entries [B, K, k] int64 to the device of the indices."""
        coming = in_background(self._gather, FromDevice(indices), indices.device)
        return Fetch(indices, coming, self.traffic)

    def _gather(self, indices_from_device: FromDevice, device: torch.device) -> tuple[Tensor, Begun]:
        indices = indices_from_device.get()
        start = time.perf_counter()
        gathered = self.rows(flat_rows(indices).flatten()).unflatten(0, indices.shape)
        with on_side_stream(device):
            gathered = gathered.to(device, non_blocking=True)
            sending = Begun(device)
        self.traffic.fetched += gathered.nbytes
        self.traffic.fetching += time.perf_counter() - start
        return gathered, sending


def flat_rows(indices: Tensor) -> Tensor:
    """Entries [B, K, k] int64 of each row and head -> flat indices into [S, B, K]."""
    batch, kv_heads, _ = indices.shape
    heads = torch.arange(batch * kv_heads, device=indices.device).view(batch, kv_heads, 1)
    return indices * (batch * kv_heads) + heads


def await_counted(coming: "Future[Result]", traffic: Traffic) -> Result:
    """Wait for a result; the time is counted."""
    start = time.perf_counter()
    result = coming.result()
    traffic.waited += time.perf_counter() - start
    return result


def require_memory(rows: int, tokens: int, layers: int, kv_heads: int, width: int, item: int) -> None:
    """Refuse prompts whose full cache does not fit into free CPU memory."""
    needed = rows * tokens * layers * kv_heads * width * 2 * item
    free = psutil.virtual_memory().available
    if needed > free:
        raise UserError(
            f"the full cache does not fit into the CPU's memory: {rows} rows x {tokens} tokens x {layers} layers x "
            f"{kv_heads} KV heads x {width} dimensions x 2 (keys, values) x {item} bytes = {needed / 1e9:.1f} GB, and "
            f"{free / 1e9:.1f} GB are free; give fewer rows or shorter prompts",
            field="full",
            code="memory",
        )
