"""Top-k hit rate of methods that read or keep a part of the cache: the share of the most attended entries they have.

The model answers from the full cache. It then reads the answer again with full attention, and at each step a method
selects entries by the base model's queries, keys and features. Methods are thus compared on the same steps; what their
selections would change in later steps is not measured. A method that evicts has the same entries of the prompt at each
step, and all tokens of the answer before it.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from pydantic import FiniteFloat
from torch import Tensor
from torch.nn import functional
from transformers import PreTrainedModel

from keepsight.runtime.evict import Evict
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
    model: PreTrainedModel,
    prompt: Tensor,
    max_new_tokens: int,
    end_tokens: list[int],
    features: tuple[int, ...],
    needs: Needs | None = None,
) -> Answering:
    """Answer a prompt [1, N] int64 from the full cache, recording queries, and the outputs of the layers `features`.

    `needs` is what the prefill must record beside these, for methods that evict.
    """
    needs = Needs(window=max_new_tokens, features=features) | (needs or Needs())
    before = prefill(model, prompt, needs=needs)
    answer = decode(model, before.copy(), stop_after(max_new_tokens, end_tokens), pad_token=end_tokens[0]).ids
    after, _ = read(model, before.copy(), answer, logits_to_keep=1)
    tokens = answer.shape[1]
    weights = []
    for layer in after.layers:
        recorded = recorded_queries(layer, tokens)
        keys = layer.attended().keys
        by_token = attention_weights(recorded.queries, keys, recorded.softmax)[0].transpose(0, 1)
        weights.append(reduce_group(by_token, keys.shape[1]).transpose(0, 1))
    return Answering(before, after, answer, torch.stack(weights))


def entries_read(model: PreTrainedModel, method: CacheMethod, answered: Answering) -> Iterator[list[Tensor]]:
    """For each step, the entries before the token that each layer reads, [K, C] bool."""
    state = method.compress_state(model, answered.before)
    cache: Any = state.cache
    tokens = answered.answer.shape[1]
    keys = [layer.attended().keys for layer in answered.after.layers]
    recorded = [recorded_queries(layer, tokens) for layer in answered.after.layers]
    for step in range(tokens):
        length = answered.prompt_length + step
        layers = full_layers(cache)
        selections: Sequence[Selection | None] = [None] * len(layers)
        if isinstance(cache, RetrievalCache):
            selections = _selections_of_head(model, cache, answered, step)
        masks = []
        for index, (layer, selection) in enumerate(zip(layers, selections, strict=True)):
            if selection is None and isinstance(layer, SelectedLayer) and layer.selector is not None:
                query = recorded[index].queries[:, :, step : step + 1]
                keys_so_far = keys[index][:, :, : length + 1]
                selection = layer.selector.select(query, recorded[index].softmax, keys_so_far, None)
            masks.append(_mask(selection, keys[index].shape[1], length))
        yield masks


def entries_kept(model: PreTrainedModel, method: Evict, answered: Answering) -> Iterator[list[Tensor]]:
    """As `entries_read`, for a method that evicts from the prompt: what it keeps, and the answer so far."""
    _, selected = method.evict(model, answered.before.copy())
    for step in range(answered.answer.shape[1]):
        yield [functional.pad(mask[0], (0, step), value=True) for mask in selected]


def _selections_of_head(
    model: PreTrainedModel, cache: RetrievalCache, answered: Answering, step: int
) -> Sequence[Selection | None]:
    """A retrieval head's selection for each layer."""
    selector = cache.selector
    token = answered.answer[:, step : step + 1]
    position = answered.prompt_length + step
    positions = torch.full((1, 1), position, device=answered.answer.device)
    selected = selector.select(model.get_input_embeddings()(token), positions)
    if selector.layers:
        selector.features = answered.after.features_of(selector.layers, slice(position, position + 1))
    return [selection for _, selection in cache.by_layer(selected)]


def _mask(selection: Selection | None, kv_heads: int, length: int) -> Tensor:
    """[K, C] bool; a layer that selects nothing reads everything."""
    if selection is None:
        return torch.ones(kv_heads, length, dtype=torch.bool)
    indices = selection.indices[0]
    is_real = torch.ones_like(indices, dtype=torch.bool) if selection.real is None else selection.real[0]
    counts = torch.zeros(kv_heads, length, dtype=torch.long, device=indices.device)
    return counts.scatter_add_(1, indices, is_real.long()) > 0


def best_shared(answered: Answering, budget: int, groups: int = 1) -> Iterator[list[Tensor]]:
    """As `entries_read`, for the set of entries that has the largest mean weight over the layers of a group."""
    layers = len(answered.weights)
    group_of_layer = torch.tensor([layer * groups // layers for layer in range(layers)])
    for step in range(answered.answer.shape[1]):
        length = answered.prompt_length + step
        best = []
        for group in range(groups):
            weights = answered.weights[group_of_layer == group, :, step, :length].mean(dim=0)
            best.append(top_mask(weights, min(budget, length)))
        yield [best[group] for group in group_of_layer.tolist()]


def compare(name: str, budget: int, answered: Answering, masks_of_steps: Iterator[list[Tensor]]) -> Hits | None:
    """The hit rate of a method's choices in one answer; None where all steps have no more entries than the budget."""
    hits: list[float] = []
    masses: list[float] = []
    overlaps: list[float] = []
    entries: list[float] = []
    previous: Tensor | None = None
    for step, masks in enumerate(masks_of_steps):
        length = answered.prompt_length + step
        mask = torch.stack(masks)
        if length > budget:
            weights = answered.weights[:, :, step, :length]
            read = mask.sum(-1)
            before = torch.zeros_like(mask) if previous is None else functional.pad(previous, (0, 1))
            hits.append(_mean((top_mask(weights, budget) & mask).sum(-1) / budget))
            masses.append(_mean((weights * mask).sum(-1) / weights.sum(-1)))
            overlaps.append(_mean((before & mask).sum(-1) / read.clamp(min=1)))
            entries.append(_mean(read))
        previous = mask
    if not hits:
        return None
    if len(overlaps) > 1:
        overlaps = overlaps[1:]  # the first step that counts has none before it to compare with
    return Hits(
        name,
        budget,
        steps=len(hits),
        hit=_mean(torch.tensor(hits)),
        mass=_mean(torch.tensor(masses)),
        overlap=_mean(torch.tensor(overlaps)),
        read=_mean(torch.tensor(entries)),
    )


def _mean(values: Tensor) -> float:
    return values.float().mean().item()
