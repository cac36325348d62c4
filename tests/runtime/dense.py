"""Slow, obvious references for tests: dense attention under any mask, observations by loops."""

from typing import Any

import torch
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import repeat_kv


def run_dense(model, ids, see=None) -> Any:
    """One pass of dense attention over ids [1, S].

    `see(layer, query, key)` says which keys each query sees, [K or H, S, S] bool; all before it by default. Returns the
    queries and the keys of each layer, [H, S, d] and [K, S, d], and the logits [S, V].
    """
    passed: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def attend(module, query, key, value, attention_mask, scaling=None, **_):
        passed[module.layer_idx] = query[0], key[0]
        length, group = query.shape[2], query.shape[1] // key.shape[1]
        visible = torch.ones(length, length).tril().bool().expand(key.shape[1], -1, -1)
        if see is not None:
            visible = see(module.layer_idx, query[0], key[0])
        weights = query @ repeat_kv(key, group).transpose(2, 3) * scaling
        weights = weights.masked_fill(
            ~visible.repeat_interleave(len(query[0]) // len(visible), dim=0), -torch.inf
        ).softmax(-1)
        return (weights @ repeat_kv(value, group)).transpose(1, 2).contiguous(), None

    AttentionInterface.register("test_dense", attend)
    before = model.config._attn_implementation
    model.set_attn_implementation("test_dense")
    with torch.no_grad():
        logits = model(ids, use_cache=False).logits[0]
    model.set_attn_implementation(before)
    return [passed[layer] for layer in sorted(passed)], logits


def observed(queries, visible, keys, columns, over_queries="mean", over_heads="mean"):
    """Importance [K, columns]: each query [H, d] of a list pays attention to the keys [K, S, d] that it sees.

    `visible` lists, for each query, the indices of those keys.
    """
    reducers = {"mean": lambda rows: torch.stack(rows).mean(0), "max": lambda rows: torch.stack(rows).amax(0)}
    heads, width = queries[0].shape
    group, result = heads // len(keys), []
    for kv_head, head_keys in enumerate(keys):
        by_head = []
        for head in range(kv_head * group, (kv_head + 1) * group):
            by_query = []
            for query, seen in zip(queries, visible, strict=True):
                weights = torch.zeros(len(head_keys))
                weights[seen] = (head_keys[seen] @ query[head] / width**0.5).softmax(0)
                by_query.append(weights[:columns])
            by_head.append(reducers[over_queries](by_query))
        result.append(reducers[over_heads](by_head))
    return torch.stack(result)


def pooled(importance, kernel=7):
    """Max over the `kernel` neighbours, [K, n] -> [K, n]."""
    half, length = kernel // 2, importance.shape[1]
    return torch.stack([importance[:, max(t - half, 0) : t + half + 1].amax(1) for t in range(length)], dim=1)


def best_of(scores, count):
    """The indices of the `count` highest, in this order, lowest index first among equals."""
    return sorted(range(len(scores)), key=lambda index: (-scores[index], index))[:count]


def best(importance, count):
    """For each KV head the indices of the `count` highest."""
    return [set(best_of(row, count)) for row in importance.tolist()]
