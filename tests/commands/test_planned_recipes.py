"""Recipes for models that are too large to train here: each is found, and planned from a configuration alone.

The sizes are those that the models' pages, their GGUF files' metadata and transformers' configurations name.
"""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from keepsight.commands.config import Train
from keepsight.commands.parse import parse
from keepsight.commands.recipe import choose_recipe
from keepsight.models.decoder import cached_kv_heads, full_attention_layers, head_width
from keepsight.models.retrieval_head import RetrievalHead
from keepsight.models.targets import outline_model
from keepsight.runtime.retrieval.memory_plan import plan_for
from tests.commands.commands import CommandLine

QWEN3_5 = {
    "vocab_size": 248320,
    "num_hidden_layers": 32,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "max_position_embeddings": 262144,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
}
GEMMA4 = {"vocab_size": 262144, "head_dim": 256, "global_head_dim": 512}
PUBLISHED: dict[str, dict[str, Any]] = {
    "qwen3.5-4b": {
        "model_type": "qwen3_5",
        "text_config": QWEN3_5 | {"hidden_size": 2560, "intermediate_size": 9216},
    },
    "qwen3.5-9b": {
        "model_type": "qwen3_5",
        "text_config": QWEN3_5 | {"hidden_size": 4096, "intermediate_size": 12288},
    },
    "gemma4-e4b": {
        "model_type": "gemma4",
        "text_config": GEMMA4
        | {
            "hidden_size": 2560,
            "intermediate_size": 10240,
            "num_hidden_layers": 42,
            "num_attention_heads": 8,
            "num_key_value_heads": 2,
            "num_kv_shared_layers": 18,
            "sliding_window": 512,
            "hidden_size_per_layer_input": 256,
            "vocab_size_per_layer_input": 262144,
            "max_position_embeddings": 131072,
        },
    },
    "gemma4-12b": {
        "model_type": "gemma4_unified",
        "text_config": GEMMA4
        | {
            "hidden_size": 3840,
            "intermediate_size": 15360,
            "num_hidden_layers": 48,
            "num_attention_heads": 16,
            "num_key_value_heads": 8,
            "num_global_key_value_heads": 1,
            "attention_k_eq_v": True,
            "sliding_window": 1024,
            "max_position_embeddings": 262144,
        },
    },
    "ministral3-8b": {
        "model_type": "mistral3",
        "text_config": {
            "model_type": "ministral3",
            "vocab_size": 131072,
            "hidden_size": 4096,
            "intermediate_size": 14336,
            "num_hidden_layers": 34,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "sliding_window": None,
            "max_position_embeddings": 262144,
        },
    },
    "olmo3-7b": {
        "model_type": "olmo3",
        "vocab_size": 100278,
        "hidden_size": 4096,
        "intermediate_size": 11008,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 32,
        "sliding_window": 4096,
        "max_position_embeddings": 65536,
    },
    "gpt-oss-20b": {
        "model_type": "gpt_oss",
        "vocab_size": 201088,
        "hidden_size": 2880,
        "intermediate_size": 2880,
        "num_hidden_layers": 24,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "num_local_experts": 32,
        "num_experts_per_tok": 4,
        "sliding_window": 128,
        "max_position_embeddings": 131072,
        "quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]},
    },
    "nemotron-h-8b": {
        "model_type": "nemotron_h",
        "vocab_size": 131072,
        "hidden_size": 4096,
        "intermediate_size": 21504,
        "num_hidden_layers": 52,
        "hybrid_override_pattern": "M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-",
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "mamba_num_heads": 128,
        "mamba_head_dim": 64,
        "ssm_state_size": 128,
        "n_groups": 8,
        "max_position_embeddings": 8192,
    },
}
ENTRIES = {
    "qwen3.5-4b": (8, 4, 256),
    "qwen3.5-9b": (8, 4, 256),
    "gemma4-e4b": (4, 2, 512),
    "gemma4-12b": (8, 1, 512),
    "ministral3-8b": (34, 8, 128),
    "olmo3-7b": (8, 32, 128),
    "gpt-oss-20b": (12, 8, 64),
    "nemotron-h-8b": (4, 8, 128),
}
"""Layers with entries of their own, KV heads and dimensions."""
PARAMETERS = {
    "qwen3.5-4b": (4e9, 5e9),
    "qwen3.5-9b": (8.5e9, 9.5e9),
    "gemma4-e4b": (7e9, 9e9),
    "gemma4-12b": (11e9, 13e9),
    "ministral3-8b": (8e9, 9e9),
    "olmo3-7b": (7e9, 8e9),
    "gpt-oss-20b": (20e9, 21e9),
    "nemotron-h-8b": (8e9, 9e9),
}
"""Between which two numbers."""
FAST = ("gemma4-e4b", "nemotron-h-8b")
"""Layers that differ and share entries; layers without any."""


def write_config(name: str) -> None:
    """In a folder of that name."""
    Path(name).mkdir()
    Path(name, "config.json").write_text(json.dumps(PUBLISHED[name]))


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in FAST else pytest.mark.slow) for name in PUBLISHED]
)
def test_its_entries_are_planned_from_a_configuration(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write_config(name)
    model = outline_model(name)
    layers, kv_heads, width = ENTRIES[name]
    assert len(full_attention_layers(model.config)) == layers
    assert cached_kv_heads(model) == kv_heads
    assert head_width(model.config.get_text_config()) == width
    least, most = PARAMETERS[name]
    assert least < sum(parameter.numel() for parameter in model.parameters()) < most
    plan = plan_for(model, limit=80 * 2**30, requests=1, budget=1024)
    assert (plan.layers, plan.entry) == (layers, 2 * kv_heads * width * 2)
    assert RetrievalHead.untrained(model, "none", 64).config.num_key_value_heads == kv_heads


@pytest.mark.parametrize("name", PUBLISHED)
def test_its_recipe_is_found_by_architecture_and_size(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write_config(name)
    choice = choose_recipe(Train, {"model.id": name})
    assert choice.name == name
    assert choice.note.endswith("which is for this architecture and size")
    config = parse(Train, [f"recipe={name}", "data=data", "out=out"])
    assert config.model.id.count("/") == 1
    assert choose_recipe(Train, {"model.id": config.model.id}).name == name
    config_of_qwen = parse(Train, ["recipe=qwen3-8b", "data=data", "out=out"])
    assert replace(config, model=config_of_qwen.model) == config_of_qwen, "settings are shared by size"


def test_a_plan_says_what_a_token_takes(
    keepsight: CommandLine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write_config("gemma4-12b")
    printed = keepsight("plan", "recipe=gemma4-12b", "model.id=gemma4-12b", "memory=80GiB")
    assert "a token: 8 layers x 1 KV heads x 512 dimensions x 2 (keys, values) x 2 bytes = 16384 bytes" in printed
    assert "the model's context of 262144 tokens a request fits with every layer on the GPU" in printed
