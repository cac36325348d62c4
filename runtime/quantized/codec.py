"""Group quantisation to 1, 2 or 4 bits: each group has a zero point and a scale, codes are packed into bytes.

The groups are those of KIVI (arXiv 2402.02750, section 3.3): keys per channel, over neighbouring tokens; values per
token, over neighbouring channels. At 1 bit KIVI's two levels are a group's extremes, which inflates every entry;
SpeCache (arXiv 2503.16163, section 3.4, equation 3) takes the middles of the group's lower and upper half.
"""

import functools
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from keepsight.errors import UserError

BITS = (1, 2, 4)
LEVELS = ("middles", "extremes")


class Packed(NamedTuple):
    """Quantised groups.

    Attributes:
        codes: [..., g * bits / 8] uint8. Element e of a group is in the bits from bits * e on, little-endian.
        scale: [...], in the dtype of what was quantised.
        zero: [...], the value of code 0; the same dtype.
    """

    codes: Tensor
    scale: Tensor
    zero: Tensor

    @property
    def bytes(self) -> int:
        """Bytes of all three."""
        return sum(each.nbytes for each in self)


@dataclass(frozen=True)
class Quantizer:
    """How keys and values become codes and come back.

    Attributes:
        bits: Bits per code: 1, 2 or 4.
        group: Number of neighbours that share a zero point and a scale.
        one_bit: Levels at 1 bit: `middles` of the group's halves (SpeCache), or its `extremes` (KIVI).

    Raises:
        UserError: a value is not offered; one line names it.
    """

    bits: int = 2
    group: int = 32
    one_bit: str = "middles"

    def __post_init__(self) -> None:
        if type(self.bits) is not int or self.bits not in BITS:
            raise UserError(f"bits {self.bits!r} is not offered; choose one of {', '.join(map(str, BITS))}")
        if type(self.group) is not int or self.group < 8 or self.group % 8:
            raise UserError(f"group {self.group!r} must be a multiple of 8, such as 32 or 64")
        if self.one_bit not in LEVELS:
            raise UserError(f"one_bit {self.one_bit!r} is unknown; choose one of {', '.join(LEVELS)}")

    def check_head(self, width: int) -> None:
        """Refuse a head dimension that groups do not divide.

        Raises:
            UserError: with one line that says why.
        """
        if width % self.group:
            fitting = [str(each) for each in range(8, width + 1, 8) if width % each == 0]
            hint = f"choose a group of {', '.join(fitting)}" if fitting else "this model's values cannot be quantised"
            raise UserError(f"group {self.group} does not divide the head dimension {width}; {hint}")

    def pack_keys(self, keys: Tensor) -> Packed:
        """[B, K, T, d] with T a multiple of the group -> groups [B, K, T / g, d]."""
        return self.pack(keys.unflatten(2, (-1, self.group)).transpose(-1, -2))

    def unpack_keys(self, packed: Packed, out: Tensor | None = None) -> Tensor:
        """Groups [B, K, T / g, d] -> [B, K, T, d], in `out` where it is given."""
        groups = None if out is None else out.unflatten(2, (-1, self.group)).transpose(-1, -2)
        return self.unpack(packed, groups).transpose(-1, -2).flatten(2, 3)

    def pack_values(self, values: Tensor) -> Packed:
        """[B, K, T, d] -> groups [B, K, T, d / g]."""
        return self.pack(values.unflatten(3, (-1, self.group)))

    def unpack_values(self, packed: Packed, out: Tensor | None = None) -> Tensor:
        """Groups [B, K, T, d / g] -> [B, K, T, d], in `out` where it is given."""
        return self.unpack(packed, None if out is None else out.unflatten(3, (-1, self.group))).flatten(3, 4)

    def pack(self, groups: Tensor) -> Packed:
        """Quantise groups [..., g] of any float dtype. Ties round to even; a constant group comes back exactly."""
        low, high = (each.float() for each in torch.aminmax(groups, dim=-1))
        if self.bits == 1 and self.one_bit == "middles":
            zero, scale = low + (high - low) / 4, (high - low) / 2
        else:
            zero, scale = low, (high - low) / (2**self.bits - 1)
        zero, scale = zero.to(groups.dtype), scale.to(groups.dtype)
        # A constant group has the scale 0, and is 0 above its zero point.
        step = scale.float().clamp(min=torch.finfo(torch.float32).tiny)[..., None]
        # Under `middles` the largest element is at 1.5, which rounds to 2: codes are clamped.
        codes = ((groups.float() - zero.float()[..., None]) / step).round_().clamp_(0, 2**self.bits - 1)
        return Packed(pack_codes(codes.to(torch.uint8), self.bits), scale, zero)

    def unpack(self, packed: Packed, out: Tensor | None = None) -> Tensor:
        """[..., g], in the dtype of the scale, and in `out` where it is given."""
        codes = unpack_codes(packed.codes, self.bits)
        return torch.addcmul(packed.zero[..., None], codes, packed.scale[..., None], out=out)


def pack_codes(codes: Tensor, bits: int) -> Tensor:
    """[..., n] uint8 below 2 ** bits -> [..., n * bits / 8] uint8, little-endian."""
    return (codes.unflatten(-1, (-1, 8 // bits)) << _shifts(bits, codes.device)).sum(dim=-1, dtype=torch.uint8)


def unpack_codes(packed: Tensor, bits: int) -> Tensor:
    """The inverse of `pack_codes`."""
    return ((packed[..., None] >> _shifts(bits, packed.device)) & (2**bits - 1)).flatten(-2)


@functools.lru_cache(maxsize=8)
@torch.inference_mode(False)  # a cached tensor may be used in any mode
def _shifts(bits: int, device: torch.device) -> Tensor:
    return torch.arange(0, 8, bits, dtype=torch.uint8, device=device)
