"""One pass over the new tokens of several states: where each token goes, and what it sees (see `together`)."""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional
from transformers.cache_utils import DynamicLayer
from typing_extensions import override

from keepsight.runtime.attention import OwnAttention, Softmax, attend_grouped
from keepsight.runtime.layer import LayerEntries


class PaddedEntries:
    """One layer's entries of R states, padded on the left to the longest, with room behind them.

    Args:
        column: The entries of each state.
        room: Number of tokens that may be read.
        window: None, or the size of the layer's window and whether windows are chunks of the positions.

    Attributes:
        keys: [R, K, C + room, d].
        values: [R, K, C + room, d].
        length: C.
        padding: [R, 1 or K, C], what is added to the logits: -inf for padding, else 0; None where nothing is padded.
    """

    def __init__(self, column: Sequence[LayerEntries], room: int, window: tuple[int, bool] | None = None) -> None:
        self.window = window
        self.length = max(each.keys.shape[2] for each in column)
        # Zeros: even what no query sees is multiplied by a weight of zero, and must be finite.
        self.keys, self.values = (
            torch.cat([functional.pad(each, (0, 0, self.length - each.shape[2], room)) for each in part])
            for part in ([each.keys for each in column], [each.values for each in column])
        )
        self.padding = None
        if any(each.real is not None or each.keys.shape[2] < self.length for each in column):
            heads = max(1 if each.real is None else each.real.shape[1] for each in column)
            real = torch.cat([self._padded(each, heads) for each in column])
            self.padding = self.keys.new_zeros(real.shape).masked_fill_(~real, -torch.inf)

    def _padded(self, entries: LayerEntries, heads: int) -> Tensor:
        count = entries.keys.shape[2]
        real = entries.real if entries.real is not None else entries.keys.new_ones(1, 1, count, dtype=torch.bool)
        return functional.pad(real.expand(-1, heads, -1), (self.length - count, 0))


class StateGroup:
    """States whose attention is computed in one call per layer.

    Args:
        members: Indices of the states.
        states: The entries of each layer, for each of them.
        room: Number of tokens that may be read.
        windows: For each layer, None or the size of its window and whether windows are chunks of the positions.

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
        self.layers = [PaddedEntries(column, room, window) for column, window in columns]


class SharedPass:
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
        group: StateGroup,
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

    def write(self, entries: PaddedEntries, new: tuple[Tensor, Tensor]) -> None:
        """Write the group's part of keys and values [T x K, d] behind the states' entries."""
        rows = self._rows_of(entries)
        own = slice(self.first * self.kv_heads, (self.first + self.tokens) * self.kv_heads)
        for room, each in zip((entries.keys, entries.values), new, strict=True):
            room.view(-1, room.shape[-1]).index_copy_(0, rows, each[own])

    def attend(self, entries: PaddedEntries, queries: Tensor, softmax: Softmax) -> Tensor:
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

    def _rows_of(self, entries: PaddedEntries) -> Tensor:
        """[n x K] int64: where the group's tokens go in a layer's flattened states, heads and entries."""
        if entries.length not in self._rows:
            heads = torch.arange(self.kv_heads, device=self.state.device)
            row = (self.state[:, None] * self.kv_heads + heads) * entries.keys.shape[2]
            self._rows[entries.length] = (row + (entries.length + self.slot)[:, None]).flatten()
        return self._rows[entries.length]

    def _mask_of(self, entries: PaddedEntries) -> Tensor:
        """What is added to the logits: [states that read, 1 or K, queries of a KV head, C + grown]."""
        if (padding := entries.padding) is not None:
            return self._mask(padding if self.active is None else padding[self.active], entries.window)
        if (kind := (entries.length, entries.window)) not in self._masks:
            self._masks[kind] = self._mask(self.after.new_zeros(len(self.after), 1, entries.length), entries.window)
        return self._masks[kind]

    def _mask(self, padding: Tensor, window: tuple[int, bool] | None) -> Tensor:
        reading, heads, length = padding.shape
        mask = padding.new_empty(reading, heads, self.sharing, self.queries, length + self.grown)
        mask[..., :length], mask[..., length:] = padding[:, :, None, None], self.after[:, :, None]
        if window is not None:
            mask.masked_fill_(self._outside(length, *window)[:, None, None], -torch.inf)
        return mask.flatten(2, 3)

    def _outside(self, length: int, size: int, chunked: bool) -> Tensor:
        """[states that read, Q, C + grown] bool: what a layer's window hides from each query."""
        query = (self.before[:, None] + torch.arange(self.queries, device=self.before.device))[..., None]
        key = torch.arange(-length, self.grown, device=query.device)
        if not chunked:
            return query - key >= size
        start = self.starts[:, None, None]
        return (start + query) // size != (start + key) // size


class SharedLayer(OwnAttention, DynamicLayer):
    """A layer of all reading groups; each token attends to the entries of its own group."""

    def __init__(self, index: int, passes: Sequence[SharedPass]) -> None:
        super().__init__()
        self.columns = [(each, each.group.layers[index]) for each in passes]

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
