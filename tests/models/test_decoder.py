"""Which models are supported: all others are refused in one line, before anything runs."""

import itertools
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM

from keepsight.errors import UserError
from keepsight.models.decoder import context_of, require_supported
from keepsight.runtime.generate import generate
from keepsight.runtime.methods.drafts import DapQ
from keepsight.runtime.methods.window import SnapKV
from keepsight.runtime.prompt_compression.text import Truncation
from tests.families import fresh_model
from tests.tiny import prompt_ids, tiny_model

SMALL: dict[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 2,
}
INTERFACE, OWN_WAY = "does not compute attention by transformers' AttentionInterface", "in a way of its own"
OTHERS: dict[str, tuple[dict[str, Any], str]] = {
    "bert": ({"is_decoder": True}, INTERFACE),
    "falcon": ({}, INTERFACE),
    "mpt": ({"d_model": 32, "n_heads": 4, "n_layers": 2}, INTERFACE),
    "stablelm": ({}, OWN_WAY),
    "recurrent_gemma": ({"head_dim": 8, "lru_width": 32, "attention_window_size": 16}, "has its own kind of cache"),
    "diffllama": ({}, "shares its KV heads among query heads in its own way"),
    "jetmoe": ({"num_local_experts": 2, "num_experts_per_tok": 2, "kv_channels": 8}, "in its own way"),
    "mamba": ({}, "has no attention, and so no KV entries"),
    "minimax": ({"num_local_experts": 2, "head_dim": 8, "block_size": 8}, "has its own kind of cache"),
}


def other(kind: str) -> Any:
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **SMALL | OTHERS[kind][0])).eval()


METHODS = [None, SnapKV(16, window=8), DapQ(16), Truncation(16)]


@pytest.mark.parametrize(("kind", "method"), [*zip(OTHERS, itertools.cycle(METHODS), strict=False)], ids=str)
def test_unsupported_models_are_refused_in_one_line(kind, method):
    with pytest.raises(UserError, match=f"^{kind} .*{OTHERS[kind][1]}") as caught:
        generate(other(kind), prompt_ids(41)[0], method, max_new_tokens=2)
    assert "\n" not in str(caught.value)


def test_encoders_are_refused():
    config = AutoConfig.for_model("t5", vocab_size=128, d_model=32, num_heads=4, d_kv=8, num_layers=1, d_ff=32)
    with pytest.raises(UserError, match="t5 is an encoder-decoder model"):
        require_supported(AutoModelForSeq2SeqLM.from_config(config))


def test_layers_on_several_devices_are_refused():
    model = tiny_model()
    model.model.layers[1].to("meta")
    with pytest.raises(UserError, match="the layers of llama lie on cpu, meta; load the model on one device"):
        generate(model, prompt_ids(20)[0], max_new_tokens=2)


def test_yarn_stretches_the_context():
    """transformers runs such models beyond `max_position_embeddings`, and so does keepsight."""
    rope = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, "rope_theta": 10000.0}
    model = tiny_model(max_position_embeddings=32, rope_parameters=rope)
    assert context_of(model) == 128
    ids, _ = prompt_ids(60)
    expected = model.generate(ids, max_new_tokens=4, do_sample=False)[:, 60:]
    assert torch.equal(generate(model, ids, SnapKV(60, window=8), max_new_tokens=4), expected)
    assert generate(model, ids, DapQ(16), max_new_tokens=4).shape == (1, 4)
    with pytest.raises(UserError, match="do not fit the context of 128"):
        generate(model, prompt_ids(100)[0], DapQ(16), max_new_tokens=4)


def test_yarn_of_the_layers_with_full_attention_counts():
    rope = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256, "rope_theta": 10000.0}
    plain = {"rope_type": "default", "rope_theta": 10000.0}
    model = fresh_model("Gemma 3 (text)", rope_parameters={"full_attention": rope, "sliding_attention": plain})
    assert context_of(model) == 1024
