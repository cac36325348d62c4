"""The cost of a decoding step with SpeCache: bytes held and moved, and seconds by part."""

from collections.abc import Callable, Iterator
from dataclasses import replace

import torch
from torch import Tensor
from transformers import PreTrainedModel

from keepsight.eval.bench.timing import median_seconds, random_ids, read_greedily, seconds_of
from keepsight.models.targets import Target
from keepsight.runtime.attention import Softmax
from keepsight.runtime.generate import FullCache, Method
from keepsight.runtime.quantized.kernel import attend_packed
from keepsight.runtime.quantized.kivi import Kivi
from keepsight.runtime.quantized.specache import SpeCache, specache_layers


def bench_specache(target: Target, method: SpeCache, tokens: int, batch: int, steps: int) -> Iterator[str]:
    """A line for each cache and for each part of a step, in milliseconds.

    SpeCache, with its speculative token and without, is compared with the full cache and KIVI. `waited` is the time for
    which the model waited for entries being fetched, `hidden` the share of the fetches' time in which it did not.

    Args:
        target: The model; prompts are random tokens.
        method: SpeCache with its options.
        tokens: Prompt length in tokens.
        batch: Batch size.
        steps: Timed steps, after three to warm up.
    """
    model = target.model
    ids = random_ids(model, batch, tokens)
    yield f"{batch} rows of {tokens} tokens, {steps} steps, {torch.get_num_threads()} threads; {method}"
    yield (
        f"{'cache':<22}{'ms a step':>11}{'tokens/s':>10}{'KV MB':>9}{'moved MB a step':>17}{'waited ms':>11}"
        f"{'hidden':>8}"
    )
    kivi = Kivi(method.bits, method.group, method.residual, one_bit=method.one_bit)
    guessing, waiting = (replace(method, speculative=each) for each in (True, False))
    methods = {"full": FullCache(), "KIVI": kivi, "SpeCache": guessing, "no guess": waiting}
    for name, each in methods.items():
        yield _cache_line(name, model, each, ids, steps)
    yield from _part_lines(model, guessing, ids, steps)


def _cache_line(name: str, model: PreTrainedModel, method: Method, ids: Tensor, steps: int) -> str:
    state = method.start(model, ids)
    reader = method.reader(model)
    state = read_greedily(reader, state, 3)
    layers = specache_layers(state.cache)
    traffic = layers[0].full.traffic if layers else None
    if traffic is not None:
        traffic.fetched = traffic.offloaded = 0
        traffic.fetching = traffic.waited = 0.0

    def decode() -> None:
        nonlocal state
        state = read_greedily(reader, state, steps)

    seconds = seconds_of(decode) / steps
    line = f"{name:<22}{seconds * 1000:>11.1f}{len(ids) / seconds:>10.1f}{state.kv_bytes / 1e6:>9.2f}"
    if traffic is None:
        return line
    moved = (traffic.fetched + traffic.offloaded) / steps / 1e6
    hidden = 1 - traffic.waited / traffic.fetching if traffic.fetching else 1.0
    return f"{line}{moved:>17.2f}{traffic.waited / steps * 1000:>11.2f}{max(hidden, 0):>8.0%}"


@torch.no_grad()
def _part_lines(model: PreTrainedModel, method: SpeCache, ids: Tensor, repeats: int) -> Iterator[str]:
    """Parts measured one by one on the first layer; a real step runs all layers, its fetches in parallel."""
    state = read_greedily(method.reader(model), method.start(model, ids), 1)
    layer, config = specache_layers(state.cache)[0], model.config.get_text_config()
    held, heads = layer.held, config.num_attention_heads
    query = held.recent_values[:, :, -2:].repeat_interleave(heads // held.recent_values.shape[1], dim=1)
    attention = attend_packed(query, held, Softmax(1.0))[1]

    def fetch() -> None:
        if (coming := layer.begin_fetch(attention)) is not None:
            coming.wait()

    def select() -> Tensor:
        return layer.selector.select(attention)

    def dequantise() -> tuple[Tensor, Tensor]:
        return held.keys(), held.values()

    def attend() -> Tensor:
        return attend_packed(query, held, Softmax(1.0))[0]

    parts: dict[str, Callable[[], object]] = {
        "dequantise": dequantise,
        "attention, with it": attend,
        "select": select,
        "select and fetch": fetch,
    }
    for name, part in parts.items():
        seconds = median_seconds(part, repeats)
        yield f"{name:<22}{seconds * 1000 * config.num_hidden_layers:>11.1f}  in {config.num_hidden_layers} layers"
