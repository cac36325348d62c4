"""Recorded features are the hidden states that transformers reports."""

import pytest
import torch

from keepsight.errors import UserError
from keepsight.runtime.features import RecordFeatures
from keepsight.runtime.state import Needs, prefill
from tests.close import assert_close
from tests.tiny import FAMILIES, prompt_ids, tiny_model


@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_a_layers_output_is_what_enters_the_next_and_the_one_past_the_last_is_normed(family):
    model = tiny_model(family)
    ids, _ = prompt_ids(9)
    with RecordFeatures(model, (3, 0, 1)) as recorded:
        states = model(ids, output_hidden_states=True).hidden_states
    normed, first, second = recorded.outputs()
    assert torch.equal(first, states[1])
    assert torch.equal(second, states[2])
    assert torch.equal(normed, model.model(ids).last_hidden_state)
    assert not torch.allclose(normed, states[2])


@torch.no_grad()
def test_a_chunked_prefill_keeps_the_normed_output_of_every_token():
    model = tiny_model()
    ids, _ = prompt_ids(9)
    state = prefill(model, ids, chunk=4, needs=Needs(features=(1, 3)))
    assert_close(state.features_of((3,)), model.model(ids).last_hidden_state)


@pytest.mark.parametrize("layer", [-1, 4])
def test_a_layer_that_is_not_there_is_refused(layer):
    with pytest.raises(UserError, match=f"feature layer {layer} is out of range: the target's layers are 0 to 2"):
        RecordFeatures(tiny_model(), (layer,))
