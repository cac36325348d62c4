"""Batches of states, such as those of one prompt under several methods.

Rows are padded on the left to the longest head of each layer, or stored as ragged layers are: one head after the other,
without padding. The latter is done if padding one of the states would cost more than attending to each head by itself,
and on a GPU where one kernel attends to all heads (`keepsight.runtime.ragged_kernel`).
"""

import copy
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from keepsight.models.transformers_internals import DummyLayer
from keepsight.runtime.attention import StateCache, is_bounded
from keepsight.runtime.images import Images
from keepsight.runtime.layer import KeptLayer, RaggedLayer
from keepsight.runtime.state import State, has_recurrent

CALL = 384
"""On a CPU, attending to one more head by itself takes as long as reading about so many entries of padding: measured
with SmolLM2-135M in float32, a batch of 8 and two AVX2 cores."""


def can_join(state: State) -> bool:
    """Whether `join` takes a state: not one with recurrent states, or with entries in a form of its own."""
    return state.has_plain_entries and not has_recurrent(state.cache)


def join(states: Sequence[State]) -> State:
    """One batch of states of one model for which `can_join` holds; nothing that was recorded for observers is joined.

    Entries are copied. States of similar lengths join best, unless one `joins_unpadded`. The states, of any number of
    rows each, stay unchanged.
    """
    tokens_seen = max(state.cache.get_seq_length() for state in states)
    unpadded = any(map(joins_unpadded, states))
    layers: list[Any] = []
    for state_layers in zip(*(state.cache.layers for state in states), strict=True):
        if isinstance(state_layers[0], DummyLayer):  # it holds nothing
            layers.append(state_layers[0])
        elif is_bounded(state_layers[0]):
            layers.append(join_bounded(state_layers, tokens_seen))
        elif unpadded:
            layers.append(_join_ragged(state_layers, tokens_seen))
        else:
            layers.append(_join_dense(state_layers, tokens_seen))

    return joined_fields(states, StateCache(layers=layers))


def joined_fields(states: Sequence[State], cache: StateCache) -> State:
    """One batch of states with this cache, which holds the entries of all of them."""
    width = max(state.tokens.shape[1] for state in states)
    images = Images({}) if any(state.images for state in states) else None
    logits = []
    tokens = []
    lengths = []
    rope_offsets = []
    batch_offsets = []
    padded: Literal[False] | None = False
    for state in states:
        padding = width - state.tokens.shape[1]
        if padding or state.padded is not False:
            padded = None  # the lengths will tell
        logits.append(state.logits)
        tokens.append(functional.pad(state.tokens, (padding, 0)))
        lengths.append(state.lengths)
        rope_offsets.append(torch.zeros_like(state.lengths) + state.rope_offset)
        batch_offsets.append(torch.zeros_like(state.lengths) + state.batch_offset)
    return State(
        cache,
        torch.cat(logits),
        torch.cat(tokens),
        torch.cat(lengths),
        rope_offset=torch.cat(rope_offsets),
        batch_offset=torch.cat(batch_offsets),
        padded=padded,
        images=images,
    )


def joins_unpadded(state: State) -> bool:
    """Whether a batch with this state is stored without padding."""
    ragged = [layer for layer in state.layers if isinstance(layer, RaggedLayer)]
    if not ragged:
        return False
    if not state.logits.is_cpu:
        return all(layer.in_kernel for layer in ragged)
    longest = sum(layer.longest for layer in state.layers) / len(state.layers)
    return longest - state.mean_entries() > CALL


def take_rows(state: State, rows: Sequence[int]) -> State:
    """Some rows of a batch that `join` made, without the padding that all of them share; entries are copied."""
    index = torch.tensor(rows, device=state.lengths.device)
    lengths = state.lengths[index]
    width = int(lengths.max())
    first_column = state.tokens.shape[1] - width
    tokens_seen = state.cache.get_seq_length() - first_column

    cache_layers: list[Any] = state.cache.layers
    layers: list[Any] = []
    for layer in cache_layers:
        if isinstance(layer, DummyLayer):
            layers.append(layer)
        elif is_bounded(layer):
            layers.append(bounded_rows(layer, index, tokens_seen))
        elif isinstance(layer, RaggedLayer):
            layers.append(_take_ragged(layer, rows, tokens_seen))
        else:
            layers.append(_take_dense(layer, index, tokens_seen))

    return rows_of(state, index, width, StateCache(layers=layers))


def rows_of(state: State, index: Tensor, width: int, cache: StateCache) -> State:
    """The rows `index` [B] of a batch, whose longest has `width` tokens, with this cache of their entries."""
    first_column = state.tokens.shape[1] - width
    lengths = state.lengths[index]
    images = Images({}) if state.images else None
    padded = state.padded is not False and bool((lengths < width).any())
    return State(
        cache,
        state.logits[index],
        state.tokens[index, first_column:],
        lengths,
        rope_offset=offsets_of(state.rope_offset, index),
        batch_offset=offsets_of(state.batch_offset, index),
        padded=padded,
        images=images,
    )


def offsets_of(offset: Tensor | Literal[0], index: Tensor) -> Tensor | Literal[0]:
    """The offsets of the rows `index` [n], from those of all rows [B]; 0 is that of every row."""
    return offset[index] if isinstance(offset, Tensor) else offset


def last_entries(state: State, row: int, count: int) -> list[tuple[Tensor, Tensor]]:
    """For each layer with full attention, copies of a row's keys and values of the last `count` tokens.

    They are [1, K, count, d]; nothing was evicted after these tokens.
    """
    entries = []
    for layer in state.layers:
        if isinstance(layer, RaggedLayer):
            entries.append(layer.last_of_row(row, count))
        else:
            keys = layer.keys[row : row + 1, :, -count:].clone()
            entries.append((keys, layer.values[row : row + 1, :, -count:].clone()))
    return entries


def _take_dense(layer: KeptLayer, index: Tensor, seen: int) -> KeptLayer:
    entries = layer.entries()
    index = index.to(entries.keys.device)
    keys = entries.keys[index]
    values = entries.values[index]
    real = None
    if entries.real is not None:
        real = entries.real[index].expand(keys.shape[:3])
        padding = int(real.any(dim=1).any(dim=0).int().argmax())  # of all rows and heads
        keys = keys[:, :, padding:].contiguous()
        values = values[:, :, padding:].contiguous()
        real = real[:, :, padding:].contiguous()
        if bool(real.all()):
            real = None
    taken = KeptLayer(keys, values, seen, real)
    taken.take_over_from(layer)
    return taken


def _take_ragged(layer: RaggedLayer, rows: Sequence[int], seen: int) -> RaggedLayer:
    sizes = layer.head_sizes()
    row_sizes = sizes.sum(axis=1).tolist()
    packed_keys, packed_values = layer.packed()
    row_keys = packed_keys.split(row_sizes)
    row_values = packed_values.split(row_sizes)
    keys = torch.cat([row_keys[row] for row in rows])
    values = torch.cat([row_values[row] for row in rows])
    taken = RaggedLayer(keys, values, sizes[[*rows]], seen)
    taken.take_over_from(layer)
    return taken


def bounded_rows(layer: Any, index: Tensor, seen: int) -> Any:
    """A layer with a sliding window or chunks, which holds no more than the tokens seen."""
    taken_layer = copy.copy(layer)
    padding = max(layer.keys.shape[2] - seen, 0)
    index = index.to(layer.keys.device)
    taken_layer.keys = layer.keys[index][:, :, padding:]
    taken_layer.values = layer.values[index][:, :, padding:]
    taken_layer.cumulative_length = seen
    return taken_layer


def _join_dense(layers: Sequence[KeptLayer], seen: int) -> KeptLayer:
    """A layer with full attention, its padding marked; `seen` is its logical length."""
    all_entries = [layer.entries() for layer in layers]
    keys = _joined([entries.keys for entries in all_entries])
    values = _joined([entries.values for entries in all_entries])
    longest = keys.shape[2]
    real = None
    if any(entries.real is not None or entries.keys.shape[2] < longest for entries in all_entries):
        marks = []
        for entries in all_entries:
            marks.append(functional.pad(entries.marks, (longest - entries.keys.shape[2], 0)))
        real = torch.cat(marks)
    joined = KeptLayer(keys, values, seen, real)
    joined.take_over_from(layers[0])
    return joined


def _join_ragged(layers: Sequence[KeptLayer], seen: int) -> RaggedLayer:
    """A layer with full attention, its heads one after the other; `seen` is its logical length."""
    all_keys = []
    all_values = []
    all_counts = []
    for layer in layers:
        ragged = as_ragged(layer)
        keys, values = ragged.packed()
        all_keys.append(keys)
        all_values.append(values)
        all_counts.append(ragged.head_sizes())
    joined = RaggedLayer(torch.cat(all_keys), torch.cat(all_values), np.concatenate(all_counts), seen)
    joined.take_over_from(layers[0])
    return joined


def as_ragged(layer: KeptLayer) -> RaggedLayer:
    """The layer itself, or the entries of a dense one without its padding."""
    if not isinstance(layer, RaggedLayer):
        sizes = torch.as_tensor(layer.head_sizes()).cpu().numpy()
        layer = layer.keep(layer.entries().marks, sizes, ragged=True)
    assert isinstance(layer, RaggedLayer)
    return layer


def join_bounded(layers: Sequence[Any], seen: int) -> Any:
    """A layer with a sliding window or chunks, whose padding is that of the tokens."""
    joined = copy.copy(layers[0])
    joined.keys = _joined([layer.keys for layer in layers])
    joined.values = _joined([layer.values for layer in layers])
    joined.cumulative_length = seen
    return joined


def _joined(tensors: Sequence[Tensor]) -> Tensor:
    """[B, K, C, d] each -> [sum of B, K, longest C, d], zeros on the left."""
    longest = max(tensor.shape[2] for tensor in tensors)
    return torch.cat([functional.pad(tensor, (0, 0, longest - tensor.shape[2], 0)) for tensor in tensors])
