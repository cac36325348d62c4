"""A tiny random model of every type that transformers can load as a decoder: causal, or for images and text."""

from dataclasses import fields
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
)

MODEL_TYPES = sorted({*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, *MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES})
"""Every model type of the installed transformers that has a decoder."""
LAYERS = 4
HEADS = 4
WINDOW = 12
_NAMES_BY_SIZE = (
    (
        32,
        "hidden_size n_embd d_model dim embed_dim emb_dim out_hidden_size output_hidden_size embedding_size hidden_dim "
        "projection_dim text_hidden_size projector_hidden_size image_token_embed_dim mm_embed_dim audio_embed_dim "
        "pronunciation_embed_dim shape_embed_dim projection_hidden_size output_proj_dims",
    ),
    (
        48,
        "intermediate_size n_inner ffn_dim d_ff dim_ff mlp_dim ffn_hidden_size dff d_inner decoder_ffn_dim "
        "encoder_ffn_dim intermediate_size_mlp dense_intermediate_size feed_forward_size alignment_intermediate_size",
    ),
    (
        24,
        "moe_intermediate_size shared_expert_intermediate_size shared_intermediate_size expert_ffn_hidden_size "
        "moe_shared_expert_intermediate_size shared_experts_intermediate_size share_expert_dim",
    ),
    (LAYERS, "num_hidden_layers n_layer n_layers num_layers decoder_layers"),
    (
        HEADS,
        "num_attention_heads n_head n_heads decoder_attention_heads encoder_attention_heads attention_heads num_heads "
        "linear_num_value_heads linear_num_heads index_n_heads num_experts num_local_experts n_routed_experts "
        "moe_num_experts",
    ),
    (2, "num_key_value_heads num_kv_heads num_experts_per_tok top_k_experts moe_k linear_num_key_heads n_group"),
    (1, "topk_group first_k_dense_replace encoder_layers depth num_shared_experts n_shared_experts"),
    (
        8,
        "head_dim global_head_dim linear_key_head_dim linear_value_head_dim qk_nope_head_dim v_head_dim dim_head "
        "attention_head_size d_head linear_head_dim index_head_dim d_kv kv_channels attention_head_dim",
    ),
    (4, "qk_rope_head_dim mamba_d_state ssm_state_size rotary_dim patch_size"),
    (WINDOW, "q_lora_rank sliding_window attention_chunk_size local_attention sliding_window_size"),
    (16, "kv_lora_rank chunk_size mamba_chunk_size image_size"),
    (128, "vocab_size vocab_size_per_layer_input"),
    (256, "max_position_embeddings n_positions max_seq_len n_ctx"),
    (0.0, "attention_dropout"),
    (0.2, "initializer_range init_std"),
    (1, "bos_token_id"),
    (2, "eos_token_id pad_token_id"),
    (False, "tie_word_embeddings"),
)
SMALL: dict[str, Any] = {name: value for value, names in _NAMES_BY_SIZE for name in names.split()}
"""What a configuration gets, and each one within it, for the names that it has."""
_WINDOW_SIZES = ("sliding_window", "attention_chunk_size", "local_attention", "sliding_window_size")
"""Values that stay None where that is the default: in layers that all have a window nothing is evicted."""
_LATENT = {"num_key_value_heads": HEADS, "head_dim": SMALL["qk_rope_head_dim"]}
_MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 8}
_CONVOLUTIONS = {"layer_types": ["conv", "full_attention"] * 2}
_NO_WINDOW = {"sliding_window": None}
_RECURRENT = ["linear_attention", "full_attention"] * 2
_WINDOWS = ["sliding_attention", "full_attention"] * 2
_SHARED = {"layer_types": _WINDOWS, "num_kv_shared_layers": 2}
_GEMMA_4 = _SHARED | {"hidden_size_per_layer_input": 8}
_GEMMA_3N = _GEMMA_4 | {
    "laurel_rank": 4,
    "intermediate_size": [48] * LAYERS,
    "activation_sparsity_pattern": [0.0] * LAYERS,
}
_BY_KIND: dict[str, Any] = {"layer_types": _WINDOWS}
_BY_KIND["rope_parameters"] = {
    kind: {"rope_type": "default", "rope_theta": 1e4} for kind in ("sliding_attention", "full_attention")
}
_QSA = {
    "ngram_vocab_size_base": 64,
    "indexer_n_heads": 4,
    "indexer_kv_heads": 1,
    "indexer_head_dim": 8,
    "indexer_budget": 16,
    "indexer_compress_ratio": 4,
}
_TOKENS = {"image_token_id": 0, "video_token_id": 1, "audio_token_id": 2}
_MROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]}}
_DOTS_3 = {"num_key_value_heads": HEADS, "per_layer_config": {}}
CHANGES: dict[str, dict[str, Any]] = {
    "bamba": _MAMBA | {"attn_layer_indices": [1, 3]},
    "blt": {"encoder_hash_byte_group_vocab": 50},
    "chameleon": {"vocabulary_map": {"<image>": 120}},
    "cohere_compass": {"text_config": _BY_KIND},
    "cohere_compass_text": _BY_KIND,
    "cosmos3_edge": {
        "text_config": {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]}}
    },
    "dbrx": {"attn_config": {"rope_theta": 1e4}},
    "dots1": {"n_shared_experts": 1},
    "dots3_note": {"text_config": _DOTS_3, "vision_config": {"per_layer_config": {}}},
    "dots3_note_text": _DOTS_3,
    "ernie4_5_vl_moe": {"text_config": {"moe_intermediate_size": [24, 24]}},
    "falcon_h1": _MAMBA | {"mamba_d_ssm": 64},
    "gemma3n": {"text_config": _GEMMA_3N},
    "gemma3n_text": _GEMMA_3N,
    "gemma4": {"text_config": _GEMMA_4} | _TOKENS,
    "gemma4_assistant": {"text_config": _SHARED | {"hidden_size_per_layer_input": 0}},
    "gemma4_text": _GEMMA_4,
    "gemma4_unified": {"text_config": _SHARED} | _TOKENS,
    "gemma4_unified_assistant": {"text_config": _SHARED},
    "gemma4_unified_text": _SHARED,
    "glm46v": {"text_config": _MROPE},
    "glm4v": {"text_config": _MROPE},
    "glm4v_moe": {"text_config": {"rope_parameters": _MROPE["rope_parameters"] | {"mrope_section": [1, 1, 0]}}},
    "glm_ocr": {"text_config": _MROPE},
    "glmga": {"text_config": _MROPE},
    "glm5_next": {"text_config": {"qk_rope_head_dim": 0}},
    "gpt_neo": {"attention_types": [[["global", "local"], 2]]},
    "granite4_vision": {"deepstack_layer_map": []},
    "granitemoehybrid": _MAMBA | {"layer_types": _RECURRENT},
    "inkling_mm_model": {"vision_config": {"patch_size": 8, "temporal_patch_size": 2}},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2},
    "janus": {"vq_config": {"base_channels": 32, "channel_multiplier": [1, 1], "latent_channels": 8}},
    "lfm2": _CONVOLUTIONS,
    "lfm2_moe": _CONVOLUTIONS,
    "lfm2_vl": {"text_config": _CONVOLUTIONS},
    "mamba2": {"num_heads": 8, "head_dim": 8, "state_size": 8},
    "mistral": _NO_WINDOW,  # as the models have it since Mistral 7B v0.2
    "mistral3": {"text_config": _NO_WINDOW},
    "molmo2": {"vision_config": {"image_size": [16, 16]}, "adapter_config": {"vision_feature_layer": [2, 1]}},
    "moshi": {"sliding_window": 256},  # without a cache its attention has no window
    "nemotron_h": {
        "layers_block_type": ["linear_attention", "full_attention", "moe", "full_attention"],
        "mamba_num_heads": 8,
        "mamba_head_dim": 8,
        "n_groups": 2,
    },
    "nemotron_h_omni": {
        "vision_config": {"video_temporal_patch_size": 2},
        "text_config": {
            "layers_block_type": ["linear_attention", "full_attention", "moe", "full_attention"],
            "mamba_num_heads": 8,
            "mamba_head_dim": 8,
            "n_groups": 2,
        },
    },
    "paddleocr_vl": {"text_config": _MROPE},
    "qwen2_5_vl": {"text_config": _MROPE},
    "qwen2_vl": {"text_config": _MROPE},
    "qwen4_exp": {"text_config": _QSA},
    "qwen4_exp_text": _QSA,
    "reformer": {"is_decoder": True},
    "roc_bert": {"pronunciation_vocab_size": 16, "shape_vocab_size": 16},
    "step3p7": {"text_config": {"sliding_window": WINDOW}},
    "zamba": {
        "layers_block_type": ["linear_attention", "hybrid"] * 2,
        "attention_head_dim": 16,
        "num_key_value_heads": HEADS,
    },
    "zamba2": {"layers_block_type": ["linear_attention", "hybrid"] * 2, "n_mamba_heads": 8, "attention_head_dim": 16},
    "zaya": {"num_experts_per_tok": 1, "router_hidden_size": 16},
}
"""What else a type needs: for its configuration, or for the one within it that is named."""


def small_config(kind: str) -> Any:
    """The configuration of a type, with `SMALL` and its `CHANGES`."""
    config_class = CONFIG_MAPPING[kind]
    return config_class(**_merged(_small_values(config_class), CHANGES.get(kind, {})))


def _small_values(config_class: Any) -> dict[str, Any]:
    names = {field.name for field in fields(config_class)}
    values = {}
    optional = {field.name for field in fields(config_class) if field.default is None}
    unset = optional.intersection(_WINDOW_SIZES)
    for name, value in SMALL.items():
        native_name = config_class.attribute_map.get(name, name)
        if native_name in names - unset:
            values[native_name] = value
    if "kv_lora_rank" in names:
        values |= {name: value for name, value in _LATENT.items() if name in names}
    for name, spec in config_class.sub_configs_defaults.items():
        inner_class = type(spec.default_config)
        values[name] = {"model_type": inner_class.model_type} | _small_values(inner_class)
    if "layer_types" in names:  # each kind of layer in turn: four layers might have fewer kinds than all
        kinds = [*dict.fromkeys(config_class().layer_types or ())]
        if kinds:
            values["layer_types"] = (kinds * LAYERS)[:LAYERS]
    return values


def _merged(values: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    merged = dict(values)
    for name, change in changes.items():
        is_nested = isinstance(change, dict) and isinstance(values.get(name), dict)
        merged[name] = _merged(values[name], change) if is_nested else change
    return merged


def small_model(kind: str) -> Any:
    """A random model of a type in float32, in evaluation mode; the same one every time."""
    config = small_config(kind)
    text = config.get_text_config(decoder=True)
    options = {}
    if getattr(text, "attn_logit_softcapping", None):  # as load_target does
        options["attn_implementation"] = "eager"
    auto: Any = AutoModelForCausalLM if kind in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES else AutoModelForImageTextToText
    torch.manual_seed(0)
    model = auto.from_config(config, **options).eval()
    if getattr(model, "generation_config", None) is not None:
        model.generation_config.eos_token_id = None  # answers of one length
        model.generation_config.pad_token_id = SMALL["pad_token_id"]
    return model
