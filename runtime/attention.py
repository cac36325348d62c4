"""The attention function that lets a recorder see each layer's queries and keys.

It is registered with transformers under two neutral names and computes attention exactly as sdpa or flash_attention_2
do. Whoever calls `model(..., recorder=...)` gets `recorder(layer, query, key, scaling)` called in every layer; nothing
of transformers is patched.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import flash_attention_mask, sdpa_mask
from transformers.modeling_flash_attention_utils import _flash_attention_forward

Recorder = Callable[[int, Tensor, Tensor, float], None]
"""Called with the layer's index, its queries [B, H, q, d], all keys they may see [B, K, S, d] (both after RoPE), and
the factor that multiplies their dot products. The queries are those of the last q of the S positions."""

# A name with "flash" or "sdpa" in it would take code paths in transformers that belong to its own implementations.
_DENSE, _VARLEN = "keepsight_dense", "keepsight_varlen"


def record_attention(model: PreTrainedModel) -> None:
    """Switch a model to the recording attention function that matches the one it was loaded with. Idempotent."""
    loaded_with = model.config._attn_implementation
    if loaded_with not in (_DENSE, _VARLEN):
        model.set_attn_implementation(_VARLEN if loaded_with == "flash_attention_2" else _DENSE)


def _dense(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    recorder: Recorder | None = None,
    scaling: float | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    _record(recorder, module, query, key, scaling)
    return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **options)


def _varlen(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    recorder: Recorder | None = None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **options: Any,
) -> tuple[Tensor, None]:
    _record(recorder, module, query, key, scaling)
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


def _record(recorder: Recorder | None, module: nn.Module, query: Tensor, key: Tensor, scaling: float | None) -> None:
    if recorder is not None:
        recorder(int(module.layer_idx), query, key, scaling or query.shape[-1] ** -0.5)  # type: ignore[arg-type]


AttentionInterface.register(_DENSE, _dense)
AttentionMaskInterface.register(_DENSE, sdpa_mask)
AttentionInterface.register(_VARLEN, _varlen)
AttentionMaskInterface.register(_VARLEN, flash_attention_mask)
