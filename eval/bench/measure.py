"""Seconds and bytes of an action, random prompts, and greedy steps."""

import os
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from keepsight.errors import UserError
from keepsight.eval.answers import free_tokens
from keepsight.models.decoder import context_of
from keepsight.runtime.attention import Reader
from keepsight.runtime.layer import GROWTH
from keepsight.runtime.state import State, cache_bytes, full_layers, read


def require_room(model: PreTrainedModel, tokens: int, rows: int = 1, beyond_context: bool = False) -> None:
    """UserError for `rows` prompts that do not fit the context or the free memory, before anything is allocated.

    Of a model without weights only the context is known.
    """
    context = context_of(model)
    if tokens > context and not beyond_context:
        advice = "lower tokens=, lengths= or answer_tokens="
        raise UserError(f"{tokens} tokens do not fit the context of {context}; {advice}", field="tokens", code="range")
    if model.device.type == "meta":
        return
    free = free_tokens(model)
    if tokens * rows > free:
        raise UserError(
            f"{rows} x {tokens} tokens: the free memory has room for the KV entries of {free}; lower them",
            field="tokens",
            code="memory",
        )


def row_bytes_with_room(stored: int, config: Any) -> float:
    """Bytes that a batch takes for a row while it decodes, where the row's entries take `stored` bytes.

    Beyond the entries these are the room that a growing cache adds (`GROWTH`), two copies of one layer, which is copied
    where it grows and may be where attention reads it, and float32 logits twice: the last step's and the next one's.
    """
    return stored * (1 + GROWTH + 2 / config.num_hidden_layers) + 2 * 4 * config.vocab_size


def random_ids(model: PreTrainedModel, batch: int, length: int) -> Tensor:
    """Random token ids [batch, length] int64 on the model's device, the same ones each time."""
    vocabulary = model.config.get_text_config().vocab_size
    ids = torch.randint(3, vocabulary - 1, (batch, length), generator=torch.Generator().manual_seed(0))
    return ids.to(model.device)


def read_greedily(reader: Reader, state: State, steps: int) -> State:
    """The state after `steps` of its own greedy tokens."""
    for _ in range(steps):
        state, _ = read(reader, state, state.logits.argmax(dim=-1, keepdim=True))
    return state


def seconds_of(action: Callable[[], object]) -> float:
    """Seconds that an action takes, including what it leaves to a GPU."""
    _synchronize()
    start = time.perf_counter()
    action()
    _synchronize()
    return time.perf_counter() - start


@torch.no_grad()
def median_seconds(action: Callable[[], object], repeats: int, least: float = 0.0) -> float:
    """Median seconds of an action over at least `repeats` runs of `least` seconds in all, after one to warm up."""
    action()
    times: list[float] = []
    while len(times) < repeats or sum(times) < least:
        times.append(seconds_of(action))
    return statistics.median(times)


def _synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def peak_bytes(action: Callable[[], object]) -> int:
    """Peak bytes of tensors during an action, beyond those before it.

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
    current = 0
    peak = 0
    for event in sorted(changes, key=lambda change: change.start_ns()):
        current += event.nbytes()
        peak = max(peak, current)
    return peak


def peak_kv_bytes(model: nn.Module, start: Callable[[], State]) -> int:
    """Peak bytes of keys and values while a prompt is read and compressed.

    They are counted in every layer: before attention, and again once a smaller layer lies beside the whole one.
    """
    counter = _PeakOfPrefill()
    hook: Any = model.register_forward_pre_hook(counter.watch, with_kwargs=True)
    try:
        state = start()
    finally:
        hook.remove()
    in_prefill = full_layers(counter.cache)
    in_state = full_layers(state.cache)
    shares_keys = all(layer.keys is other.keys for layer, other in zip(in_prefill, in_state, strict=True))
    bytes_at_end = state.kv_bytes
    if not shares_keys:
        bytes_at_end += cache_bytes(counter.cache)
    return max(counter.peak, bytes_at_end)


class _PeakOfPrefill:
    """The cache of the last forward pass, and the most bytes of it while the pass recorded its layers."""

    def __init__(self) -> None:
        self.cache = Cache(layers=[])
        self.peak = 0

    def watch(self, module: nn.Module, inputs: Any, options: dict[str, Any]) -> Any:
        """A pre-hook of the model's forward pass, whose recorder then counts too."""
        cache = options["past_key_values"]
        record = options["recorder"]
        self.cache = cache

        def record_and_count(index: int, *recorded: Any) -> None:
            before = cache_bytes(cache)
            layer = cache.layers[index]
            record(index, *recorded)
            new_layers = [] if cache.layers[index] is layer else [cache.layers[index]]
            self.peak = max(self.peak, before + cache_bytes(Cache(layers=new_layers)))

        return inputs, {**options, "recorder": record_and_count}
