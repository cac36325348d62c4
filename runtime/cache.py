"""Whole caches: their entries, copies that share them, and their bytes.

Entries are those of layers with full attention. Bounded layers (a sliding window, a chunk, a recurrent state) keep the
cache that transformers gives them: they are copied with the others, and never evicted from.
"""

import copy
from collections.abc import Iterable
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer, LinearAttentionLayer

from keepsight.errors import UserError
from keepsight.models.decoder import on_each, require_supported
from keepsight.runtime.cache_layers import KeptLayer, LayerEntries, RaggedLayer
from keepsight.runtime.viewed_layers import ViewedState


def empty_cache(model: PreTrainedModel) -> Cache:
    """An empty cache, with a layer of its kind for each layer of the model.

    Raises:
        UserError: the model is not supported; one line says why.
    """
    require_supported(model)
    return DynamicCache(config=model.config)


def is_bounded(layer: Any) -> bool:
    """Whether a layer is bounded: it has a sliding window, or a recurrent state in place of entries."""
    return not isinstance(layer, DynamicLayer) or bool(layer.is_sliding)


def has_recurrent(cache: Cache) -> bool:
    """Whether a layer has a recurrent state, which cannot be rolled back."""
    return not all(isinstance(layer, DynamicLayer) for layer in cache.layers)


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


def as_observed(cache: Cache, layers: Iterable[Any]) -> Cache:
    """`with_full_layers` for observers, who change no recurrent state."""
    copied = with_full_layers(cache, layers).layers
    return Cache(layers=[ViewedState(each) if isinstance(each, LinearAttentionLayer) else each for each in copied])


def record_past(cache: Cache) -> None:
    """Let bounded layers keep what `roll_back` will need.

    Raises:
        UserError: one of them has a recurrent state, which cannot be rolled back.
    """
    if recurrent := [layer for layer in cache.layers if not isinstance(layer, DynamicLayer)]:
        raise UserError(
            f"a {type(recurrent[0]).__name__} cannot forget tokens it has read; use a method that reads no token twice"
        )
    cache.activate_past_recording()


def roll_back(cache: Cache, count: int) -> None:
    """Roll bounded layers that have recorded the past back by `count` tokens."""
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
    own = on_each(mask[:, None])
    return [
        each
        if each.real is not None or each.keys.shape[2] < mask.shape[1]
        else each._replace(real=own(each.keys.device))
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
    held = sum(tensor.nbytes for layer in cache.layers for tensor in _held(layer))
    return held + sum(layer.kept_bytes for layer in cache.layers if isinstance(layer, RaggedLayer))


def _held(layer: Any) -> list[Tensor]:
    if not isinstance(layer, DynamicLayer):
        return [
            each for held in (layer.conv_states, layer.recurrent_states) for each in held.values() if each is not None
        ]
    return [each for each in (layer.keys, layer.values) if each is not None]
