"""Packing and quantisation against loops written from the definitions."""

import pytest
import torch

from keepsight.errors import UserError
from keepsight.runtime.quantized.packing import Quantizer, pack_codes, unpack_codes
from tests.close import assert_close


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


@pytest.mark.parametrize("options", [{"bits": 3}, {"group": 12}, {"one_bit": "median"}])
def test_bad_options_are_refused(options):
    with pytest.raises(UserError, match=next(iter(options))):
        Quantizer(**options)
