"""Sparse reading: a cache that keeps every entry, of which each step reads a few; base of the methods that do so.

A step reads what was selected among the entries before its token, and the token's own entry, which the budget does not
count. Padding stays on the left; generated tokens follow the prompt's and are selected like them. Keys are stored after
RoPE, so that gathered entries may be in any order. Several tokens read in one pass are read one by one, but for a
further turn (`keepsight.runtime.turn`).
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional
from transformers import PreTrainedModel
from transformers.cache_utils import Cache
from typing_extensions import override

from keepsight.errors import UserError
from keepsight.runtime.attention import OwnAttention, Reader
from keepsight.runtime.allocate import Budget
from keepsight.runtime.state import cache_bytes, with_full_layers
from keepsight.runtime.layer import KeptLayer, LayerEntries
from keepsight.runtime.latents import Expansion
from keepsight.runtime.generate import CacheMethod
from keepsight.runtime.attention import Softmax, grouped_attention, visible
from keepsight.runtime.state import State
from keepsight.runtime.turn import TurnReader


class Selection(NamedTuple):
    """What the KV heads of one or several layers read at a step, beside the token's own entry.

    Attributes:
        indices: [B, K, k] int64, indices into the C entries before the token, in any order.
        real: [B, K, k] bool, False where a row has fewer entries to read than others; None when all are real.
    """

    indices: Tensor
    real: Tensor | None

    def part(self, place: int, parts: int, device: torch.device) -> "Selection":
        """The selection of KV heads at `place` among `parts` equal runs of them, on a device."""
        mine = (None if each is None else each.tensor_split(parts, dim=1)[place].to(device) for each in self)
        return Selection(*mine)  # type: ignore[arg-type]


class LayerSelector(ABC):
    """Selects inside a layer, once its queries are known."""

    @abstractmethod
    def select(self, query: Tensor, softmax: Softmax, keys: Tensor, padding: Tensor | None) -> Selection:
        """Select what a step reads.

        Args:
            query: [B, H, 1, d] after RoPE.
            softmax: The layer's.
            keys: [B, K, C + 1, d] after RoPE, the token's own key last.
            padding: [B] int64, number of padding entries on the left; None for none.
        """

    @property
    def bytes(self) -> int:
        """Bytes of what it stores beside the cache."""
        return 0

    def share(self) -> "LayerSelector":
        """An independent copy; a selector without state is its own."""
        return self


class SelectedLayer(OwnAttention, KeptLayer):
    """A cache layer that attends to selected entries only.

    Args:
        keys: [B, K, C, d].
        values: [B, K, C, d].
        seen: Logical length.
        padding: [B] int64, number of padding entries on the left; None for none.
        selector: Selects inside the layer; None when every step is announced with `prepare`.
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
        self.padding, self.selector = padding, selector
        self._announced: Selection | None = None

    @property
    def bytes(self) -> int:
        """Bytes on the device: entries, and what the selector stores."""
        return self.keys.nbytes + self.values.nbytes + (self.selector.bytes if self.selector is not None else 0)

    def prepare(self, chosen: Selection) -> None:
        """Announce what the next step reads, before the model runs; a layer may start to fetch it."""
        self._announced = chosen

    def gather(self, chosen: Selection) -> LayerEntries:
        """The selected entries in any order, followed by the newest one: k + 1 entries per head."""
        indices = functional.pad(chosen.indices, (0, 1), value=self.keys.shape[2] - 1)
        keys, values = self._room or (self.keys, self.values)
        batch, kv_heads, room, _ = keys.shape
        # Whole rows are copied: `gather` along an expanded index would copy them number by number.
        heads = torch.arange(batch * kv_heads, device=indices.device).view(batch, kv_heads, 1) * room
        rows = (heads + indices).flatten()
        keys, values = (each.flatten(0, 2).index_select(0, rows).view(*indices.shape, -1) for each in (keys, values))
        return LayerEntries(keys, values, _with_newest(chosen.real))

    @override
    def attend(self, query: Tensor, key: Tensor, value: Tensor, softmax: Softmax) -> Tensor:
        tokens = zip(query.split(1, dim=2), key.split(1, dim=2), value.split(1, dim=2), strict=True)
        return torch.cat([self.step(*token, softmax) for token in tokens], dim=1)

    def step(self, query: Tensor, key: Tensor, value: Tensor, softmax: Softmax) -> Tensor:
        """Append a token and attend: query [B, H, 1, d], key and value [B, K, 1, d] -> [B, 1, H, d]."""
        self.append(key, value)
        chosen, self._announced = self._announced, None
        if chosen is None:
            if self.selector is None:
                raise UserError("this state is read by its method's reader: give method.reader(model) for the model")
            chosen = self.selector.select(query, softmax, self.keys, self.padding)
        keys, values, real = self.gather(chosen)
        return grouped_attention(query, keys, values, None if real is None else real[:, :, None], softmax)

    def append(self, keys: Tensor, values: Tensor) -> None:
        """Append entries [B, K, q, d]."""
        self._append(keys, values)
        self.seen += keys.shape[2]

    def read_turn(self, keys: Tensor, values: Tensor) -> LayerEntries:
        """Append entries [B, K, q, d] and return all, for tokens that attend to all; see `keepsight.runtime.turn`."""
        self.append(keys, values)
        return self.entries()

    @override
    def entries(self) -> LayerEntries:
        return LayerEntries(self.keys, self.values, self.real_entries(self.keys))

    def real_entries(self, keys: Tensor) -> Tensor | None:
        """[B, K, S] bool, False where keys [B, K, S, d] are padding; None without padding."""
        if self.padding is None:
            return None
        return real_mask(self.padding, keys.shape[2])[:, None].expand(-1, keys.shape[1], -1)

    @override
    def share(self) -> "SelectedLayer":
        self._shared = self.keys.shape[2]
        selector = self.selector.share() if self.selector is not None else None
        return SelectedLayer(self.keys, self.values, self.seen, self.padding, selector)


class LatentLayer(SelectedLayer):
    """A layer of latent attention that expands, for each head, the latents that a step reads.

    SpeContext (arXiv 2512.00722), section 4.3, "Support for MLA". `keys` are the latents [B, 1, C, rank] and `values`
    the keys' part with RoPE [B, 1, C, rope], as transformers caches them; selections have H heads.
    """

    def __init__(
        self, expansion: Expansion, latents: Tensor, rotated: Tensor, seen: int, padding: Tensor | None = None
    ) -> None:
        super().__init__(latents, rotated, seen, padding)
        self.expansion = expansion

    @override
    def update(self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object) -> Any:
        self._new = key_states, value_states
        return key_states, value_states

    @override
    def attend(self, query: Tensor, key: Tensor, value: Tensor, softmax: Softmax) -> Tensor:
        return super().attend(query, *self._new, softmax)

    @override
    def gather(self, chosen: Selection) -> LayerEntries:
        return self._expanded(super().gather(chosen))

    @override
    def read_turn(self, keys: Tensor, values: Tensor) -> LayerEntries:
        return self._expanded(super().read_turn(*self._new))

    def _expanded(self, latent: LayerEntries) -> LayerEntries:
        return LayerEntries(*self.expansion(latent.keys, latent.values), latent.real)

    @override
    def share(self) -> "LatentLayer":
        return LatentLayer(self.expansion, self.keys, self.values, self.seen, self.padding)


class DenseLayer(OwnAttention, KeptLayer):
    """A cache layer that attends to all of its entries, also where the model would append latents to them."""

    @override
    def attend(self, query: Tensor, key: Tensor, value: Tensor, softmax: Softmax) -> Tensor:
        KeptLayer.update(self, key, value)
        real = self.real if self.real is not None else self.keys.new_ones(self.keys.shape[:3], dtype=torch.bool)
        return grouped_attention(query, self.keys, self.values, visible(query.shape[2], real), softmax)

    @override
    def share(self) -> "DenseLayer":
        self._shared = self.keys.shape[2]
        return DenseLayer(self.keys, self.values, self.seen, self.real)


@dataclass(frozen=True)
class SelectedState(State):
    """A state that keeps every entry and reads a few of them per step; its layers know what is padding."""

    @property
    @override
    def kv_bytes(self) -> int:
        """Bytes on the device: all keys and values there, and what selectors store."""
        return sum(
            layer.bytes if isinstance(layer, SelectedLayer) else cache_bytes(Cache(layers=[layer]))
            for layer in self.cache.layers
        )


@dataclass(frozen=True)
class SparseRead(CacheMethod):
    """Base of the methods that keep every entry and read `budget` of them for every token.

    Attributes:
        budget: Entries that each layer and KV head reads per step, sinks and window included, beside the token's own
            entry; a ratio (a float between 0 and 1) stands for `round(ratio * N)` with the prompt's own length N. A
            budget that covers the cache gives full attention.

    Raises:
        UserError: a value is out of range.
    """

    budget: int | float
    selects_each_step = True

    def __post_init__(self) -> None:
        budget = Budget(self.budget)
        budget.check(type(self).__name__)
        if not budget.is_ratio:
            self._check_budget(budget.entries(0))

    def least(self) -> tuple[int, str]:
        """The smallest budget that leaves something to select, and why."""
        return 1, "one entry to choose"

    @override
    def budget_for(self, length: int) -> int:
        return Budget(self.budget).entries(length)

    @override
    def check(self, length: int, context: int) -> None:
        if length > context:
            raise UserError(
                f"{type(self).__name__}: a prompt of {length} tokens does not fit the context of {context}; shorten it"
            )
        if (budget := self.budget_for(length)) < length:
            self._check_budget(budget)

    @override
    @torch.no_grad()
    def compress(self, model: PreTrainedModel, state: State) -> State:
        state = expanded(model, state)
        budgets = tuple(self.budgets(state))
        layers = [self.make_layer(index, budgets, *parts) for index, parts in enumerate(layer_parts(state))]
        cache = with_full_layers(state.cache, layers)
        return state.as_kind(SelectedState, cache)

    @override
    def turn_reader(self, model: PreTrainedModel) -> Reader:
        return TurnReader(model)

    @abstractmethod
    def make_layer(
        self, index: int, budgets: tuple[int, ...], keys: Tensor, values: Tensor, seen: int, padding: Tensor | None
    ) -> KeptLayer:
        """Make the layer at `index` for rows with these budgets; other arguments as for `SelectedLayer`."""

    def _check_budget(self, budget: int) -> None:
        least, reason = self.least()
        if budget < least:
            which = "" if budget == self.budget else f" leaves {budget} entries, which"
            raise UserError(
                f"{type(self).__name__}: budget {self.budget}{which} is below {least} ({reason}); give a larger budget"
            )


def layer_parts(state: State) -> Iterator[tuple[Tensor, Tensor, int, Tensor | None]]:
    """The keys, values, logical length and padding of each layer of a state, as `SelectedLayer` takes them.

    Raises:
        UserError: entries were evicted.
    """
    tokens, layers = state.tokens.shape[1], state.entries()
    if evicted := {keys.shape[2] for keys, _, _ in layers} - {tokens}:
        raise UserError(
            f"a step selects among all {tokens} tokens, and the cache has {max(evicted)} of them; give a state from "
            "which nothing was evicted"
        )
    padding = None if state.tokens_mask is None else tokens - state.lengths
    for keys, values, _ in layers:
        yield keys, values, tokens, None if padding is None else padding.to(keys.device)


def expanded(model: PreTrainedModel, state: State) -> State:
    """A state of latents with every head's keys and values in their place; any other state unchanged.

    For methods that select by keys. It can be compressed, not read: the model appends latents.
    """
    if not any(layer.expansion for layer in state.layers):
        return state
    layers = [KeptLayer(*layer.attended()[:2], layer.seen) for layer in state.layers]
    for layer in layers:
        layer.token_mask = state.tokens_mask
    return replace(state, cache=with_full_layers(state.cache, layers))


def real_mask(padding: Tensor, length: int) -> Tensor:
    """Numbers [B] of padding entries on the left -> [B, length] bool, False for padding."""
    return torch.arange(length, device=padding.device) >= padding[:, None]


def _with_newest(real: Tensor | None) -> Tensor | None:
    return None if real is None else functional.pad(real, (0, 1), value=True)
