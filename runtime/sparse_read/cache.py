"""Sparse reading: the cache keeps every entry, and each step reads a few of them; the methods' common base."""

import functools
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional
from transformers import PreTrainedModel
from typing_extensions import Self, override

from keepsight.errors import Budget, UserError
from keepsight.runtime.attention import OwnAttention, Reader, Softmax, grouped_attention, visible
from keepsight.runtime.generate import CacheMethod
from keepsight.runtime.layer import KeptLayer, LayerEntries
from keepsight.runtime.readers import TurnReader
from keepsight.runtime.state import State, require_plain_entries, with_full_layers


class Selection(NamedTuple):
    """The entries that the KV heads of a layer, or of all layers, read at one step beside the token's own.

    `indices` [B, K, k] int64 into the C entries before the token, in any order; `real` [B, K, k] bool is False where a
    row has fewer entries to read than others, and None when all are real.
    """

    indices: Tensor
    real: Tensor | None

    def of_group(self, group: int, groups: int, device: torch.device) -> "Selection":
        """The selection of one of `groups` equal groups of KV heads, on a device."""
        indices = self.indices.tensor_split(groups, dim=1)[group].to(device)
        if self.real is None:
            return Selection(indices, None)
        return Selection(indices, self.real.tensor_split(groups, dim=1)[group].to(device))


class LayerSelector(ABC):
    """Selects entries inside a layer, once its queries are known."""

    selecting_method: ClassVar[str] = "select"
    """The method that a decoding step calls to select; benchmarks time it."""

    @abstractmethod
    def select(self, query: Tensor, softmax: Softmax, keys: Tensor, padding: Tensor | None) -> Selection:
        """Select entries by a step's query [B, H, 1, d] and keys [B, K, C + 1, d], the step's own last, after RoPE.

        `padding` [B] int64 is the number of padding entries on the left; None for none.
        """

    @property
    def nbytes(self) -> int:
        """Bytes of the selector's own tensors, beside the cache."""
        return 0

    def share(self) -> "LayerSelector":
        """An independent copy; a selector without state returns itself."""
        return self


class SelectedLayer(OwnAttention, KeptLayer):
    """A cache layer that attends to selected entries only; see `KeptLayer`.

    With an `expansion` it holds latents, of which it expands those that a step reads; selections then have H heads.
    `padding` [B] int64 counts padding entries on the left. Without a `selector` every step is announced with `prepare`.
    """

    def __init__(
        self,
        keys: Tensor,
        values: Tensor,
        seen: int,
        padding: Tensor | None = None,
        selector: LayerSelector | None = None,
    ) -> None:
        super().__init__(keys, values, seen)
        self.padding = padding
        self.selector = selector
        self._announced: Selection | None = None

    @property
    @override
    def nbytes(self) -> int:
        """Bytes on the device: entries, and what the selector holds."""
        entry_bytes = super().nbytes
        if self.selector is None:
            return entry_bytes
        return entry_bytes + self.selector.nbytes

    def prepare(self, selection: Selection) -> None:
        """Announce the next step's selection before the model runs; a layer may start to fetch it."""
        self._announced = selection

    def gather(self, selection: Selection) -> LayerEntries:
        """The selected entries in any order, [B, K, k + 1, d], and the newest one last."""
        length = self.keys.shape[2]
        device = selection.indices.device
        newest = consecutive(length - 1, length, device).expand(*selection.indices.shape[:2], -1)
        indices = torch.cat([selection.indices, newest], dim=2)
        real = selection.real
        if real is not None:
            real = functional.pad(real, (0, 1), value=True)

        # The layer's keys and values are views of its room, which can be flattened without a copy.
        keys = self.keys
        values = self.values
        if self._room is not None:
            keys, values = self._room

        # Whole rows are copied: `gather` along an expanded index would copy them number by number.
        batch, kv_heads, capacity, _ = keys.shape
        first_rows = _first_rows(batch * kv_heads, capacity, device).view(batch, kv_heads, 1)
        rows = (first_rows + indices).flatten()
        keys = keys.flatten(0, 2).index_select(0, rows).view(*indices.shape, -1)
        values = values.flatten(0, 2).index_select(0, rows).view(*indices.shape, -1)
        return self.attended(LayerEntries(keys, values, real))

    @override
    def update(self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object) -> Any:
        if self.expansion is not None:
            self._new = key_states, value_states
        return key_states, value_states

    @override
    def attend(self, query: Tensor, key: Tensor, value: Tensor, softmax: Softmax) -> Tensor:
        if self.expansion is not None:
            key, value = self._new  # the model has expanded them
        if query.shape[2] == 1:
            return self.step(query, key, value, softmax)
        tokens = zip(query.split(1, dim=2), key.split(1, dim=2), value.split(1, dim=2), strict=True)
        outputs = []
        for token_query, token_key, token_value in tokens:
            outputs.append(self.step(token_query, token_key, token_value, softmax))
        return torch.cat(outputs, dim=1)

    def step(self, query: Tensor, key: Tensor, value: Tensor, softmax: Softmax) -> Tensor:
        """Append a token and attend: query [B, H, 1, d], key and value [B, K, 1, d] -> [B, 1, H, d]."""
        self.append(key, value)
        selection = self._announced
        self._announced = None
        if selection is None:
            if self.selector is None:
                raise UserError(
                    "this state is read by its method's reader: pass method.reader(model), not the model",
                    field="state",
                    code="state",
                )
            selection = self.selector.select(query, softmax, self.keys, self.padding)

        keys, values, real = self.gather(selection)
        mask = None if real is None else real[:, :, None]
        return grouped_attention(query, keys, values, mask, softmax)

    def append(self, keys: Tensor, values: Tensor) -> None:
        """Append entries [B, K, q, d]."""
        KeptLayer.update(self, keys, values)

    def read_turn(self, keys: Tensor, values: Tensor) -> LayerEntries:
        """Append entries [B, K, q, d] and return all, for tokens that attend to all of them."""
        if self.expansion is not None:
            keys, values = self._new  # the model has expanded them
        self.append(keys, values)
        return self.attended()

    @override
    def entries(self) -> LayerEntries:
        return LayerEntries(self.keys, self.values, self.real_entries(self.keys.shape[2]))

    def real_entries(self, length: int) -> Tensor | None:
        """[B, K, length] bool, False for padding; None when there is none."""
        if self.padding is None:
            return None
        return real_mask(self.padding, length)[:, None].expand(-1, self.keys.shape[1], -1)

    @override
    def share(self) -> Self:
        twin = super().share()
        twin._announced = None
        if self.selector is not None:
            twin.selector = self.selector.share()
        return twin


class DenseLayer(OwnAttention, KeptLayer):
    """A cache layer that attends to all of its entries, also where the model would append latents to them."""

    @override
    def attend(self, query: Tensor, key: Tensor, value: Tensor, softmax: Softmax) -> Tensor:
        KeptLayer.update(self, key, value)
        mask = None
        if self.real is not None:
            mask = visible(query.shape[2], self.real)
        elif query.shape[2] > 1:
            mask = visible(query.shape[2], self.keys.new_ones(self.keys.shape[:3], dtype=torch.bool))
        return grouped_attention(query, self.keys, self.values, mask, softmax)


class SelectedState(State):
    """A state that keeps every entry and reads a few of them per step. Its layers know their padding."""


def entries_of(state: State) -> Iterator[tuple[Tensor, Tensor, int, Tensor | None]]:
    """For each layer with full attention: keys, values [B, K, C, d], logical length, and padding by row [B] or None.

    Raises:
        UserError: entries were evicted before.
    """
    tokens = state.tokens.shape[1]
    lengths = {keys.shape[2] for keys, _, _ in state.entries()}
    lengths.discard(tokens)
    if lengths:
        raise UserError(
            f"a step selects among all {tokens} tokens, and the cache holds {max(lengths)} of them; give a state from "
            "which nothing was evicted",
            field="budget",
            code="state",
        )

    padding = None
    if state.tokens_mask is not None:
        padding = tokens - state.lengths
    for keys, values, _ in state.entries():
        if padding is not None:
            padding = padding.to(keys.device)
        yield keys, values, tokens, padding


def real_mask(padding: Tensor, length: int) -> Tensor:
    """Numbers [B] of padding entries on the left -> [B, length] bool, False for padding."""
    return consecutive(0, length, padding.device) >= padding[:, None]


@functools.lru_cache(maxsize=64)
@torch.inference_mode(False)  # a cached tensor may be used in any mode
def consecutive(first: int, end: int, device: torch.device) -> Tensor:
    """[end - first] int64, the numbers from `first` on, computed once for all layers of a step; do not write to it."""
    return torch.arange(first, end, device=device)


@functools.lru_cache(maxsize=64)
@torch.inference_mode(False)
def _first_rows(heads: int, capacity: int, device: torch.device) -> Tensor:
    """[heads] int64: where each head's entries begin in a room of `capacity` entries a head, flattened."""
    return torch.arange(0, heads * capacity, capacity, device=device)


@functools.lru_cache(maxsize=64)
@torch.inference_mode(False)
def on_device(numbers: tuple[int, ...], device: torch.device) -> Tensor:
    """[n] int64. Copied once: a copy of Python's numbers waits for the device."""
    return torch.tensor(numbers, device=device)


def with_expanded_latents(state: State) -> State:
    """A state of latents with every head's keys and values in their place; any other state unchanged.

    For methods that select by keys. It can be compressed, not read: the model appends latents.
    """
    for layer in state.layers:
        require_plain_entries(layer)
    if not any(layer.expansion for layer in state.layers):
        return state
    expanded_layers = []
    for layer in state.layers:
        keys, values, _ = layer.attended()
        expanded = KeptLayer(keys, values, layer.seen)
        expanded.token_mask = state.tokens_mask
        expanded_layers.append(expanded)
    return replace(state, cache=with_full_layers(state.cache, expanded_layers))


@dataclass(frozen=True)
class SparseRead(CacheMethod):
    """Reads `budget` entries of the cache for every token, beside the token's own.

    Attributes:
        budget: Entries per KV head and step, or a ratio.
    """

    section = "read"
    cost = "all entries stay; a selection at each step"
    budget: Budget
    selects_each_step = True

    def __post_init__(self) -> None:
        smallest, reason = self.smallest_budget()
        if isinstance(self.budget, int) and self.budget < smallest:
            raise UserError(
                f"{type(self).__name__}: budget {self.budget} is below {smallest} ({reason}); give a larger budget",
                field="budget",
                code="range",
            )

    def smallest_budget(self) -> tuple[int, str]:
        """The smallest budget that leaves something to select, and why."""
        return 1, "one entry to choose"

    @override
    def least_budget(self) -> int:
        smallest, _ = self.smallest_budget()
        return smallest

    @override
    def check(self, length: int, context: int) -> None:
        if length > context:
            name = type(self).__name__
            raise UserError(
                f"{name}: a prompt of {length} tokens does not fit the context of {context}; shorten it",
                field="prompt",
                code="range",
            )

    @override
    @torch.no_grad()
    def compress_state(self, model: PreTrainedModel, state: State) -> State:
        state = with_expanded_latents(state)
        layers = self.layers_for(model, state)
        return state.as_kind(SelectedState, with_full_layers(state.cache, layers))

    @override
    def turn_reader(self, model: PreTrainedModel) -> Reader:
        return TurnReader(model)

    @abstractmethod
    def layers_for(self, model: PreTrainedModel, state: State) -> Sequence[KeptLayer]:
        """A layer for each of a state's layers with full attention."""
