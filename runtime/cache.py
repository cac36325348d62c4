"""Cache layers: entries after eviction, and entries as observers see them.

Layers store KV heads, never query heads. A layer's *logical* length counts the tokens seen and determines positions;
its *physical* length counts the entries held. KV heads with different numbers of entries are stored concatenated
(`RaggedLayer`), and padded on the left once they are read from.

Entries are those of layers with full attention. Layers that are bounded by themselves (a sliding window, a chunk, a
recurrent state) keep the cache that transformers gives them: they are copied with the others, and never evicted from.
"""

import copy
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional
from transformers import PreTrainedModel
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer
from typing_extensions import override

from keepsight.errors import UserError
from keepsight.models.decoder import require_supported

ROOM = 64
"""Entries for which caches make room when they grow, at least; memory plans count it."""
GROWTH = 1 / 16
"""Share of the entries held for which caches make room when they grow, if that is more; memory plans count it."""


class LayerEntries(NamedTuple):
    """The entries of one layer.

    Attributes:
        keys: [B, K, C, d], as the model computed them: RoPE at the original positions.
        values: [B, K, C, d].
        real: [B, K, C] bool, False for padding on the left; None when all are real, or a mask of the batch marks it.
    """

    keys: Tensor
    values: Tensor
    real: Tensor | None


def spare(count: int) -> int:
    """Entries to make room for beyond `count`: a share of them, so that they are not copied again and again."""
    return max(ROOM, int(count * GROWTH))


class KeptLayer(DynamicLayer):
    """The same number of entries in each KV head, and room for more.

    Args:
        keys: [B, K, C, d].
        values: [B, K, C, d].
        seen: Logical length: tokens seen so far, evicted ones included.
        real: [B, K, C] bool, for entries that were padded to one length; None otherwise.
    """

    keys: Tensor
    values: Tensor

    def __init__(self, keys: Tensor, values: Tensor, seen: int, real: Tensor | None = None) -> None:
        super().__init__()
        self.lazy_initialization(keys, values)
        self.keys, self.values, self.seen, self.real = keys, values, seen, real
        self._room: tuple[Tensor, Tensor] | None = None
        self._real_room: Tensor | None = None
        self._shared = 0  # number of first entries that other layers may hold too

    @override
    def update(self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object) -> Any:
        self.seen += key_states.shape[-2]
        self._append(key_states, value_states)
        return self.keys, self.values

    @property
    def returned(self) -> Tensor | None:
        """[B, K, S] bool: which of the keys that `update` has returned are real; None for all that a mask shows."""
        return self.real

    def _append(self, keys: Tensor, values: Tensor) -> None:
        """Append in place where there is room: copying all entries for every token would cost more than attention.

        The room belongs to this layer alone; memory shared with other layers is never written.
        """
        before, after = self.keys.shape[2], self.keys.shape[2] + keys.shape[2]
        if self._room is None or after > self._room[0].shape[2]:
            grown = 0, 0, 0, after + spare(after) - before
            self._room, self._shared = (functional.pad(self.keys, grown), functional.pad(self.values, grown)), 0
            if self.real is not None:
                self._real_room = functional.pad(self.real, grown[2:], value=True)
        for room, new in zip(self._room, (keys, values), strict=True):
            room[:, :, before:after] = new
        self.keys, self.values = (room[:, :, :after] for room in self._room)
        if self._real_room is not None:
            self.real = self._real_room[..., :after]

    @override
    def get_seq_length(self) -> int:
        return self.seen

    @override
    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        physical = self.keys.shape[-2]
        return physical + query_length, self.seen - physical

    @override
    def crop(self, tokens_to_remove: int) -> None:
        super().crop(tokens_to_remove)
        self.seen += tokens_to_remove
        if self.keys.shape[2] < self._shared:
            self._room = None  # what comes next would overwrite what others hold
        if self.real is not None:
            self.real = self.real[..., : self.keys.shape[-2]]

    def entries(self) -> LayerEntries:
        """All entries."""
        return LayerEntries(self.keys, self.values, self.real)

    def share(self) -> "KeptLayer":
        """An independent layer over the same tensors."""
        self._shared = self.keys.shape[2]
        return KeptLayer(self.keys, self.values, self.seen, self.real)


class RaggedLayer(KeptLayer):
    """Different numbers of entries per KV head, stored without padding; entries appended later have one length.

    From the first update on all entries are held in one padded form, to which tokens are appended in place.

    Args:
        kept_keys: [total, d], concatenated over heads, then rows.
        kept_values: [total, d].
        counts: [B, K] int64: entries of each head; they sum up to `total`.
        seen: Logical length.
        appended: Keys and values [B, K, T, d] appended since; none by default.
    """

    def __init__(
        self,
        kept_keys: Tensor,
        kept_values: Tensor,
        counts: Tensor,
        seen: int,
        appended: tuple[Tensor, Tensor] | None = None,
    ) -> None:
        keys, values = (kept.new_empty(*counts.shape, 0, kept.shape[-1]) for kept in (kept_keys, kept_values))
        super().__init__(*(appended or (keys, values)), seen)
        self.counts = counts
        self._held: tuple[Tensor, Tensor] | KeptLayer = kept_keys, kept_values  # packed, or padded with what came since

    @property
    def kept_keys(self) -> Tensor:
        """[total, d], concatenated over heads, then rows."""
        return self._packed(0)

    @property
    def kept_values(self) -> Tensor:
        """[total, d]."""
        return self._packed(1)

    def _packed(self, part: int) -> Tensor:
        if not isinstance(self._held, KeptLayer):
            return self._held[part]
        entries = self._held.entries()
        kept = slice(None, entries.keys.shape[2] - self.keys.shape[2])
        assert entries.real is not None
        return (entries.keys, entries.values)[part][:, :, kept][entries.real[..., kept]]

    @property
    def kept_bytes(self) -> int:
        """Bytes of the kept keys and values, without padding."""
        if not isinstance(self._held, KeptLayer):
            return sum(each.numel() * each.element_size() for each in self._held)
        row = self.keys.shape[-1] * self.keys.element_size() + self.values.shape[-1] * self.values.element_size()
        return int(self.counts.sum()) * row

    @override
    def _append(self, keys: Tensor, values: Tensor) -> None:
        if not isinstance(self._held, KeptLayer):
            padded, of_values, real = self.entries()
            self._held = KeptLayer(padded, of_values, self.seen, real)
        longest = self._held.keys.shape[2] - self.keys.shape[2]
        self._held._append(keys, values)
        self.keys, self.values = (each[:, :, longest:] for each in (self._held.keys, self._held.values))

    @override
    def update(self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object) -> Any:
        super().update(key_states, value_states)
        keys, values, _ = self.entries()
        return keys, values

    @property
    @override
    def returned(self) -> Tensor | None:
        return self._held.real if isinstance(self._held, KeptLayer) else None

    @override
    def entries(self) -> LayerEntries:
        """All entries, padded on the left to the longest head."""
        if isinstance(self._held, KeptLayer):
            return self._held.entries()
        longest = int(self.counts.max())
        real = torch.arange(longest, device=self.counts.device) >= longest - self.counts[..., None]
        keys, values = (
            torch.cat([_unpack(kept, real), appended], dim=2)
            for kept, appended in zip(self._held, (self.keys, self.values), strict=True)
        )
        return LayerEntries(keys, values, functional.pad(real, (0, self.keys.shape[2]), value=True))

    @override
    def crop(self, tokens_to_remove: int) -> None:
        if -tokens_to_remove > (appended := self.keys.shape[2]):
            raise UserError(
                f"crop: cannot remove {-tokens_to_remove} tokens, only the {appended} that were read since the last "
                "eviction; keep a copy of the state from before instead"
            )
        super().crop(tokens_to_remove)
        if isinstance(self._held, KeptLayer):
            self._held.crop(tokens_to_remove)

    @override
    def share(self) -> "RaggedLayer":
        twin = copy.copy(self)
        if isinstance(self._held, KeptLayer):
            twin._held = self._held.share()
        return twin


class ViewedLayer(DynamicLayer):
    """Entries as observers see them: observers see what they append, but it is never stored."""

    keys: Tensor
    values: Tensor

    def __init__(self, keys: Tensor, values: Tensor, real: Tensor | None = None) -> None:
        super().__init__()
        self.lazy_initialization(keys, values)
        self.keys, self.values, self.real = keys, values, real
        self.returned: Tensor | None = None

    @override
    def update(self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object) -> Any:
        if self.real is not None:
            self.returned = functional.pad(self.real, (0, key_states.shape[-2]), value=True)
        return torch.cat([self.keys, key_states], dim=-2), torch.cat([self.values, value_states], dim=-2)


def _unpack(packed: Tensor, real: Tensor) -> Tensor:
    """[total, d] -> [B, K, C, d], zeros where `real` is False."""
    padded = packed.new_zeros(*real.shape, packed.shape[-1])
    padded[real] = packed
    return padded


def empty_cache(model: PreTrainedModel) -> Cache:
    """The cache that every reading begins with: for each layer one of its kind.

    Raises:
        UserError: the model is not supported; one line says why.
    """
    require_supported(model)
    return DynamicCache(config=model.config)


def is_bounded(layer: Any) -> bool:
    """Whether a layer is bounded by itself: its window slides, or it holds no entries but a recurrent state."""
    return not isinstance(layer, DynamicLayer) or bool(layer.is_sliding)


def filled_layer(empty: Any, keys: Tensor, values: Tensor, seen: int) -> Any:
    """A layer of these entries, from one as transformers begins with; `seen` is its logical length."""
    if not is_bounded(empty):
        return KeptLayer(keys, values, seen)
    empty.update(keys, values)
    empty.cumulative_length = seen
    return empty


def full_layers(cache: Cache) -> list[Any]:
    """The layers with full attention."""
    return [layer for layer in cache.layers if not is_bounded(layer)]


def with_full_layers(cache: Cache, layers: Iterable[Any]) -> Cache:
    """A cache with other layers in place of those with full attention, and copies of the bounded ones."""
    others = iter(layers)
    return Cache(layers=[_copied(layer) if is_bounded(layer) else next(others) for layer in cache.layers])


def record_past(cache: Cache) -> None:
    """Let bounded layers hold on to what `roll_back` will need.

    Raises:
        UserError: one of them has a recurrent state, from which nothing can be taken back.
    """
    if recurrent := [layer for layer in cache.layers if not isinstance(layer, DynamicLayer)]:
        raise UserError(
            f"a {type(recurrent[0]).__name__} cannot forget tokens it has read; use a method that reads no token twice"
        )
    cache.activate_past_recording()


def roll_back(cache: Cache, count: int) -> None:
    """Take the last `count` tokens back from bounded layers that have recorded the past."""
    layers: list[Any] = [layer for layer in cache.layers if is_bounded(layer)]
    for layer in layers:
        layer.crop(-count)
        layer.record_past = False


def _copied(layer: Any) -> Any:
    """An independent copy of a bounded layer."""
    # A window's tensors are replaced when it slides, a recurrent state is written in place.
    return copy.copy(layer) if isinstance(layer, DynamicLayer) else copy.deepcopy(layer)


def entries(cache: Cache) -> list[LayerEntries]:
    """The entries of each layer with full attention, padded where its heads differ."""
    return [
        layer.entries() if isinstance(layer, KeptLayer) else LayerEntries(layer.keys, layer.values, None)
        for layer in full_layers(cache)
    ]


def marked(cache: Cache, mask: Tensor | None) -> list[LayerEntries]:
    """The entries of each layer with full attention, each with its padding.

    Args:
        cache: The cache.
        mask: [B, C] bool, False for padding among the tokens; it holds for layers from which nothing was evicted.
    """
    given = entries(cache)
    if mask is None:
        return given
    return [
        each if each.real is not None or each.keys.shape[2] < mask.shape[1] else each._replace(real=mask[:, None])
        for each in given
    ]


def share(cache: Cache) -> Cache:
    """An independent cache of the same entries, without copies: appending to one leaves the other unchanged."""
    seen = cache.get_seq_length()
    return with_full_layers(
        cache,
        [
            layer.share() if isinstance(layer, KeptLayer) else KeptLayer(layer.keys, layer.values, seen)
            for layer in full_layers(cache)
        ],
    )


def cache_bytes(cache: Cache) -> int:
    """Bytes of all keys and values: entries of all layers, rows and KV heads x head dimension x 2 x item size.

    The windows and states of bounded layers are in it; the padding of a ragged layer that is being read from, and the 8
    bytes a head of its counts, are not.
    """
    held = sum(tensor.numel() * tensor.element_size() for layer in cache.layers for tensor in _held(layer))
    return held + sum(layer.kept_bytes for layer in cache.layers if isinstance(layer, RaggedLayer))


def _held(layer: Any) -> list[Tensor]:
    if not isinstance(layer, DynamicLayer):
        return [
            each for held in (layer.conv_states, layer.recurrent_states) for each in held.values() if each is not None
        ]
    return [each for each in (layer.keys, layer.values) if each is not None]
