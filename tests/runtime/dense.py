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
    queries_and_keys: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def attend(module, query, key, value, attention_mask, scaling=None, **_):
        queries_and_keys[module.layer_idx] = (query[0], key[0])
        heads, length = query.shape[1:3]
        kv_heads = key.shape[1]
        group = heads // kv_heads
        if see is None:
            visible = torch.ones(length, length).tril().bool().expand(kv_heads, -1, -1)
        else:
            visible = see(module.layer_idx, query[0], key[0])
        visible = visible.repeat_interleave(heads // len(visible), dim=0)
        logits = query @ repeat_kv(key, group).transpose(2, 3) * scaling
        weights = logits.masked_fill(~visible, -torch.inf).softmax(-1)
        output = weights @ repeat_kv(value, group)
        return output.transpose(1, 2).contiguous(), None

    AttentionInterface.register("test_dense", attend)
    implementation = model.config._attn_implementation
    model.set_attn_implementation("test_dense")
    with torch.no_grad():
        logits = model(ids, use_cache=False).logits[0]
    model.set_attn_implementation(implementation)
    return [queries_and_keys[layer] for layer in sorted(queries_and_keys)], logits


def observed(queries, visible, keys, columns, over_queries="mean", over_heads="mean"):
    """Importance [K, columns]: each query [H, d] of a list pays attention to the keys [K, S, d] that it sees.

    `visible` lists, for each query, the indices of those keys.
    """
    reducers = {
        "mean": lambda rows: torch.stack(rows).mean(0),
        "max": lambda rows: torch.stack(rows).amax(0),
    }
    heads, width = queries[0].shape
    group = heads // len(keys)
    by_kv_head = []
    for kv_head, head_keys in enumerate(keys):
        by_head = []
        for head in range(kv_head * group, (kv_head + 1) * group):
            by_query = []
            for query, seen_keys in zip(queries, visible, strict=True):
                weights = torch.zeros(len(head_keys))
                logits = head_keys[seen_keys] @ query[head] / width**0.5
                weights[seen_keys] = logits.softmax(0)
                by_query.append(weights[:columns])
            by_head.append(reducers[over_queries](by_query))
        by_kv_head.append(reducers[over_heads](by_head))
    return torch.stack(by_kv_head)


def pooled(importance, kernel=7):
    """Max over the `kernel` neighbours, [K, n] -> [K, n]."""
    half = kernel // 2
    columns = []
    for position in range(importance.shape[1]):
        neighbours = importance[:, max(position - half, 0) : position + half + 1]
        columns.append(neighbours.amax(1))
    return torch.stack(columns, dim=1)


def best_of(scores, count):
    """The indices of the `count` highest, in this order, lowest index first among equals."""
    ranking = sorted(range(len(scores)), key=lambda index: (-scores[index], index))
    return ranking[:count]


def best(importance, count):
    """For each KV head the indices of the `count` highest."""
    return [set(best_of(scores, count)) for scores in importance.tolist()]
