"""Batches of states, such as those of one prompt under several methods, padded on the left."""

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from transformers.cache_utils import Cache

from keepsight.runtime.attention import is_bounded
from keepsight.runtime.layer import KeptLayer, LayerEntries
from keepsight.runtime.state import State, has_recurrent


def can_join(state: State) -> bool:
    """Whether `join` takes a state: not one with recurrent states, or with entries in a form of its own."""
    return state.joins and not has_recurrent(state.cache)


def join(states: Sequence[State]) -> State:
    """One batch of states of one model for which `can_join` holds; nothing that was recorded for observers is joined.

    Entries are copied and padded on the left to the longest of each layer, so that states of similar lengths join best.
    The states, of any number of rows each, stay unchanged.
    """
    width, seen = (max(lengths) for lengths in zip(*map(_lengths, states), strict=True))
    same_width = all(state.tokens.shape[1] == width and state.padded is False for state in states)
    offsets = [torch.zeros_like(state.lengths) + state.rope_offset for state in states]
    full = iter(zip(*(state.entries() for state in states), strict=True))
    columns = zip(*(state.cache.layers for state in states), strict=True)
    layers: list[Any] = [
        _join_bounded(column, seen) if is_bounded(column[0]) else _join_entries(next(full), seen) for column in columns
    ]
    return State(
        Cache(layers=layers),
        torch.cat([state.logits for state in states]),
        torch.cat([functional.pad(state.tokens, (width - state.tokens.shape[1], 0)) for state in states]),
        torch.cat([state.lengths for state in states]),
        rope_offset=torch.cat(offsets),
        padded=False if same_width else None,
    )


def take_rows(state: State, rows: Sequence[int]) -> State:
    """Some rows of a batch that `join` made, without the padding that all of them share; entries are copied."""
    index = torch.tensor(rows, device=state.lengths.device)
    lengths = state.lengths[index]
    width, before = int(lengths.max()), state.tokens.shape[1]
    seen = state.cache.get_seq_length() - (before - width)
    full = iter(state.entries())
    layers: list[Any] = [
        _take_bounded(layer, index, seen) if is_bounded(layer) else _take_entries(next(full), index, seen)
        for layer in state.cache.layers
    ]
    return State(
        Cache(layers=layers),
        state.logits[index],
        state.tokens[index, before - width :],
        lengths,
        rope_offset=state.rope_offset[index] if isinstance(state.rope_offset, Tensor) else 0,
        padded=False if state.padded is False else bool((lengths < width).any()),
    )


def _take_entries(entries: LayerEntries, index: Tensor, seen: int) -> KeptLayer:
    keys, values = entries.keys[index], entries.values[index]
    if entries.real is None:
        return KeptLayer(keys, values, seen)
    real = entries.real[index].expand(keys.shape[:3])
    first = int(real.any(dim=1).any(dim=0).int().argmax())
    keys, values, real = (each[:, :, first:].contiguous() for each in (keys, values, real))
    return KeptLayer(keys, values, seen, None if bool(real.all()) else real)


def _take_bounded(layer: Any, index: Tensor, seen: int) -> Any:
    """A layer with a sliding window or chunks, which holds no more than the tokens seen."""
    rows = copy.copy(layer)
    first = max(layer.keys.shape[2] - seen, 0)
    rows.keys, rows.values = layer.keys[index][:, :, first:], layer.values[index][:, :, first:]
    rows.cumulative_length = seen
    return rows


def _lengths(state: State) -> tuple[int, int]:
    return state.tokens.shape[1], state.cache.get_seq_length()


def _join_entries(column: Sequence[LayerEntries], seen: int) -> KeptLayer:
    """A layer with full attention, its padding marked; `seen` is its logical length."""
    longest = max(each.keys.shape[2] for each in column)
    keys, values = _joined([each.keys for each in column]), _joined([each.values for each in column])
    if all(each.real is None and each.keys.shape[2] == longest for each in column):
        return KeptLayer(keys, values, seen)
    marks = torch.cat([functional.pad(each.marks, (longest - each.keys.shape[2], 0)) for each in column])
    return KeptLayer(keys, values, seen, marks)


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
