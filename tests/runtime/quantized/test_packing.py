"""Packing and quantisation against loops written from the definitions."""

import pytest
import torch

from keepsight.errors import UserError
from keepsight.runtime.layer import ROOM
from keepsight.runtime.quantized.packing import BITS, Packed, PackedRoom, Quantizer, pack_codes, unpack_codes
from tests.close import assert_close


def _random(*shape, dtype=torch.float32, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def _slow(group, bits, one_bit):
    """One group, number by number."""
    low, high = min(group), max(group)
    if bits == 1 and one_bit == "middles":
        zero, scale = (3 * low + high) / 4, (high - low) / 2
    else:
        zero, scale = low, (high - low) / (2**bits - 1)
    if scale == 0:
        return [0] * len(group), [zero] * len(group)
    codes = [min(max(round((each - zero) / scale), 0), 2**bits - 1) for each in group]
    return codes, [code * scale + zero for code in codes]


@pytest.mark.parametrize("bits", BITS)
def test_element_e_is_in_the_bits_from_bits_times_e(bits):
    codes = torch.randint(0, 2**bits, (3, 64), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    packed = pack_codes(codes, bits)
    assert packed.shape == (3, 8 * bits)
    assert torch.equal(unpack_codes(packed, bits), codes)
    for row, each in zip(codes.tolist(), packed, strict=True):
        number = int.from_bytes(bytes(each.tolist()), "little")
        assert [(number >> bits * index) & (2**bits - 1) for index in range(64)] == row


@pytest.mark.parametrize("one_bit", ["middles", "extremes"])
@pytest.mark.parametrize("bits", BITS)
def test_groups_are_quantised_by_the_definition(bits, one_bit):
    quantizer, groups = Quantizer(bits, 8, one_bit), _random(5, 8, dtype=torch.float64)
    packed = quantizer.pack(groups)
    for group, codes, back in zip(
        groups.tolist(), unpack_codes(packed.codes, bits).tolist(), quantizer.unpack(packed), strict=True
    ):
        slow_codes, slow_back = _slow(group, bits, one_bit)
        assert codes == slow_codes
        assert_close(back, torch.tensor(slow_back, dtype=torch.float64), torch.float32)


@pytest.mark.parametrize("bits", BITS)
def test_keys_are_grouped_over_tokens_and_values_over_channels(bits):
    quantizer, states = Quantizer(bits, 8), _random(2, 3, 16, 24)
    keys = quantizer.unpack_keys(quantizer.pack_keys(states))
    values = quantizer.unpack_values(quantizer.pack_values(states))
    for row, head in [(0, 0), (1, 2)]:
        for start in (0, 8):
            for channel in (0, 7, 23):
                expected = _slow(states[row, head, start : start + 8, channel].tolist(), bits, "middles")[1]
                assert_close(keys[row, head, start : start + 8, channel], torch.tensor(expected))
        for token in (0, 5, 15):
            for start in (0, 8, 16):
                expected = _slow(states[row, head, token, start : start + 8].tolist(), bits, "middles")[1]
                assert_close(values[row, head, token, start : start + 8], torch.tensor(expected))


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


@pytest.mark.parametrize("options", [{"bits": 3}, {"group": 12}, {"one_bit": "median"}])
def test_what_is_not_offered_is_refused(options):
    with pytest.raises(UserError, match=next(iter(options))):
        Quantizer(**options)


def test_head_dimension_must_be_divisible():
    Quantizer(2, 32).check_head(64)
    with pytest.raises(UserError, match="group 64 does not divide the head dimension 96; choose a group of 8, 16, 24"):
        Quantizer(2, 64).check_head(96)


QUANTIZER = Quantizer(2, 8)


def groups(count: int, seed: int = 0) -> Packed:
    return QUANTIZER.pack_values(torch.randn(1, 2, count, 16, generator=torch.Generator().manual_seed(seed)))


def joined(*parts: Packed) -> Packed:
    return Packed(*(torch.cat(each, dim=2) for each in zip(*parts, strict=True)))


def same(one: Packed, other: Packed) -> bool:
    return all(torch.equal(*pair) for pair in zip(one, other, strict=True))


def test_appended_groups_follow_in_place() -> None:
    room, held = PackedRoom().append(groups(0), groups(100))
    assert held.codes.untyped_storage().nbytes() == held.codes.numel(), "a prompt takes no more than it needs"
    expected, places = groups(100), []
    for token in range(ROOM + 5):
        room, held = room.append(held, groups(1, token))
        expected = joined(expected, groups(1, token))
        places.append(held.codes.data_ptr())
    assert same(held, expected)
    assert len({*places}) == 2, "moved once when the first token came, and once when the room was full"


@pytest.mark.parametrize("count", [1, ROOM + 1])
def test_views_from_before_stay_valid_and_can_be_appended_to(count: int) -> None:
    room, first = PackedRoom().append(groups(0), groups(10))
    room, first = room.append(first, groups(1))
    before = Packed(*(each.clone() for each in first))
    one_room, one = room.append(first, groups(count, 1))
    other_room, other = room.append(first, groups(2, 2))
    again_room, again = one_room.append(one, groups(1, 3))
    assert same(first, before)
    assert same(one, joined(first, groups(count, 1)))
    assert same(other, joined(first, groups(2, 2)))
    assert same(again, joined(one, groups(1, 3)))
    assert other_room is not one_room and again_room is one_room
