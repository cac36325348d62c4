"""Wrappers of a model that read token by token, or read a further turn into a cache that is read sparsely."""

from abc import ABC, abstractmethod
from typing import Any, cast

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import Cache, DynamicLayer
from transformers.modeling_outputs import CausalLMOutputWithPast
from typing_extensions import override

from keepsight.runtime.attention import (
    OpenCache,
    OwnAttention,
    Reader,
    Softmax,
    grouped_attention,
    recurrent_of,
    visible,
)


class TokenReader(ABC):
    """Base of wrappers of a model that read one token after the other.

    Args:
        model: The base model.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model
        self.config = model.config

    def __call__(
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        past_key_values: Cache,
        attention_mask: Tensor | None = None,
        logits_to_keep: int = 0,
        **options: Any,
    ) -> CausalLMOutputWithPast:
        """Append tokens [B, q] at positions [B, q] to the method's own cache, as a model does; nothing is recorded.

        The mask [B, M + q] bool is for bounded layers; `logits_to_keep` is the number of last tokens whose logits are
        returned, 0 for all.
        """
        count = input_ids.shape[1]
        logits = []
        for index in range(count):
            token = input_ids[:, index : index + 1]
            position = position_ids[:, index : index + 1]
            mask = attention_mask
            if mask is not None:
                later_tokens = count - index - 1
                mask = mask[:, : mask.shape[1] - later_tokens]
            logits.append(self.step(token, position, mask, past_key_values))
        return CausalLMOutputWithPast(logits=cast(Any, torch.cat(logits[-logits_to_keep:], dim=1)))

    @abstractmethod
    def step(self, token: Tensor, position: Tensor, attention_mask: Tensor | None, cache: Cache) -> Tensor:
        """Append a token [B, 1] and return its logits [B, 1, V]; when this raises, the cache is unchanged."""


class TurnLayer(DynamicLayer, OwnAttention):
    """A layer while a turn is read.

    `layer`, to which it appends, has a `read_turn(keys, values)` that appends the new tokens' entries and returns all
    entries in full precision.
    """

    def __init__(self, layer: Any) -> None:
        super().__init__()
        self.layer = layer
        self.recurrent = recurrent_of(layer)
        self.is_initialized = True

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
    """A wrapper of a model that reads a further turn densely into a cache that is read sparsely at each step.

    Args:
        model: The base model.
    """

    def __init__(self, model: Reader) -> None:
        self._model = model
        self.config = model.config

    def __call__(self, *, past_key_values: Cache, **options: Any) -> Any:
        """Append tokens to a cache: see the model's own call."""
        layers = []
        for layer in past_key_values.layers:
            if hasattr(layer, "read_turn"):
                layer = TurnLayer(layer)
            layers.append(layer)
        turn_cache = OpenCache(layers=layers)
        options["entries"] = turn_cache
        return self._model(past_key_values=turn_cache, **options)
