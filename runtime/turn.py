"""A further turn: tokens that attend to all entries before them, as the prompt's did, in passes over many tokens.

Methods that keep every entry and read a few of them at each step read so while they decode; what a user adds is read
like a prompt.
"""

from typing import Any

from torch import Tensor
from transformers.cache_utils import Cache, DynamicLayer
from typing_extensions import override

from keepsight.runtime.attention import Reader


class TurnLayer(DynamicLayer):
    """A layer while a turn is read.

    Args:
        layer: The layer that it appends to. Its `read_turn(keys, values)` takes what `update` takes, and returns all
            its entries in full precision as `update` returns them.
    """

    def __init__(self, layer: Any) -> None:
        super().__init__()
        self.layer, self.is_initialized = layer, True

    @override
    def update(self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object) -> Any:
        return self.layer.read_turn(key_states, value_states)

    @override
    def get_seq_length(self) -> int:
        return self.layer.get_seq_length()

    @override
    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.layer.get_mask_sizes(query_length)


class TurnReader:
    """A model that reads a turn after a state whose layers read a few entries per step.

    Args:
        model: What reads the layers as such: the target, or a wrapper of it.
    """

    def __init__(self, model: Reader) -> None:
        self._model, self.config = model, model.config

    def __call__(self, *, past_key_values: Cache, **options: Any) -> Any:
        """Append tokens to a cache: see the model's own call."""
        layers = [TurnLayer(each) if hasattr(each, "read_turn") else each for each in past_key_values.layers]
        return self._model(past_key_values=Cache(layers=layers), **options)
