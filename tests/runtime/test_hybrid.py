"""Layers that keep more than entries, none, or those of another layer."""

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


def answer(model: Any, state: Any) -> list[int]:
    ids: Tensor = greedy_draft(model, state.copy(), 6).ids
    return ids[0].tolist()


@pytest.mark.parametrize("family", [family for family in RECURRENT if (family, "lookaheadkv") not in REFUSED])
def test_soft_tokens_and_answers_move_no_recurrent_state_of_the_prompt(family: str) -> None:
    model = family_model(family)
    method = LookaheadKV(16, **adapter_fields(random_on(model).adapter()))
    whole = prefill(model, PROMPT, needs=method.needs())
    before = recurrent_tensors(whole)
    evicted = method.compress_state(model, whole)
    after_eviction = recurrent_tensors(evicted)
    assert before.keys() == after_eviction.keys()
    for name, tensor in before.items():
        assert torch.equal(tensor, after_eviction[name]), name
    answered, _ = read(model, evicted.copy(), PROMPT[:, :3])
    moved = recurrent_tensors(answered)
    assert any(not torch.equal(tensor, before[name]) for name, tensor in moved.items())
    for name, tensor in (recurrent_tensors(whole) | recurrent_tensors(evicted)).items():
        assert torch.equal(tensor, before[name]), name


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
    assert mixers and targets
    assert not [name for name in targets for mixer in mixers if name.startswith(f"{mixer}.")]


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
    assert_close(read(model, take_rows(batch, [1]), PROMPT[:, :1])[1], alone[1])


def test_what_reads_shared_entries_in_its_own_way_is_refused_in_one_line() -> None:
    model = family_model(SHARED)
    with refused("model", "model"):
        make_method("kivi", 16, DRAFT, **OPTIONS["kivi"]).start(model, PROMPT)
    with refused("draft.layers", "model"):
        keep_layers(model, [0, 1])
    with refused("draft.layers", "model"):
        keep_layers(family_model("Bamba"), [0, 1])
