"""Dense caches whose layers ask a test how they attend."""

from collections.abc import Callable
from typing import Any

from torch import Tensor
from transformers.cache_utils import Cache, DynamicLayer
from typing_extensions import override

from keepsight.runtime.attention import OwnAttention, Softmax

Attend = Callable[[int, Tensor, Tensor, Tensor, float], Tensor]
"""Layer, queries [B, H, q, d], all keys and values [B, K, S, d], scaling -> [B, q, H, d]."""


class AskingLayer(DynamicLayer, OwnAttention):
    """A dense layer that computes attention with `function`, as `Attend` says."""

    function: Attend

    def __init__(self, index: int, keys: Tensor, values: Tensor) -> None:
        super().__init__()
        self.index = index
        self.lazy_initialization(keys, values)
        self.keys = keys
        self.values = values

    @override
    def attend(self, query: Tensor, key: Tensor, value: Tensor, softmax: Softmax) -> Tensor:
        return self.function(self.index, query, key, value, softmax.scaling)


def asking(cache: Cache) -> Cache:
    """A cache of the same entries in layers that ask."""
    layers: list[Any] = cache.layers
    return Cache(layers=[AskingLayer(index, layer.keys, layer.values) for index, layer in enumerate(layers)])


def answer_with(cache: Cache, function: Attend) -> None:
    """Let the layers of a cache attend with `function` from now on."""
    for layer in cache.layers:
        assert isinstance(layer, AskingLayer)
        layer.function = function
