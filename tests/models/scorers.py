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

WIDE = 6


def tiny_scorer(kind: type[Scorer], model: Any) -> Scorer:
    return kind("tiny", tiny_tensors(kind, model))


def tiny_tensors(kind: type[Scorer], model: Any, *, deep: bool = False) -> dict[str, Tensor]:
    """Of every layer with full attention.

    `deep` for KVzap's MLP, for TRIM-KV's gate of three layers, and for DMS's projections of their own.
    """
    generator, tensors = torch.Generator().manual_seed(3), {}
    for place, index in enumerate(full_attention_layers(model.config) or [0]):
        shapes = _shapes(kind, model, index, deep)
        prefix = {
            KVzapScorer: f"layers.{index}",
            FastKVzipScorer: f"module.{place}",
            TrimKVScorer: f"model.layers.{index}.self_attn.retention_gate",
            LocretScorer: f"model.layers.{index}.self_attn",
            DMSScorer: f"model.layers.{index}",
        }[kind]
        for name, shape in shapes.items():
            tensors[f"{prefix}.{name}"] = torch.randn(shape, generator=generator) / shape[-1] ** 0.5
    return tensors


def tiny_restore(model: Any, count: int = 2) -> RestoreWeights:
    """Random learned tokens without a LoRA."""
    width = model.get_input_embeddings().weight.shape[1]
    return RestoreWeights("tiny", torch.randn(count, width, generator=torch.Generator().manual_seed(4)), {})


def save_restore(folder: Path, model: Any, count: int = 2) -> Path:
    """Random learned tokens and a random LoRA, as they are published for kvpress."""
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(5)
    adapted = get_peft_model(
        copy.deepcopy(model),
        LoraConfig(
            r=2, lora_alpha=6, init_lora_weights=False, target_modules=["q_proj", "v_proj", "o_proj", "up_proj"]
        ),
    )
    adapted.save_pretrained(str(folder))
    save_file({"restore_embeddings": tiny_restore(model, count).tokens}, folder / "restore_embeddings.safetensors")
    return folder


def _shapes(kind: type[Scorer], model: Any, index: int, deep: bool) -> dict[str, tuple[int, ...]]:
    config = model.config.get_text_config()
    width = getattr(config, "attention_hidden_size", config.hidden_size)  # Zamba 2 attends to two states side by side
    heads = cached_kv_heads(model)
    queries = config.num_attention_heads
    if kind is KVzapScorer and deep:
        return {"0.weight": (WIDE, width), "0.bias": (WIDE,), "2.weight": (heads, WIDE), "2.bias": (heads,)}
    if kind is KVzapScorer:
        return {"weight": (heads, width), "bias": (heads,)}
    if kind is FastKVzipScorer:
        norms = {"q_norm.weight": (16,), "k_norm.weight": (16,), "k_proj.weight": (16 * heads, width)}
        query = {"q_proj.weight": (16 * queries, width), "q_proj.bias": (16 * queries,)}
        return norms | query | {"k_base": (heads, 1, 16, 16), "b": (heads, 1, queries // heads)}
    if kind is TrimKVScorer:
        first = {"linear1.weight": (WIDE, width), "linear1.bias": (WIDE,), "bias": (heads,)}
        if deep:
            return first | {"linear2.weight": (WIDE, WIDE), "linear2.bias": (WIDE,), "linear3.weight": (heads, WIDE)}
        return first | {"linear2.weight": (heads, WIDE)}
    if kind is DMSScorer and deep:
        norms = {"input_layernorm.weight": (width,), "self_attn.dms_proj_alpha_norm.weight": (width,)}
        return norms | {"self_attn.dms_proj_alpha.weight": (heads, width)}
    if kind is DMSScorer:
        head_width = getattr(config, "head_dim", None) or width // queries
        return {"self_attn.q_proj.weight": (queries * head_width, width), "self_attn.q_norm.weight": (head_width,)}
    attention = attention_of(model, index)
    parts = [getattr(attention, name, None) for name in ("qkv_proj", "q_proj", "k_proj", "v_proj")]
    states = sum(part.weight.shape[0] for part in parts if part is not None)
    return {"fc1.weight": (WIDE, states), "fc2.weight": (heads, WIDE)}
