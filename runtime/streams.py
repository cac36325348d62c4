"""Work beside the model: in a background thread, and on a side CUDA stream; nothing differs where there is no GPU."""

from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import cache
from typing import TypeVar

import torch
from torch import Tensor

Result = TypeVar("Result")


class FromDevice:
    """A tensor on its way to the CPU; a thread can wait for it, and for all device work enqueued before it.

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
    """All the work that a device's current stream was given so far.

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
        """Let what the current stream is given from now on wait for it; the calling thread does not."""
        if self._event is not None:
            torch.cuda.current_stream(self._device).wait_event(self._event)


@contextmanager
def on_side_stream(device: torch.device) -> Iterator[None]:
    """Work enqueued inside runs beside the model."""
    if device.type != "cuda":
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
