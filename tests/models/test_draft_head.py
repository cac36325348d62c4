"""The EAGLE-3 layer against a slow one, and what it says about its target."""

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig

from keepsight.errors import UserError
from keepsight.models.draft_head import DraftHead, default_feature_layers
from tests.close import assert_close
from tests.models import slow_heads
from tests.models.public_heads import LLAMA3, QWEN3, eagle3_tensors
from tests.models.slow_heads import causal_attend
from tests.tiny import tiny_model

CONFIGS = {
    "llama-3.1": LLAMA3,
    "qwen3": QWEN3,
    "one KV head a query head": LLAMA3 | {"num_key_value_heads": 8},
    "another width": LLAMA3 | {"target_hidden_size": 20},
    "biases": LLAMA3 | {"qkv_bias": True},
    "eagle-3.1 norms": QWEN3 | {"fc_norm": True},
}


def head_of(config: dict[str, Any]) -> tuple[DraftHead, dict[str, Tensor]]:
    tensors = eagle3_tensors(config)
    head = DraftHead(LlamaConfig.from_dict(config))
    head.load_state_dict(tensors)
    return head.requires_grad_(False), tensors


def rows(config: dict[str, Any], count: int = 7) -> tuple[Tensor, Tensor]:
    """Embeddings [1, count, hidden] and taps [1, count, 3 * width]."""
    generator = torch.Generator().manual_seed(1)
    width = config.get("target_hidden_size", config["hidden_size"])
    embeddings = torch.randn(1, count, config["hidden_size"], generator=generator)
    return embeddings, 3 * torch.randn(1, count, 3 * width, generator=generator)


@pytest.mark.parametrize("name", CONFIGS)
def test_the_layer_is_the_slow_one(name):
    config = CONFIGS[name]
    head, tensors = head_of(config)
    embeddings, taps = rows(config)
    hidden = head(embeddings, head.combine(taps), 3 + torch.arange(7)[None], causal_attend)
    expected = slow_heads.eagle3(tensors, config, embeddings[0], taps[0], start=3)
    assert_close(hidden[0], expected)
    assert_close(head.logits(hidden)[0], slow_heads.eagle3_logits(tensors, config, expected))


def test_norm_output_norms_the_features_of_the_next_row_and_leaves_the_logits():
    plain, tensors = head_of(QWEN3)
    normed, _ = head_of(QWEN3 | {"norm_output": True})
    embeddings, taps = rows(QWEN3)
    positions = torch.arange(7)[None]
    before = plain(embeddings, plain.combine(taps), positions, causal_attend)
    after = normed(embeddings, normed.combine(taps), positions, causal_attend)
    expected = torch.stack([slow_heads.norm(row, tensors["norm.weight"], 1e-6) for row in before[0]])
    assert_close(after[0], expected)
    assert_close(normed.logits(after), plain.logits(before))


def test_row_after_row_with_a_cache_is_the_whole_pass():
    head, _ = head_of(LLAMA3)
    embeddings, taps = rows(LLAMA3)
    features = head.combine(taps)
    whole = head(embeddings, features, torch.arange(7)[None], causal_attend)
    keys, values = [], []

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        assert query.shape == (1, 8, 1, 4) and key.shape == value.shape == (1, 2, 1, 4)
        keys.append(key)
        values.append(value)
        seen, read = (torch.cat(each, dim=2).repeat_interleave(4, dim=1) for each in (keys, values))
        return ((query @ seen.mT / 2).softmax(dim=-1) @ read).transpose(1, 2)

    for t in range(7):
        row = head(embeddings[:, t : t + 1], features[:, t : t + 1], torch.tensor([[t]]), attend)
        assert_close(row, whole[:, t : t + 1])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_angles_of_far_positions_stay_exact_in_half_precision(dtype):
    head, _ = head_of(QWEN3)
    far = torch.tensor([[39_999]])
    expected = head.rotary_emb(torch.zeros(1, 1, 32), far)
    head.to(dtype)
    assert head.fc.weight.dtype == dtype
    for found, exact in zip(head.rotary_emb(torch.zeros(1, 1, 32), far), expected, strict=True):
        assert torch.equal(found, exact)


def test_the_drafts_vocabulary_maps_to_the_targets():
    head, _ = head_of(LLAMA3 | {"draft_vocab_size": 4})
    head.set_vocabulary(torch.tensor([3, 4, 90, 127]))
    assert head.target_ids(torch.tensor([[0, 3], [2, 1]])).tolist() == [[3, 127], [90, 4]]
    assert head.d2t.tolist() == [3, 3, 88, 124]
    assert head.t2d.nonzero().flatten().tolist() == [3, 4, 90, 127]


def test_a_head_with_the_targets_whole_vocabulary_maps_each_id_to_itself():
    head = DraftHead(LlamaConfig.from_dict(LLAMA3 | {"draft_vocab_size": 128}))
    assert head.target_ids(torch.arange(128)).tolist() == list(range(128))
    assert head.t2d.all()


def test_the_feature_layers_are_the_named_ones_or_those_that_enter_layers_2_half_and_3_before_the_end():
    named, _ = head_of(QWEN3)
    assert named.layers_of(tiny_model()) == (0, 1, 2)
    assert head_of(LLAMA3)[0].layers_of(tiny_model(num_hidden_layers=8)) == (2 - 1, 8 // 2 - 1, 8 - 3 - 1)
    assert default_feature_layers(32) == (1, 15, 28)


@pytest.mark.parametrize("layers", [1, 3, 6])
def test_a_target_too_shallow_for_three_layers_is_refused(layers):
    with pytest.raises(UserError, match=f"a model of {layers} layers is too shallow"):
        default_feature_layers(layers)
