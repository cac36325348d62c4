"""KIVI as a cache layer and as a method, against dense attention over what was unpacked; packing, against loops."""

from typing import Any

import pytest
import torch

from keepsight import generate
from keepsight.errors import UserError
from keepsight.runtime.attention import Softmax
from keepsight.runtime.layer import ROOM
from keepsight.runtime.methods import AdaKV, PyramidKV, SnapKV
from keepsight.runtime.quantized.kernel import attend_packed
from keepsight.runtime.quantized.kivi import Kivi, PackedLayer
from keepsight.runtime.quantized.packing import PackedEntries, Quantizer, pack_codes, unpack_codes
from keepsight.runtime.sparse_read.selection import Quest
from keepsight.runtime.state import prefill, read
from tests.close import assert_close
from tests.refused import refused
from tests.runtime.quantized.slow_specache import dequantised
from tests.runtime.scoring import score_answer
from tests.tiny import prompt_ids, tiny_model

WIDTH, RESIDUAL, QUANTIZER = 16, 16, Quantizer(2, 8)
SMALL = Kivi(2, 8, RESIDUAL)


def _states(length, seed=0, kv_heads=2):
    return torch.randn(2, kv_heads, length, WIDTH, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(("extra", "keys", "values"), [(-1, 15, 15), (0, 0, 16), (1, 1, 16), (21, 5, 16)])
def test_residual_lengths(extra, keys, values):
    """The same whether the tokens come at once or one by one."""
    length = RESIDUAL + extra
    both = _states(length), _states(length, 1)
    whole = PackedEntries.pack(QUANTIZER, RESIDUAL, *both)
    layer = PackedLayer(PackedEntries.pack(QUANTIZER, RESIDUAL, *(each[:, :, :3] for each in both)), 3)
    for token in range(3, length):
        layer.append(*(each[:, :, token : token + 1] for each in both))
        layer.pack()
    expected = dequantised(QUANTIZER, RESIDUAL, *both)[:2]
    for packed in (whole, layer.packed):
        assert (packed.recent_keys.shape[2], packed.recent_values.shape[2], packed.length) == (keys, values, length)
        assert_close((packed.keys(), packed.values()), expected)


def test_attention_equals_dense_attention_over_what_is_unpacked():
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


def test_prefill_packs_layer_by_layer_to_the_same_state():
    model = tiny_model(head_dim=WIDTH)
    ids, _ = prompt_ids(50, 50)
    whole = SMALL.compress_state(model, prefill(model, ids))
    for chunk in (None, 13):
        state = SMALL.start(model, ids, chunk=chunk)
        assert_close(state.logits, whole.logits)
        assert (state.length, state.kv_bytes, state.counts().tolist()) == (50, whole.kv_bytes, whole.counts().tolist())
        for one, other in zip(packed_of(state), packed_of(whole), strict=True):
            assert_close(one.recent_values, other.recent_values)
            assert_close(one.packed_keys.scale, other.packed_keys.scale)


def packed_of(state) -> list[Any]:
    return [layer.packed for layer in state.layers]


def _bytes(state):
    """Of all tensors, and of their storages."""
    tensors = []
    for each in packed_of(state):
        tensors += [*each.packed_keys, *each.packed_values, each.recent_keys, each.recent_values]
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


def test_copies_share_what_is_packed_and_go_their_own_ways():
    """Through residuals and rooms that fill."""
    model, ids, first = tiny_model(head_dim=WIDTH), prompt_ids(50)[0], prompt_ids(9, seed=3)[0]
    state, _ = read(model, SMALL.start(model, ids), first)
    for seed, each in enumerate((state.copy(), state.copy(), state)):
        answer = prompt_ids(20 + ROOM, seed=seed)[0]
        expected = read(model, SMALL.start(model, ids), torch.cat([first, answer], dim=1))[1][:, 9:]
        assert_close(read(model, each, answer)[1], expected)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_dot_products_beyond_float16(dtype):
    """Of 300 x 300 x 16 and more: the attention is that of float32, not of an overflow."""
    keys, values, queries = (300 * _states(40)).to(dtype), _states(40, 1).to(dtype), (300 * _states(1, 2, 6)).to(dtype)
    packed = PackedEntries.pack(QUANTIZER, RESIDUAL, keys, values)
    output = attend_packed(queries, packed, Softmax(0.25))[0]
    wide = [each.float().repeat_interleave(3, dim=1) for each in (packed.keys(), packed.values())]
    weights = (0.25 * queries.float() @ wide[0].transpose(-1, -2)).softmax(dim=-1)
    assert_close(output.float(), (weights @ wide[1]).transpose(1, 2), dtype)


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
    ("options", "field", "code"),
    [
        ({"residual": 16}, "residual", "range"),
        ({"inner": Kivi()}, "inner", "type"),
        ({"inner": Quest(32)}, "inner", "type"),
        ({"inner": AdaKV(20, window=4)}, "inner", "conflict"),
        ({"inner": SnapKV(32, window=4, every=8)}, "inner", "conflict"),
    ],
)
def test_bad_options_are_refused(options, field, code):
    with refused(field, code):
        Kivi(**options)


def test_bad_inputs_are_refused():
    model = tiny_model(head_dim=WIDTH)
    ids, mask = prompt_ids(40, 30)
    with refused("prompt", "conflict"):
        generate(model, ids, SMALL, attention_mask=mask, max_new_tokens=2)
    with refused("prompt", "conflict"):
        SMALL.compress_state(model, prefill(model, ids, mask))
    with refused("group", "range"):
        Kivi().start(model, ids)


def _random(*shape, dtype=torch.float32, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def _slow(group, bits, one_bit="middles"):
    """One group, number by number."""
    low, high = min(group), max(group)
    if bits == 1 and one_bit == "middles":
        zero, scale = (3 * low + high) / 4, (high - low) / 2
    else:
        zero, scale = low, (high - low) / (2**bits - 1)
    codes = [min(max(round((each - zero) / scale), 0), 2**bits - 1) for each in group]
    return codes, [code * scale + zero for code in codes]


@pytest.mark.parametrize("bits", [1, 2, 4])
def test_element_e_is_in_the_bits_from_bits_times_e(bits):
    codes = torch.randint(0, 2**bits, (3, 64), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    packed = pack_codes(codes, bits)
    assert packed.shape == (3, 8 * bits)
    assert torch.equal(unpack_codes(packed, bits), codes)
    for row, each in zip(codes.tolist(), packed, strict=True):
        number = int.from_bytes(bytes(each.tolist()), "little")
        assert [(number >> bits * index) & (2**bits - 1) for index in range(64)] == row


@pytest.mark.parametrize(("bits", "one_bit"), [(1, "middles"), (1, "extremes"), (2, "middles"), (4, "middles")])
def test_keys_are_grouped_over_tokens_and_values_over_channels(bits, one_bit):
    quantizer, states = Quantizer(bits, 8, one_bit), _random(2, 3, 16, 24, dtype=torch.float64)
    packed = quantizer.pack_keys(states)
    keys, values = quantizer.unpack_keys(packed), quantizer.unpack_values(quantizer.pack_values(states))
    for row, head, start, other in [(0, 0, 0, 0), (1, 2, 8, 7), (0, 1, 8, 15)]:
        codes, expected = _slow(states[row, head, start : start + 8, other].tolist(), bits, one_bit)
        assert unpack_codes(packed.codes[row, head, start // 8, other], bits).tolist() == codes
        assert_close(keys[row, head, start : start + 8, other], torch.tensor(expected).double(), torch.float32)
        expected = _slow(states[row, head, other, start : start + 8].tolist(), bits, one_bit)[1]
        assert_close(values[row, head, other, start : start + 8], torch.tensor(expected).double(), torch.float32)


@pytest.mark.parametrize(("bits", "dtype"), [(1, torch.float32), (2, torch.float16), (4, torch.bfloat16)])
def test_constant_groups_come_back_exactly(bits, dtype):
    groups = _random(50, 1, dtype=dtype).expand(-1, 32)
    quantizer = Quantizer(bits)
    assert torch.equal(quantizer.unpack(quantizer.pack(groups)), groups)


def test_known_levels():
    """A half rounds to even, and one bit stands for the middles of the halves, or for the extremes."""
    packed = Quantizer(2, 8).pack(torch.tensor([0, 0.5, 1, 3, 3, 3, 3, 3]))
    assert unpack_codes(packed.codes, 2).tolist() == [0, 0, 1, 3, 3, 3, 3, 3]
    group = torch.tensor([0, 0.5, 1, 1.5, 2.5, 3, 3.5, 4])
    middles, extremes = (Quantizer(1, 8, levels) for levels in ("middles", "extremes"))
    assert middles.unpack(middles.pack(group)).tolist() == [1, 1, 1, 1, 3, 3, 3, 3]
    assert extremes.unpack(extremes.pack(group)).tolist() == [0, 0, 0, 0, 4, 4, 4, 4]


@pytest.mark.parametrize("bits", [1, 2, 4])
def test_a_range_beyond_float16_stays_finite(bits):
    group = torch.tensor([-60000.0, 60000.0] * 4, dtype=torch.float16)
    for levels in ("middles", "extremes"):
        quantizer = Quantizer(bits, 8, levels)
        back = quantizer.unpack(quantizer.pack(group)).float()
        assert back.isfinite().all() and (back[1::2] > back[::2] + 50000).all()


@pytest.mark.parametrize(("field", "value"), [("bits", 3), ("group", 12), ("one_bit", "median")])
def test_quantizers_of_bad_options_are_refused(field, value):
    with pytest.raises(UserError) as error:
        Quantizer(**{field: value})
    assert error.value.field == field
