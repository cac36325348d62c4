"""States on disk: what comes back is what was saved, and what is wrong with a file is said in one line."""

import json
import os
import struct
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from keepsight.models.identity import template_digest
from keepsight.runtime.allocate import Adaptive
from keepsight.runtime.conversation import Conversation
from keepsight.runtime.join import join
from keepsight.runtime.layer import RaggedLayer
from keepsight.runtime.methods import SnapKV
from keepsight.runtime.saved import load_state, save_state
from keepsight.runtime.state import Needs, prefill, read
from tests.refused import refused
from tests.runtime.scoring import recorded
from tests.tiny import prompt_ids, tiny_model, tiny_tokenizer

DENSE, RAGGED = SnapKV(12, window=4), SnapKV(12, window=4, allocate=Adaptive())
STATES: dict[str, Any] = {
    "dense": lambda model: DENSE.start(model, prompt_ids(30)[0]),
    "ragged": lambda model: RAGGED.start(model, prompt_ids(30)[0]),
    "ragged batch": lambda model: RAGGED.start(model, *prompt_ids(30, 11)),
    "whole prompt": lambda model: prefill(model, prompt_ids(30)[0], needs=Needs(4, accumulated=True)),
    "appended": lambda model: read(model, RAGGED.start(model, prompt_ids(30)[0]), prompt_ids(5)[0])[0],
    "joined": lambda model: join([STATES["dense"](model), STATES["ragged"](model)]),
    "received": lambda model: RAGGED.compress_state(
        model, prefill(model, prompt_ids(30)[0], needs=Needs(4, accumulated=True))
    ),
}


def of_cache(state):
    """Every tensor of the cache as it lies in memory."""
    found = list[Any]()
    for layer in state.cache.layers:
        if isinstance(layer, RaggedLayer):
            found += [*layer.packed(), torch.from_numpy(layer.head_sizes())]
        else:
            found += [getattr(layer, name, None) for name in ("keys", "values", "real")]
    return found


def of_rest(state):
    both = recorded(state, "queries"), recorded(state, "accumulated")
    return [state.tokens_mask, state.logits, state.tokens, state.lengths, *both[0], *both[1]]


def size(tensors):
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors if tensor is not None)


def same(first, second):
    if first is None or second is None:
        return first is second
    return first.dtype == second.dtype and torch.equal(first, second)


@pytest.mark.parametrize(("kind", "dtype"), [*((kind, torch.float32) for kind in STATES), ("ragged", torch.bfloat16)])
def test_a_round_trip_is_equal_to_the_bit(tmp_path, kind, dtype):
    model = tiny_model().to(dtype)
    state = STATES[kind](model)
    loaded = load_state(save_state(state, tmp_path / "a.safetensors", model=model), model).state
    assert all(same(*pair) for pair in zip(of_cache(state), of_cache(loaded), strict=True))
    assert all(same(*pair) for pair in zip(of_rest(state), of_rest(loaded), strict=True))
    assert [type(layer) for layer in loaded.cache.layers] == [type(layer) for layer in state.copy().cache.layers]
    assert loaded.cache.get_seq_length() == state.cache.get_seq_length()
    assert (loaded.needs, recorded(loaded, "softmax")) == (state.needs, recorded(state, "softmax"))
    assert torch.equal(loaded.counts(), state.counts())
    assert loaded.kv_bytes == state.kv_bytes


@pytest.mark.parametrize("method", [DENSE, RAGGED], ids=["dense", "ragged"])
def test_a_loaded_state_is_evicted_from_as_the_saved_one(tmp_path, method):
    """The trace is saved too: the next turn's observers see the same queries."""
    model, turn = tiny_model(), prompt_ids(2, seed=9)[0]
    state = method.start(model, prompt_ids(30)[0])
    loaded = load_state(save_state(state, tmp_path, model=model), tiny_model()).state
    options = {"max_new_tokens": 6, "do_sample": False}
    talks: Any = [
        Conversation(each_model, method, each) for each_model, each in ((model, state), (tiny_model(), loaded))
    ]
    assert torch.equal(*(talk.say(turn, **options) for talk in talks))
    assert all(torch.equal(*pair) for pair in zip(*(recorded(talk.state, "queries") for talk in talks), strict=True))


@pytest.mark.parametrize("kind", ["dense", "ragged batch", "received"])
def test_the_file_holds_the_entries_and_a_small_rest(tmp_path, kind):
    model = tiny_model()
    state = STATES[kind](model)
    padding = size(of_cache(state)) - state.kv_bytes  # counts of ragged heads, or a mask by head
    file = save_state(state, tmp_path, model=model)
    header = file.stat().st_size - state.kv_bytes - padding - size(of_rest(state))
    assert 0 < header < 8192


def test_a_folder_or_a_file_is_named_and_replaced_whole(tmp_path):
    model = tiny_model()
    assert save_state(STATES["dense"](model), tmp_path / "new" / "folder", model=model).name == "state.safetensors"
    file = save_state(STATES["dense"](model), str(tmp_path / "one.safetensors"), model=model)
    assert file == tmp_path / "one.safetensors"
    ragged = STATES["ragged"](model)
    save_state(ragged, file, model=model)
    assert torch.equal(load_state(file, model).state.counts(), ragged.counts())
    assert sorted(os.listdir(tmp_path)) == ["new", "one.safetensors"]


@pytest.mark.parametrize(
    ("other", "field", "code"),
    [
        ({"num_hidden_layers": 2}, "layers", "model"),
        ({"vocab_size": 64}, "vocabulary", "model"),
        (
            {"seed": 1},
            "model",
            "conflict",
        ),
    ],
)
def test_another_target_is_refused(tmp_path, other, field, code):
    model = tiny_model()
    model.config.name_or_path = "ada/tiny"
    file = save_state(STATES["ragged"](model), tmp_path, model=model)
    with refused(field, code) as error:
        load_state(tmp_path, tiny_model(**other))
    assert str(file) in str(error.value)
    assert "'ada/tiny'" in str(error.value)
    with refused("dtype", "model"):
        load_state(tmp_path, tiny_model().bfloat16())
    if "seed" not in other:
        with refused("state", "model"):
            save_state(STATES["ragged"](model), tmp_path, model=tiny_model(**other))


def test_the_tokenizer_is_compared_where_both_are_known(tmp_path):
    model, tokenizer = tiny_model(), tiny_tokenizer()
    save_state(STATES["dense"](model), tmp_path / "unknown", model=model)
    assert load_state(tmp_path / "unknown", model, tokenizer=tokenizer).identity.template is None
    save_state(STATES["dense"](model), tmp_path, model=model, tokenizer=tokenizer)
    assert load_state(tmp_path, model).identity.template == template_digest(tokenizer)
    assert load_state(tmp_path, model, tokenizer=tokenizer).question == "seen"
    tokenizer.chat_template = "{{ messages }}"
    with refused("model", "conflict"):
        load_state(tmp_path, model, tokenizer=tokenizer)


def header_of(file):
    data = file.read_bytes()
    length = struct.unpack("<Q", data[:8])[0]
    return json.loads(data[8 : 8 + length])["__metadata__"]


def rewrite(file, tensors=None, **changes):
    """The same file with other tensors or other values in its header."""
    metadata, tensors = header_of(file), load_file(file) if tensors is None else tensors
    values = json.loads(metadata["keepsight_state"]) | changes
    save_file(tensors, file, metadata={"keepsight_state": json.dumps(values)})


def cut(file):
    file.write_bytes(file.read_bytes()[:-100])


def flip(file):
    data = bytearray(file.read_bytes())
    data[-5] ^= 1
    file.write_bytes(data)


def drop_tensor(file):
    tensors = load_file(file)
    del tensors["layers.1.values"]
    rewrite(file, tensors)


def drop_key(file):
    values = json.loads(header_of(file)["keepsight_state"])
    del values["needs"]
    save_file(load_file(file), file, metadata={"keepsight_state": json.dumps(values)})


@pytest.mark.parametrize(
    ("harm", "code"),
    [
        (lambda file: file.unlink(), "missing"),
        (cut, "file"),
        (lambda file: file.write_bytes(b"\x80\x04pickled" * 9), "file"),
        (flip, "file"),
        (lambda file: rewrite(file, seen=31), "file"),
        (drop_tensor, "file"),
        (lambda file: save_file(load_file(file), file), "file"),
        (lambda file: save_file(load_file(file), file, metadata={"keepsight_state": "{"}), "file"),
        (drop_key, "file"),
        (lambda file: rewrite(file, shape=[3]), "file"),
    ],
)
def test_what_is_wrong_with_a_file_is_said_in_one_line(tmp_path, harm, code):
    model = tiny_model()
    file = save_state(STATES["ragged"](model), tmp_path, model=model)
    harm(file)
    with refused("state.safetensors", code) as error:
        load_state(tmp_path, model)
    assert str(error.value).startswith(str(file))
