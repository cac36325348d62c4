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

WIDTH = 16
GROUP = 3
"""Query heads of a KV head."""
SCALING = 0.25
RESIDUAL = 16
QUANTIZER = Quantizer(2, 8)
SMALL = Kivi(2, 8, RESIDUAL)


def random_tensor(*shape, dtype=torch.float32, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def random_states(length, seed=0, heads=2):
    """Keys, values or queries [2, heads, length, WIDTH]."""
    return random_tensor(2, heads, length, WIDTH, seed=seed)


def dense_attention(queries, keys, values):
    """Queries [B, H, q, d] that see all keys and values [B, K, S, d] -> [B, q, H, d]."""
    keys = keys.repeat_interleave(GROUP, dim=1)
    values = values.repeat_interleave(GROUP, dim=1)
    weights = (SCALING * queries @ keys.transpose(-1, -2)).softmax(dim=-1)
    return (weights @ values).transpose(1, 2)


def packed_entries_of(state) -> list[Any]:
    return [layer.packed for layer in state.layers]


@pytest.mark.parametrize(("extra", "recent_keys", "recent_values"), [(-1, 15, 15), (0, 0, 16), (1, 1, 16), (21, 5, 16)])
def test_residual_lengths(extra, recent_keys, recent_values):
    """The same whether the tokens come at once or one by one."""
    length = RESIDUAL + extra
    keys = random_states(length)
    values = random_states(length, seed=1)
    at_once = PackedEntries.pack(QUANTIZER, RESIDUAL, keys, values)
    layer = PackedLayer(PackedEntries.pack(QUANTIZER, RESIDUAL, keys[:, :, :3], values[:, :, :3]), 3)
    for token in range(3, length):
        layer.append(keys[:, :, token : token + 1], values[:, :, token : token + 1])
        layer.pack()
    read_keys, read_values, _ = dequantised(QUANTIZER, RESIDUAL, keys, values)
    for packed in (at_once, layer.packed):
        assert packed.recent_keys.shape[2] == recent_keys
        assert packed.recent_values.shape[2] == recent_values
        assert packed.length == length
        assert_close(packed.keys(), read_keys)
        assert_close(packed.values(), read_values)


def test_attention_equals_dense_attention_over_what_is_unpacked():
    keys = random_states(90)
    values = random_states(90, seed=1)
    queries = random_states(90, seed=2, heads=2 * GROUP)
    layer = PackedLayer(PackedEntries.pack(QUANTIZER, RESIDUAL, keys[:, :, :50], values[:, :, :50]), 50)
    new_keys, new_values = layer.update(keys[:, :, 50:], values[:, :, 50:])
    output = layer.attend(queries[:, :, 50:], new_keys, new_values, Softmax(SCALING))
    for token in range(50, 90):
        before = slice(0, token)
        newest = slice(token, token + 1)
        old_keys, old_values, _ = dequantised(QUANTIZER, RESIDUAL, keys[:, :, before], values[:, :, before])
        read_keys = torch.cat([old_keys, keys[:, :, newest]], dim=2)
        read_values = torch.cat([old_values, values[:, :, newest]], dim=2)
        expected = dense_attention(queries[:, :, newest], read_keys, read_values)
        assert_close(output[:, token - 50], expected[:, 0])


def test_prefill_packs_layer_by_layer_to_the_same_state():
    model = tiny_model(head_dim=WIDTH)
    ids, _ = prompt_ids(50, 50)
    expected = SMALL.compress_state(model, prefill(model, ids))
    for chunk in (None, 13):
        state = SMALL.start(model, ids, chunk=chunk)
        assert_close(state.logits, expected.logits)
        assert state.length == 50
        assert state.kv_bytes == expected.kv_bytes
        assert state.counts().tolist() == expected.counts().tolist()
        for packed, expected_packed in zip(packed_entries_of(state), packed_entries_of(expected), strict=True):
            assert_close(packed.recent_values, expected_packed.recent_values)
            assert_close(packed.packed_keys.scale, expected_packed.packed_keys.scale)


def bytes_of(state):
    """Of all tensors, and of their storages."""
    tensors = []
    for packed in packed_entries_of(state):
        tensors += [*packed.packed_keys, *packed.packed_values, packed.recent_keys, packed.recent_values]
    tensor_bytes = sum(tensor.nbytes for tensor in tensors)
    storage_bytes = sum(tensor.untyped_storage().nbytes() for tensor in tensors)
    return tensor_bytes, storage_bytes


def test_bytes_are_those_of_the_tensors():
    model = tiny_model(head_dim=WIDTH)
    state = SMALL.start(model, prompt_ids(50)[0])
    tensor_bytes, storage_bytes = bytes_of(state)
    assert state.kv_bytes == tensor_bytes
    assert state.kv_bytes == storage_bytes, "a prompt takes no more memory than it needs"

    state, _ = read(model, state, prompt_ids(5, seed=1)[0])
    tensor_bytes, storage_bytes = bytes_of(state)
    heads = 3 * 2  # 3 layers of 2 KV heads
    room = heads * ROOM * (WIDTH * 2 / 8 + WIDTH / 8 * 2 * 4)  # for more values
    assert state.kv_bytes == tensor_bytes <= storage_bytes <= tensor_bytes + room

    # Of 55 tokens, 48 keys and 39 values are packed, with 2 numbers of 4 bytes for 8 codes of 2 bits.
    codes = (48 + 39) * WIDTH * 2 / 8
    numbers = (48 + 39) * WIDTH / 8 * 2 * 4
    recent = (7 + 16) * WIDTH * 4
    assert state.kv_bytes == heads * (codes + numbers + recent)


def test_copies_share_what_is_packed_and_go_their_own_ways():
    """Through residuals and rooms that fill."""
    model = tiny_model(head_dim=WIDTH)
    ids = prompt_ids(50)[0]
    prefix = prompt_ids(9, seed=3)[0]
    state, _ = read(model, SMALL.start(model, ids), prefix)
    for seed, branch in enumerate((state.copy(), state.copy(), state)):
        answer = prompt_ids(20 + ROOM, seed=seed)[0]
        expected = read(model, SMALL.start(model, ids), torch.cat([prefix, answer], dim=1))[1][:, 9:]
        assert_close(read(model, branch, answer)[1], expected)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_dot_products_beyond_float16(dtype):
    """Of 300 x 300 x 16 and more: the attention is that of float32, not of an overflow."""
    keys = (300 * random_states(40)).to(dtype)
    values = random_states(40, seed=1).to(dtype)
    queries = (300 * random_states(1, seed=2, heads=2 * GROUP)).to(dtype)
    packed = PackedEntries.pack(QUANTIZER, RESIDUAL, keys, values)
    output = attend_packed(queries, packed, Softmax(SCALING))[0]
    expected = dense_attention(queries.float(), packed.keys().float(), packed.values().float())
    assert_close(output.float(), expected, dtype)


@pytest.mark.parametrize("inner", [SnapKV(32, window=4), PyramidKV(32, window=4)], ids=["snapkv", "pyramidkv"])
def test_what_a_method_keeps_can_be_packed(inner):
    """With a residual that holds all of it the answers are those of the method alone."""
    model = tiny_model(head_dim=WIDTH)
    ids = prompt_ids(60)[0]
    answer = prompt_ids(9, seed=1)[0]
    alone = inner.start(model, ids)
    expected, _ = score_answer(model, alone.copy(), answer)
    all_recent = Kivi(2, 8, 128, inner=inner)
    nll, _ = score_answer(model, all_recent.start(model, ids), answer)
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


def slow_quantized(group, bits, one_bit="middles"):
    """Codes and values of one group, number by number."""
    low = min(group)
    high = max(group)
    if bits == 1 and one_bit == "middles":
        zero = (3 * low + high) / 4
        scale = (high - low) / 2
    else:
        zero = low
        scale = (high - low) / (2**bits - 1)
    codes = [min(max(round((number - zero) / scale), 0), 2**bits - 1) for number in group]
    return codes, [code * scale + zero for code in codes]


@pytest.mark.parametrize("bits", [1, 2, 4])
def test_element_e_is_in_the_bits_from_bits_times_e(bits):
    codes = torch.randint(0, 2**bits, (3, 64), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    packed = pack_codes(codes, bits)
    assert packed.shape == (3, 8 * bits)
    assert torch.equal(unpack_codes(packed, bits), codes)
    for row, packed_row in zip(codes.tolist(), packed, strict=True):
        number = int.from_bytes(bytes(packed_row.tolist()), "little")
        assert [(number >> bits * index) & (2**bits - 1) for index in range(64)] == row


@pytest.mark.parametrize(("bits", "one_bit"), [(1, "middles"), (1, "extremes"), (2, "middles"), (4, "middles")])
def test_keys_are_grouped_over_tokens_and_values_over_channels(bits, one_bit):
    quantizer = Quantizer(bits, 8, one_bit)
    states = random_tensor(2, 3, 16, 24, dtype=torch.float64)
    packed_keys = quantizer.pack_keys(states)
    keys = quantizer.unpack_keys(packed_keys)
    values = quantizer.unpack_values(quantizer.pack_values(states))
    for row, head, start, fixed in [(0, 0, 0, 0), (1, 2, 8, 7), (0, 1, 8, 15)]:
        grouped = slice(start, start + 8)
        codes, expected = slow_quantized(states[row, head, grouped, fixed].tolist(), bits, one_bit)
        assert unpack_codes(packed_keys.codes[row, head, start // 8, fixed], bits).tolist() == codes
        assert_close(keys[row, head, grouped, fixed], torch.tensor(expected).double(), torch.float32)
        _, expected = slow_quantized(states[row, head, fixed, grouped].tolist(), bits, one_bit)
        assert_close(values[row, head, fixed, grouped], torch.tensor(expected).double(), torch.float32)


@pytest.mark.parametrize(("bits", "dtype"), [(1, torch.float32), (2, torch.float16), (4, torch.bfloat16)])
def test_constant_groups_come_back_exactly(bits, dtype):
    groups = random_tensor(50, 1, dtype=dtype).expand(-1, 32)
    quantizer = Quantizer(bits)
    assert torch.equal(quantizer.unpack(quantizer.pack(groups)), groups)


def test_known_levels():
    """A half rounds to even, and one bit stands for the middles of the halves, or for the extremes."""
    packed = Quantizer(2, 8).pack(torch.tensor([0, 0.5, 1, 3, 3, 3, 3, 3]))
    assert unpack_codes(packed.codes, 2).tolist() == [0, 0, 1, 3, 3, 3, 3, 3]

    group = torch.tensor([0, 0.5, 1, 1.5, 2.5, 3, 3.5, 4])
    middles = Quantizer(1, 8, "middles")
    assert middles.unpack(middles.pack(group)).tolist() == [1, 1, 1, 1, 3, 3, 3, 3]
    extremes = Quantizer(1, 8, "extremes")
    assert extremes.unpack(extremes.pack(group)).tolist() == [0, 0, 0, 0, 4, 4, 4, 4]


@pytest.mark.parametrize("bits", [1, 2, 4])
def test_a_range_beyond_float16_stays_finite(bits):
    group = torch.tensor([-60000.0, 60000.0] * 4, dtype=torch.float16)
    for levels in ("middles", "extremes"):
        quantizer = Quantizer(bits, 8, levels)
        unpacked = quantizer.unpack(quantizer.pack(group)).float()
        low = unpacked[::2]
        high = unpacked[1::2]
        assert unpacked.isfinite().all()
        assert (high > low + 50000).all()


@pytest.mark.parametrize(("field", "value"), [("bits", 3), ("group", 12), ("one_bit", "median")])
def test_quantizers_of_bad_options_are_refused(field, value):
    with pytest.raises(UserError) as error:
        Quantizer(**{field: value})
    assert error.value.field == field
