"""Latent attention (MLA of DeepSeek-V2 and V3): a cache of latents, expanded only where they are read.

A layer's keys and values come from one latent c per token that all heads share: k_nope = W_uk c and v = W_uv c with
each head's own rows of `kv_b_proj`; a part with RoPE, shared by all heads too, completes the key. transformers caches c
and that part, and expands all of them at every step. SpeContext (arXiv 2512.00722, section 4.3, "Support for MLA")
selects by head, as for multi-head attention, and expands what is selected.
"""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.cache_utils import Cache
from typing_extensions import override

from keepsight.errors import UserError
from keepsight.runtime.attention import OwnAttention, Reader, grouped_attention, visible
from keepsight.runtime.cache import KeptLayer, LayerEntries, PaddedKeys, entries
from keepsight.runtime.sparse_read.cache import MakeLayer, SelectedLayer, Selection
from keepsight.runtime.state import State
from keepsight.runtime.turn import TurnLayer


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


class LatentLayer(SelectedLayer):
    """A cache layer that holds latents and expands, for each head, those that a step reads.

    Its `keys` are the latents after their norm, [B, 1, C, rank], and its `values` the keys' part with RoPE,
    [B, 1, C, rope]: what transformers caches. Selections have H heads.

    Args:
        expansion: The layer's expansion.
        latents: [B, 1, C, rank].
        rotated: [B, 1, C, rope].
        seen: Logical length.
        padding: See `SelectedLayer`.
    """

    def __init__(
        self, expansion: Expansion, latents: Tensor, rotated: Tensor, seen: int, padding: Tensor | None = None
    ) -> None:
        super().__init__(latents, rotated, seen, padding)
        self.expansion = expansion

    @override
    def gather(self, chosen: Selection) -> LayerEntries:
        latents, rotated, real = super().gather(chosen)
        return LayerEntries(*self.expansion(latents, rotated), real)

    @override
    def attended(self) -> LayerEntries:
        latents, rotated, real = self.entries()
        return LayerEntries(*self.expansion(latents, rotated), real)

    @override
    def share(self) -> "LatentLayer":
        return LatentLayer(self.expansion, self.keys, self.values, self.seen, self.padding)


class _NewTokens(Cache):
    """The cache that a model with latent attention sees: updates return its new tokens alone.

    The model expands them and hands them with the queries to `attend`. Layers of latents take what came to `update`,
    others the expanded keys and values.

    Args:
        cache: The cache whose layers it shares.
    """

    def __init__(self, cache: Cache) -> None:
        super().__init__(layers=cache.layers)
        self._coming: dict[int, tuple[Tensor, Tensor]] = {}

    @override
    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> Any:
        self._coming[layer_idx] = key_states, value_states
        return key_states, value_states

    def attend(self, index: int, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
        """See `keepsight.runtime.attention.Attend`; key and value are those of the new tokens."""
        layer: Any = self.layers[index]
        came = self._coming.pop(index)
        holder = layer.layer if isinstance(layer, TurnLayer) else layer
        keys, values = layer.update(*(came if isinstance(holder, LatentLayer) else (key, value)))
        if isinstance(keys, OwnAttention):
            return keys.attend(query, scaling)
        keys, real = keys if isinstance(keys, PaddedKeys) else (keys, None)
        if real is None:
            real = torch.ones(keys.shape[:3], dtype=torch.bool, device=keys.device)
        return grouped_attention(query, keys, values, visible(query.shape[2], real), scaling)


class LatentReader:
    """A model with latent attention that reads tokens after a state whose layers select entries.

    Args:
        model: The target.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self._model, self.config = model, model.config

    def __call__(self, *, past_key_values: Cache, **options: Any) -> Any:
        """Append tokens to a cache: see the model's own call."""
        cache = _NewTokens(past_key_values)
        return self._model(past_key_values=cache, **{**options, "attend": cache.attend})


def has_latents(model: PreTrainedModel) -> bool:
    """Whether a model's attention is latent."""
    return bool(getattr(model.config.get_text_config(), "kv_lora_rank", None))


def reader_of(model: PreTrainedModel) -> Reader:
    """What reads tokens after states whose layers select entries: the model itself unless its attention is latent."""
    return LatentReader(model) if has_latents(model) else model


def expanded(model: PreTrainedModel, state: State) -> State:
    """A state of latents with every head's keys and values in their place; any other state unchanged.

    For methods that select by keys. It holds far more than the latents: in DeepSeek-V3, 40960 numbers per token and
    layer instead of 576.
    """
    if not _holds_latents(model, state):
        return state
    seen = state.cache.get_seq_length()
    pairs = zip(_expansions(model), entries(state.cache), strict=True)
    layers: list[Any] = [KeptLayer(*expand(each.keys, each.values), seen, each.real) for expand, each in pairs]
    return replace(state, cache=Cache(layers=layers))


def layers_of(model: PreTrainedModel, state: State, make: MakeLayer) -> MakeLayer:
    """Makes layers of latents for a state that holds them; `make` for any other state."""
    if not _holds_latents(model, state):
        return make
    expansions = _expansions(model)
    return lambda index, *held: LatentLayer(expansions[index], *held)


def _holds_latents(model: PreTrainedModel, state: State) -> bool:
    """Whether the cache holds latents: earlier versions of transformers, such as 5.10, cache every head's entries."""
    if not has_latents(model):
        return False
    config: Any = model.config.get_text_config()
    keys, values, _ = entries(state.cache)[0]
    return (keys.shape[1], keys.shape[3], values.shape[3]) == (1, config.kv_lora_rank, config.qk_rope_head_dim)


def _expansions(model: PreTrainedModel) -> list[Expansion]:
    """One for each cache layer, of which a decoder layer may have several."""
    attentions: list[Any] = [module for module in model.modules() if hasattr(module, "kv_b_proj")]
    if any(hasattr(attention, "indexer") for attention in attentions):
        raise UserError(
            f"{model.config.model_type} chooses by itself what its latent attention reads; entries can only be chosen "
            "for models with full attention"
        )
    return [Expansion.of(attention) for attention in sorted(attentions, key=lambda each: int(each.layer_idx))]
