"""Rotary position embeddings of a base model (RoPE), undone on keys and queries that were cached, and applied anew."""

import sys
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel

from keepsight.errors import UserError
from keepsight.models.decoder import FULL, decoder_of, has_latents, layer_kinds

_BY_LENGTH = ("dynamic", "longrope")
"""Kinds of RoPE whose angles follow the length of what is read."""


class Rotary:
    """RoPE of one layer; layers without it leave heads as they are.

    Args:
        model: The base model.
        index: Index of the layer among all of the decoder's.

    Raises:
        UserError: the model's latents, or angles that follow the prompt's length, cannot be undone.
    """

    def __init__(self, model: PreTrainedModel, index: int) -> None:
        decoder, config = decoder_of(model), model.config.get_text_config(decoder=True)
        attention = getattr(decoder.layers[index], "self_attn", None)
        parameters: dict[str, Any] = getattr(config, "rope_parameters", None) or {}
        kind = (parameters.get(FULL) or parameters).get("rope_type")
        self._embedding: Any = getattr(decoder, "rotary_emb", None) if getattr(attention, "use_rope", True) else None
        self._kind = [layer_kinds(model.config)[index]] if hasattr(self._embedding, "layer_types") else []
        self._apply: Any = getattr(sys.modules[type(attention).__module__], "apply_rotary_pos_emb", None)
        if has_latents(model) or kind in _BY_LENGTH or (self._embedding is not None and self._apply is None):
            reason = f"its rope_type is {kind}" if kind in _BY_LENGTH else "its heads are turned in a way of their own"
            raise UserError(
                f"positions in cached keys of {config.model_type} cannot be undone: {reason}; take a method that "
                "reads keys as they are, such as quest"
            )

    def turned(self, heads: Tensor, positions: Tensor) -> Tensor:
        """Heads [B, h, n, d] float32 without positions -> at positions [B or 1, n]."""
        return self._turned(heads, positions, back=False)

    def undone(self, heads: Tensor, positions: Tensor) -> Tensor:
        """Heads [B, h, n, d] float32 at positions [B or 1, n] -> without."""
        return self._turned(heads, positions, back=True)

    def _turned(self, heads: Tensor, positions: Tensor, *, back: bool) -> Tensor:
        if self._embedding is None:
            return heads
        cos, sin = self._embedding(heads, positions, *self._kind)
        if back:
            scale = cos**2 + sin**2  # of YaRN's attention factor
            cos, sin = cos / scale, -sin / scale
        turned: Tensor = self._apply(heads, heads[:, :0], cos, sin)[0]
        return turned
