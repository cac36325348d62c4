"""The EAGLE-1 layer against a slow one."""

import pytest
import torch
from transformers import LlamaConfig

from keepsight.errors import UserError
from keepsight.models.draft_head import FeatureHead
from keepsight.runtime.features import RecordFeatures
from tests.close import assert_close
from tests.models import slow_heads
from tests.models.public_heads import EAGLE1, VICUNA, eagle1_tensors
from tests.models.slow_heads import causal_attend
from tests.tiny import prompt_ids, tiny_model

CONFIGS = {"llama-3": EAGLE1, "vicuna": VICUNA, "biases": EAGLE1 | {"bias": True, "qkv_bias": True}}


def head_of(config, lm_head=None):
    tensors = eagle1_tensors(config)
    del tensors["embed_tokens.weight"]
    head = FeatureHead(LlamaConfig.from_dict(config), lm_head)
    head.load_state_dict(tensors)
    return head.requires_grad_(False), tensors


@pytest.mark.parametrize("name", CONFIGS)
def test_the_layer_is_the_slow_one(name):
    config = CONFIGS[name]
    head, tensors = head_of(config)
    assert ("fc.bias" in tensors) == config.get("bias", True)
    torch.manual_seed(1)
    embeddings, features = torch.randn(2, 1, 7, 32).unbind()
    hidden = head(embeddings, head.combine(features), torch.arange(7)[None], causal_attend)
    expected = slow_heads.eagle1(tensors, config, embeddings[0], features[0])
    assert_close(hidden[0], expected)


@torch.no_grad()
def test_its_feature_is_what_the_targets_lm_head_reads():
    target = tiny_model()
    head, _ = head_of(EAGLE1, target.get_output_embeddings())
    ids, _ = prompt_ids(9)
    with RecordFeatures(target, head.layers_of(target)) as recorded:
        expected = target(ids).logits
    assert_close(head.logits(head.combine(recorded.outputs()[0])), expected)


def test_the_targets_lm_head_is_no_part_of_it():
    target = tiny_model()
    head, tensors = head_of(EAGLE1, target.get_output_embeddings())
    assert head.state_dict().keys() == tensors.keys()
    head.to(torch.bfloat16)
    assert target.lm_head.weight.dtype == torch.float32


def test_without_its_target_there_are_no_logits():
    with pytest.raises(UserError, match="no lm_head of its own; load it together with its model"):
        head_of(EAGLE1)[0].logits(torch.zeros(1, 1, 32))
