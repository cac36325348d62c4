"""Rotary positions (RoPE): the rotation that the attention of a decoder layer applies to queries and keys."""

import inspect
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from keepsight.errors import UserError
from keepsight.models.decoder import FULL, attention_of, decoder_of, has_latents


@dataclass(frozen=True)
class Rotation:
    """Turns vectors of one layer's heads, as the model's own function does, without its scaling.

    Rotations add up: a query at position p, turned by t, is the query at position p + t. Which dimensions make a pair,
    and which are not turned at all, differs between families.

    Attributes:
        table: The model's module that gives cosines and sines.
        apply: The model's function that turns queries and keys by them.
        latent: Whether only the last dimensions are turned (MLA).
    """

    table: Any
    apply: Callable[..., tuple[Tensor, Tensor]]
    latent: bool = False

    def angles(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and sines [1, n, r] float32 at positions [n], for `turned`."""
        like = torch.empty(0, dtype=torch.float32, device=positions.device)
        named = {"layer_type": FULL} if "layer_type" in inspect.signature(self.table.forward).parameters else {}
        both = self.table(like, torch.cat([positions.new_zeros(1), positions])[None], **named)
        scale = both[0][:, :1]  # the cosine of 0, times the scaling
        return both[0][:, 1:] / scale, both[1][:, 1:] / scale

    def turned(self, vectors: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
        """Vectors [B, H, n, d] turned by angles [1, n, r], or all by one [1, 1, r]; linear in both."""
        width = sines.shape[-1]
        fixed, moved = vectors[..., :0], vectors
        if self.latent:
            fixed, moved = vectors[..., :-width], vectors[..., -width:]
        return torch.cat([fixed, self.apply(moved, moved, cosines, sines)[0]], dim=-1)

    def pair_norms(self, vectors: Tensor) -> Tensor:
        """The norm of the pair that each dimension belongs to, [B, H, n, d]; 0 where a dimension is not turned."""
        _, sines = self.angles(torch.zeros(1, dtype=torch.long, device=vectors.device))
        quarter = torch.zeros_like(sines), torch.ones_like(sines)
        ramp = torch.arange(1.0, vectors.shape[-1] + 1, device=vectors.device)[None, None, None]
        moves = self.turned(ramp, *quarter) != ramp
        return torch.hypot(vectors, self.turned(vectors, *quarter)) * moves


def rotation_of(model: PreTrainedModel, index: int) -> Rotation | None:
    """The rotation of a decoder layer's attention; None where queries and keys are not turned.

    Raises:
        UserError: the model turns them in a way that is not known.
    """
    attention: Any = attention_of(model, index)
    table = getattr(decoder_of(model), "rotary_emb", None)
    if table is None or not getattr(attention, "use_rope", True):
        return None
    apply = getattr(sys.modules[type(attention).__module__], "apply_rotary_pos_emb", None)
    if apply is None:
        raise UserError(f"{model.config.model_type} rotates queries in a way that is not known; use another method")
    return Rotation(table, apply, has_latents(model))
