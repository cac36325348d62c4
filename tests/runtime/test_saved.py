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

DENSE = SnapKV(12, window=4)
RAGGED = SnapKV(12, window=4, allocate=Adaptive())
STATES: dict[str, Any] = {
    "dense": lambda model: DENSE.start(model, prompt_ids(30)[0]),
    "ragged": lambda model: RAGGED.start(model, prompt_ids(30)[0]),
    "ragged batch": lambda model: RAGGED.start(model, *prompt_ids(30, 11)),
    "full cache": lambda model: prefill(model, prompt_ids(30)[0], needs=Needs(4, accumulated=True)),
    "appended": lambda model: read(model, RAGGED.start(model, prompt_ids(30)[0]), prompt_ids(5)[0])[0],
    "joined": lambda model: join([STATES["dense"](model), STATES["ragged"](model)]),
    "received": lambda model: RAGGED.compress_state(
        model, prefill(model, prompt_ids(30)[0], needs=Needs(4, accumulated=True))
    ),
}


def cache_tensors(state):
    """Every tensor of the cache as it lies in memory."""
    tensors: list[Any] = []
    for layer in state.cache.layers:
        if isinstance(layer, RaggedLayer):
            tensors += [*layer.packed(), torch.from_numpy(layer.head_sizes())]
        else:
            tensors += [getattr(layer, name, None) for name in ("keys", "values", "real")]
    return tensors


def other_tensors(state):
    """Every tensor of a state beside its cache."""
    records = [*recorded(state, "queries"), *recorded(state, "accumulated")]
    return [state.tokens_mask, state.logits, state.tokens, state.lengths, *records]


def bytes_of(tensors):
    return sum(tensor.nbytes for tensor in tensors if tensor is not None)


def assert_equal(tensors, expected):
    """To the bit, dtypes included; some may be none."""
    for tensor, expected_tensor in zip(tensors, expected, strict=True):
        if tensor is None or expected_tensor is None:
            assert tensor is expected_tensor
        else:
            assert tensor.dtype == expected_tensor.dtype
            assert torch.equal(tensor, expected_tensor)


@pytest.mark.parametrize(("kind", "dtype"), [*((kind, torch.float32) for kind in STATES), ("ragged", torch.bfloat16)])
def test_a_round_trip_is_equal_to_the_bit(tmp_path, kind, dtype):
    model = tiny_model().to(dtype)
    state = STATES[kind](model)
    loaded = load_state(save_state(state, tmp_path / "a.safetensors", model=model), model).state
    assert_equal(cache_tensors(loaded), cache_tensors(state))
    assert_equal(other_tensors(loaded), other_tensors(state))
    assert [type(layer) for layer in loaded.cache.layers] == [type(layer) for layer in state.copy().cache.layers]
    assert loaded.cache.get_seq_length() == state.cache.get_seq_length()
    assert loaded.needs == state.needs
    assert recorded(loaded, "softmax") == recorded(state, "softmax")
    assert torch.equal(loaded.counts(), state.counts())
    assert loaded.kv_bytes == state.kv_bytes


@pytest.mark.parametrize("method", [DENSE, RAGGED], ids=["dense", "ragged"])
def test_a_loaded_state_is_evicted_from_as_the_saved_one(tmp_path, method):
    """The trace is saved too: the next turn's observers see the same queries."""
    model = tiny_model()
    turn = prompt_ids(2, seed=9)[0]
    state = method.start(model, prompt_ids(30)[0])
    loaded = load_state(save_state(state, tmp_path, model=model), tiny_model()).state
    from_saved: Any = Conversation(model, method, state)
    from_loaded: Any = Conversation(tiny_model(), method, loaded)
    options = {"max_new_tokens": 6, "do_sample": False}
    assert torch.equal(from_loaded.say(turn, **options), from_saved.say(turn, **options))
    assert_equal(recorded(from_loaded.state, "queries"), recorded(from_saved.state, "queries"))


@pytest.mark.parametrize("kind", ["dense", "ragged batch", "received"])
def test_the_file_holds_the_tensors_and_a_small_header(tmp_path, kind):
    model = tiny_model()
    state = STATES[kind](model)
    file = save_state(state, tmp_path, model=model)
    tensor_bytes = bytes_of(cache_tensors(state)) + bytes_of(other_tensors(state))
    header_bytes = file.stat().st_size - tensor_bytes
    assert 0 < header_bytes < 8192


def test_a_folder_or_a_file_is_named_and_replaced_at_once(tmp_path):
    model = tiny_model()
    in_folder = save_state(STATES["dense"](model), tmp_path / "new" / "folder", model=model)
    assert in_folder.name == "state.safetensors"
    file = save_state(STATES["dense"](model), str(tmp_path / "one.safetensors"), model=model)
    assert file == tmp_path / "one.safetensors"
    ragged = STATES["ragged"](model)
    save_state(ragged, file, model=model)
    assert torch.equal(load_state(file, model).state.counts(), ragged.counts())
    assert sorted(os.listdir(tmp_path)) == ["new", "one.safetensors"]


@pytest.mark.parametrize(
    ("changes", "field", "code"),
    [
        ({"num_hidden_layers": 2}, "layers", "model"),
        ({"vocab_size": 64}, "vocabulary", "model"),
        ({"seed": 1}, "model", "conflict"),
    ],
)
def test_another_target_is_refused(tmp_path, changes, field, code):
    model = tiny_model()
    model.config.name_or_path = "ada/tiny"
    file = save_state(STATES["ragged"](model), tmp_path, model=model)
    with refused(field, code) as error:
        load_state(tmp_path, tiny_model(**changes))
    assert str(file) in str(error.value)
    assert "'ada/tiny'" in str(error.value)
    with refused("dtype", "model"):
        load_state(tmp_path, tiny_model().bfloat16())
    if "seed" not in changes:
        with refused("state", "model"):
            save_state(STATES["ragged"](model), tmp_path, model=tiny_model(**changes))


def test_the_tokenizer_is_compared_where_both_are_known(tmp_path):
    model = tiny_model()
    tokenizer = tiny_tokenizer()
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
    values = json.loads(header_of(file)["keepsight_state"]) | changes
    if tensors is None:
        tensors = load_file(file)
    save_file(tensors, file, metadata={"keepsight_state": json.dumps(values)})


def cut_short(file):
    file.write_bytes(file.read_bytes()[:-100])


def flip_a_bit(file):
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
    ("damage", "code"),
    [
        (lambda file: file.unlink(), "missing"),
        (cut_short, "file"),
        (lambda file: file.write_bytes(b"\x80\x04pickled" * 9), "file"),
        (flip_a_bit, "file"),
        (lambda file: rewrite(file, seen=31), "file"),
        (drop_tensor, "file"),
        (lambda file: save_file(load_file(file), file), "file"),
        (lambda file: save_file(load_file(file), file, metadata={"keepsight_state": "{"}), "file"),
        (drop_key, "file"),
        (lambda file: rewrite(file, shape=[3]), "file"),
    ],
)
def test_what_is_wrong_with_a_file_is_said_in_one_line(tmp_path, damage, code):
    model = tiny_model()
    file = save_state(STATES["ragged"](model), tmp_path, model=model)
    damage(file)
    with refused("state.safetensors", code) as error:
        load_state(tmp_path, model)
    assert str(error.value).startswith(str(file))
