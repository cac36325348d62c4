"""KIVI as a cache layer and as a method, against dense attention over what was unpacked."""

import pytest
import torch

from keepsight import generate
from keepsight.errors import UserError
from keepsight.runtime.attention import Softmax
from keepsight.runtime.layer import ROOM
from keepsight.runtime.methods import AdaKV, PyramidKV, SnapKV
from keepsight.runtime.quantized.kivi import Kivi, PackedLayer, packed_layers
from keepsight.runtime.quantized.packing import PackedEntries, Quantizer
from keepsight.runtime.state import prefill, read
from tests.close import assert_close
from tests.runtime.quantized.slow_specache import dequantised
from tests.runtime.scoring import score_answer
from tests.tiny import prompt_ids, tiny_model

WIDTH, RESIDUAL, QUANTIZER = 16, 16, Quantizer(2, 8)
SMALL = Kivi(2, 8, RESIDUAL)


def _states(length, seed=0, kv_heads=2):
    return torch.randn(2, kv_heads, length, WIDTH, generator=torch.Generator().manual_seed(seed))


def _tensors(packed):
    return [*packed.packed_keys, *packed.packed_values]


@pytest.mark.parametrize(("extra", "keys", "values"), [(-1, 15, 15), (0, 0, 16), (1, 1, 16), (16, 0, 16), (21, 5, 16)])
def test_residual_lengths(extra, keys, values):
    """The same whether the tokens come at once or one by one."""
    length = RESIDUAL + extra
    whole = PackedEntries.pack(QUANTIZER, RESIDUAL, _states(length), _states(length, 1))
    layer = PackedLayer(
        PackedEntries.pack(QUANTIZER, RESIDUAL, _states(length)[:, :, :3], _states(length, 1)[:, :, :3]), 3
    )
    for token in range(3, length):
        layer.add(*(each[:, :, token : token + 1] for each in (_states(length), _states(length, 1))))
        layer.settle()
    for held in (whole, layer.held):
        assert (held.recent_keys.shape[2], held.recent_values.shape[2], held.length) == (keys, values, length)
        for found, expected in zip(
            (held.keys(), held.values()),
            dequantised(QUANTIZER, RESIDUAL, _states(length), _states(length, 1)),
            strict=False,
        ):
            assert_close(found, expected)


def test_attention_equals_dense_attention_over_what_is_unpacked(monkeypatch):
    """Token after token, each of which unpacks all entries at once."""
    unpacked: list[int] = []
    monkeypatch.setattr(PackedEntries, "keys", _noting(PackedEntries.keys, unpacked))
    keys, values, queries = _states(90), _states(90, 1), _states(90, 2, kv_heads=6)
    layer = PackedLayer(PackedEntries.pack(QUANTIZER, RESIDUAL, keys[:, :, :50], values[:, :, :50]), 50)
    new_keys, new_values = layer.update(keys[:, :, 50:], values[:, :, 50:])
    output = layer.attend(queries[:, :, 50:], new_keys, new_values, Softmax(0.25))
    for token in range(50, 90):
        read_keys, read_values, _ = dequantised(QUANTIZER, RESIDUAL, keys[:, :, :token], values[:, :, :token])
        read_keys = torch.cat([read_keys, keys[:, :, token : token + 1]], dim=2).repeat_interleave(3, dim=1)
        read_values = torch.cat([read_values, values[:, :, token : token + 1]], dim=2).repeat_interleave(3, dim=1)
        weights = (0.25 * queries[:, :, token : token + 1] @ read_keys.transpose(-1, -2)).softmax(dim=-1)
        assert_close(output[:, token - 50], (weights @ read_values)[:, :, 0])
    assert unpacked == [*range(51, 91)]


def _noting(keys_of, lengths):
    def noting(self):
        keys = keys_of(self)
        lengths.append(keys.shape[2])
        return keys

    return noting


def test_prefill_packs_layer_by_layer_to_the_same_state():
    model = tiny_model(head_dim=WIDTH)
    ids, _ = prompt_ids(50, 50)
    whole = SMALL.compress(model, prefill(model, ids))
    for chunk in (None, 13):
        state = SMALL.start(model, ids, chunk=chunk)
        assert_close(state.logits, whole.logits)
        assert (state.length, state.kv_bytes, state.counts().tolist()) == (50, whole.kv_bytes, whole.counts().tolist())
        for one, other in zip(packed_layers(state.cache), packed_layers(whole.cache), strict=True):
            assert_close(one.held.recent_values, other.held.recent_values)
            assert_close(one.held.packed_keys.scale, other.held.packed_keys.scale)


def _bytes(state):
    """Of all tensors, and of the memory that they hold on to."""
    held = [layer.held for layer in packed_layers(state.cache)]
    tensors = [tensor for each in held for tensor in (*_tensors(each), each.recent_keys, each.recent_values)]
    return sum(each.nbytes for each in tensors), sum(each.untyped_storage().nbytes() for each in tensors)


def test_bytes_are_those_of_the_tensors():
    model = tiny_model(head_dim=WIDTH)
    state = SMALL.start(model, prompt_ids(50)[0])
    assert (state.kv_bytes,) * 2 == _bytes(state), "a prompt takes no more memory than it needs"
    state, _ = read(model, state, prompt_ids(5, seed=1)[0])
    tensors, memory = _bytes(state)
    room = 3 * 2 * ROOM * (WIDTH * 2 / 8 + WIDTH / 8 * 2 * 4)  # for more values, in 3 layers of 2 KV heads
    assert state.kv_bytes == tensors <= memory <= tensors + room
    # 55 tokens of 2 KV heads in 3 layers: 48 packed keys with 2 numbers of 4 bytes for 8 codes of 2 bits, 39 values
    codes, numbers, recent = (48 + 39) * WIDTH * 2 / 8, (48 + 39) * WIDTH / 8 * 2 * 4, (7 + 16) * WIDTH * 4
    assert state.kv_bytes == 3 * 2 * (codes + numbers + recent)


@pytest.mark.parametrize("inner", [SnapKV(32, window=4), PyramidKV(32, window=4)], ids=["snapkv", "pyramidkv"])
def test_what_a_method_keeps_can_be_packed(inner):
    """With a residual that holds all of it the answers are those of the method alone."""
    model = tiny_model(head_dim=WIDTH)
    ids, answer = prompt_ids(60)[0], prompt_ids(9, seed=1)[0]
    alone = inner.start(model, ids)
    expected, _ = score_answer(model, alone.copy(), answer)
    nll, _ = score_answer(model, Kivi(2, 8, 128, inner=inner).start(model, ids), answer)
    assert_close(nll, expected)
    packed = Kivi(2, 8, 8, inner=inner).start(model, ids)
    assert torch.equal(packed.counts(), alone.counts())
    assert packed.kv_bytes < alone.kv_bytes
    assert packed.lengths.tolist() == [60]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"residual": 16}, "residual 16 must be a multiple of the group of 32"),
        ({"bits": 8}, "bits 8 is not offered; choose one of 1, 2, 4"),
        ({"inner": Kivi()}, "packed again"),
        ({"inner": SnapKV(32, window=4, every=8)}, "every"),
    ],
)
def test_bad_options_are_refused(options, words):
    with pytest.raises(UserError, match=words):
        Kivi(**options)


def test_bad_inputs_are_refused():
    model = tiny_model(head_dim=WIDTH)
    ids, mask = prompt_ids(40, 30)
    with pytest.raises(UserError, match="different lengths"):
        generate(model, ids, SMALL, attention_mask=mask, max_new_tokens=2)
    with pytest.raises(UserError, match="different lengths"):
        SMALL.compress(model, prefill(model, ids, mask))
    with pytest.raises(UserError, match="group 32 does not divide the head dimension 16"):
        Kivi().start(model, ids)
    with pytest.raises(UserError, match="different numbers of entries"):
        Kivi(2, 8, 16, inner=AdaKV(20, window=4)).start(model, ids[:1])
