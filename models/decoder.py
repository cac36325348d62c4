"""The decoder of a language model: its layers, their kinds, and which models are supported."""

from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.cache_utils import DynamicCache, DynamicLayer

from keepsight.errors import UserError
from keepsight.models.offloaded import running_devices

FULL, CHUNKED = "full_attention", "chunked_attention"
RECURRENT = ("linear_attention", "conv")
BOUNDED = ("sliding_attention", CHUNKED, *RECURRENT)
"""Kinds of layers whose memory is bounded by itself, the last ones by a recurrent state."""
_OTHER_HEADS = ("diffllama", "jetmoe")
_OTHER_CACHES = ("minimax", "recurrent_gemma")


def decoder_of(model: PreTrainedModel) -> Any:
    """The stack of decoder layers, without head and vision tower; its `layers` are the decoder layers."""
    decoder: Any = model.get_decoder()
    return decoder if hasattr(decoder, "layers") else getattr(decoder, "model", decoder)


def layer_kinds(config: Any) -> list[str]:
    """The kind of each decoder layer, such as `full_attention`, from a model's configuration."""
    config = config.get_text_config(decoder=True)
    if kinds := getattr(config, "layer_types", None):
        return list(kinds)
    kind = "sliding_attention" if getattr(config, "sliding_window", None) else FULL
    kind = CHUNKED if getattr(config, "attention_chunk_size", None) else kind
    return [kind] * config.num_hidden_layers


def head_width(config: Any) -> int:
    """Dimensions of one attention head, from the configuration of a text model."""
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)


def full_attention_layers(config: Any) -> list[int]:
    """Indices of the layers that keep a key and a value for every token; these alone are scored and evicted from."""
    return [index for index, kind in enumerate(layer_kinds(config)) if kind == FULL]


def require_layers_for(groups: int, target: PreTrainedModel) -> None:
    """Refuse more groups of layers for a retrieval head than the target has layers that it selects for.

    Raises:
        UserError: there are more.
    """
    if groups > (layers := len(full_attention_layers(target.config))):
        raise UserError(
            f"retrieval_head.groups={groups}: the target has {layers} layers with full attention; give no more groups"
        )


def cached_kv_heads(target: PreTrainedModel) -> int:
    """KV heads that selections are for: with latent attention (MLA), every query head."""
    config = target.config.get_text_config()
    if getattr(config, "kv_lora_rank", None):
        return int(config.num_attention_heads)
    return int(getattr(config, "num_key_value_heads", None) or config.num_attention_heads)


def has_latents(model: PreTrainedModel) -> bool:
    """Whether attention is latent (MLA of DeepSeek-V2 and V3): one latent per token, from which heads are expanded."""
    return bool(getattr(model.config.get_text_config(decoder=True), "kv_lora_rank", None))


def require_supported(model: PreTrainedModel) -> None:
    """Refuse models that keepsight would answer wrongly with.

    Raises:
        UserError: one line that names what is not supported.
    """
    kind = model.config.model_type
    if model.config.is_encoder_decoder:
        raise UserError(f"{kind} is an encoder-decoder model; load a model of decoder layers alone")
    if not _attends_by_interface(decoder_of(model)):
        raise UserError(
            f"{kind} does not compute attention by transformers' AttentionInterface, so that no query can be seen; "
            "load a model that does, such as Llama, Qwen, Mistral or Gemma"
        )
    if kind in _OTHER_HEADS:
        raise UserError(f"{kind} shares its KV heads among query heads in its own way; load a model with grouped heads")
    if kind in _OTHER_CACHES:
        raise UserError(f"{kind} keeps a cache of its own; load a model that takes transformers' DynamicCache")
    if has_latents(model) and any(hasattr(module, "indexer") for module in decoder_of(model).modules()):
        raise UserError(
            f"{kind} chooses by itself what its latent attention reads; load a model with full attention, such as "
            "DeepSeek-V3"
        )
    if not any(isinstance(layer, DynamicLayer) for layer in DynamicCache(config=model.config).layers):
        raise UserError(f"{kind} has no attention, and so no KV entries; use it without keepsight")
    if not hasattr(model, "hf_device_map"):  # nothing moves what layers on several devices hand on
        require_one_device(model)
    if odd := sorted(set(layer_kinds(model.config)) - {FULL, *BOUNDED}):
        raise UserError(
            f"{kind} has layers of {', '.join(odd)}; load a model whose layers are of {', '.join((FULL, *BOUNDED))}"
        )


def require_one_device(model: PreTrainedModel) -> None:
    """Refuse models whose layers run on several devices.

    Raises:
        UserError: with one line that names the devices.
    """
    if len(devices := sorted(map(str, running_devices(decoder_of(model))))) > 1:
        kind = model.config.model_type
        raise UserError(f"the layers of {kind} lie on {', '.join(devices)}; load the model on one device")


def require_full_attention(model: PreTrainedModel) -> None:
    """Refuse to train what looks ahead for a model that forgets by itself.

    Raises:
        UserError: no layer keeps an entry for every token.
    """
    if not full_attention_layers(model.config):
        raise UserError(
            f"{model.config.model_type} has no layer with full attention, so that there is nothing to choose from; "
            "use it without a trained module"
        )


def logits_of(model: PreTrainedModel, hidden: Tensor) -> Tensor:
    """The logits [..., V] that a model makes of what its decoder puts out, [..., hidden]."""
    config: Any = model.config.get_text_config(decoder=True)
    lm_head: Any = model.get_output_embeddings()
    logits: Tensor = lm_head(hidden) * getattr(config, "logit_scale", 1.0) / getattr(config, "logits_scaling", 1.0)
    cap = getattr(config, "final_logit_softcapping", None)
    return logits if cap is None else torch.tanh(logits / cap) * cap


def _attends_by_interface(decoder: nn.Module) -> bool:
    asked: Any = decoder
    return hasattr(asked, "layers") and bool(asked._can_set_attn_implementation())
