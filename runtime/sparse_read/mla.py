"""Latent attention under methods that read a few entries per step.

SpeContext (arXiv 2512.00722, section 4.3, "Support for MLA") selects by head, as for multi-head attention, and expands
what is selected; methods that select by keys need all of them expanded (see `keepsight.runtime.latents`).
"""

from dataclasses import replace
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel
from typing_extensions import override

from keepsight.runtime.attention import Softmax
from keepsight.runtime.latents import Expansion
from keepsight.runtime.layer import KeptLayer, LayerEntries
from keepsight.runtime.sparse_read.cache import MakeLayer, SelectedLayer, Selection
from keepsight.runtime.state import State, with_full_layers


class LatentLayer(SelectedLayer):
    """A cache layer that holds latents and expands, for each head, those that a step reads.

    Its `keys` are the latents after their norm, [B, 1, C, rank], and its `values` the keys' part with RoPE,
    [B, 1, C, rope]: what transformers caches. Selections have H heads.

    Args:
        expand: The layer's expansion.
        latents: [B, 1, C, rank].
        rotated: [B, 1, C, rope].
        seen: Logical length.
        padding: See `SelectedLayer`.
    """

    def __init__(
        self, expand: Expansion, latents: Tensor, rotated: Tensor, seen: int, padding: Tensor | None = None
    ) -> None:
        super().__init__(latents, rotated, seen, padding)
        self.expand = expand

    @override
    def update(self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object) -> Any:
        self._new = key_states, value_states
        return key_states, value_states

    @override
    def attend(self, query: Tensor, key: Tensor, value: Tensor, softmax: Softmax) -> Tensor:
        return super().attend(query, *self._new, softmax)

    @override
    def gather(self, chosen: Selection) -> LayerEntries:
        latents, rotated, real = super().gather(chosen)
        return LayerEntries(*self.expand(latents, rotated), real)

    @override
    def read_turn(self, keys: Tensor, values: Tensor) -> LayerEntries:
        latents, rotated, real = super().read_turn(*self._new)
        return LayerEntries(*self.expand(latents, rotated), real)

    @override
    def share(self) -> "LatentLayer":
        return LatentLayer(self.expand, self.keys, self.values, self.seen, self.padding)


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


def layers_of(model: PreTrainedModel, state: State, make: MakeLayer) -> MakeLayer:
    """Makes layers of latents for a state that holds them; `make` for any other state."""
    each: list[Any] = [layer.expansion for layer in state.layers]
    if not any(each):
        return make
    return lambda index, *held: LatentLayer(each[index], *held)
