"""What a draft head learns from, in every family: what the model itself says, scaled and capped as it does."""

from typing import Any

import pytest
import torch

from keepsight.train.draft_head import RunModel, next_tokens
from tests.close import assert_close
from tests.families import FAMILIES, fresh_model
from tests.tiny import prompt_ids

LOGITS: dict[str, dict[str, Any]] = {
    "Gemma 2": {"final_logit_softcapping": 1.0},
    "Gemma 3 (text)": {"final_logit_softcapping": 1.0},
    "Granite": {"logits_scaling": 8.0},
    "Granite 4 (Mamba-2)": {"logits_scaling": 8.0},
}


@pytest.mark.parametrize("family", FAMILIES)
def test_the_teacher_says_what_the_model_says(family: str) -> None:
    model, ids, words = fresh_model(family, **LOGITS.get(family, {})), prompt_ids(20)[0], torch.arange(3, 90)
    with torch.no_grad():
        logits = model(ids).logits[0]
    teacher = next_tokens(RunModel(model, [0, 1, 2])(ids[0]).hidden, model, words, torch.float32)
    assert_close(teacher.probabilities, logits[:, words].softmax(dim=-1))
    assert torch.equal(teacher.known, torch.isin(logits.argmax(dim=-1), words))
