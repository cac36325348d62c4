"""Several states read in one pass, each with its own tokens after its own entries; no state sees another.

Layers that work token by token see the tokens of all states as one sequence, so that the model's weights are read once
for all of them and no token is padded. Attention is computed for groups of states of similar length: short ones
together, because a call costs more than their attention, a long one alone. What cannot be read so (latents, recurrent
states, layers on several devices) is read state by state.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from keepsight.models.decoder import CHUNKED, decoder_of, has_latents, layer_kinds
from keepsight.models.decoder import running_devices
from keepsight.runtime.attention import is_bounded, run
from keepsight.runtime.layer import LayerEntries
from keepsight.runtime.shared_pass import SharedLayer, SharedPass, StateGroup
from keepsight.runtime.state import State, has_recurrent, read

_ENTRIES_TOGETHER = 4096
"""Max padded KV entries per head in one attention call over several states."""
_PADDING = 1.5
"""Max length of a state relative to the shortest of its group."""


class Rows:
    """States after which more tokens are read, in one pass. The entries are copied: the states stay unchanged.

    Args:
        model: The target, without adapters.
        states: States of one row each.
        room: Maximum number of tokens read after each state, without those rolled back.
    """

    def __init__(self, model: PreTrainedModel, states: Sequence[State], room: int) -> None:
        self.model, self.room = model, room
        self._heads = int(model.config.get_text_config().num_attention_heads)
        self._starts = [int(state.next_position[0]) for state in states]
        self._read = [0] * len(states)
        apart = has_recurrent(states[0].cache) or has_latents(model) or len(running_devices(decoder_of(model))) > 1
        self._alone = [_Alone(state) for state in states] if apart else []
        groups = [] if self._alone else _groups(states)
        windows = [] if self._alone else _windows(model, states[0].cache)
        self._groups = [
            StateGroup(members, [_all_entries(states[row]) for row in members], room, windows) for members in groups
        ]

    @torch.no_grad()
    def read(self, tokens: Sequence[Tensor]) -> list[Tensor]:
        """Read more tokens after each state.

        Args:
            tokens: Tokens [q] int64 for each state; q may differ, and may be 0 for all but one.

        Returns:
            For each state, the logits [q, V] float32 after each of its tokens.
        """
        if self._alone:
            return [each.read(self.model, own) for each, own in zip(self._alone, tokens, strict=True)]
        reading = [group for group in self._groups if any(len(tokens[row]) for row in group.members)]
        order = [row for group in reading for row in group.members]
        counts = [len(tokens[row]) for row in order]
        places = [torch.arange(start, start + q) for start, q in zip(map(self._place, order), counts, strict=True)]
        passes = list[SharedPass]()
        for group in reading:
            own = [len(tokens[row]) for row in group.members]
            first = sum(each.tokens for each in passes)
            starts = [self._starts[row] for row in group.members]
            passes.append(SharedPass(group, own, self._read, starts, first, self._heads, self.model.device))
        for row, count in zip(order, counts, strict=True):
            self._read[row] += count
        assert max(self._read) <= self.room
        layers: list[Any] = [SharedLayer(index, passes) for index in range(len(reading[0].layers))]
        output = run(
            self.model,
            Cache(layers=layers),
            input_ids=torch.cat([tokens[row] for row in order])[None],
            position_ids=torch.cat(places)[None].to(self.model.device),
        )
        logits = output.logits[0].float()
        by_row = dict(zip(order, logits.split(counts), strict=True))
        return [by_row.get(row, logits[:0]) for row in range(len(tokens))]

    def forget(self, row: int, count: int) -> None:
        """Roll a state back by its last `count` tokens; what it reads next overwrites them."""
        if self._alone:
            self._alone[row].forget(self.model, count)
            return
        assert 0 <= count <= self._read[row]
        self._read[row] -= count

    def _place(self, row: int) -> int:
        return self._starts[row] + self._read[row]


class _Alone:
    """A state that is read by itself."""

    def __init__(self, state: State) -> None:
        self._first, self._state = state.copy(), state.copy()
        self._before, self._latest = self._first, state.tokens[0, :0]
        self._read = self._latest  # before the latest

    def read(self, model: PreTrainedModel, tokens: Tensor) -> Tensor:
        """As `Rows.read`."""
        if not len(tokens):
            return self._state.logits[:0]
        self._before, self._read = self._state.copy(), torch.cat([self._read, self._latest])
        self._latest = tokens
        self._state, logits = read(model, self._state, tokens[None])
        return logits[0]

    def forget(self, model: PreTrainedModel, count: int) -> None:
        """As `Rows.forget`: what stays of the latest pass, or of all if that is too little, is read again."""
        if not count:
            return
        again, self._state = self._latest, self._before
        if count > len(again):
            again, self._state = torch.cat([self._read, again]), self._first.copy()
            self._read = again[:0]
        self._latest = self._read[:0]
        self.read(model, again[: len(again) - count])


def _groups(states: Sequence[State]) -> Iterator[list[int]]:
    lengths = [state.length for state in states]
    group: list[int] = []
    for row in sorted(range(len(states)), key=lengths.__getitem__):
        size, shortest = lengths[row], lengths[group[0]] if group else 0
        if group and (size > _PADDING * shortest or size * (len(group) + 1) > _ENTRIES_TOGETHER):
            yield group
            group = []
        group.append(row)
    yield group


def _windows(model: PreTrainedModel, cache: Cache) -> list[tuple[int, bool] | None]:
    """Of each bounded layer, the size of its window, and whether windows are chunks of the positions."""
    pairs: Any = zip(cache.layers, layer_kinds(model.config), strict=True)
    return [(layer.sliding_window, kind == CHUNKED) if is_bounded(layer) else None for layer, kind in pairs]


def _all_entries(state: State) -> list[LayerEntries]:
    """The entries of each layer, those of bounded layers too."""
    full, mask = iter(state.entries()), state.tokens_mask
    layers: list[Any] = state.cache.layers
    return [_of_window(layer, mask) if is_bounded(layer) else next(full) for layer in layers]


def _of_window(layer: Any, mask: Tensor | None) -> LayerEntries:
    count = layer.keys.shape[2]
    return LayerEntries(layer.keys, layer.values, None if mask is None else mask[:, None, mask.shape[1] - count :])
