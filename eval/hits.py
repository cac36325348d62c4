"""Top-k hit rate of methods that read a part of the cache: the share of the most attended entries they select.

The model answers from the full cache. It then reads the answer again with full attention, and at each step a method
selects entries by the base model's queries, keys and features. Methods are thus compared on the same steps; what their
selections would change in later steps is not measured.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from pydantic import FiniteFloat
from torch import Tensor
from torch.nn import functional
from transformers import PreTrainedModel

from keepsight.runtime.generate import CacheMethod, decode, stop_after
from keepsight.runtime.importance import attention_weights, recorded_queries, reduce_group, top_mask
from keepsight.runtime.retrieval.specontext import RetrievalCache
from keepsight.runtime.sparse_read.cache import SelectedLayer, Selection
from keepsight.runtime.state import Needs, State, full_layers, prefill, read

SHARED = "best shared"
"""The entries with the largest mean weight over all layers: no other set for all layers has a larger attention mass."""


@dataclass(frozen=True)
class Hits:
    """Means over steps, layers and KV heads. Steps with no more entries than the budget are left out.

    Attributes:
        name: Name of the method.
        budget: KV entries per head that it may read in a step.
        steps: Number of decoding steps counted.
        hit: Top-k hit rate: share of the `budget` entries with the largest weights in a layer and KV head that are
            read there.
        mass: Share of the layer's attention to all entries before the token that falls on what is read.
        overlap: Share of the entries of a step that were read in the step before too.
        read: Number of entries read per head.
    """

    name: str
    budget: int
    steps: int
    hit: FiniteFloat
    mass: FiniteFloat
    overlap: FiniteFloat
    read: FiniteFloat


@dataclass(frozen=True)
class Answering:
    """An answer [1, T] int64 under full attention, as the base model's layers saw it.

    `before` is the one-row state of the prompt. `after` is the state after the answer, with its queries in the layers
    and all features. `weights` [L, K, T, S] float32 is the causal attention over all S entries, mean over a KV head's
    query heads.
    """

    before: State
    after: State
    answer: Tensor
    weights: Tensor

    @property
    def prompt_length(self) -> int:
        """Entries before the answer's first token."""
        return self.before.tokens.shape[1]


@torch.no_grad()
def answering(
    model: PreTrainedModel, prompt: Tensor, max_new_tokens: int, end_tokens: list[int], features: tuple[int, ...]
) -> Answering:
    """Answer a prompt [1, N] int64 from the full cache, recording queries, and the outputs of the layers `features`."""
    before = prefill(model, prompt, needs=Needs(window=max_new_tokens, features=features))
    answer = decode(model, before.copy(), stop_after(max_new_tokens, end_tokens), pad_token=end_tokens[0]).ids
    after, _ = read(model, before.copy(), answer, logits_to_keep=1)
    rows = answer.shape[1]
    weights = []
    for layer in after.layers:
        recorded, keys = recorded_queries(layer, rows), layer.attended().keys
        by_row = attention_weights(recorded.queries, keys, recorded.softmax)[0].transpose(0, 1)
        weights.append(reduce_group(by_row, keys.shape[1]).transpose(0, 1))
    return Answering(before, after, answer, torch.stack(weights))


def choices(model: PreTrainedModel, method: CacheMethod, seen: Answering) -> Iterator[list[Tensor]]:
    """For each step, the entries before the token that each layer reads, [K, C] bool."""
    state = method.compress_state(model, seen.before)
    cache: Any = state.cache
    keys = [layer.attended().keys for layer in seen.after.layers]
    recorded = [recorded_queries(layer, seen.answer.shape[1]) for layer in seen.after.layers]
    for step in range(seen.answer.shape[1]):
        length = seen.prompt_length + step
        layers = full_layers(cache)
        ahead = _of_head(model, cache, seen, step) if isinstance(cache, RetrievalCache) else [None] * len(layers)
        chosen = []
        for index, (layer, of_layer) in enumerate(zip(layers, ahead, strict=True)):
            if of_layer is None and isinstance(layer, SelectedLayer) and layer.selector is not None:
                query = recorded[index].queries[:, :, step : step + 1]
                softmax, before = recorded[index].softmax, keys[index][:, :, : length + 1]
                of_layer = layer.selector.select(query, softmax, before, None)
            chosen.append(_mask(of_layer, keys[index].shape[1], length))
        yield chosen


def _of_head(model: PreTrainedModel, cache: RetrievalCache, seen: Answering, step: int) -> Sequence[Selection | None]:
    """A retrieval head's selection for each layer."""
    selector, token = cache.selector, seen.answer[:, step : step + 1]
    place = seen.prompt_length + step
    chosen = selector.select(model.get_input_embeddings()(token), torch.full((1, 1), place, device=seen.answer.device))
    if selector.layers:
        selector.features = seen.after.features_of(selector.layers, slice(place, place + 1))
    return [part for _, part in cache.by_layer(chosen)]


def _mask(chosen: Selection | None, kv_heads: int, length: int) -> Tensor:
    """[K, C] bool; a layer that chooses nothing reads everything."""
    if chosen is None:
        return torch.ones(kv_heads, length, dtype=torch.bool)
    indices = chosen.indices[0]
    real = torch.ones_like(indices, dtype=torch.bool) if chosen.real is None else chosen.real[0]
    counts = torch.zeros(kv_heads, length, dtype=torch.long, device=indices.device)
    return counts.scatter_add_(1, indices, real.long()) > 0


def best_shared(seen: Answering, budget: int, groups: int = 1) -> Iterator[list[Tensor]]:
    """As `choices`, for the set of entries that has the largest mean weight over the layers of a group."""
    layers = len(seen.weights)
    for step in range(seen.answer.shape[1]):
        length = seen.prompt_length + step
        of_layer = [place * groups // layers for place in range(layers)]
        parts = [seen.weights[[g == group for g in of_layer], :, step, :length].mean(dim=0) for group in range(groups)]
        best = [top_mask(each, min(budget, length)) for each in parts]
        yield [best[group] for group in of_layer]


def compare(name: str, budget: int, seen: Answering, chosen: Iterator[list[Tensor]]) -> Hits | None:
    """The hit rate of a method's choices in one answer; None where all steps have no more entries than the budget."""
    rows: list[list[Tensor]] = []
    previous: Tensor | None = None
    for step, of_layers in enumerate(chosen):
        length = seen.prompt_length + step
        mask = torch.stack(of_layers)
        if length > budget:
            weights = seen.weights[:, :, step, :length]
            hit = (top_mask(weights, budget) & mask).sum(-1) / budget
            mass = (weights * mask).sum(-1) / weights.sum(-1)
            before = torch.zeros_like(mask) if previous is None else functional.pad(previous, (0, 1))
            same = (before & mask).sum(-1) / mask.sum(-1).clamp(min=1)
            rows.append([each.float().mean() for each in (hit, mass, same, mask.sum(-1))])
        previous = mask
    if not rows:
        return None
    hit, mass, same, entries = torch.tensor([[each.item() for each in row] for row in rows]).T
    later = same[1:] if len(same) > 1 else same
    return Hits(name, budget, len(rows), *(each.mean().item() for each in (hit, mass, later, entries)))
