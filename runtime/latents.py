"""Latent attention (MLA of DeepSeek-V2 and V3): a cache of latents, expanded only where they are read.

A layer's keys and values come from one latent c per token that all heads share: k_nope = W_uk c and v = W_uv c with
each head's own rows of `kv_b_proj`; a part with RoPE, shared by all heads too, completes the key. transformers caches c
and that part, and expands all of them at every step. An entry is a latent then, which all heads keep or lose together.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from keepsight.errors import UserError


@dataclass(frozen=True)
class Expansion:
    """From the latents of a layer to each head's keys and values.

    Attributes:
        weight: [H, nope + v, rank], the rows of `kv_b_proj` by head: those of keys before those of values.
        key_width: nope, the dimensions of a key that come from the latent.
    """

    weight: Tensor
    key_width: int

    @classmethod
    def of(cls, attention: Any) -> "Expansion":
        """The expansion of an attention layer; it shares the weights.

        Raises:
            UserError: `kv_b_proj` is quantized, or no plain matrix.
        """
        projection = attention.kv_b_proj
        weight: Tensor = projection.weight
        if not isinstance(projection, nn.Linear) or projection.bias is not None or weight.dtype.itemsize < 2:
            raise UserError(
                f"kv_b_proj of layer {attention.layer_idx} is a {type(projection).__name__} of {weight.dtype}; latents "
                "are expanded by head with a plain matrix of 16 or 32 bit floats: load the model unquantized"
            )
        rows = attention.qk_nope_head_dim + attention.v_head_dim
        return cls(weight.unflatten(0, (-1, rows)), attention.qk_nope_head_dim)

    def __call__(self, latents: Tensor, rotated: Tensor) -> tuple[Tensor, Tensor]:
        """Keys [B, H, n, nope + rope] and values [B, H, n, v].

        Args:
            latents: [B, H or 1, n, rank]: of each head, or the same for all.
            rotated: [B, H or 1, n, rope]: the keys' part with RoPE.
        """
        both = latents @ self.weight.transpose(1, 2)
        keys, values = both[..., : self.key_width], both[..., self.key_width :]
        return torch.cat([keys, rotated.expand(-1, keys.shape[1], -1, -1)], dim=3), values


def expansions(model: PreTrainedModel) -> list[Expansion]:
    """One for each cache layer, of which a decoder layer may have several."""
    attentions: list[Any] = [module for module in model.modules() if hasattr(module, "kv_b_proj")]
    return [Expansion.of(attention) for attention in sorted(attentions, key=lambda each: int(each.layer_idx))]
