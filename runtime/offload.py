"""The full cache in the CPU's memory, and entries fetched back from it while the model computes.

A fetch is begun by a thread of its own, which gathers the rows and sends them on a CUDA stream of its own where there
is one. Nothing else differs between a GPU and a CPU.
"""

import time
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cache

import psutil
import torch
from torch import Tensor

from keepsight.errors import UserError
from keepsight.runtime.packed_entries import Slots

_SPARE = 256
"""Tokens for which a new buffer has room beyond those that are there."""


@dataclass
class Traffic:
    """What moved between the two memories, counted over all layers of a cache.

    Attributes:
        offloaded: Bytes sent to the CPU.
        fetched: Bytes sent back.
        fetching: Seconds that the gathers took.
        waited: Seconds for which the model had to wait for them.
    """

    offloaded: int = 0
    fetched: int = 0
    fetching: float = 0.0
    waited: float = 0.0


@dataclass
class _Buffer:
    """Rows [B, K, S, 2d], keys beside values, of which the first `filled` entries a head are taken."""

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

    def wait(self) -> Slots:
        """The entries, as soon as they are there; it may be asked again."""
        start = time.perf_counter()
        rows = self._coming.result()
        self._traffic.waited += time.perf_counter() - start
        if rows.is_cuda:
            rows.record_stream(torch.cuda.current_stream(rows.device))
        return Slots(self._indices, *rows.chunk(2, dim=3))


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
        none = _Buffer(keys.new_empty(*keys.shape[:2], 0, 2 * keys.shape[3], device="cpu"), 0)
        return cls(0, traffic, none).append(keys, values)

    def append(self, keys: Tensor, values: Tensor) -> "FullEntries":
        """With more entries [B, K, q, d]."""
        buffer, end = self._buffer, self.length + keys.shape[2]
        # Where another view has appended already, or where there is no room, this one goes on in a buffer of its own.
        if buffer.filled != self.length or end > buffer.rows.shape[2]:
            room = end + max(_SPARE, end // 8)
            pinned = keys.device.type == "cuda"
            rows = torch.empty(
                *keys.shape[:2], room, 2 * keys.shape[3], dtype=keys.dtype, device="cpu", pin_memory=pinned
            )
            rows[:, :, : self.length] = buffer.rows[:, :, : self.length]
            buffer = _Buffer(rows, self.length)
        buffer.rows[:, :, self.length : end] = torch.cat([keys, values], dim=3).cpu()
        buffer.filled = end
        self.traffic.offloaded += 2 * keys.numel() * keys.element_size()
        return replace(self, length=end, _buffer=buffer)

    def fetch(self, indices: Tensor) -> Fetch:
        """Begin to bring entries [B, K, k] int64 back to the device of the indices."""
        ready = None
        if indices.is_cuda:
            wanted = indices.to("cpu", non_blocking=True)
            ready = torch.cuda.Event()
            ready.record(torch.cuda.current_stream(indices.device))
        else:
            wanted = indices
        return Fetch(indices, _worker().submit(self._gather, wanted, indices.device, ready), self.traffic)

    def _gather(self, indices: Tensor, device: torch.device, ready: torch.cuda.Event | None) -> Tensor:
        if ready is not None:
            ready.synchronize()
        start = time.perf_counter()
        rows = self._buffer.rows
        heads = torch.arange(indices.shape[0] * indices.shape[1]).view(*indices.shape[:2], 1)
        gathered = torch.empty(*indices.shape, rows.shape[3], dtype=rows.dtype, pin_memory=ready is not None)
        flat = (heads * rows.shape[2] + indices).flatten()
        torch.index_select(rows.view(-1, rows.shape[3]), 0, flat, out=gathered.view(-1, rows.shape[3]))
        if ready is not None:
            with torch.cuda.stream(_side_stream(device)):
                gathered = gathered.to(device, non_blocking=True)
            _side_stream(device).synchronize()  # holds up this thread alone
        self.traffic.fetched += gathered.numel() * gathered.element_size()
        self.traffic.fetching += time.perf_counter() - start
        return gathered


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
