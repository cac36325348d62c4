"""Peak memory of an action, on the GPU or on the CPU."""

import os
from collections.abc import Callable
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile


def peak_bytes(action: Callable[[], object]) -> int:
    """The most bytes of tensors that an action holds at once, beyond what was there before.

    On a CPU PyTorch's profiler sums up allocations, which slows the action down: do not time it.
    """
    if torch.cuda.is_available():
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        action()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # silences its messages at start and stop
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        result = action()  # kept alive, or its memory would count as freed within
    del result
    recorded: Any = profiled.profiler
    changes = [event for event in recorded.kineto_results.events() if event.name() == "[memory]"]
    held = most = 0
    for event in sorted(changes, key=lambda each: each.start_ns()):
        held += event.nbytes()
        most = max(most, held)
    return most
