"""The packed entries of one layer.

Of T tokens the keys are packed up to the last multiple of the residual R, R tokens at a time, so that 0 to R - 1
recent keys stay unpacked; values are packed token by token, all but the last R. Nothing is packed twice.
"""

from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from keepsight.runtime.quantized.codec import Packed, Quantizer
from keepsight.runtime.quantized.room import PackedRoom


@dataclass(frozen=True)
class PackedEntries:
    """The entries of one layer; immutable, and what is appended to shares what is packed.

    Attributes:
        quantizer: Bits and groups.
        residual: R, a multiple of the group.
        packed_keys: Groups [B, K, n / g, d] of the first n tokens.
        packed_values: Groups [B, K, m, d / g] of the first m tokens; m is at most n.
        recent_keys: [B, K, T - n, d].
        recent_values: [B, K, T - m, d].
        key_room: Where the packed keys are, and more can follow.
        value_room: The same for values.
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
        none = keys[:, :, :0]
        return cls(quantizer, residual, quantizer.pack_keys(none), quantizer.pack_values(none), keys, values).settled()

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
        recent = (each.nbytes for each in (self.recent_keys, self.recent_values))
        return self.packed_keys.bytes + self.packed_values.bytes + sum(recent)

    def with_recent(self, keys: Tensor, values: Tensor) -> "PackedEntries":
        """The entries with more [B, K, q, d] in full precision; nothing is packed yet."""
        return replace(
            self,
            recent_keys=torch.cat([self.recent_keys, keys], dim=2),
            recent_values=torch.cat([self.recent_values, values], dim=2),
        )

    def settled(self) -> "PackedEntries":
        """The entries with whatever exceeds the residual packed."""
        recent, old = self.recent_keys.shape[2], max(self.recent_values.shape[2] - self.residual, 0)
        full, packed = recent - recent % self.residual, self
        if full:
            keys = self.quantizer.pack_keys(self.recent_keys[:, :, :full])
            rest = self.recent_keys[:, :, full:].clone()  # a slice would keep the whole prompt alive
            room, joined = self.key_room.append(self.packed_keys, keys)
            packed = replace(packed, packed_keys=joined, key_room=room, recent_keys=rest)
        if old:
            values = self.quantizer.pack_values(self.recent_values[:, :, :old])
            rest = self.recent_values[:, :, old:].clone()
            room, joined = self.value_room.append(self.packed_values, values)
            packed = replace(packed, packed_values=joined, value_room=room, recent_values=rest)
        return packed

    def keys(self) -> Tensor:
        """All keys [B, K, T, d], a copy."""
        keys = _room(self.recent_keys, packed := self.packed_length)
        self.quantizer.unpack_keys(self.packed_keys, keys[:, :, :packed])
        keys[:, :, packed:] = self.recent_keys
        return keys

    def values(self) -> Tensor:
        """All values [B, K, T, d], a copy."""
        values = _room(self.recent_values, packed := self.packed_values.scale.shape[2])
        self.quantizer.unpack_values(self.packed_values, values[:, :, :packed])
        values[:, :, packed:] = self.recent_values
        return values

    def recent(self) -> tuple[Tensor, Tensor]:
        """Keys and values [B, K, T - n, d] of the tokens whose keys are not packed."""
        packed = self.packed_length - self.packed_values.scale.shape[2]
        return self.recent_keys, self.recent_values[:, :, packed:]


def _room(recent: Tensor, packed: int) -> Tensor:
    """Room for `packed` entries and, after them, the recent ones."""
    return recent.new_empty(*recent.shape[:2], packed + recent.shape[2], recent.shape[3])
