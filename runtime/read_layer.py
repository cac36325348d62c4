"""A layer that has been read, as observers see it: of a state, or in the middle of a prefill."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel

from keepsight.runtime.cache_layers import LayerEntries
from keepsight.runtime.latents import Expansion, attended, expansions_for
from keepsight.runtime.softmax import Softmax
from keepsight.runtime.state import State


@dataclass(frozen=True)
class ReadLayer:
    """A layer with full attention: its entries, and what was recorded of it.

    Attributes:
        place: Its index among the layers with full attention.
        layers: Number of these.
        held: Its entries, as the cache holds them.
        real_tokens: [B, M] bool, False where a token that was read is padding; None when none is.
        ahead: [B, w] int64 or None, see `Trace.ahead`.
        expansion: From latents to every head's keys and values; None where the cache holds the latter.
        queries: [B, H, w, d] of the last w tokens, after RoPE; None where none were recorded.
        softmax: Its softmax; None where nothing was recorded.
        received: [B, H, C] float32, see `Trace.received`; None where it was not recorded.
    """

    place: int
    layers: int
    held: LayerEntries
    real_tokens: Tensor | None
    ahead: Tensor | None
    expansion: Expansion | None
    queries: Tensor | None
    softmax: Softmax | None
    received: Tensor | None

    @property
    def attended(self) -> LayerEntries:
        """The entries as queries see them, computed at each use: those of latents take far more memory."""
        return attended(self.held, self.expansion)


def read_layers(model: PreTrainedModel, state: State) -> Iterator[ReadLayer]:
    """The layers of a state, one after the other."""
    entries, trace, real_tokens = state.entries(), state.trace, state.tokens_mask
    recorded: list[Any] = [expansions_for(model, entries), trace.queries, trace.softmax, trace.received]
    for place, held in enumerate(entries):
        of_layer = (each[place] if each else None for each in recorded)
        yield ReadLayer(place, len(entries), held, real_tokens, trace.ahead, *of_layer)
