"""Peak memory: of an action, on the GPU or on the CPU, and of the KV entries while a prompt is read."""

import os
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile
from transformers.cache_utils import Cache

from keepsight.runtime.state import State, cache_bytes, full_layers


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


def peak_kv_bytes(model: nn.Module, start: Callable[[], State]) -> int:
    """The most bytes of keys and values that are held at once while a prompt is read and compressed.

    They are counted in every layer: before attention, and again once a smaller layer lies beside the whole one.

    Args:
        model: The target.
        start: Reads a prompt with it.
    """
    filled, most = Cache(layers=[]), 0

    def watch(module: nn.Module, inputs: Any, options: dict[str, Any]) -> Any:
        nonlocal filled
        cache, record = options["past_key_values"], options["recorder"]
        filled = cache

        def record_and_count(index: int, *recorded: Any) -> None:
            nonlocal most
            before, whole = cache_bytes(cache), cache.layers[index]
            record(index, *recorded)
            added = [] if cache.layers[index] is whole else [cache.layers[index]]
            most = max(most, before + cache_bytes(Cache(layers=added)))

        return inputs, options | {"recorder": record_and_count}

    hook: Any = model.register_forward_pre_hook(watch, with_kwargs=True)
    try:
        state = start()
    finally:
        hook.remove()
    same = all(one.keys is other.keys for one, other in zip(full_layers(filled), full_layers(state.cache), strict=True))
    return max(most, state.kv_bytes + (0 if same else cache_bytes(filled)))
