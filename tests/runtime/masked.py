"""Dense attention in which evicted entries are masked: what decoding from an evicted cache must equal."""

from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import repeat_kv


def masked_logits(model: Any, ids: Tensor, prompt_length: int, selected: list[Tensor]) -> Tensor:
    """Logits of a model whose rows after the prompt see only the selected prompt entries of their KV head.

    Args:
        model: Any model of transformers.
        ids: [1, N + T].
        prompt_length: N.
        selected: For each layer, [1, K, N] bool.
    """

    def masked(module, query, key, value, attention_mask, scaling=None, **_):
        group, length = module.num_key_value_groups, query.shape[2]
        visible = torch.ones(length, length).tril().bool().expand(1, key.shape[1], -1, -1).clone()
        visible[:, :, prompt_length:, :prompt_length] &= selected[module.layer_idx][:, :, None]
        visible = visible.repeat_interleave(group, dim=1)
        weights = (query @ repeat_kv(key, group).transpose(2, 3) * scaling).masked_fill(~visible, -torch.inf)
        return (weights.softmax(-1) @ repeat_kv(value, group)).transpose(1, 2).contiguous(), None

    AttentionInterface.register("test_masked", masked)
    before = model.config._attn_implementation
    model.set_attn_implementation("test_masked")
    with torch.no_grad():
        logits = model(ids, use_cache=False).logits
    model.set_attn_implementation(before)
    return logits
