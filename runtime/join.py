"""Batches of states, such as those of one prompt under several methods.

Rows are padded on the left to the longest head of each layer, or stored as ragged layers are: one head after the other,
without padding. The latter is done if padding one of the states would cost more than attending to each head by itself,
and on a GPU where one kernel attends to all heads (`keepsight.runtime.ragged_kernel`).
"""

import copy
from collections.abc import Sequence
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from keepsight.runtime.attention import StateCache, is_bounded
from keepsight.runtime.images import Images
from keepsight.runtime.layer import KeptLayer, RaggedLayer
from keepsight.runtime.state import State, has_recurrent

Made = TypeVar("Made", bound=KeptLayer)


CALL = 384
"""On a CPU, attending to one more head by itself takes as long as reading about so many entries of padding: measured
with SmolLM2-135M in float32, a batch of 8 and two AVX2 cores."""


def can_join(state: State) -> bool:
    """Whether `join` takes a state: not one with recurrent states, or with entries in a form of its own."""
    return state.joins and not has_recurrent(state.cache)


def join(states: Sequence[State]) -> State:
    """One batch of states of one model for which `can_join` holds; nothing that was recorded for observers is joined.

    Entries are copied. States of similar lengths join best, unless one `joins_unpadded`. The states, of any number of
    rows each, stay unchanged.
    """
    width, seen = (max(lengths) for lengths in zip(*map(_lengths, states), strict=True))
    same_width = all(state.tokens.shape[1] == width and state.padded is False for state in states)
    offsets = [torch.zeros_like(state.lengths) + state.rope_offset for state in states]
    batch_offsets = [torch.zeros_like(state.lengths) + state.batch_offset for state in states]
    join_full = _join_ragged if any(map(joins_unpadded, states)) else _join_dense
    columns = zip(*(state.cache.layers for state in states), strict=True)
    layers: list[Any] = [
        _join_bounded(column, seen) if is_bounded(column[0]) else join_full(column, seen) for column in columns
    ]
    return State(
        StateCache(layers=layers),
        torch.cat([state.logits for state in states]),
        torch.cat([functional.pad(state.tokens, (width - state.tokens.shape[1], 0)) for state in states]),
        torch.cat([state.lengths for state in states]),
        rope_offset=torch.cat(offsets),
        batch_offset=torch.cat(batch_offsets),
        padded=False if same_width else None,
        images=Images({}) if any(state.images for state in states) else None,
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
    width, before = int(lengths.max()), state.tokens.shape[1]
    seen = state.cache.get_seq_length() - (before - width)

    def taken(layer: Any) -> Any:
        if is_bounded(layer):
            return _take_bounded(layer, index, seen)
        return _take_ragged(layer, rows, seen) if isinstance(layer, RaggedLayer) else _take_dense(layer, index, seen)

    layers = [taken(layer) for layer in state.cache.layers]
    return State(
        StateCache(layers=layers),
        state.logits[index],
        state.tokens[index, before - width :],
        lengths,
        rope_offset=state.rope_offset[index] if isinstance(state.rope_offset, Tensor) else 0,
        batch_offset=state.batch_offset[index] if isinstance(state.batch_offset, Tensor) else 0,
        padded=False if state.padded is False else bool((lengths < width).any()),
        images=Images({}) if state.images else None,
    )


def _take_dense(layer: KeptLayer, index: Tensor, seen: int) -> KeptLayer:
    entries = layer.entries()
    index = index.to(entries.keys.device)
    keys, values = entries.keys[index], entries.values[index]
    if entries.real is None:
        return _like(layer, KeptLayer(keys, values, seen))
    real = entries.real[index].expand(keys.shape[:3])
    first = int(real.any(dim=1).any(dim=0).int().argmax())
    keys, values, real = (each[:, :, first:].contiguous() for each in (keys, values, real))
    return _like(layer, KeptLayer(keys, values, seen, None if bool(real.all()) else real))


def _take_ragged(layer: RaggedLayer, rows: Sequence[int], seen: int) -> RaggedLayer:
    sizes = layer.head_sizes()
    by_row = [each.split(sizes.sum(axis=1).tolist()) for each in layer.packed()]
    keys, values = (torch.cat([each[row] for row in rows]) for each in by_row)
    return _like(layer, RaggedLayer(keys, values, sizes[[*rows]], seen))


def _take_bounded(layer: Any, index: Tensor, seen: int) -> Any:
    """A layer with a sliding window or chunks, which holds no more than the tokens seen."""
    rows = copy.copy(layer)
    first = max(layer.keys.shape[2] - seen, 0)
    index = index.to(layer.keys.device)
    rows.keys, rows.values = layer.keys[index][:, :, first:], layer.values[index][:, :, first:]
    rows.cumulative_length = seen
    return rows


def _lengths(state: State) -> tuple[int, int]:
    return state.tokens.shape[1], state.cache.get_seq_length()


def _join_dense(column: Sequence[KeptLayer], seen: int) -> KeptLayer:
    """A layer with full attention, its padding marked; `seen` is its logical length."""
    entries = [layer.entries() for layer in column]
    longest = max(each.keys.shape[2] for each in entries)
    keys, values = _joined([each.keys for each in entries]), _joined([each.values for each in entries])
    if all(each.real is None and each.keys.shape[2] == longest for each in entries):
        return _like(column[0], KeptLayer(keys, values, seen))
    marks = torch.cat([functional.pad(each.marks, (longest - each.keys.shape[2], 0)) for each in entries])
    return _like(column[0], KeptLayer(keys, values, seen, marks))


def _join_ragged(column: Sequence[KeptLayer], seen: int) -> RaggedLayer:
    """A layer with full attention, its heads one after the other; `seen` is its logical length."""
    ragged = [_as_ragged(layer) for layer in column]
    keys, values = map(torch.cat, zip(*(layer.packed() for layer in ragged), strict=True))
    counts = np.concatenate([layer.head_sizes() for layer in ragged])
    return _like(column[0], RaggedLayer(keys, values, counts, seen))


def _as_ragged(layer: KeptLayer) -> RaggedLayer:
    """The layer itself, or the entries of a dense one without its padding."""
    if not isinstance(layer, RaggedLayer):
        sizes = torch.as_tensor(layer.head_sizes()).cpu().numpy()
        layer = layer.keep(layer.entries().marks, sizes, ragged=True)
    assert isinstance(layer, RaggedLayer)
    return layer


def _like(layer: KeptLayer, made: Made) -> Made:
    """A layer that was made of others, with what they have of the model."""
    made.expansion, made.origin = layer.expansion, layer.origin
    return made


def _join_bounded(column: Sequence[Any], seen: int) -> Any:
    """A layer with a sliding window or chunks, whose padding is that of the tokens."""
    layer = copy.copy(column[0])
    layer.keys, layer.values = _joined([each.keys for each in column]), _joined([each.values for each in column])
    layer.cumulative_length = seen
    return layer


def _joined(tensors: Sequence[Tensor]) -> Tensor:
    """[B, K, C, d] each -> [sum of B, K, longest C, d], zeros on the left."""
    longest = max(each.shape[2] for each in tensors)
    return torch.cat([functional.pad(each, (0, 0, longest - each.shape[2], 0)) for each in tensors])
