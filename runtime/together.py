"""Several states read in one pass, each its own tokens after its own entries: nothing is padded, nothing is joined.

The layers that work token by token see the tokens of all states as one sequence, so that the model's weights are read
once for all of them. Only attention is computed for one state after another.
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import Cache, DynamicLayer
from typing_extensions import override

from keepsight.runtime.attention import OwnAttention, grouped_attention, record_attention, visible
from keepsight.runtime.cache import KeptLayer, PaddedKeys
from keepsight.runtime.state import State, Trace


def apart(state: State) -> State:
    """The same state with a cache that nothing else appends to, to be read with `read_together`; without a trace.

    Nothing is copied before the first token is appended.
    """
    seen = state.cache.get_seq_length()
    layers: list[Any] = [
        _OwnLayer(keys, values, seen, None if real is None or bool(real.all()) else real.expand(keys.shape[:3]))
        for keys, values, real in state.entries()
    ]
    return replace(state, cache=Cache(layers=layers), mask=None, trace=Trace())


@torch.no_grad()
def read_together(
    model: PreTrainedModel, states: Sequence[State], tokens: Sequence[Tensor]
) -> tuple[list[State], Tensor]:
    """Let the model read more tokens after each of several states.

    Args:
        model: The target, without adapters.
        states: Of one row each, made by `apart`; their caches grow.
        tokens: For each state, [1, q] int64 of at least one token; q may differ.

    Returns:
        The states after them, and the logits [sum of q, V] float32 of all tokens, state after state.
    """
    record_attention(model)
    counts = [each.shape[1] for each in tokens]
    masks = functools.cache(functools.partial(_mask, dtype=model.dtype, device=model.device))
    columns = zip(*(state.cache.layers for state in states), strict=True)
    layers: list[Any] = [_Layers(column, counts, masks) for column in columns]
    places = [
        state.lengths[:, None] + torch.arange(q, device=model.device) for state, q in zip(states, counts, strict=True)
    ]
    output = model(
        input_ids=torch.cat(list(tokens), dim=1),
        position_ids=torch.cat(places, dim=1),
        past_key_values=Cache(layers=layers),
        use_cache=True,
    )
    logits = output.logits[0].float()
    after = [
        replace(
            state,
            logits=each[-1:],
            tokens=torch.cat([state.tokens, new], dim=1),
            lengths=state.lengths + new.shape[1],
        )
        for state, new, each in zip(states, tokens, logits.split(counts), strict=True)
    ]
    return after, logits


def forget_last(state: State, count: int) -> State:
    """A state made by `apart` as it was before its last `count` tokens; its logits become those of no token.

    What it forgets is overwritten by what it reads next.
    """
    if not count:
        return state
    state.cache.crop(-count)
    return replace(state, logits=state.logits[:0], tokens=state.tokens[:, :-count], lengths=state.lengths - count)


class _OwnLayer(KeptLayer):
    """Entries that no other layer shares, so that the room of what is forgotten can be used again."""

    @override
    def crop(self, tokens_to_remove: int) -> None:
        room = self._room
        super().crop(tokens_to_remove)
        self._room = room

    @override
    def share(self) -> KeptLayer:
        return KeptLayer(self.keys.clone(), self.values.clone(), self.seen, self.real)


class _Layers(DynamicLayer):
    """A layer of several caches.

    Args:
        layers: Of one row each.
        counts: Tokens that each of them gets.
        masks: See `_mask`.
    """

    def __init__(self, layers: Sequence[Any], counts: Sequence[int], masks: Callable[[int, int], Tensor]) -> None:
        super().__init__()
        self.layers, self.counts, self.masks = layers, counts, masks

    @override
    def update(self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object) -> Any:
        return _OneAfterAnother(self, key_states, value_states), value_states

    @override
    def get_seq_length(self) -> int:
        return 0

    @override
    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return query_length, 0


class _OneAfterAnother(OwnAttention):
    """Tokens of several caches, appended and attended to cache by cache."""

    def __init__(self, column: _Layers, keys: Tensor, values: Tensor) -> None:
        self.column, self.keys, self.values = column, keys, values

    @override
    def attend(self, query: Tensor, scaling: float) -> Tensor:
        parts = zip(*(each.split(self.column.counts, dim=2) for each in (query, self.keys, self.values)), strict=True)
        outputs = []
        for layer, (queries, *new) in zip(self.column.layers, parts, strict=True):
            seen, values = layer.update(*new)
            rows = queries.shape[2]
            mask: Tensor | None = None
            if isinstance(seen, PaddedKeys):
                seen, mask = seen.keys, visible(rows, seen.real)
            elif rows > 1:
                mask = self.column.masks(rows, seen.shape[2])
            outputs.append(grouped_attention(queries, seen, values, mask, scaling))
        return torch.cat(outputs, dim=1)


def _mask(rows: int, keys: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """[1, 1, rows, keys], what is added to the logits of the last `rows` of so many entries."""
    hidden = torch.full((rows, keys), -torch.inf, dtype=dtype, device=device)
    return hidden.triu_(keys - rows + 1)[None, None]
