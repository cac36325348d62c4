"""A further turn: tokens that attend to all entries before them, as the prompt's did, in passes over many tokens.

Methods that keep every entry and read a few of them at each step read so while they decode; what a user adds is read
like a prompt.
"""

from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicLayer
from typing_extensions import override

from keepsight.runtime.attention import OwnAttention, Reader, Softmax, grouped_attention, visible


class TurnLayer(DynamicLayer, OwnAttention):
    """A layer while a turn is read.

    Args:
        layer: The layer that it appends to. Its `read_turn(keys, values)` takes those of the new tokens, as its own
            `attend` does, and returns all its entries in full precision.
    """

    def __init__(self, layer: Any) -> None:
        super().__init__()
        self.layer, self.is_initialized = layer, True

    @override
    def update(self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object) -> Any:
        return self.layer.update(key_states, value_states)

    @override
    def attend(self, query: Tensor, key: Tensor, value: Tensor, softmax: Softmax) -> Tensor:
        keys, values, real = self.layer.read_turn(key, value)
        if real is None:
            real = keys.new_ones(1, 1, keys.shape[2], dtype=torch.bool)
        return grouped_attention(query, keys, values, visible(query.shape[2], real), softmax)

    @override
    def get_seq_length(self) -> int:
        return self.layer.get_seq_length()

    @override
    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.layer.get_mask_sizes(query_length)


class TurnReader:
    """A model that reads a turn after a state whose layers read a few entries per step.

    Args:
        model: The target.
    """

    def __init__(self, model: Reader) -> None:
        self._model, self.config = model, model.config

    def __call__(self, *, past_key_values: Cache, **options: Any) -> Any:
        """Append tokens to a cache: see the model's own call."""
        layers = [TurnLayer(each) if hasattr(each, "read_turn") else each for each in past_key_values.layers]
        turn = Cache(layers=layers)
        return self._model(past_key_values=turn, **{**options, "entries": turn})
