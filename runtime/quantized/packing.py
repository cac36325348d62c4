"""Packed KV entries: codes of 1, 2 or 4 bits with a scale and zero point per group, and the memory for them."""

import functools
from dataclasses import dataclass, field, replace
from typing import Annotated, Literal, NamedTuple

import torch
from annotated_types import Ge, MultipleOf
from torch import Tensor

from keepsight.errors import UserError, as_options
from keepsight.runtime.layer import spare

Bits = Annotated[int, Literal[1, 2, 4]]
Group = Annotated[int, Ge(8), MultipleOf(8), "a multiple of 8, such as 32 or 64"]
Levels = Annotated[str, Literal["middles", "extremes"]]


class Packed(NamedTuple):
    """Quantised groups.

    Attributes:
        codes: [..., g * bits / 8] uint8. Element e of a group is in the bits from bits * e on, little-endian.
        scale: [...], in the dtype of the quantised tensor.
        zero: [...], the value of code 0; the same dtype.
    """

    codes: Tensor
    scale: Tensor
    zero: Tensor

    @property
    def bytes(self) -> int:
        """Bytes of all three."""
        return self.codes.nbytes + self.scale.nbytes + self.zero.nbytes


@as_options
@dataclass(frozen=True)
class Quantizer:
    """Quantises keys and values.

    Attributes:
        bits: Bits per code: 1, 2 or 4.
        group: Number of neighbours that share a zero point and a scale.
        one_bit: Levels at 1 bit: `middles` of the group's halves (SpeCache), or its `extremes` (KIVI).

    Raises:
        UserError: a value is not offered; one line names it.
    """

    bits: Bits = 2
    group: Group = 32
    one_bit: Levels = "middles"

    def check_head(self, width: int) -> None:
        """Refuse a head dimension that groups do not divide."""
        if width % self.group == 0:
            return
        divisors = [str(divisor) for divisor in range(8, width + 1, 8) if width % divisor == 0]
        hint = "this model's values cannot be quantised"
        if divisors:
            hint = f"choose a group of {', '.join(divisors)}"
        raise UserError(
            f"group {self.group} does not divide the head dimension {width}; {hint}", field="group", code="range"
        )

    def pack_keys(self, keys: Tensor) -> Packed:
        """[B, K, T, d] with T a multiple of the group -> groups [B, K, T / g, d]."""
        return self.pack(keys.unflatten(2, (-1, self.group)).transpose(-1, -2))

    def unpack_keys(self, packed: Packed, out: Tensor | None = None) -> Tensor:
        """Groups [B, K, T / g, d] -> [B, K, T, d], in `out` if it is not None."""
        if out is not None:
            out = out.unflatten(2, (-1, self.group)).transpose(-1, -2)
        return self.unpack(packed, out).transpose(-1, -2).flatten(2, 3)

    def pack_values(self, values: Tensor) -> Packed:
        """[B, K, T, d] -> groups [B, K, T, d / g]."""
        return self.pack(values.unflatten(3, (-1, self.group)))

    def unpack_values(self, packed: Packed, out: Tensor | None = None) -> Tensor:
        """Groups [B, K, T, d / g] -> [B, K, T, d], in `out` if it is not None."""
        if out is not None:
            out = out.unflatten(3, (-1, self.group))
        return self.unpack(packed, out).flatten(3, 4)

    def pack(self, groups: Tensor) -> Packed:
        """Quantise groups [..., g] of any float dtype. Ties round to even; a constant group comes back exactly."""
        low, high = torch.aminmax(groups, dim=-1)
        low = low.float()
        span = high.float() - low
        if self.bits == 1 and self.one_bit == "middles":
            zero = low + span / 4
            scale = span / 2
        else:
            zero = low
            scale = span / (2**self.bits - 1)
        if groups.dtype == torch.float16:  # a group may span more than its largest number
            scale = scale.clamp(max=torch.finfo(torch.float16).max)
        zero = zero.to(groups.dtype)
        scale = scale.to(groups.dtype)

        # A constant group has the scale 0, and is 0 above its zero point.
        step = scale.float().clamp(min=torch.finfo(torch.float32).tiny)[..., None]
        # Under `middles` the largest element is at 1.5, which rounds to 2: codes are clamped.
        codes = ((groups.float() - zero.float()[..., None]) / step).round_().clamp_(0, 2**self.bits - 1)
        return Packed(pack_codes(codes.to(torch.uint8), self.bits), scale, zero)

    def unpack(self, packed: Packed, out: Tensor | None = None) -> Tensor:
        """[..., g], in the dtype of the scale, and in `out` if it is not None."""
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


class PackedRoom:
    """Memory to which groups are appended. Views of it stay valid: only memory after the longest view is written.

    Groups appended to a shorter view get a room of their own.
    """

    def __init__(self, memory: Packed | None = None) -> None:
        self._memory = memory
        self._filled = 0  # number of groups, along dimension 2, that are written

    def append(self, packed: Packed, new: Packed) -> tuple["PackedRoom", Packed]:
        """Append groups along dimension 2; returns the room that they are in, and all groups."""
        before = packed.scale.shape[2]
        after = before + new.scale.shape[2]
        room = self
        memory = self._memory
        if memory is None or before != self._filled or after > memory.scale.shape[2]:
            memory = _moved(packed, after)
            room = PackedRoom(memory)

        for rows, new_rows in zip(memory, new, strict=True):
            rows[:, :, before:after] = new_rows
        room._filled = after
        return room, Packed(memory.codes[:, :, :after], memory.scale[:, :, :after], memory.zero[:, :, :after])


def _moved(packed: Packed, after: int) -> Packed:
    """New memory that begins with `packed`, for `after` groups, and spare ones if `packed` has any."""
    before = packed.scale.shape[2]
    capacity = after
    if before > 0:
        capacity += spare(after)

    memory = []
    for stored in packed:
        rows = stored.new_empty(*stored.shape[:2], capacity, *stored.shape[3:])
        rows[:, :, :before] = stored
        memory.append(rows)
    return Packed(*memory)


@dataclass(frozen=True)
class PackedEntries:
    """The entries of one layer; immutable, and longer copies share the packed memory.

    Attributes:
        quantizer: Bits and groups.
        residual: R, a multiple of the group.
        packed_keys: Groups [B, K, n / g, d] of the first n tokens.
        packed_values: Groups [B, K, m, d / g] of the first m tokens; m is at most n.
        recent_keys: [B, K, T - n, d].
        recent_values: [B, K, T - m, d].
        key_room, value_room: Their memory.
    """

    quantizer: Quantizer
    residual: int
    packed_keys: Packed
    packed_values: Packed
    recent_keys: Tensor
    recent_values: Tensor
    key_room: PackedRoom = field(default_factory=PackedRoom, repr=False)
    value_room: PackedRoom = field(default_factory=PackedRoom, repr=False)

    @classmethod
    def pack(cls, quantizer: Quantizer, residual: int, keys: Tensor, values: Tensor) -> "PackedEntries":
        """Pack the entries [B, K, T, d] of a prompt."""
        no_keys = quantizer.pack_keys(keys[:, :, :0])
        no_values = quantizer.pack_values(values[:, :, :0])
        return cls(quantizer, residual, no_keys, no_values, keys, values).packed()

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
        return self.packed_keys.bytes + self.packed_values.bytes + self.recent_keys.nbytes + self.recent_values.nbytes

    def with_recent(self, keys: Tensor, values: Tensor) -> "PackedEntries":
        """The entries with more [B, K, q, d] in full precision; nothing is packed yet."""
        return replace(
            self,
            recent_keys=torch.cat([self.recent_keys, keys], dim=2),
            recent_values=torch.cat([self.recent_values, values], dim=2),
        )

    def packed(self) -> "PackedEntries":
        """The entries after packing keys in groups of `residual`, and all values but the last `residual`."""
        packed = self
        recent = self.recent_keys.shape[2]
        full = recent - recent % self.residual
        if full > 0:
            room, packed_keys = self.key_room.append(
                self.packed_keys, self.quantizer.pack_keys(self.recent_keys[:, :, :full])
            )
            recent_keys = self.recent_keys[:, :, full:].clone()  # a slice would keep the whole prompt alive
            packed = replace(packed, packed_keys=packed_keys, key_room=room, recent_keys=recent_keys)

        excess = self.recent_values.shape[2] - self.residual
        if excess > 0:
            room, packed_values = self.value_room.append(
                self.packed_values, self.quantizer.pack_values(self.recent_values[:, :, :excess])
            )
            recent_values = self.recent_values[:, :, excess:].clone()
            packed = replace(packed, packed_values=packed_values, value_room=room, recent_values=recent_values)
        return packed

    def keys(self) -> Tensor:
        """All keys [B, K, T, d], a copy."""
        batch, kv_heads, _, width = self.recent_keys.shape
        packed_length = self.packed_length
        keys = self.recent_keys.new_empty(batch, kv_heads, self.length, width)
        self.quantizer.unpack_keys(self.packed_keys, keys[:, :, :packed_length])
        keys[:, :, packed_length:] = self.recent_keys
        return keys

    def values(self) -> Tensor:
        """All values [B, K, T, d], a copy."""
        batch, kv_heads, _, width = self.recent_values.shape
        packed_length = self.packed_values.scale.shape[2]
        values = self.recent_values.new_empty(batch, kv_heads, self.length, width)
        self.quantizer.unpack_values(self.packed_values, values[:, :, :packed_length])
        values[:, :, packed_length:] = self.recent_values
        return values

    def recent(self) -> tuple[Tensor, Tensor]:
        """Keys and values [B, K, T - n, d] of the tokens whose keys are not packed."""
        start = self.packed_length - self.packed_values.scale.shape[2]
        return self.recent_keys, self.recent_values[:, :, start:]
