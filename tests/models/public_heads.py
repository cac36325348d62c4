"""Folders like those of public EAGLE heads: their configurations and the names of their tensors, shrunk, with random
weights."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

# Llama-3.1-8B's EAGLE-3 head: without head_dim, without RoPE's base.
LLAMA3: dict[str, Any] = json.loads("""{
  "architectures": ["LlamaForCausalLM"], "bos_token_id": 128000, "eos_token_id": 128001, "pad_token_id": 0,
  "hidden_act": "silu", "hidden_size": 32, "initializer_range": 0.02, "intermediate_size": 112,
  "max_position_embeddings": 2048, "model_type": "llama", "num_attention_heads": 8, "num_key_value_heads": 2,
  "num_hidden_layers": 1, "rms_norm_eps": 1e-05, "tie_word_embeddings": false, "torch_dtype": "float16",
  "transformers_version": "4.28.1", "use_cache": true, "vocab_size": 128, "draft_vocab_size": 24}""")
# Qwen3-8B's, as SpecForge writes it: heads together wider than the hidden state.
QWEN3: dict[str, Any] = json.loads("""{
  "architectures": ["LlamaForCausalLMEagle3"], "attention_bias": false, "attention_dropout": 0.0,
  "bos_token_id": 151643, "eos_token_id": 151645, "head_dim": 16, "hidden_act": "silu", "hidden_size": 32,
  "initializer_range": 0.02, "intermediate_size": 96, "max_position_embeddings": 40960, "max_window_layers": 36,
  "model_type": "llama", "num_attention_heads": 4, "num_hidden_layers": 1, "num_key_value_heads": 1,
  "rms_norm_eps": 1e-06, "rope_scaling": null, "rope_theta": 1000000, "sliding_window": null,
  "tie_word_embeddings": false, "torch_dtype": "bfloat16", "transformers_version": "4.51.0", "use_cache": true,
  "use_sliding_window": false, "vocab_size": 128, "draft_vocab_size": 24,
  "eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 1, 2], "use_aux_hidden_state": true}}""")
# Llama-3-8B's EAGLE-1 head, and Vicuna's, which says neither bias nor KV heads.
EAGLE1: dict[str, Any] = LLAMA3 | {"rope_theta": 500000.0, "bias": False}
del EAGLE1["draft_vocab_size"]
VICUNA: dict[str, Any] = dict(EAGLE1)
del VICUNA["bias"], VICUNA["rope_theta"], VICUNA["num_key_value_heads"]


def eagle3_tensors(config: dict[str, Any], seed: int = 0) -> dict[str, Tensor]:
    """Random tensors of an EAGLE-3 head in float32, named as in public files."""
    hidden = config["hidden_size"]
    target_hidden = config.get("target_hidden_size", hidden)
    vocab = config["vocab_size"]
    draft_vocab = config["draft_vocab_size"]
    shapes = {
        **_layer_shapes("midlayer", config, 2 * hidden),
        "midlayer.hidden_norm.weight": (hidden,),
        "midlayer.input_layernorm.weight": (hidden,),
        "fc.weight": (hidden, 3 * target_hidden),
        "norm.weight": (hidden,),
        "lm_head.weight": (draft_vocab, hidden),
    }
    if config.get("fc_norm"):
        for tap in range(3):
            shapes[f"fc_norm.{tap}.weight"] = (target_hidden,)
    tensors = _random_tensors(shapes, seed)
    order = torch.randperm(vocab, generator=torch.Generator().manual_seed(seed))
    drafted_ids = order[:draft_vocab].sort().values
    tensors["d2t"] = drafted_ids - torch.arange(draft_vocab)
    tensors["t2d"] = torch.zeros(vocab, dtype=torch.bool).index_fill(0, drafted_ids, True)
    return tensors


def eagle1_tensors(config: dict[str, Any], seed: int = 0) -> dict[str, Tensor]:
    """Random tensors of an EAGLE-1 head in float32, named as in public files."""
    hidden = config["hidden_size"]
    shapes: dict[str, tuple[int, ...]] = {
        **_layer_shapes("layers.0", config, hidden),
        "fc.weight": (hidden, 2 * hidden),
        "embed_tokens.weight": (config["vocab_size"], hidden),
    }
    if config.get("bias", True):
        shapes["fc.bias"] = (hidden,)
    return _random_tensors(shapes, seed)


def write_head(folder: Path, config: dict[str, Any], tensors: dict[str, Tensor]) -> Path:
    """The files of a public head; returns `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors")
    return folder


def write_pickled_head(folder: Path) -> Path:
    """The files of an EAGLE-3 head whose weights are a pickle; returns `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(LLAMA3))
    torch.save(eagle3_tensors(LLAMA3), folder / "pytorch_model.bin")
    return folder


def _layer_shapes(layer: str, config: dict[str, Any], inputs: int) -> dict[str, tuple[int, ...]]:
    hidden = config["hidden_size"]
    intermediate = config["intermediate_size"]
    heads = config["num_attention_heads"]
    width = config.get("head_dim", hidden // heads)
    queries = heads * width
    keys = config.get("num_key_value_heads", heads) * width
    shapes: dict[str, tuple[int, ...]] = {
        f"{layer}.self_attn.q_proj.weight": (queries, inputs),
        f"{layer}.self_attn.k_proj.weight": (keys, inputs),
        f"{layer}.self_attn.v_proj.weight": (keys, inputs),
        f"{layer}.self_attn.o_proj.weight": (hidden, queries),
        f"{layer}.mlp.gate_proj.weight": (intermediate, hidden),
        f"{layer}.mlp.up_proj.weight": (intermediate, hidden),
        f"{layer}.mlp.down_proj.weight": (hidden, intermediate),
        f"{layer}.post_attention_layernorm.weight": (hidden,),
    }
    if config.get("qkv_bias"):
        shapes[f"{layer}.self_attn.q_proj.bias"] = (queries,)
        shapes[f"{layer}.self_attn.k_proj.bias"] = (keys,)
        shapes[f"{layer}.self_attn.v_proj.bias"] = (keys,)
    return shapes


def _random_tensors(shapes: dict[str, tuple[int, ...]], seed: int) -> dict[str, Tensor]:
    """Norms around 1, and all else around 0."""
    generator = torch.Generator().manual_seed(seed)
    tensors: dict[str, Tensor] = {}
    for name, shape in shapes.items():
        noise = torch.randn(shape, generator=generator)
        tensors[name] = 1 + 0.3 * noise if "norm" in name else 0.2 * noise
    return tensors
