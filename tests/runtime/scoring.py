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
        logits = torch.cat([logits, read(model, state, answer[:, :-1])[1]], dim=1)
    nll = functional.cross_entropy(logits.transpose(1, 2), answer, reduction="none")
    return nll, logits.argmax(dim=-1) == answer


def observed_by_query_head(model: Any, method: Evict, state: State) -> list[Tensor]:
    """What a method observes, [B, H, C] of each layer, from which its scores by KV head are made."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(observe, "reduce_group", lambda scores, kv_heads, heads: scores)
        by_query_head = method.bound_observer(model, state, method.reduce)
    for scores, heads, held in zip(
        method.bound_observer(model, state, method.reduce), by_query_head, state.entries(), strict=True
    ):
        assert torch.equal(scores, reduce_group(heads, held.keys.shape[1], method.reduce.heads))
    return by_query_head


def recorded(state: State, name: str) -> list[Tensor]:
    """The `queries` or `accumulated` attention of each layer; none where nothing of the kind was recorded."""
    found = [getattr(layer.recorded, name, None) for layer in state.layers]
    return [each for each in found if each is not None]


def divide(allocate: Allocation, importance: list[Tensor], budget: int) -> list[Tensor]:
    """For each layer [B, K] int64, entries to keep, of [B, K, C]: +inf where protected, -inf for padding."""
    every = torch.stack(importance)
    held = HeadSizes((every != -torch.inf).sum(-1).numpy(), (every == torch.inf).sum(-1).numpy())
    return list(torch.from_numpy(allocate(held, [budget] * every.shape[1], importance)))


def kept_entries(method: Any, model: Any, ids: Tensor, mask: Any = None, chunk: int | None = None) -> list[Any]:
    """For each row, layer and KV head the kept entries, counted without padding."""
    state = prefill(model, ids, mask, needs=method.needs(), chunk=chunk)
    first = (ids.shape[1] - state.lengths).tolist()
    chosen = method.select(state, method.importance(model, state))
    rows = range(len(ids))
    return [[[(head.nonzero()[:, 0] - first[row]).tolist() for head in each[row]] for each in chosen] for row in rows]
