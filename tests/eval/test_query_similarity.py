"""Similarity of queries against a plain forward pass of the model."""

from itertools import product
from typing import Any

import pytest
import torch
from torch.nn.functional import cosine_similarity

from keepsight.errors import UserError
from keepsight.eval.query_similarity import POSITIONS, query_similarity
from keepsight.runtime.methods.drafts import OwnAnswer
from keepsight.runtime.state import prefill
from tests.families import family_model
from tests.tiny import prompt_ids, tiny_model


def projected(model: Any, ids: torch.Tensor, positions: torch.Tensor, count: int) -> torch.Tensor:
    """Queries before RoPE of the last `count` tokens, [L, count, H, d]."""
    found = []
    hooks = [
        layer.self_attn.q_proj.register_forward_hook(lambda _, __, output: found.append(output[0, -count:]))
        for layer in model.model.layers
    ]
    with torch.no_grad():
        model(ids, position_ids=positions[None])
    for hook in hooks:
        hook.remove()
    return torch.stack(found).unflatten(-1, (-1, model.config.head_dim))


def test_the_answers_own_tokens_elsewhere_and_others_in_its_place() -> None:
    model, (ids, _) = tiny_model("llama"), prompt_ids(40)
    (found,) = query_similarity(model, ids.tolist(), 6)
    assert [*found] == [*product(("same", "other"), POSITIONS)]
    assert found["same", 1.0] == pytest.approx((1, 1), abs=1e-5)
    after, before = found["other", 1.0]
    assert after == pytest.approx(before, abs=1e-5)  # the same turn on both sides
    answer = OwnAnswer(6)(model, prefill(model, ids))
    answer_ids = answer.ids if answer.mask is None else answer.ids[:, answer.mask[0]]
    both, count = torch.cat([ids, answer_ids], dim=1), answer_ids.shape[1]
    own = projected(model, both, torch.arange(40 + count), count)
    moved = projected(model, both, torch.cat([torch.arange(40), torch.arange(20, 20 + count)]), count)
    assert found["same", 0.5][1] == pytest.approx(float(cosine_similarity(own, moved, dim=-1).mean()), abs=1e-5)
    assert found["same", 0.5][0] < found["same", 1.0][0]


def test_sliding_windows_are_refused() -> None:
    with pytest.raises(UserError, match="bench queries compares layers with full attention, and this model has"):
        next(query_similarity(family_model("Gemma 3 (text)"), prompt_ids(40)[0].tolist(), 4))
