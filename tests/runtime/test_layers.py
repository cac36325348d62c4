"""The room behind a layer's entries: used again after a crop, never written to where another layer reads."""

import itertools
import random

import numpy as np
import pytest
import torch

from keepsight.runtime.conversation import Conversation
from keepsight.runtime.join import can_join, join
from keepsight.runtime.layer import GROWTH, ROOM, KeptLayer, RaggedLayer
from keepsight.runtime.methods.window import AdaKV, SnapKV
from keepsight.runtime.saved import load_state, save_state
from keepsight.runtime.sparse_read.cache import SelectedLayer
from keepsight.runtime.state import read
from tests.close import assert_close
from tests.families import family_model, fresh_model
from tests.tiny import prompt_ids


def kept_layer(entries: int = 5) -> KeptLayer:
    keys, values = torch.randn(2, 1, 2, entries, 4)
    return KeptLayer(keys, values, entries)


def selected_layer() -> KeptLayer:
    keys, values = torch.randn(2, 1, 2, 5, 4)
    return SelectedLayer(keys, values, 5)


def ragged_layer() -> KeptLayer:
    keys, values = torch.randn(2, 4, 4)
    return RaggedLayer(keys, values, np.array([[3, 1]]), 5)


def append_to(layer: KeptLayer, keys: torch.Tensor, values: torch.Tensor) -> None:
    """A selected layer appends when it attends, the others when the model hands them new entries."""
    if isinstance(layer, SelectedLayer):
        layer.append(keys, values)
    else:
        layer.update(keys, values)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("make", [kept_layer, ragged_layer, selected_layer])
def test_copies_of_a_layer_go_their_own_ways(make, seed):
    """Whatever is appended, cropped and shared, each layer holds what plain tensors would."""
    draw = random.Random(seed)
    layers = [make()]
    expected = [layers[0].entries().keys]
    least = 3 if make is ragged_layer else 0  # only what was appended is cropped
    for _ in range(60):
        index = draw.randrange(len(layers))
        layer = layers[index]
        stored = expected[index].shape[2]
        action = draw.choice(["append", "append", "crop", "share"])
        if action == "append":
            keys = torch.randn(1, 2, draw.choice([1, 3, 40]), 4)
            append_to(layer, keys, -keys)
            expected[index] = torch.cat([expected[index], keys], dim=2)
        elif action == "crop" and (count := draw.randint(0, min(stored - least, 4))):
            layer.crop(-count)
            expected[index] = expected[index][:, :, : stored - count]
        elif action == "share" and len(layers) < 6:
            layers.append(layer.share())
            expected.append(expected[index])
        for layer, keys in zip(layers, expected, strict=True):
            entries = layer.entries()
            assert torch.equal(entries.keys, keys)
            assert entries.values.shape == keys.shape


@pytest.mark.parametrize("make", [kept_layer, selected_layer, ragged_layer])
def test_room_grows_by_a_share_of_what_is_held(make):
    """A long answer moves its cache seldom: 5,000 tokens one by one, where 64 at a time would be 79 moves."""
    layer = make()
    addresses = []
    for _ in range(5000):
        token = torch.zeros(1, 2, 1, 4)
        append_to(layer, token, token)
        addresses.append(layer.keys.untyped_storage().data_ptr())
    moves = sum(before != after for before, after in itertools.pairwise(addresses))
    assert moves <= 45
    entry_bytes = 2 * 4 * 4
    assert layer.keys.untyped_storage().nbytes() <= (layer.longest * (1 + GROWTH) + ROOM) * entry_bytes


FAMILIES = ["Llama 4 (text)", "Gemma 2", "GPT-OSS", "Mistral with a window", "Qwen3-Next"]
METHODS = [SnapKV(16, window=8), AdaKV(16, window=8)]
every_family = pytest.mark.parametrize("family", FAMILIES)
every_pair = pytest.mark.parametrize(
    ("family", "method"), [*zip(FAMILIES, METHODS * 3, strict=False), ("GPT-OSS", METHODS[1])]
)
ANSWER = prompt_ids(5, seed=1)[0]


@pytest.mark.parametrize("family", ["Mistral with a window", "Mixtral", "Phi-3, Phi-4"])
def test_models_of_windows_alone_answer_as_without_us(family):
    model = fresh_model(family, sliding_window=12)
    ids = prompt_ids(41)[0]
    expected = model.generate(ids, max_new_tokens=6, do_sample=False)
    for method in METHODS:
        answer = model.generate(ids, custom_generate=method, max_new_tokens=6, do_sample=False)
        assert torch.equal(answer, expected)


@every_pair
def test_padded_rows_answer_as_they_do_alone(family, method):
    model = family_model(family)
    ids, mask = prompt_ids(41, 27)
    state, logits = read(model, method.start(model, ids, mask, chunk=7), ANSWER.expand(2, -1))
    for row, length in enumerate((41, 27)):
        prompt = ids[row : row + 1, 41 - length :]
        alone, logits_alone = read(model, method.start(model, prompt), ANSWER)
        assert_close(logits[row : row + 1], logits_alone)
        if alone.entries():
            assert torch.equal(state.counts()[:, row], alone.counts()[:, 0])


@every_pair
def test_a_saved_state_answers_as_it_did(family, method, tmp_path):
    model = family_model(family)
    state = method.start(model, prompt_ids(41)[0])
    loaded = load_state(save_state(state, tmp_path, model=model), model).state
    assert torch.equal(read(model, loaded, ANSWER)[1], read(model, state, ANSWER)[1])


@pytest.mark.parametrize(
    ("family", "method"), [*zip(["DeepSeek-V3", *FAMILIES[:-1], "GPT-OSS"], METHODS * 3, strict=True)]
)
def test_joined_states_are_read_as_alone(family, method):
    model = family_model(family)
    states = [method.start(model, prompt_ids(length)[0]) for length in (41, 30, 9)]
    joined = join(states)
    logits_of_parts = []
    for part in ANSWER.split(3, dim=1):
        joined, logits = read(model, joined, part.expand(3, -1))
        logits_of_parts.append(logits)
    logits = torch.cat(logits_of_parts, dim=1)
    for row, state in enumerate(states):
        assert_close(logits[row], read(model, state.copy(), ANSWER)[1][0])


def test_recurrent_states_are_not_joined():
    model = family_model("Qwen3-Next")
    assert not can_join(METHODS[0].start(model, prompt_ids(41)[0]))


@every_family
def test_a_turn_goes_on_from_the_same_windows(family):
    model = family_model(family)
    ids = prompt_ids(41)[0]
    conversation = Conversation(model, SnapKV(60, window=8))
    answer = conversation.say(ids, max_new_tokens=3, eos_token_id=999)
    next_answer = conversation.say(ANSWER, max_new_tokens=3, eos_token_id=999)
    prompt = torch.cat([ids, answer, ANSWER], dim=1)
    expected = model.generate(prompt, max_new_tokens=3, do_sample=False, eos_token_id=999)
    assert torch.equal(next_answer, expected[:, prompt.shape[1] :])
