"""What methods are compared by: how likely an answer is, what observers score, what was recorded, what is kept."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from keepsight.runtime import observe
from keepsight.runtime.allocate import Allocation, HeadSizes
from keepsight.runtime.attention import Reader
from keepsight.runtime.evict import Evict
from keepsight.runtime.importance import reduce_group
from keepsight.runtime.state import State, prefill, read


@torch.no_grad()
def score_answer(model: Reader, state: State, answer: Tensor) -> tuple[Tensor, Tensor]:
    """How likely an answer is when it is read from the kept entries, teacher-forced in one forward pass.

    Args:
        model: What reads the state: the target without adapters, or the method's reader.
        state: Its cache grows by T - 1 entries.
        answer: [B, T] int64, the same number of tokens in every row.

    Returns:
        Negative log-likelihood [B, T] float32 in nats, and whether each token is the arg-max, [B, T] bool. The first
        token comes from the prompt's own logits, which no eviction changes.
    """
    logits = state.logits[:, None]
    if answer.shape[1] > 1:
        _, answer_logits = read(model, state, answer[:, :-1])
        logits = torch.cat([logits, answer_logits], dim=1)
    nll = functional.cross_entropy(logits.transpose(1, 2), answer, reduction="none")
    return nll, logits.argmax(dim=-1) == answer


def observed_by_query_head(model: Any, method: Evict, state: State) -> list[Tensor]:
    """What a method observes, [B, H, C] of each layer, from which its scores by KV head are made."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(observe, "reduce_group", lambda scores, kv_heads, heads: scores)
        by_query_head = method.bound_observer(model, state, method.reduce)
    by_kv_head = method.bound_observer(model, state, method.reduce)
    for layer_scores, head_scores, entries in zip(by_kv_head, by_query_head, state.entries(), strict=True):
        kv_heads = entries.keys.shape[1]
        assert torch.equal(layer_scores, reduce_group(head_scores, kv_heads, method.reduce.heads))
    return by_query_head


def recorded(state: State, name: str) -> list[Tensor]:
    """The `queries` or `accumulated` attention of each layer; none where nothing of the kind was recorded."""
    by_layer = [getattr(layer.recorded, name, None) for layer in state.layers]
    return [tensor for tensor in by_layer if tensor is not None]


def divide(allocate: Allocation, importance: list[Tensor], budget: int) -> list[Tensor]:
    """For each layer [B, K] int64, entries to keep, of [B, K, C]: +inf where protected, -inf for padding."""
    scores = torch.stack(importance)
    batch_size = scores.shape[1]
    entries = (scores != -torch.inf).sum(-1)
    protected = (scores == torch.inf).sum(-1)
    sizes = HeadSizes(entries.numpy(), protected.numpy())
    counts = allocate(sizes, [budget] * batch_size, importance)
    return list(torch.from_numpy(counts))


def kept_entries(method: Any, model: Any, ids: Tensor, mask: Any = None, chunk: int | None = None) -> list[Any]:
    """For each row, layer and KV head the kept entries, counted without padding."""
    state = prefill(model, ids, mask, needs=method.needs(), chunk=chunk)
    padding = (ids.shape[1] - state.lengths).tolist()
    keep_masks = method.select(state, method.importance(model, state))
    kept: list[Any] = []
    for row in range(len(ids)):
        layers = []
        for layer_mask in keep_masks:
            heads = [(head_mask.nonzero()[:, 0] - padding[row]).tolist() for head_mask in layer_mask[row]]
            layers.append(heads)
        kept.append(layers)
    return kept
