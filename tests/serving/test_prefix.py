"""Prefixes: turned keys give the logits of the unturned cache, files are found by what placeholders spell."""

import hashlib
import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from keepsight import AdaKV, SnapKV
from keepsight.errors import UserError
from keepsight.runtime.allocate import Global
from keepsight.runtime.state import read
from keepsight.serving.export import Rotation, export, rotations_of, turned
from keepsight.serving.prefix import PrefixStore, digest_in, file_of, letters_of_id, placeholders, write_prefix
from tests.close import assert_close
from tests.families import family_model
from tests.refused import refused
from tests.tiny import prompt_ids, tiny_model

PROMPT = prompt_ids(90)[0]
AFTER = prompt_ids(6)[0]
METHOD = SnapKV(40, window=8)
TURNED = ("Llama 3", "Phi-3, Phi-4", "GLM-4", "SmolLM3", "Qwen3", "Qwen2.5-VL (text)")
"""Halves and neighbours rotated, in part or whole; layers without rotation; norms of keys; M-RoPE."""
SCALED = (
    {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e4},
    {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4, "original_max_position_embeddings": 64},
    {
        "rope_type": "llama3",
        "factor": 8.0,
        "rope_theta": 1e4,
        "original_max_position_embeddings": 64,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
    },
)


def logits(model, state, ids):
    """The logits of tokens that are read after a state."""
    return read(model, state, ids)[1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_only_a_wrong_turn_is_refused(dtype, monkeypatch):
    """What rounding does is accepted, in all dtypes; one position too far is not."""
    model = tiny_model().to(dtype)
    state = SnapKV(32, window=8).start(model, *prompt_ids(200))
    turned(model, state, 32)
    turn = Rotation.turn
    monkeypatch.setattr(Rotation, "turn", lambda self, keys, by: turn(self, keys, by + 1))
    with refused("model", "model"):
        turned(model, state, 32)


@pytest.mark.parametrize("method", [METHOD, AdaKV(40, window=8)], ids=["uniform", "ragged"])
@pytest.mark.parametrize("family", TURNED)
def test_turned_entries_answer_as_the_evicted_cache(family, method):
    model = family_model(family)
    state = method.start(model, PROMPT)
    after_turn = turned(model, state, 40)
    assert int((after_turn.lengths + after_turn.rope_offset)[0]) == 40
    assert_close(logits(model, after_turn, AFTER), logits(model, state, AFTER))


@pytest.mark.parametrize("scaling", SCALED, ids=lambda scaling: scaling["rope_type"])
def test_scaled_positions_are_turned_exactly(scaling):
    model = tiny_model(rope_parameters=scaling)
    state = METHOD.start(model, PROMPT)
    after_turn = turned(model, state, 40)
    assert_close(logits(model, after_turn, AFTER), logits(model, state, AFTER))


@pytest.mark.parametrize("family", ["Gemma 2", "DeepSeek-V3", "Qwen3-Next"])
def test_a_family_that_cannot_be_turned_is_refused(family):
    model = family_model(family)
    with refused("model", "model"):
        turned(model, METHOD.start(model, PROMPT), 40)


def test_positions_scaled_by_length_are_refused():
    model = tiny_model(rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4})
    with refused("model", "model"):
        rotations_of(model)


def test_the_wrong_turn_is_noticed(monkeypatch):
    model = tiny_model()
    state = METHOD.start(model, PROMPT)
    monkeypatch.setattr("keepsight.serving.export.rotations_of", lambda model: [None] * len(state.layers))
    with refused("model", "model"):
        turned(model, state, 40)


@pytest.mark.parametrize("base", [2, 10, 14, 16])
def test_placeholders_spell_their_digest(base):
    alphabet = list(range(100, 100 + base))
    letters = letters_of_id(base)
    for digest in ("0" * 32, "f" * 32, "00ab" * 8):
        ids = placeholders(digest, letters + 5, alphabet)
        assert digest_in(ids, alphabet) == digest
        assert digest_in(ids[: letters - 1], alphabet) is None
    assert digest_in([1, *ids], alphabet) is None
    assert digest_in(None, alphabet) is None
    with refused("budget", "range"):
        placeholders(digest, letters - 1, alphabet)


def test_a_prefix_is_read_as_it_was_written(tmp_path: Path):
    model = tiny_model()
    state = METHOD.start(model, PROMPT)
    digest, header = export(model, state, tmp_path, before="<|user|>")
    assert header.entries == 40
    assert header.seen == 90
    assert header.before == "<|user|>"
    store = PrefixStore(tmp_path)
    assert store.header(digest) == header
    keys = torch.stack([layer.keys[0] for layer in turned(model, state, 40).layers])
    assert torch.equal(store.tensors(digest)["keys"], keys)
    for _ in range(8):
        again, _ = export(model, state, tmp_path, before="<|user|>")
        assert again == digest
    other, _ = export(model, state, tmp_path, before="another")
    assert other != digest


def test_ragged_heads_are_stored_in_whole_pages(tmp_path: Path):
    model = tiny_model()
    state = SnapKV(32, window=8, allocate=Global(page=8)).start(model, PROMPT)
    counts = state.counts()[:, 0]
    entries = int(counts.sum())
    assert not (counts % 8).any()
    assert entries == 32 * counts.numel()
    assert counts.min() != counts.max()
    digest, header = export(model, state, tmp_path, page=8)
    tensors = PrefixStore(tmp_path).tensors(digest)
    assert header.entries == 32
    assert torch.equal(tensors["pages"] * 8, counts)
    assert tensors["keys"].shape == (entries, header.shape[2])
    unpaged = AdaKV(33, window=8).start(model, PROMPT)
    with refused("allocate", "conflict"):
        export(model, unpaged, tmp_path, page=8)
    with refused("allocate", "conflict"):
        export(model, unpaged, tmp_path)


def test_nothing_outside_the_folder_is_read(tmp_path: Path):
    model = tiny_model()
    digest, _ = export(model, METHOD.start(model, PROMPT), tmp_path / "other")
    root = tmp_path / "root"
    root.mkdir()
    os.symlink(file_of(tmp_path / "other", digest), file_of(root, digest))
    store = PrefixStore(root)
    for name in (digest, f"../other/{digest}", "/etc/passwd", "", "A" * 32, "0" * 32, f"{digest}\n"):
        with pytest.raises(UserError) as error:
            store.tensors(name)
        assert error.value.field == "prefix"


def test_a_changed_file_is_refused(tmp_path: Path):
    model = tiny_model()
    digest, _ = export(model, METHOD.start(model, PROMPT), tmp_path)
    path = file_of(tmp_path, digest)
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    with refused("prefix", "file"):
        PrefixStore(tmp_path).tensors(digest)


def test_a_file_that_changes_after_its_header_was_read_is_not_used(tmp_path: Path):
    model = tiny_model()
    digest, header = export(model, METHOD.start(model, PROMPT), tmp_path)
    store = PrefixStore(tmp_path)
    assert store.header(digest) == header
    assert not store._tensors, "the server's processes hold none"
    other, _ = export(model, SnapKV(48, window=8).start(model, PROMPT), tmp_path)
    file_of(tmp_path, digest).write_bytes(file_of(tmp_path, other).read_bytes())
    with refused("prefix", "file"):
        store.tensors(digest)


@pytest.mark.parametrize("changes", [{"entries": 64}, {"page": 16}, {"page": 0}, {"version": 2}, {"shape": (3, 2, 4)}])
def test_a_file_whose_header_and_tensors_differ_is_refused(tmp_path: Path, changes):
    model = tiny_model()
    state = SnapKV(32, window=8, allocate=Global(page=8)).start(model, PROMPT)
    digest, header = export(model, state, tmp_path, page=8)
    tensors = PrefixStore(tmp_path).tensors(digest)
    with_other_header = write_prefix(tmp_path, replace(header, **changes), tensors)
    pages = tensors["pages"].clone()
    pages[0, 0] -= 100
    pages[0, 1] += 100
    with_negative_pages = write_prefix(tmp_path, header, {**tensors, "pages": pages})
    for wrong in (with_other_header, with_negative_pages):
        with refused("prefix", "file"):
            PrefixStore(tmp_path).tensors(wrong)


@pytest.mark.parametrize(
    "data", [b"", b"1234567", b"\xff" * 64, b"\x02" + 7 * b"\0" + b"{}", b"\x02" + 7 * b"\0" + b"[]"]
)
def test_a_file_that_is_no_prefix_is_refused(tmp_path: Path, data):
    digest = hashlib.sha256(data).digest()[:16].hex()
    file_of(tmp_path, digest).write_bytes(data)
    with refused("prefix", "file"):
        PrefixStore(tmp_path).header(digest)


def test_a_store_reads_several_folders(tmp_path):
    model = tiny_model()
    state = METHOD.start(model, PROMPT)
    first, _ = export(model, state, tmp_path / "first", method="first")
    second, _ = export(model, state, tmp_path / "second", method="second")
    store_of_both = PrefixStore(tmp_path / "first", tmp_path / "second")
    assert store_of_both.header(first).method == "first"
    assert store_of_both.header(second).method == "second"
    with refused("prefix", "unknown"):
        PrefixStore(tmp_path / "first").header(second)
