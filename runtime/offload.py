"""The full cache in the CPU's memory, and entries fetched back from it while the model computes.

A fetch is begun by a thread of its own, which gathers the rows and sends them on a CUDA stream of its own where there
is one. Nothing else differs between a GPU and a CPU.
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
"""Tokens for which a new buffer has room beyond those that are there."""


@dataclass
class Traffic:
    """What moved between the two memories, counted over all layers of a cache.

    Attributes:
        offloaded: Bytes sent to the CPU.
        fetched: Bytes sent back.
        asked: Bytes that would have been sent back had no entry been there already.
        reused: Entries that were there already.
        selections: Selections that slots were filled with, one for each layer and step.
        fetching: Seconds that the gathers took.
        waited: Seconds for which the model had to wait for them.
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
        """Share of the entries asked for that were there already; also of the bytes that were saved."""
        return 1 - self.fetched / self.asked if self.asked else 0.0


class FetchedEntries(NamedTuple):
    """Entries brought back to the device in full precision.

    Attributes:
        indices: [B, K, k] int64, which entries; none twice in a head.
        keys: [B, K, k, d].
        values: [B, K, k, d].
    """

    indices: Tensor
    keys: Tensor
    values: Tensor


@dataclass
class _Buffer:
    """Rows [S, B, K, 2d], keys beside values, of which the first `filled` tokens are taken.

    What is appended is one piece of memory, so that a GPU can write it while the program goes on.
    """

    rows: Tensor
    filled: int


class Fetch:
    """Entries on their way to the device.

    Args:
        indices: [B, K, k] int64, on the device.
        coming: Rows [B, K, k, 2d] on the device.
        traffic: Counts the seconds.
    """

    def __init__(self, indices: Tensor, coming: "Future[Tensor]", traffic: Traffic) -> None:
        self._indices, self._coming, self._traffic = indices, coming, traffic

    def wait(self) -> FetchedEntries:
        """The entries, as soon as they are there; it may be asked again."""
        rows = await_counted(self._coming, self._traffic)
        if rows.is_cuda:
            rows.record_stream(torch.cuda.current_stream(rows.device))
        return FetchedEntries(self._indices, *rows.chunk(2, dim=3))


@dataclass(frozen=True)
class FullEntries:
    """The entries of one layer in the CPU's memory, pinned where there is a GPU.

    Appending returns another view; both stay valid, and share what they have in common.

    Attributes:
        length: Entries of each KV head.
        traffic: Counts what moves.
    """

    length: int
    traffic: Traffic
    _buffer: _Buffer

    @classmethod
    def offload(cls, keys: Tensor, values: Tensor, traffic: Traffic) -> "FullEntries":
        """Entries [B, K, T, d] of a prompt."""
        batch, kv_heads, _, width = keys.shape
        none = _Buffer(keys.new_empty(0, batch, kv_heads, width + values.shape[3], device="cpu"), 0)
        return cls(0, traffic, none).append(keys, values)

    def append(self, keys: Tensor, values: Tensor) -> "FullEntries":
        """With more entries [B, K, q, d]; a GPU may still be writing them when this returns."""
        buffer, end, on_gpu = self._buffer, self.length + keys.shape[2], keys.device.type == "cuda"
        # Where another view has appended already, or where there is no room, this one goes on in a buffer of its own.
        if buffer.filled != self.length or end > len(buffer.rows):
            shape = end + max(_SPARE, end // 8), *buffer.rows.shape[1:]
            rows = torch.empty(shape, dtype=keys.dtype, device="cpu", pin_memory=torch.cuda.is_available())
            if on_gpu:
                torch.cuda.current_stream(keys.device).synchronize()  # earlier entries may be on their way
            rows[: self.length] = buffer.rows[: self.length]
            buffer = _Buffer(rows, self.length)
        new = torch.cat([keys, values], dim=3).permute(2, 0, 1, 3).contiguous()
        buffer.rows[self.length : end].copy_(new, non_blocking=on_gpu)
        buffer.filled = end
        self.traffic.offloaded += new.numel() * new.element_size()
        return replace(self, length=end, _buffer=buffer)

    def cropped(self, length: int) -> "FullEntries":
        """With the first entries only."""
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
        """Begin to bring entries [B, K, k] int64 back to the device of the indices."""
        return Fetch(indices, in_background(self._gather, FromDevice(indices), indices.device), self.traffic)

    def _gather(self, wanted: "FromDevice", device: torch.device) -> Tensor:
        indices = wanted.get()
        start = time.perf_counter()
        gathered = self.rows(flat_rows(indices).flatten()).view(*indices.shape, -1)
        with on_side_stream(device):
            gathered = gathered.to(device, non_blocking=True)
        self.traffic.fetched += gathered.numel() * gathered.element_size()
        self.traffic.fetching += time.perf_counter() - start
        return gathered


def flat_rows(indices: Tensor) -> Tensor:
    """Entries [B, K, k] int64 of each row and head -> flat indices into [S, B, K]."""
    batch, kv_heads, _ = indices.shape
    heads = torch.arange(batch * kv_heads, device=indices.device).view(batch, kv_heads, 1)
    return indices * (batch * kv_heads) + heads


class FromDevice:
    """A tensor on its way to the CPU, for a thread that can wait for it and for all that was begun before it.

    Args:
        tensor: On any device.
    """

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor.to("cpu", non_blocking=True)
        self._begun = Begun(tensor.device)

    def get(self) -> Tensor:
        """The tensor, once it is there."""
        self._begun.wait()
        return self._tensor


class Begun:
    """All that a device was given to do so far.

    Args:
        device: Nothing is ever waited for on a CPU.
    """

    def __init__(self, device: torch.device) -> None:
        self._event = torch.cuda.Event() if device.type == "cuda" else None
        if self._event is not None:
            self._event.record(torch.cuda.current_stream(device))

    def wait(self) -> None:
        """Until it is done; that holds up the calling thread alone."""
        if self._event is not None:
            self._event.synchronize()


@contextmanager
def on_side_stream(device: torch.device) -> Iterator[None]:
    """What is begun inside runs beside the model, and is done at the end: that holds up the calling thread alone."""
    if device.type != "cuda":
        yield
        return
    stream = _side_stream(device)
    with torch.cuda.stream(stream):
        yield
    stream.synchronize()


def in_background(function: Callable[..., Result], *arguments: object) -> "Future[Result]":
    """Call a function in the thread that fetches, after what was given to it before."""
    return _worker().submit(function, *arguments)


def await_counted(coming: "Future[Result]", traffic: Traffic) -> Result:
    """What is coming, as soon as it is there; the time is counted."""
    start = time.perf_counter()
    result = coming.result()
    traffic.waited += time.perf_counter() - start
    return result


@cache
def _worker() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(max_workers=1, thread_name_prefix="keepsight-fetch")


@cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


def require_memory(rows: int, tokens: int, layers: int, kv_heads: int, width: int, item: int) -> None:
    """Refuse prompts whose full cache does not fit into the CPU's free memory.

    Raises:
        UserError: with the arithmetic.
    """
    needed, free = rows * tokens * layers * kv_heads * width * 2 * item, psutil.virtual_memory().available
    if needed > free:
        raise UserError(
            f"the full cache does not fit into the CPU's memory: {rows} rows x {tokens} tokens x {layers} layers x "
            f"{kv_heads} KV heads x {width} dimensions x 2 (keys, values) x {item} bytes = {needed / 1e9:.1f} GB, and "
            f"{free / 1e9:.1f} GB are free; give fewer rows or shorter prompts"
        )
