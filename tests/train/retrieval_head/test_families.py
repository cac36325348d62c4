"""What a retrieval head learns from, in every family: the mean over the layers with full attention."""

import pytest
import torch

from keepsight.errors import UserError
from keepsight.train.dataset import Batch
from keepsight.train.retrieval_head import left_padded, run_teacher
from tests.close import assert_close
from tests.families import FAMILIES, family_model, fresh_model
from tests.models.retrieval_heads import tiny_retrieval_head
from tests.runtime.family_methods import kv_heads_of
from tests.runtime.slow_families import slow_pass
from tests.tiny import prompt_ids
from tests.train.retrieval_head.heads import objective_of

WINDOWED = "Mistral with a window"


@pytest.mark.parametrize("family", sorted({*FAMILIES} - {WINDOWED}))
def test_importance_is_the_models_own_attention(family: str) -> None:
    model, kv_heads = family_model(family), kv_heads_of(family)
    (ids, mask), answer = prompt_ids(30, 17), prompt_ids(5, 5, seed=1)[0]
    head = tiny_retrieval_head("none", kv_heads=kv_heads)
    found = run_teacher(model, head, left_padded(Batch(ids, answer, mask.bool())), 10).importance[0]
    for row, length in enumerate((30, 17)):
        text = torch.cat([ids[row : row + 1, 30 - length :], answer[row : row + 1]], dim=1)
        weights = torch.stack(slow_pass(model, input_ids=text)[0])[:, 0, :, -10:]
        mean = weights.unflatten(1, (kv_heads, -1)).mean(dim=(0, 2))
        assert_close(found[row, ..., 30 - length :], mean / mean.sum(dim=-1, keepdim=True))


def test_sinks_of_padded_rows_leave_gradients_finite() -> None:
    (ids, mask), answer = prompt_ids(30, 3), prompt_ids(5, 5, seed=1)[0]
    head = tiny_retrieval_head("none")
    objective_of(head, fresh_model("GPT-OSS"), 20, answers=0.5).loss(Batch(ids, answer, mask.bool())).backward()
    assert all(each.grad is not None and each.grad.isfinite().all() for each in head.parameters())


def test_a_model_that_forgets_by_itself_is_refused() -> None:
    with pytest.raises(UserError, match="mistral has no layer with full attention"):
        objective_of(tiny_retrieval_head("none"), fresh_model(WINDOWED), 10)
