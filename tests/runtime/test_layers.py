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


def kept(entries: int = 5) -> KeptLayer:
    keys, values = torch.randn(2, 1, 2, entries, 4)
    return KeptLayer(keys, values, entries)


def selected() -> KeptLayer:
    keys, values = torch.randn(2, 1, 2, 5, 4)
    return SelectedLayer(keys, values, 5)


def ragged() -> KeptLayer:
    keys, values = torch.randn(2, 4, 4)
    return RaggedLayer(keys, values, np.array([[3, 1]]), 5)


def append_to(layer: KeptLayer, keys: torch.Tensor, values: torch.Tensor) -> None:
    """A selected layer appends when it attends, the others when the model hands them new entries."""
    (layer.append if isinstance(layer, SelectedLayer) else layer.update)(keys, values)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("make", [kept, ragged, selected])
def test_copies_of_a_layer_go_their_own_ways(make, seed):
    """Whatever is appended, cropped and shared, each layer holds what plain tensors would."""
    chosen, layers = random.Random(seed), [make()]
    expected, first = [layers[0].entries().keys], 3 if make is ragged else 0  # only what was appended is cropped
    for _ in range(60):
        index = chosen.randrange(len(layers))
        layer, stored = layers[index], expected[index].shape[2]
        what = chosen.choice(["append", "append", "crop", "share"])
        if what == "append":
            new = torch.randn(1, 2, chosen.choice([1, 3, 40]), 4)
            append_to(layer, new, -new)
            expected[index] = torch.cat([expected[index], new], dim=2)
        elif what == "crop" and (count := chosen.randint(0, min(stored - first, 4))):
            layer.crop(-count)
            expected[index] = expected[index][:, :, : stored - count]
        elif what == "share" and len(layers) < 6:
            layers.append(layer.share())
            expected.append(expected[index])
        for each, keys in zip(layers, expected, strict=True):
            held = each.entries()
            assert torch.equal(held.keys, keys)
            assert held.values.shape == keys.shape


@pytest.mark.parametrize("make", [kept, selected, ragged])
def test_room_grows_by_a_share_of_what_is_held(make):
    """A long answer moves its cache seldom: 5,000 tokens one by one, where 64 at a time would be 79 moves."""
    layer, places = make(), []
    for _ in range(5000):
        new = torch.zeros(1, 2, 1, 4)
        append_to(layer, new, new)
        places.append(layer.keys.untyped_storage().data_ptr())
    assert sum(one != other for one, other in itertools.pairwise(places)) <= 45
    row = 2 * 4 * 4
    assert layer.keys.untyped_storage().nbytes() <= (layer.longest * (1 + GROWTH) + ROOM) * row


FAMILIES = ["Llama 4 (text)", "Gemma 2", "GPT-OSS", "Mistral with a window", "Qwen3-Next"]
METHODS = [SnapKV(16, window=8), AdaKV(16, window=8)]
each_family = pytest.mark.parametrize("family", FAMILIES)
each_pair = pytest.mark.parametrize(
    ("family", "method"), [*zip(FAMILIES, METHODS * 3, strict=False), ("GPT-OSS", METHODS[1])]
)
ANSWER = prompt_ids(5, seed=1)[0]


@pytest.mark.parametrize("family", ["Mistral with a window", "Mixtral", "Phi-3, Phi-4"])
def test_models_of_windows_alone_answer_as_without_us(family):
    model, ids = fresh_model(family, sliding_window=12), prompt_ids(41)[0]
    expected = model.generate(ids, max_new_tokens=6, do_sample=False)
    for method in METHODS:
        assert torch.equal(model.generate(ids, custom_generate=method, max_new_tokens=6, do_sample=False), expected)


@each_pair
def test_padded_rows_answer_as_they_do_alone(family, method):
    model, (ids, mask) = family_model(family), prompt_ids(41, 27)
    state, logits = read(model, method.start(model, ids, mask, chunk=7), ANSWER.expand(2, -1))

    for row, length in enumerate((41, 27)):
        own, alone = read(model, method.start(model, ids[row : row + 1, 41 - length :]), ANSWER)
        assert_close(logits[row : row + 1], alone)
        for both, single in zip(state.counts(), own.counts(), strict=True) if own.entries() else ():
            assert torch.equal(both[row], single[0])


@each_pair
def test_a_saved_state_answers_as_it_did(family, method, tmp_path):
    model = family_model(family)
    state = method.start(model, prompt_ids(41)[0])
    loaded = load_state(save_state(state, tmp_path, model=model), model).state
    assert torch.equal(read(model, loaded, ANSWER)[1], read(model, state, ANSWER)[1])


@pytest.mark.parametrize(
    ("family", "method"), zip(["DeepSeek-V3", *FAMILIES[:-1], "GPT-OSS"], METHODS * 3, strict=True)
)
def test_joined_states_are_read_as_alone(family, method):
    model = family_model(family)
    states = [method.start(model, prompt_ids(length)[0]) for length in (41, 30, 9)]
    joined = join(states)
    found = []
    for part in ANSWER.split(3, dim=1):
        joined, logits = read(model, joined, part.expand(3, -1))
        found.append(logits)
    for row, state in enumerate(states):
        assert_close(torch.cat(found, dim=1)[row], read(model, state.copy(), ANSWER)[1][0])


def test_recurrent_states_are_not_joined():
    model = family_model("Qwen3-Next")
    assert not can_join(METHODS[0].start(model, prompt_ids(41)[0]))


@each_family
def test_a_turn_goes_on_from_the_same_windows(family):
    model, ids = family_model(family), prompt_ids(41)[0]
    talk = Conversation(model, SnapKV(60, window=8))
    first = talk.say(ids, max_new_tokens=3, eos_token_id=999)
    second = talk.say(ANSWER, max_new_tokens=3, eos_token_id=999)
    whole = torch.cat([ids, first, ANSWER], dim=1)
    expected = model.generate(whole, max_new_tokens=3, do_sample=False, eos_token_id=999)[:, whole.shape[1] :]
    assert torch.equal(second, expected)
