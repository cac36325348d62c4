"""How likely an answer is after a state, teacher-forced, and what observers score: what methods are compared by."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from keepsight.runtime import observe
from keepsight.runtime.attention import Reader
from keepsight.runtime.evict import Evict
from keepsight.runtime.importance import reduce_group
from keepsight.runtime.state import State, read


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
