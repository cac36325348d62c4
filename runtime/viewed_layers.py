"""Layers as observers see them: what observers append is seen by them, and never stored."""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from transformers.cache_utils import DynamicLayer, LinearAttentionLayer
from typing_extensions import override


class ViewedLayer(DynamicLayer):
    """Entries as observers see them: observers see what they append, but it is never stored.

    Where there are several times as many rows of observers as of entries, those after one another share a row.
    """

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
        stored, sharing = (self.keys, self.values), len(key_states) // len(self.keys)
        if sharing > 1:
            stored = self.keys.repeat_interleave(sharing, 0), self.values.repeat_interleave(sharing, 0)
        return torch.cat([stored[0], key_states], dim=-2), torch.cat([stored[1], value_states], dim=-2)


class ViewedState(LinearAttentionLayer):
    """A recurrent state as observers see it: it goes on for them, but is never stored, so that gradients can flow.

    Args:
        layer: The layer that holds it.
    """

    def __init__(self, layer: LinearAttentionLayer) -> None:
        vars(self).update(vars(layer))

    @override
    def update_conv_state(
        self, conv_states: Tensor, state_idx: int = 0, conv_kernel_size: int | None = None, **kwargs: object
    ) -> Tensor:
        before = self.conv_states[state_idx]
        assert before is not None
        return torch.cat([before, conv_states], dim=-1)

    @override
    def update_recurrent_state(self, recurrent_states: Tensor, state_idx: int = 0, **kwargs: object) -> Tensor:
        return recurrent_states
