"""Reading token by token: for methods that choose anew at each step which entries are read."""

from abc import ABC, abstractmethod
from typing import Any, cast

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import Cache
from transformers.modeling_outputs import CausalLMOutputWithPast


class TokenReader(ABC):
    """A model that reads one token after the other.

    Args:
        model: The target.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self._model, self.config = model, model.config

    def __call__(
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        past_key_values: Cache,
        attention_mask: Tensor | None = None,
        logits_to_keep: int = 0,
        **options: Any,
    ) -> CausalLMOutputWithPast:
        """Append tokens to a cache.

        Args:
            input_ids: [B, q] int64.
            position_ids: [B, q] int64.
            past_key_values: The method's own cache.
            attention_mask: [B, M + q] bool, for bounded layers; None without padding.
            logits_to_keep: Number of last tokens whose logits are returned; 0 for all.
            options: Other arguments of a model; unused, as nothing is recorded.
        """
        count = input_ids.shape[1]
        ends = [1 + place - count or None for place in range(count)]
        masks = [None if attention_mask is None else attention_mask[:, :end] for end in ends]
        steps = zip(input_ids.split(1, dim=1), position_ids.split(1, dim=1), masks, strict=True)
        logits = [self.step(*step, past_key_values) for step in steps]
        return CausalLMOutputWithPast(logits=cast(Any, torch.cat(logits[-logits_to_keep:], dim=1)))

    @abstractmethod
    def step(self, token: Tensor, position: Tensor, attention_mask: Tensor | None, cache: Cache) -> Tensor:
        """Append a token [B, 1] and return its logits [B, 1, V]; when this raises, the cache is unchanged."""
