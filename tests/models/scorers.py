"""Random stand-ins for the published weights of trained scorers, under their names."""

import copy
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from keepsight.models.decoder import attention_of, cached_kv_heads, full_attention_layers
from keepsight.models.scorers import DMSScorer, FastKVzipScorer, KVzapScorer, LocretScorer, Scorer, TrimKVScorer
from keepsight.runtime.methods.restore import RestoreWeights

INNER = 6


def tiny_scorer(kind: type[Scorer], model: Any) -> Scorer:
    return kind("tiny", tiny_tensors(kind, model))


def tiny_tensors(kind: type[Scorer], model: Any, *, deep: bool = False) -> dict[str, Tensor]:
    """Of every layer with full attention.

    `deep` for KVzap's MLP, for TRIM-KV's gate of three layers, and for DMS's projections of their own.
    """
    generator = torch.Generator().manual_seed(3)
    tensors: dict[str, Tensor] = {}
    for position, layer in enumerate(full_attention_layers(model.config) or [0]):
        prefix = {
            KVzapScorer: f"layers.{layer}",
            FastKVzipScorer: f"module.{position}",
            TrimKVScorer: f"model.layers.{layer}.self_attn.retention_gate",
            LocretScorer: f"model.layers.{layer}.self_attn",
            DMSScorer: f"model.layers.{layer}",
        }[kind]
        for name, shape in _shapes(kind, model, layer, deep).items():
            tensors[f"{prefix}.{name}"] = torch.randn(shape, generator=generator) / shape[-1] ** 0.5
    return tensors


def tiny_restore(model: Any, count: int = 2) -> RestoreWeights:
    """Random learned tokens without a LoRA."""
    width = model.get_input_embeddings().weight.shape[1]
    tokens = torch.randn(count, width, generator=torch.Generator().manual_seed(4))
    return RestoreWeights("tiny", tokens, {})


def save_restore(folder: Path, model: Any, count: int = 2) -> Path:
    """Random learned tokens and a random LoRA, as they are published for kvpress."""
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(5)
    targets = ["q_proj", "v_proj", "o_proj", "up_proj"]
    lora = LoraConfig(r=2, lora_alpha=6, init_lora_weights=False, target_modules=targets)
    get_peft_model(copy.deepcopy(model), lora).save_pretrained(str(folder))
    save_file({"restore_embeddings": tiny_restore(model, count).tokens}, folder / "restore_embeddings.safetensors")
    return folder


def _shapes(kind: type[Scorer], model: Any, layer: int, deep: bool) -> dict[str, tuple[int, ...]]:
    config = model.config.get_text_config()
    width = getattr(config, "attention_hidden_size", config.hidden_size)  # Zamba 2 attends to two states side by side
    kv_heads = cached_kv_heads(model)
    heads = config.num_attention_heads
    if kind is KVzapScorer and deep:
        return {
            "0.weight": (INNER, width),
            "0.bias": (INNER,),
            "2.weight": (kv_heads, INNER),
            "2.bias": (kv_heads,),
        }
    if kind is KVzapScorer:
        return {"weight": (kv_heads, width), "bias": (kv_heads,)}
    if kind is FastKVzipScorer:
        return {
            "q_norm.weight": (16,),
            "k_norm.weight": (16,),
            "k_proj.weight": (16 * kv_heads, width),
            "q_proj.weight": (16 * heads, width),
            "q_proj.bias": (16 * heads,),
            "k_base": (kv_heads, 1, 16, 16),
            "b": (kv_heads, 1, heads // kv_heads),
        }
    if kind is TrimKVScorer and deep:
        return {
            "linear1.weight": (INNER, width),
            "linear1.bias": (INNER,),
            "bias": (kv_heads,),
            "linear2.weight": (INNER, INNER),
            "linear2.bias": (INNER,),
            "linear3.weight": (kv_heads, INNER),
        }
    if kind is TrimKVScorer:
        return {
            "linear1.weight": (INNER, width),
            "linear1.bias": (INNER,),
            "bias": (kv_heads,),
            "linear2.weight": (kv_heads, INNER),
        }
    if kind is DMSScorer and deep:
        return {
            "input_layernorm.weight": (width,),
            "self_attn.dms_proj_alpha_norm.weight": (width,),
            "self_attn.dms_proj_alpha.weight": (kv_heads, width),
        }
    if kind is DMSScorer:
        head_width = getattr(config, "head_dim", None) or width // heads
        return {"self_attn.q_proj.weight": (heads * head_width, width), "self_attn.q_norm.weight": (head_width,)}
    return {"fc1.weight": (INNER, _projected_width(model, layer)), "fc2.weight": (kv_heads, INNER)}


def _projected_width(model: Any, layer: int) -> int:
    """Of a layer's queries, keys and values side by side."""
    attention = attention_of(model, layer)
    projections = [getattr(attention, name, None) for name in ("qkv_proj", "q_proj", "k_proj", "v_proj")]
    return sum(projection.weight.shape[0] for projection in projections if projection is not None)
