"""Group quantization of KV entries to 1, 2 or 4 bits, and the packed entries of one layer.

KIVI (arXiv 2402.02750, section 3.3): keys are grouped per channel over neighboring tokens, values per token over
neighboring channels. At 1 bit KIVI's levels are a group's extremes, which inflates every entry; SpeCache
(arXiv 2503.16163, section 3.4, equation 3) takes the middles of the group's lower and upper half.
"""

import functools
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch
from torch import Tensor

from keepsight.errors import UserError
from keepsight.runtime.layer import spare

BITS = (1, 2, 4)
LEVELS = ("middles", "extremes")


class Packed(NamedTuple):
    """Quantized groups.

    Attributes:
        codes: [..., g * bits / 8] uint8; element e of a group is in the bits from bits * e on, little-endian.
        scale: [...], in the dtype of what was quantized.
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
    """Quantizes keys and values in groups.

    Attributes:
        bits: Bits per code: 1, 2 or 4.
        group: Number of neighbors that share a zero point and a scale; a multiple of 8.
        one_bit: Levels at 1 bit: `middles` of the group's halves (SpeCache), or its `extremes` (KIVI).

    Raises:
        UserError: a value is not supported.
    """

    bits: int = 2
    group: int = 32
    one_bit: str = "middles"

    def __post_init__(self) -> None:
        if type(self.bits) is not int or self.bits not in BITS:
            raise UserError(f"bits {self.bits!r} is not supported; choose one of {', '.join(map(str, BITS))}")
        if type(self.group) is not int or self.group < 8 or self.group % 8:
            raise UserError(f"group {self.group!r} must be a multiple of 8, such as 32 or 64")
        if self.one_bit not in LEVELS:
            raise UserError(f"one_bit {self.one_bit!r} is unknown; choose one of {', '.join(LEVELS)}")

    def check_head(self, width: int) -> None:
        """Raise a UserError where the group does not divide the head dimension."""
        if width % self.group:
            fitting = [str(each) for each in range(8, width + 1, 8) if width % each == 0]
            hint = f"choose a group of {', '.join(fitting)}" if fitting else "this model's values cannot be quantized"
            raise UserError(f"group {self.group} does not divide the head dimension {width}; {hint}")

    def pack_keys(self, keys: Tensor) -> Packed:
        """[B, K, T, d] with T a multiple of the group -> groups [B, K, T / g, d]."""
        return self.pack(keys.unflatten(2, (-1, self.group)).transpose(-1, -2))

    def unpack_keys(self, packed: Packed, out: Tensor | None = None) -> Tensor:
        """Groups [B, K, T / g, d] -> [B, K, T, d], written to `out` where it is given."""
        groups = None if out is None else out.unflatten(2, (-1, self.group)).transpose(-1, -2)
        return self.unpack(packed, groups).transpose(-1, -2).flatten(2, 3)

    def pack_values(self, values: Tensor) -> Packed:
        """[B, K, T, d] -> groups [B, K, T, d / g]."""
        return self.pack(values.unflatten(3, (-1, self.group)))

    def unpack_values(self, packed: Packed, out: Tensor | None = None) -> Tensor:
        """Groups [B, K, T, d / g] -> [B, K, T, d], written to `out` where it is given."""
        return self.unpack(packed, None if out is None else out.unflatten(3, (-1, self.group))).flatten(3, 4)

    def pack(self, groups: Tensor) -> Packed:
        """Quantize groups [..., g] of any float dtype. Ties round to even; a constant group is restored exactly."""
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
        """[..., g], in the dtype of the scale, written to `out` where it is given."""
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


class _GrowingGroups:
    """Preallocated memory to which groups are appended in place; earlier views of it stay valid.

    Only the memory behind the longest view is written: what is appended to a shorter view moves to new memory.
    """

    def __init__(self, first: Packed | None = None, capacity: int = 0) -> None:
        self._rows: tuple[Tensor, ...] = ()
        self._filled = 0
        if first is not None:
            self._filled = first.scale.shape[2]
            self._rows = tuple(part.new_empty(*part.shape[:2], capacity, *part.shape[3:]) for part in first)
            for rows, part in zip(self._rows, first, strict=True):
                rows[:, :, : self._filled] = part

    def append(self, packed: Packed, new: Packed) -> tuple["_GrowingGroups", Packed]:
        """Groups `packed` of this memory followed by `new` along dimension 2, and the memory that they are in."""
        before, after = packed.scale.shape[2], packed.scale.shape[2] + new.scale.shape[2]
        memory: _GrowingGroups = self
        if not self._rows or before != self._filled or after > self._rows[0].shape[2]:
            memory = _GrowingGroups(packed, after + (spare(after) if before else 0))
        for rows, part in zip(memory._rows, new, strict=True):
            rows[:, :, before:after] = part
        memory._filled = after
        return memory, Packed(*(rows[:, :, :after] for rows in memory._rows))


@dataclass(frozen=True)
class PackedEntries:
    """The packed entries of one layer; immutable: what is appended shares the memory of what is packed.

    Of T tokens the keys are packed up to the last multiple of the residual R, R tokens at a time, so that 0 to R - 1
    recent keys stay in full precision; values are packed token by token, all but the last R.

    Attributes:
        quantizer: Bits and groups.
        residual: R, a multiple of the group.
        packed_keys: Groups [B, K, n / g, d] of the first n tokens.
        packed_values: Groups [B, K, m, d / g] of the first m <= n tokens.
        recent_keys: [B, K, T - n, d].
        recent_values: [B, K, T - m, d].
    """

    quantizer: Quantizer
    residual: int
    packed_keys: Packed
    packed_values: Packed
    recent_keys: Tensor
    recent_values: Tensor
    _key_memory: _GrowingGroups = field(default_factory=_GrowingGroups, repr=False)
    _value_memory: _GrowingGroups = field(default_factory=_GrowingGroups, repr=False)

    @classmethod
    def pack(cls, quantizer: Quantizer, residual: int, keys: Tensor, values: Tensor) -> "PackedEntries":
        """Pack the entries [B, K, T, d] of a prompt."""
        none = quantizer.pack_keys(keys[:, :, :0]), quantizer.pack_values(values[:, :, :0])
        return cls(quantizer, residual, *none, keys, values).pack_overflow()

    @property
    def packed_length(self) -> int:
        """Number of tokens whose keys are packed; no other values are."""
        return self.packed_keys.scale.shape[2] * self.quantizer.group

    @property
    def length(self) -> int:
        """Number of entries per KV head."""
        return self.packed_length + self.recent_keys.shape[2]

    @property
    def bytes(self) -> int:
        """Bytes of codes, scales, zero points and recent entries."""
        recent = self.recent_keys.nbytes + self.recent_values.nbytes
        return self.packed_keys.bytes + self.packed_values.bytes + recent

    def append(self, keys: Tensor, values: Tensor) -> "PackedEntries":
        """These entries and more [B, K, q, d] in full precision; nothing is packed yet."""
        return replace(
            self,
            recent_keys=torch.cat([self.recent_keys, keys], dim=2),
            recent_values=torch.cat([self.recent_values, values], dim=2),
        )

    def pack_overflow(self) -> "PackedEntries":
        """The entries with whatever exceeds the residual packed."""
        recent, old = self.recent_keys.shape[2], max(self.recent_values.shape[2] - self.residual, 0)
        full, packed = recent - recent % self.residual, self
        if full:
            memory, keys = self._key_memory.append(
                self.packed_keys, self.quantizer.pack_keys(self.recent_keys[:, :, :full])
            )
            rest = self.recent_keys[:, :, full:].clone()  # a slice would keep the whole prompt alive
            packed = replace(packed, packed_keys=keys, recent_keys=rest, _key_memory=memory)
        if old:
            memory, values = self._value_memory.append(
                self.packed_values, self.quantizer.pack_values(self.recent_values[:, :, :old])
            )
            rest = self.recent_values[:, :, old:].clone()
            packed = replace(packed, packed_values=values, recent_values=rest, _value_memory=memory)
        return packed

    def keys(self) -> Tensor:
        """All keys [B, K, T, d], dequantized; a copy."""
        keys = _empty(self.recent_keys, packed := self.packed_length)
        self.quantizer.unpack_keys(self.packed_keys, keys[:, :, :packed])
        keys[:, :, packed:] = self.recent_keys
        return keys

    def values(self) -> Tensor:
        """All values [B, K, T, d], dequantized; a copy."""
        values = _empty(self.recent_values, packed := self.packed_values.scale.shape[2])
        self.quantizer.unpack_values(self.packed_values, values[:, :, :packed])
        values[:, :, packed:] = self.recent_values
        return values

    def recent(self) -> tuple[Tensor, Tensor]:
        """Keys and values [B, K, T - n, d] of the tokens whose keys are not packed."""
        return self.recent_keys, self.recent_values[:, :, self.packed_length - self.packed_values.scale.shape[2] :]


def _empty(recent: Tensor, packed: int) -> Tensor:
    return recent.new_empty(*recent.shape[:2], packed + recent.shape[2], recent.shape[3])
