"""Layers with recurrent states, without entries, or with the entries of another layer."""

from typing import Any

import pytest
import torch
from torch import Tensor

from keepsight.models.decoder import entry_owners, full_attention_layers, last_scored_layer
from keepsight.models.draft_sources import keep_layers
from keepsight.models.lora import lora_targets
from keepsight.runtime.attention import heads_of_layers
from keepsight.runtime.drafting.observer import greedy_draft
from keepsight.runtime.join import can_join, join, take_rows
from keepsight.runtime.methods import LookaheadKV, SnapKV, make_method
from keepsight.runtime.methods.lookaheadkv import adapter_fields
from keepsight.runtime.saved import layer_tensors, load_state, save_state
from keepsight.runtime.state import prefill, read
from tests.close import assert_close
from tests.families import family_model
from tests.models.modules import random_on
from tests.refused import refused
from tests.runtime.family_methods import DRAFT, OPTIONS, REFUSED
from tests.tiny import prompt_ids

RECURRENT = ["Falcon-H1", "Nemotron-H", "Bamba", "Jamba", "Zamba 2", "Inkling", "Inkling 2"]
SHARED = "Gemma 4 E2B, E4B"
PROMPT = prompt_ids(41)[0]
METHOD = SnapKV(16, window=8)


def recurrent_tensors(state: Any) -> dict[str, Tensor]:
    """Copies of all recurrent states of a cache by layer and name."""
    copies = {}
    for index, layer in enumerate(state.cache.layers):
        for name, tensor in layer_tensors(layer).items():
            if tensor is not None and name.partition(".")[0] in ("conv", "recurrent"):
                copies[f"{index}.{name}"] = tensor.clone()
    assert copies
    return copies


def assert_same_tensors(tensors: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert tensors.keys() == expected.keys()
    for name, tensor in tensors.items():
        assert torch.equal(tensor, expected[name]), name


def answer(model: Any, state: Any) -> list[int]:
    """Six greedy tokens after a state, which stays as it is."""
    ids: Tensor = greedy_draft(model, state.copy(), 6).ids
    return ids[0].tolist()


WITH_SOFT_TOKENS = [family for family in RECURRENT if (family, "lookaheadkv") not in REFUSED]


@pytest.mark.parametrize("family", WITH_SOFT_TOKENS)
def test_soft_tokens_and_answers_move_no_recurrent_state_of_the_prompt(family: str) -> None:
    model = family_model(family)
    method = LookaheadKV(16, **adapter_fields(random_on(model).adapter()))
    full_state = prefill(model, PROMPT, needs=method.needs())
    after_prompt = recurrent_tensors(full_state)
    evicted = method.compress_state(model, full_state)
    assert_same_tensors(recurrent_tensors(evicted), after_prompt)
    answered, _ = read(model, evicted.copy(), PROMPT[:, :3])
    after_answer = recurrent_tensors(answered)
    assert any(not torch.equal(tensor, after_prompt[name]) for name, tensor in after_answer.items())
    assert_same_tensors(recurrent_tensors(full_state), after_prompt)
    assert_same_tensors(recurrent_tensors(evicted), after_prompt)


@pytest.mark.parametrize("family", [*RECURRENT, SHARED])
def test_a_saved_state_answers_as_before(family: str, tmp_path: Any) -> None:
    model = family_model(family)
    state = METHOD.start(model, PROMPT)
    expected = answer(model, state)
    save_state(state, tmp_path / "state", model=model)
    assert answer(model, load_state(tmp_path / "state", model).state) == expected


@pytest.mark.parametrize("family", RECURRENT)
def test_lora_is_on_no_linear_module_of_a_recurrent_mixer(family: str) -> None:
    model = family_model(family)
    mixers = [name for name, module in model.named_modules() if hasattr(module, "conv1d")]
    targets = lora_targets(model)
    assert mixers
    assert targets
    prefixes = tuple(f"{mixer}." for mixer in mixers)
    for name in targets:
        assert not name.startswith(prefixes)


def test_layers_that_share_entries_name_their_owner() -> None:
    model = family_model(SHARED)
    assert entry_owners(model.config) == [0, 1, 0, 1]
    assert full_attention_layers(model.config) == [1]
    assert last_scored_layer(model.config) == 3
    state = prefill(model, PROMPT)
    assert [layer.readers for layer in state.layers] == [2]
    recorded: Any = state.layers[0].recorded
    assert recorded.queries.shape[1] == 2 * model.config.num_attention_heads


def test_heads_of_layers_stand_side_by_side_by_kv_head() -> None:
    first = torch.arange(4.0).view(1, 4, 1)
    merged = heads_of_layers([first, first + 10], kv_heads=2)
    assert merged.flatten().tolist() == [0, 1, 10, 11, 2, 3, 12, 13]


def test_states_of_layers_that_share_entries_join() -> None:
    model = family_model(SHARED)
    states = [METHOD.start(model, prompt_ids(length, seed=length)[0]) for length in (41, 33)]
    alone = [read(model, state.copy(), PROMPT[:, :1])[1] for state in states]
    assert all(map(can_join, states))
    batch = join(states)
    _, together = read(model, batch.copy(), PROMPT[:, :1].expand(2, -1))
    assert_close(together, torch.cat(alone))
    second_row = take_rows(batch, [1])
    assert_close(read(model, second_row, PROMPT[:, :1])[1], alone[1])


def test_uses_that_shared_entries_rule_out_are_refused_in_one_line() -> None:
    model = family_model(SHARED)
    kivi = make_method("kivi", 16, DRAFT, **OPTIONS["kivi"])
    with refused("model", "model"):
        kivi.start(model, PROMPT)
    with refused("draft.layers", "model"):
        keep_layers(model, [0, 1])
    with refused("draft.layers", "model"):
        keep_layers(family_model("Bamba"), [0, 1])
