"""The families of models that keepsight promises to run: a tiny random model of each."""

import functools
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

SMALL: dict[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "initializer_range": 0.2,  # attention that is far from uniform
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 2,
}
WINDOW = 12
_MIXED = {"sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention"] * 2}
_EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
_MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 8, "mamba_chunk_size": 16, "ssm_state_size": 8}
_INKLING = {
    "layer_types": ["hybrid_sliding", "hybrid"] * 2,
    "sliding_window_size": WINDOW,
    "swa_num_attention_heads": 4,
    "swa_num_key_value_heads": 2,
    "swa_head_dim": 8,
    "d_rel": 4,
    "rel_extent": 16,  # shorter than the prompts of the tests
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
}
_MROPE = {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 10000.0}

# Name -> (model type of transformers, changes of the configuration).
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "Llama 3": ("llama", {}),
    "Llama 4 (text)": (
        "llama4_text",
        _EXPERTS
        | {
            "intermediate_size_mlp": 48,
            "attention_chunk_size": WINDOW,
            "layer_types": ["chunked_attention", "full_attention"] * 2,
            "no_rope_layers": [1, 0, 1, 0],
            "interleave_moe_layer_step": 2,
        },
    ),
    "Mistral": ("mistral", {"sliding_window": None}),
    "Mistral with a window": ("mistral", {"sliding_window": WINDOW}),
    "Mixtral": ("mixtral", _EXPERTS | {"sliding_window": None}),
    "Qwen2, Qwen2.5": ("qwen2", {}),
    "Qwen3": ("qwen3", {}),
    "Qwen3-MoE": ("qwen3_moe", {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}),
    "Gemma 2": ("gemma2", _MIXED | {"query_pre_attn_scalar": 8, "attn_logit_softcapping": 2.0}),
    "Gemma 3 (text)": ("gemma3_text", _MIXED | {"query_pre_attn_scalar": 8}),
    "Gemma 3 (multimodal class, text)": ("gemma3", {}),
    "Phi-3, Phi-4": ("phi3", {"sliding_window": None}),
    "GPT-OSS": ("gpt_oss", _MIXED | _EXPERTS),
    "GLM-4": ("glm4", {"partial_rotary_factor": 0.5}),
    "OLMo 2": ("olmo2", {}),
    "SmolLM3": ("smollm3", {"no_rope_layers": [1, 1, 1, 0], "use_sliding_window": False}),
    "Granite": ("granite", {"attention_multiplier": 0.2, "residual_multiplier": 0.5, "logits_scaling": 2.0}),
    "Falcon 3": ("llama", {"head_dim": 16}),
    "DeepSeek-V3": (
        "deepseek_v3",
        {
            "num_key_value_heads": 4,
            "q_lora_rank": 12,
            "kv_lora_rank": 16,
            "qk_nope_head_dim": 8,
            "qk_rope_head_dim": 4,
            "v_head_dim": 6,
            "head_dim": 4,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "n_group": 2,
            "topk_group": 1,
            "moe_intermediate_size": 24,
            "first_k_dense_replace": 1,
        },
    ),
    "Qwen2.5-VL (text)": ("qwen2_5_vl", {}),
    "Qwen3-Next": (
        "qwen3_next",
        {
            "layer_types": ["linear_attention", "full_attention"] * 2,
            "linear_num_value_heads": 4,
            "linear_num_key_heads": 2,
            "linear_key_head_dim": 8,
            "linear_value_head_dim": 8,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 24,
            "shared_expert_intermediate_size": 24,
        },
    ),
    "Granite 4 (Mamba-2)": (
        "granitemoehybrid",
        _EXPERTS
        | {
            "layer_types": ["mamba", "attention"] * 2,
            "mamba_n_heads": 8,
            "mamba_d_head": 8,
            "mamba_d_state": 8,
            "mamba_chunk_size": 16,
            "shared_intermediate_size": 32,
            "attention_multiplier": 0.2,
        },
    ),
}
MORE: dict[str, tuple[str, dict[str, Any]]] = {
    "Nemotron-H": (
        "nemotron_h",
        _MAMBA
        | {
            "initializer_range": 0.1,  # recurrent states add up rounding
            "layers_block_type": ["linear_attention", "full_attention", "moe", "full_attention"],
            "mamba_num_heads": 8,
            "mamba_head_dim": 8,
            "n_groups": 2,
            "n_routed_experts": 4,
            "moe_intermediate_size": 24,
            "moe_shared_expert_intermediate_size": 24,
        },
    ),
    "Falcon-H1": ("falcon_h1", _MAMBA | {"mamba_d_ssm": 64}),
    "Bamba": ("bamba", _MAMBA | {"attn_layer_indices": [1, 3]}),
    "Zamba 2": (
        "zamba2",
        _MAMBA
        | {
            "initializer_range": 0.1,  # recurrent states add up rounding
            "layers_block_type": ["linear_attention", "hybrid"] * 2,
            "n_mamba_heads": 8,
            "attention_head_dim": 16,
        },
    ),
    "Jamba": (
        "jamba",
        {"attn_layer_period": 2, "attn_layer_offset": 1, "num_experts": 4, "mamba_d_state": 8, "mamba_dt_rank": 4},
    ),
    "Gemma 4 E2B, E4B": (
        "gemma4_text",
        _MIXED
        | {"num_kv_shared_layers": 2, "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 128}
        | {"global_head_dim": 16},  # layers with full attention have wider heads
    ),
    "GPT-2": ("gpt2", {"num_key_value_heads": 4, "attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0}),
    "StableLM": ("stablelm", {"partial_rotary_factor": 0.5}),
    # Without scaling by the length of the text, of which transformers takes padding for a part.
    "Inkling": ("inkling_text", _INKLING | {"logits_mup_width_multiplier": 1.0}),
    "Inkling 2": ("inkling2_text", _INKLING | {"unpadded_vocab_size": 128, "log_scaling_n_floor": 20}),
    "Nemotron": ("nemotron", {"partial_rotary_factor": 0.5}),
}
"""Further families, which only `tests/runtime/test_families.py` and `test_hybrid.py` run."""
_VISION = {
    "gemma3": {
        "text_config": SMALL | FAMILIES["Gemma 3 (text)"][1],
        "vision_config": {
            "hidden_size": 16,
            "intermediate_size": 24,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "image_size": 16,
            "patch_size": 4,
        },
        "mm_tokens_per_image": 4,
        "initializer_range": 0.2,
        "image_token_index": 120,
        "boi_token_index": 121,
        "eoi_token_index": 122,
    },
    "qwen2_5_vl": {
        "text_config": SMALL | {"rope_parameters": _MROPE},
        "vision_config": {
            "hidden_size": 16,
            "intermediate_size": 24,
            "depth": 1,
            "num_heads": 2,
            "out_hidden_size": 32,
            "patch_size": 4,
            "spatial_merge_size": 2,
            "temporal_patch_size": 2,
            "window_size": 16,
            "fullatt_block_indexes": [0],
        },
        "image_token_id": 120,
        "video_token_id": 121,
        "vision_start_token_id": 122,
        "vision_end_token_id": 123,
    },
}


_TEXT = {*SMALL, "layer_types"}
"""What a model for images and text has in the configuration of its text part."""


def fresh_model(family: str, seed: int = 0, **changes: Any) -> Any:
    """A random 4-layer model of a family in float32; the same one for the same seed."""
    kind, special = (FAMILIES | MORE)[family]
    torch.manual_seed(seed)
    if kind in _VISION:
        settings: dict[str, Any] = _VISION[kind] | {"tie_word_embeddings": False}
        settings["text_config"] = dict(settings["text_config"])
        for key, value in changes.items():
            part = settings["text_config"] if key in _TEXT else settings
            part[key] = value
        config = AutoConfig.for_model(kind, **settings)
        return AutoModelForImageTextToText.from_config(config).eval()
    config = AutoConfig.for_model(kind, **SMALL | special | changes)
    eager = {"attn_implementation": "eager"} if "attn_logit_softcapping" in special else {}  # as load_target does
    return AutoModelForCausalLM.from_config(config, **eager).eval()


@functools.cache
def family_model(family: str) -> Any:
    """`fresh_model`, made once: tests must leave it as it was."""
    return fresh_model(family)
