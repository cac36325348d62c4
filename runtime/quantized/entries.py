"""The packed entries of one layer, and attention that unpacks them block by block.

Of T tokens the keys are packed up to the last multiple of the residual R, R tokens at a time, so that 0 to R - 1
recent keys stay unpacked; values are packed token by token, all but the last R. Nothing is packed twice.
"""

from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from keepsight.runtime.offload import FetchedEntries
from keepsight.runtime.quantized.codec import Packed, Quantizer
from keepsight.runtime.quantized.room import PackedRoom
from keepsight.runtime.softmax import Softmax

_BLOCK = 1024
"""Tokens unpacked at a time."""


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
        recent = (each.numel() * each.element_size() for each in (self.recent_keys, self.recent_values))
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

    def keys(self, start: int, stop: int) -> Tensor:
        """[B, K, stop - start, d]; both are multiples of the group, or at the end of what is packed or held."""
        packed, group = self.packed_length, self.quantizer.group
        parts = []
        if start < packed:
            parts.append(self.quantizer.unpack_keys(self.packed_keys.part(start // group, min(stop, packed) // group)))
        if stop > packed:
            parts.append(self.recent_keys[:, :, max(start - packed, 0) : stop - packed])
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=2)

    def values(self, start: int, stop: int) -> Tensor:
        """[B, K, stop - start, d]."""
        packed = self.packed_values.scale.shape[2]
        parts = []
        if start < packed:
            parts.append(self.quantizer.unpack_values(self.packed_values.part(start, min(stop, packed))))
        if stop > packed:
            parts.append(self.recent_values[:, :, max(start - packed, 0) : stop - packed])
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=2)


def attend_packed(
    query: Tensor,
    held: PackedEntries,
    softmax: Softmax,
    fetched: FetchedEntries | None = None,
    watched: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Causal attention of the last q of T tokens; one block of entries is unpacked at a time.

    Args:
        query: [B, H, q, d].
        held: T entries of K KV heads.
        softmax: The layer's.
        fetched: Read in full precision in place of the packed entries with their indices.
        watched: Number n of first entries whose attention is returned, at least the fetched ones; the packed ones
            by default.

    Returns:
        The output [B, q, H, d], and the attention of the last query to the watched entries, [B, K, H / K, n] float32.
    """
    batch, heads, rows, width = query.shape
    kv_heads, length = held.recent_keys.shape[1], held.length
    watched = held.packed_length if watched is None else watched
    grouped = query.reshape(batch, kv_heads, -1, width)
    online, last = _OnlineSoftmax(softmax), []
    if fetched is not None:
        fetched_logits = online.add(grouped, fetched.keys, fetched.values)
        hidden = torch.zeros(batch, kv_heads, length, dtype=torch.bool, device=query.device)
        hidden = hidden.scatter_(2, fetched.indices, True)[:, :, None]
    block = max(_BLOCK // held.quantizer.group, 1) * held.quantizer.group
    for start in range(0, length, block):
        stop = min(start + block, length)
        mask = _future(start, stop, rows, length, query.device).repeat(heads // kv_heads, 1)
        if fetched is not None:
            mask = mask | hidden[..., start:stop]
        logits = online.add(grouped, held.keys(start, stop), held.values(start, stop), mask)
        last.append(logits[:, :, rows - 1 :: rows, : max(watched - start, 0)])
    output, total = online.result(kv_heads, rows)
    seen = torch.cat(last, dim=3)
    if fetched is not None:
        group = heads // kv_heads
        seen.scatter_(3, fetched.indices[:, :, None].expand(-1, -1, group, -1), fetched_logits[:, :, rows - 1 :: rows])
    attention = (seen - total[:, :, rows - 1 :: rows]).exp()
    return output.view(batch, heads, rows, width).transpose(1, 2).to(query.dtype).contiguous(), attention


class _OnlineSoftmax:
    """Attention over blocks of entries; every query sees an entry of the first block."""

    def __init__(self, softmax: Softmax) -> None:
        self.softmax = softmax
        self.best = self.total = self.output = torch.tensor(0.0)

    def add(self, query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None = None) -> Tensor:
        """Attend to one more block; `mask` is True where a query does not see. Returns the logits, float32."""
        logits = self.softmax.logits(query, keys)
        if mask is not None:
            logits = logits.masked_fill(mask, -torch.inf)
        best = logits.amax(dim=-1, keepdim=True)
        first = self.best.dim() == 0
        best = best if first else torch.maximum(best, self.best)
        weights = (logits - best).exp()
        total, output = weights.sum(dim=-1, keepdim=True), (weights.to(values.dtype) @ values).float()
        if not first:
            fade = (self.best - best).exp()
            total, output = total + fade * self.total, output + fade * self.output
        self.best, self.total, self.output = best, total, output
        return logits

    def result(self, kv_heads: int, rows: int) -> tuple[Tensor, Tensor]:
        """The output [B, K, r, d], and the logarithm of the softmax's denominator, for `rows` queries a query head."""
        total = self.best + self.total.log()
        if (sinks := self.softmax.sinks_of(kv_heads, rows)) is None:
            return self.output / self.total, total
        with_sinks = torch.logaddexp(total, sinks)
        return self.output / self.total * (total - with_sinks).exp(), with_sinks


def _future(start: int, stop: int, rows: int, length: int, device: torch.device) -> Tensor:
    """[q, stop - start] bool, True where an entry comes after the query."""
    queries = torch.arange(length - rows, length, device=device)
    return torch.arange(start, stop, device=device) > queries[:, None]
