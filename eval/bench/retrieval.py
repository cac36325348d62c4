"""The cost of reading with a retrieval head: its size, and the seconds of a decoding step by part."""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from keepsight.eval.bench.timing import median_seconds, random_ids, read_greedily
from keepsight.models.draft_head import DraftHead
from keepsight.models.retrieval_head import RetrievalHead, parameters, pruning
from keepsight.models.targets import Target
from keepsight.runtime.generate import CacheMethod, FullCache
from keepsight.runtime.layer import KeptLayer
from keepsight.runtime.retrieval.elastic import elastic_layers
from keepsight.runtime.retrieval.specontext import RetrievalCache, SpeContext
from keepsight.runtime.sparse_read.selection import Quest
from keepsight.runtime.state import Needs, State, context_of, prefill


def size_lines(target: Target, head: RetrievalHead, draft: DraftHead | None) -> Iterator[str]:
    """The head's parameters and bytes; given the draft head it was pruned from, the share that pruning removed."""
    own, whole = parameters(head), parameters(target.model)
    size = sum(each.nbytes for each in head.parameters())
    yield (
        f"retrieval head (features: {head.config.features}): {own:,} parameters, {size:,} bytes as "
        f"{_dtype(head.q_proj.weight)}, {own / whole:.2%} of the target's {whole:,}; {head.key_bytes} bytes of keys a "
        "token"
    )
    if draft is not None:
        yield f"draft head: {pruning(head, draft)}"


def step_lines(
    target: Target, head: RetrievalHead, budget: int, lengths: Sequence[int], batch: int, repeats: int
) -> Iterator[str]:
    """A line for each length and method, with the parts of a step that reads with the head.

    `head` is the time of its projections and selection, `gather` that of gathering in all layers, each measured alone;
    `rest` is the remainder of the step. With entries in CPU memory both overlap with the model, and only the whole step
    is measured.

    Args:
        target: The model; KV entries, tokens and features are random, and no prompt is read.
        head: The retrieval head.
        budget: KV entries that a KV head reads per step.
        lengths: KV entries in the cache; more than the model's context are timed all the same.
        batch: Batch size.
        repeats: Timed steps, after one to warm up; medians are printed.
    """
    model = target.model
    methods: dict[str, CacheMethod] = {
        "full": FullCache(),
        "quest": Quest(budget),
        "specontext": SpeContext(budget, head),
        "specontext, offloaded": SpeContext(budget, head, offload=model.config.get_text_config().num_hidden_layers),
    }
    threads = torch.get_num_threads()
    yield f"{batch} rows of random entries, budget {budget}, {_dtype(model)}, {repeats} steps, {threads} threads"
    yield (
        f"{'entries':<9}{'method':<22}{'ms a step':>10}{'tokens/s':>10}{'speed-up':>9}{'head':>8}{'gather':>8}"
        f"{'rest':>8}{'loaded MB':>11}"
    )
    for length in lengths:
        full = None
        for name, method in methods.items():
            seconds, parts = _step(model, method, _random_state(model, head, batch, length), repeats)
            full = full or seconds
            speed = f"{seconds * 1000:>10.2f}{batch / seconds:>10.1f}{full / seconds:>9.2f}"
            yield f"{length:<9}{name:<22}{speed}{parts}"
        if length > context_of(model):
            yield f"{'':<9}beyond the model's context of {context_of(model)}; the time is the same as within one"


def _random_state(model: PreTrainedModel, head: RetrievalHead, rows: int, length: int) -> State:
    """A state of random tokens, KV entries and features; all layers share the same entries until they append."""
    generator = torch.Generator().manual_seed(0)
    ids = random_ids(model, rows, length)
    start = prefill(model, ids[:, :1], needs=feature_needs(model, head))

    def like(given: Tensor, shape: tuple[int, ...]) -> Tensor:
        return torch.randn(shape, generator=generator).to(given.device, given.dtype)

    keys, values, _ = start.entries()[0]
    keys, values = (like(each, (*each.shape[:2], length, each.shape[3])) for each in (keys, values))
    features = tuple(like(each, (rows, length, each.shape[2])) for each in start.features)
    layers: list[Any] = [KeptLayer(keys, values, length) for _ in start.cache.layers]
    lengths = torch.full_like(start.lengths, length)
    return State(Cache(layers=layers), start.logits, ids, lengths, start.needs, features)


@torch.no_grad()
def _step(model: PreTrainedModel, method: CacheMethod, state: State, repeats: int) -> tuple[float, str]:
    """Seconds of a step, and the columns with its parts."""
    state = method.compress(model, state).unrecorded()
    reader = method.reader(model)

    def step() -> None:
        nonlocal state
        state = read_greedily(reader, state, 1)

    seconds = median_seconds(step, repeats)
    if not isinstance(state.cache, RetrievalCache):
        return seconds, ""
    if on_cpu := elastic_layers(state.cache.layers):
        traffic = on_cpu[0].full.traffic
        return seconds, f"{'':24}{traffic.fetched * len(on_cpu) / traffic.selections / 1e6:>11.3f}"
    embeddings = model.get_input_embeddings()(state.logits.argmax(dim=-1, keepdim=True))
    selector, positions = state.cache.selector.share(), state.lengths[:, None]
    chosen = state.cache.by_layer(selector.select(embeddings, positions))
    choosing = median_seconds(lambda: selector.select(embeddings, positions), repeats)
    gathering = median_seconds(lambda: [layer.gather(part) for layer, part in chosen], repeats)
    parts = choosing, gathering, seconds - choosing - gathering
    return seconds, "".join(f"{part * 1000:>8.2f}" for part in parts)


def feature_needs(model: PreTrainedModel, head: RetrievalHead) -> Needs:
    """What a prefill records for the head."""
    return Needs(features=tuple(sorted(head.layers_of(model))))


def _dtype(of: Any) -> str:
    return str(of.dtype).removeprefix("torch.")
