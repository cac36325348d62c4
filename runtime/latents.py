"""Latent attention (MLA of DeepSeek-V2 and V3): a cache of latents, expanded only where they are read.

A layer's keys and values come from one latent c per token that all heads share: k_nope = W_uk c and v = W_uv c with
each head's own rows of `kv_b_proj`; a part with RoPE, shared by all heads too, completes the key. transformers caches c
and that part, and expands all of them at every step. An entry is a latent then, which all heads keep or lose together.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from keepsight.errors import UserError
from keepsight.models.decoder import has_latents
from keepsight.runtime.cache_layers import LayerEntries
from keepsight.runtime.state import State


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


def attended_entries(model: PreTrainedModel, state: State) -> Iterator[LayerEntries]:
    """The entries of each layer as queries see them: of latents, every head's own keys and values.

    One layer at a time: they take far more memory than the latents, in DeepSeek-V3 40960 numbers per token and layer
    instead of 576.
    """
    for expansion, each in zip(expansions_for(model, state.entries()), state.entries(), strict=True):
        yield attended(each, expansion)


def attended(held: LayerEntries, expansion: Expansion | None) -> LayerEntries:
    """The entries of a layer as queries see them; without an expansion as they are held."""
    return held if expansion is None else LayerEntries(*expansion(held.keys, held.values), held.real)


def expansions_for(model: PreTrainedModel, held: Sequence[LayerEntries]) -> Sequence[Expansion | None]:
    """For each layer of a cache what expands its entries; None where these are no latents."""
    return expansions(model) if held and are_latents(model, held[0]) else [None] * len(held)


def holds_latents(model: PreTrainedModel, state: State) -> bool:
    """Whether the cache of a state holds latents."""
    return has_latents(model) and are_latents(model, state.entries()[0])


def are_latents(model: PreTrainedModel, held: LayerEntries) -> bool:
    """Whether entries are latents: earlier versions of transformers, such as 5.10, cache every head's entries."""
    if not has_latents(model):
        return False
    config: Any = model.config.get_text_config()
    widths = held.keys.shape[1], held.keys.shape[3], held.values.shape[3]
    return widths == (1, config.kv_lora_rank, config.qk_rope_head_dim)


def expansions(model: PreTrainedModel) -> list[Expansion]:
    """One for each cache layer, of which a decoder layer may have several."""
    attentions: list[Any] = [module for module in model.modules() if hasattr(module, "kv_b_proj")]
    return [Expansion.of(attention) for attention in sorted(attentions, key=lambda each: int(each.layer_idx))]
