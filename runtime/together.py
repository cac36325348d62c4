"""Several states read in one pass, each with its own tokens after its own entries; no state sees another.

Layers that work token by token see the tokens of all states as one sequence, so that the model's weights are read once
for all of them and no token is padded. Attention is computed for groups of states of similar length: short ones
together, because a call costs more than their attention, a long one alone. What cannot be read so (latents, recurrent
states) is read state by state.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from transformers import PreTrainedModel
from transformers.cache_utils import Cache, DynamicLayer
from typing_extensions import override

from keepsight.models.decoder import CHUNKED, has_latents, layer_kinds
from keepsight.runtime.attention import OwnAttention, run
from keepsight.runtime.cache import LayerEntries, is_bounded
from keepsight.runtime.prefill import read
from keepsight.runtime.softmax import Softmax, attend_grouped
from keepsight.runtime.state import State

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
        recurrent = not all(isinstance(layer, DynamicLayer) for layer in states[0].cache.layers)
        self._alone = [_Alone(state) for state in states] if recurrent or has_latents(model) else []
        groups = [] if self._alone else _groups(states)
        windows = [] if self._alone else _windows(model, states[0].cache)
        self._groups = [
            _Group(members, [_all_entries(states[row]) for row in members], room, windows) for members in groups
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
        passes = list[_Pass]()
        for group in reading:
            own = [len(tokens[row]) for row in group.members]
            first = sum(each.tokens for each in passes)
            starts = [self._starts[row] for row in group.members]
            passes.append(_Pass(group, own, self._read, starts, first, self._heads, self.model.device))
        for row, count in zip(order, counts, strict=True):
            self._read[row] += count
        assert max(self._read) <= self.room
        layers: list[Any] = [_Layer(index, passes) for index in range(len(reading[0].layers))]
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
        self._state = self._before = state.copy()
        self._latest = state.tokens[0, :0]

    def read(self, model: PreTrainedModel, tokens: Tensor) -> Tensor:
        """As `Rows.read`."""
        if not len(tokens):
            return self._state.logits[:0]
        self._before, self._latest = self._state.copy(), tokens
        self._state, logits = read(model, self._state, tokens[None])
        return logits[0]

    def forget(self, model: PreTrainedModel, count: int) -> None:
        """As `Rows.forget`, of tokens of the latest pass: what stays of it is read again."""
        if count:
            assert count <= len(self._latest)
            self._state, self._latest = self._before, self._latest[: len(self._latest) - count]
            self.read(model, self._latest)


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


class _Group:
    """States whose attention is computed in one call per layer.

    Args:
        members: Indices of the states.
        states: The entries of each layer, for each of them.
        room: Number of tokens that may be read.
        windows: See `_windows`.

    Attributes:
        members: Indices of the states.
        layers: Their entries in each layer.
    """

    def __init__(
        self,
        members: list[int],
        states: Sequence[list[LayerEntries]],
        room: int,
        windows: Sequence[tuple[int, bool] | None],
    ) -> None:
        self.members = members
        columns = zip(zip(*states, strict=True), windows, strict=True)
        self.layers = [_Entries(column, room, window) for column, window in columns]


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


class _Entries:
    """One layer's entries of R states, padded on the left to the longest, with room behind them.

    Args:
        column: The entries of each state.
        room: Number of tokens that may be read.
        window: See `_windows`.

    Attributes:
        keys: [R, K, C + room, d].
        values: [R, K, C + room, d].
        length: C.
        real: [R, 1 or K, C] bool, False for padding; None where nothing is padded.
    """

    def __init__(self, column: Sequence[LayerEntries], room: int, window: tuple[int, bool] | None = None) -> None:
        self.window = window
        self.length = max(each.keys.shape[2] for each in column)
        # Zeros: even what no query sees is multiplied by a weight of zero, and must be finite.
        self.keys, self.values = (
            torch.cat([functional.pad(each, (0, 0, self.length - each.shape[2], room)) for each in part])
            for part in ([each.keys for each in column], [each.values for each in column])
        )
        self.real = None
        if any(each.real is not None or each.keys.shape[2] < self.length for each in column):
            heads = max(1 if each.real is None else each.real.shape[1] for each in column)
            self.real = torch.cat([self._padded(each, heads) for each in column])

    def _padded(self, entries: LayerEntries, heads: int) -> Tensor:
        count = entries.keys.shape[2]
        real = entries.real if entries.real is not None else entries.keys.new_ones(1, 1, count, dtype=torch.bool)
        return functional.pad(real.expand(-1, heads, -1), (self.length - count, 0))


class _Pass:
    """Where the tokens of a group go in one pass, and what they see.

    The T tokens of the pass are concatenated, those of the group from `first` on. The group's attention is a grid of
    reading states x Q queries, Q being the most that one of them reads.

    Args:
        group: The states.
        counts: Number of tokens of each of them, not all 0.
        read: Number of tokens read before, by row.
        starts: Position of the first token that each state reads here.
        first: Index of the group's first token.
        heads: Number of query heads.
        device: The model's device.
    """

    def __init__(
        self,
        group: _Group,
        counts: list[int],
        read: Sequence[int],
        starts: list[int],
        first: int,
        heads: int,
        device: torch.device,
    ) -> None:
        self.group, self.first, self.tokens, self.queries = group, first, sum(counts), max(counts)
        taken, before = torch.tensor(counts), torch.tensor([read[row] for row in group.members])
        active = taken.nonzero()[:, 0]
        self.active = None if len(active) == len(counts) else active.to(device)
        taken, before = taken[active], before[active]
        self.grown = int((before + taken).max())
        columns = torch.arange(self.queries)
        self.before, self.starts = before.to(device), torch.tensor(starts)[active].to(device)
        state, column = (columns < taken[:, None]).nonzero(as_tuple=True)
        self.state, self.slot = active[state].to(device), (before[state] + column).to(device)
        # A cell of the grid without a token repeats another one: its result is not used.
        place = ((taken.cumsum(0) - taken)[:, None] + columns).clamp(max=self.tokens - 1) + first
        keys = group.layers[0].keys
        self.kv_heads = keys.shape[1]
        self.sharing = heads // self.kv_heads
        by_head = torch.arange(heads).view(1, self.kv_heads, -1, 1)
        self.source = (place[:, None, None] * heads + by_head).flatten().to(device)
        result = (state * self.sharing * self.queries + column)[:, None, None] * self.kv_heads
        in_group = torch.arange(self.sharing) * self.queries * self.kv_heads
        self.result = (result + torch.arange(self.kv_heads)[:, None] + in_group).flatten().to(device)
        later = (torch.arange(self.grown) > (before[:, None] + columns)[..., None])[:, None].to(device)
        self.after = torch.zeros(later.shape, dtype=keys.dtype, device=device).masked_fill_(later, -torch.inf)
        # By length; a cached method would create a reference cycle that only the garbage collector frees.
        self._rows, self._masks = dict[int, Tensor](), dict[tuple[int, tuple[int, bool] | None], Tensor]()

    def write(self, entries: _Entries, new: tuple[Tensor, Tensor]) -> None:
        """Write the group's part of keys and values [T x K, d] behind the states' entries."""
        rows = self._rows_of(entries)
        own = slice(self.first * self.kv_heads, (self.first + self.tokens) * self.kv_heads)
        for room, each in zip((entries.keys, entries.values), new, strict=True):
            room.view(-1, room.shape[-1]).index_copy_(0, rows, each[own])

    def attend(self, entries: _Entries, queries: Tensor, softmax: Softmax) -> Tensor:
        """All queries [T x H, d] -> the attention output of the group's, [n, H, d]."""
        grid = queries.index_select(0, self.source).view(len(self.after), self.kv_heads, -1, queries.shape[-1])
        seen = slice(0, entries.length + self.grown)
        keys, values = (each[:, :, seen] for each in (entries.keys, entries.values))
        if self.active is not None:
            keys, values = keys.index_select(0, self.active), values.index_select(0, self.active)
        mask = self._mask_of(entries)
        output = attend_grouped(grid, keys, values, mask, softmax)
        by_token = output.transpose(1, 2).reshape(-1, values.shape[-1]).index_select(0, self.result)
        return by_token.view(self.tokens, -1, values.shape[-1])

    def _rows_of(self, entries: _Entries) -> Tensor:
        """[n x K] int64: where the group's tokens go in a layer's flattened states, heads and entries."""
        if entries.length not in self._rows:
            heads = torch.arange(self.kv_heads, device=self.state.device)
            row = (self.state[:, None] * self.kv_heads + heads) * entries.keys.shape[2]
            self._rows[entries.length] = (row + (entries.length + self.slot)[:, None]).flatten()
        return self._rows[entries.length]

    def _mask_of(self, entries: _Entries) -> Tensor:
        """What is added to the logits: [states that read, 1 or K, queries of a KV head, C + grown]."""
        if entries.real is not None:
            return self._mask(entries.real if self.active is None else entries.real[self.active], entries.window)
        if (kind := (entries.length, entries.window)) not in self._masks:
            real = torch.ones(len(self.after), 1, entries.length, dtype=torch.bool, device=self.after.device)
            self._masks[kind] = self._mask(real, entries.window)
        return self._masks[kind]

    def _mask(self, real: Tensor, window: tuple[int, bool] | None) -> Tensor:
        padding = torch.zeros_like(real, dtype=self.after.dtype).masked_fill_(~real, -torch.inf)[:, :, None]
        both = padding.expand(-1, -1, self.queries, -1), self.after.expand(-1, real.shape[1], -1, -1)
        mask = torch.cat(both, dim=-1)
        if window is not None:
            mask.masked_fill_(self._outside(real.shape[2], *window)[:, None], -torch.inf)
        return mask.repeat(1, 1, self.sharing, 1)

    def _outside(self, length: int, size: int, chunked: bool) -> Tensor:
        """[states that read, Q, C + grown] bool: what a layer's window hides from each query."""
        query = (self.before[:, None] + torch.arange(self.queries, device=self.before.device))[..., None]
        key = torch.arange(-length, self.grown, device=query.device)
        if not chunked:
            return query - key >= size
        start = self.starts[:, None, None]
        return (start + query) // size != (start + key) // size


class _Layer(DynamicLayer, OwnAttention):
    """A layer of all reading groups; each token attends to the entries of its own group."""

    def __init__(self, index: int, passes: Sequence[_Pass]) -> None:
        super().__init__()
        self.columns = [(each, each.group.layers[index]) for each in passes]

    @override
    def update(self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object) -> Any:
        return key_states, value_states

    @override
    def attend(self, query: Tensor, key: Tensor, value: Tensor, softmax: Softmax) -> Tensor:
        new, queries = (_by_token(key), _by_token(value)), _by_token(query)
        for each, entries in self.columns:
            each.write(entries, new)
        return torch.cat([each.attend(entries, queries, softmax) for each, entries in self.columns])[None]

    @override
    def get_seq_length(self) -> int:
        return 0

    @override
    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return query_length, 0


def _by_token(states: Tensor) -> Tensor:
    """[1, heads, T, d] -> [T x heads, d]."""
    return states[0].transpose(0, 1).reshape(-1, states.shape[-1])
