"""The attention function through which a recorder sees each layer's queries and keys.

It is registered with transformers under two neutral names and computes attention exactly as sdpa or flash_attention_2.
`model(..., recorder=...)` calls `recorder(layer, query, key, scaling, real)` in every layer, and `model(..., attend=...)`
has another function compute the attention; nothing of transformers is patched.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import flash_attention_mask, sdpa_mask
from transformers.modeling_flash_attention_utils import _flash_attention_forward

from keepsight.errors import UserError
from keepsight.runtime.cache import PaddedKeys


class Reader(Protocol):
    """What appends tokens to a cache: a model, or a wrapper of one for caches that need more than a forward pass."""

    @property
    def config(self) -> Any:
        """The model's configuration."""
        ...

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Append tokens to a cache; arguments and result are those of a model."""
        ...


Recorder = Callable[[int, Tensor, Tensor, float, Tensor | None], None]
"""Called with the layer's index, its queries [B, H, q, d], all keys they may see [B, K, S, d] (both after RoPE), the
factor that multiplies their dot products, and the keys' padding [B, K, S] bool (False for padding) where it differs by
head, else None. The queries are those of the last q of the S positions."""

Attend = Callable[[int, Tensor, Tensor, Tensor, float], Tensor]
"""Computes a layer's attention in place of the usual function: called with the layer's index, its queries [B, H, q, d],
keys and values [B, K, S, d] and the factor of the dot products, it returns [B, q, H, d], contiguous."""


class OwnAttention(ABC):
    """What a cache layer may return from `update` in place of keys: it computes the attention itself."""

    @abstractmethod
    def attend(self, query: Tensor, scaling: float) -> Tensor:
        """Queries [B, H, q, d] after RoPE, of the last q tokens -> [B, q, H, d], contiguous."""


# A name with "flash" or "sdpa" in it would take code paths in transformers that belong to its own implementations.
_DENSE, _VARLEN = "keepsight_dense", "keepsight_varlen"


def record_attention(model: Reader) -> None:
    """Switch a model to the recording attention function that matches the one it was loaded with. Idempotent."""
    loaded_with = model.config._attn_implementation
    if loaded_with not in (_DENSE, _VARLEN):
        switch: Any = model  # a model itself: the one that a wrapper holds was switched by the prefill
        switch.set_attn_implementation(_VARLEN if loaded_with == "flash_attention_2" else _DENSE)


def require_full_attention(model: PreTrainedModel, what: str, latent: bool = False) -> None:
    """Refuse models with layers that do not keep one key and value per token.

    Args:
        model: The target.
        what: What needs full attention, such as `the cache can only be packed`.
        latent: Whether latent attention (MLA) will do too.

    Raises:
        UserError: sliding, linear or latent attention.
    """
    config = model.config.get_text_config()
    kinds = set(getattr(config, "layer_types", None) or ())
    if not kinds and getattr(config, "sliding_window", None):
        kinds = {"sliding_attention"}
    if not latent and getattr(config, "kv_lora_rank", None):
        kinds = {"latent attention"}
    if others := sorted(kinds - {"full_attention"}):
        raise UserError(
            f"{config.model_type} has layers of {', '.join(others)}; {what} where all layers have full attention"
        )


def _dense(
    module: nn.Module,
    query: Tensor,
    key: Tensor | PaddedKeys | OwnAttention,
    value: Tensor,
    attention_mask: Tensor | None,
    recorder: Recorder | None = None,
    attend: Attend | None = None,
    scaling: float | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    if isinstance(key, OwnAttention):
        return key.attend(query, _factor(query, scaling)), None
    keys, real = key if isinstance(key, PaddedKeys) else (key, None)
    if attend is not None:
        return attend(_layer(module), query, keys, value, _factor(query, scaling)), None
    _record(recorder, module, query, keys, scaling, real)
    if real is not None:
        return grouped_attention(query, keys, value, visible(query.shape[2], real), scaling), None
    # Under a mask transformers repeats keys and values for every query head; grouping the queries copies none.
    if attention_mask is not None and query.shape[1] * query.shape[2] <= keys.shape[2]:
        return grouped_attention(query, keys, value, attention_mask, scaling), None
    return sdpa_attention_forward(module, query, keys, value, attention_mask, scaling=scaling, **options)


def _varlen(
    module: nn.Module,
    query: Tensor,
    key: Tensor | PaddedKeys | OwnAttention,
    value: Tensor,
    attention_mask: Tensor | None,
    recorder: Recorder | None = None,
    attend: Attend | None = None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **options: Any,
) -> tuple[Tensor, None]:
    if isinstance(key, PaddedKeys | OwnAttention) or attend is not None:
        return _dense(module, query, key, value, None, recorder, attend, scaling)
    _record(recorder, module, query, key, scaling, None)
    output = _flash_attention_forward(
        query.transpose(1, 2),
        key.transpose(1, 2),
        value.transpose(1, 2),
        attention_mask,
        query_length=query.shape[2],
        is_causal=True,
        dropout=dropout,
        softmax_scale=scaling,
        target_dtype=torch.bfloat16 if query.dtype == torch.float32 else None,
        attn_implementation="flash_attention_2",
    )
    return output, None


def grouped_attention(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scaling: float | None) -> Tensor:
    """Attention in which the query heads of a KV head are rows of one head, so that no key or value is repeated.

    Args:
        query: [B, H, q, d].
        key: [B, K, S, d].
        value: [B, K, S, d].
        mask: [B, 1 or K, q, S]: bool (True where a query may look), or what is added to the logits; None where every
            query sees every key.
        scaling: Factor of the dot products; 1 / sqrt(d) by default.

    Returns:
        [B, q, H, d], contiguous.
    """
    batch, heads, rows, width = query.shape
    kv_heads = key.shape[1]
    if mask is not None:
        mask = mask[:, :, None].expand(-1, -1, heads // kv_heads, -1, -1).flatten(2, 3)
    grouped = query.reshape(batch, kv_heads, -1, width)
    output = functional.scaled_dot_product_attention(grouped, key, value, attn_mask=mask, scale=scaling)
    return output.view(batch, heads, rows, -1).transpose(1, 2).contiguous()


def visible(rows: int, real: Tensor) -> Tensor:
    """Causal mask [B, K, q, S] bool of the last q of S positions."""
    keys = real.shape[2]
    positions = torch.arange(keys, device=real.device)
    return real[:, :, None] & (positions <= positions[keys - rows :, None])


def _record(
    recorder: Recorder | None,
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    scaling: float | None,
    real: Tensor | None,
) -> None:
    if recorder is not None:
        recorder(_layer(module), query, key, _factor(query, scaling), real)


def _layer(module: nn.Module) -> int:
    return int(module.layer_idx)  # type: ignore[arg-type]


def _factor(query: Tensor, scaling: float | None) -> float:
    return scaling or query.shape[-1] ** -0.5


AttentionInterface.register(_DENSE, _dense)
AttentionMaskInterface.register(_DENSE, sdpa_mask)
AttentionInterface.register(_VARLEN, _varlen)
AttentionMaskInterface.register(_VARLEN, flash_attention_mask)
