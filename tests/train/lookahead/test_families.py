"""What a module learns from, in every family: the model's own attention, and that of the soft tokens."""

import pytest
import torch

from keepsight.errors import UserError
from keepsight.train.dataset import Batch
from keepsight.train.importance import ImportanceObjective
from tests.close import assert_close
from tests.families import FAMILIES, fresh_model
from tests.models.modules import random_on
from tests.runtime.slow_families import slow_pass, soft_token_attention
from tests.tiny import prompt_ids

WINDOWED = "Mistral with a window"


@pytest.mark.parametrize("family", sorted({*FAMILIES} - {WINDOWED}))
def test_importances_are_the_models_own_attention(family: str) -> None:
    lookahead = random_on(fresh_model(family))
    (ids, mask), answer = prompt_ids(30, 17), prompt_ids(5, 5, seed=1)[0]
    with torch.no_grad():
        layers = ImportanceObjective(lookahead).importances(Batch(ids, answer, mask.bool()))
    for row, length in enumerate((30, 17)):
        prompt = ids[row : row + 1, 30 - length :]
        weights, _ = slow_pass(lookahead.model, input_ids=torch.cat([prompt, answer[row : row + 1]], dim=1))
        wanted = [each[0, :, length:, :length].mean(dim=1) for each in weights]
        predicted = soft_token_attention(lookahead, lookahead.model.get_input_embeddings()(prompt))
        for found, expected in zip(layers, (wanted, predicted), strict=True):
            for each, its in zip(found, expected, strict=True):
                assert_close(each[row, :, 30 - length :], its)


def test_a_model_that_forgets_by_itself_is_refused() -> None:
    with pytest.raises(UserError, match="mistral has no layer with full attention, so that there is nothing to choose"):
        ImportanceObjective(random_on(fresh_model(WINDOWED)))
