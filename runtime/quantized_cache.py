"""A cache layer of packed groups and a residual in full precision (KIVI), and attention that unpacks it block by block.

Of T tokens the keys are packed up to the last multiple of the residual R, R tokens at a time, so that they hold 0 to
R - 1 recent keys; values are packed one token at a time and hold the last R. What has been packed is never packed
again. A prompt that the model is reading attends to itself in full precision; every token after it reads the packed
form. Several tokens read at once give what they give one after another.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import Cache, DynamicLayer
from typing_extensions import override

from keepsight.errors import UserError
from keepsight.runtime.attention import OwnAttention, record_attention
from keepsight.runtime.cache import KeptLayer, LayerEntries, entries
from keepsight.runtime.quantization import Packed, Quantizer
from keepsight.runtime.state import State, Trace

_BLOCK = 1024
"""Tokens that are unpacked at a time."""


class Slots(NamedTuple):
    """Entries in full precision that stand in for packed ones.

    Attributes:
        indices: [B, K, k] int64, which entries; none twice in a head.
        keys: [B, K, k, d].
        values: [B, K, k, d].
    """

    indices: Tensor
    keys: Tensor
    values: Tensor


@dataclass(frozen=True)
class PackedEntries:
    """The entries of one layer. Nothing here changes; `append` makes another one that shares what is packed.

    Attributes:
        quantizer: Bits and groups.
        residual: R, a multiple of the group.
        packed_keys: Groups [B, K, n / g, d] of the first n tokens.
        packed_values: Groups [B, K, m, d / g] of the first m tokens; m is at most n.
        recent_keys: [B, K, T - n, d].
        recent_values: [B, K, T - m, d].
    """

    quantizer: Quantizer
    residual: int
    packed_keys: Packed
    packed_values: Packed
    recent_keys: Tensor
    recent_values: Tensor

    @classmethod
    def pack(cls, quantizer: Quantizer, residual: int, keys: Tensor, values: Tensor) -> "PackedEntries":
        """The entries [B, K, T, d] of a prompt."""
        none = keys[:, :, :0]
        return cls(quantizer, residual, quantizer.pack_keys(none), quantizer.pack_values(none), keys, values).settled()

    @property
    def packed_length(self) -> int:
        """Tokens whose keys are packed; those of packed values are among them."""
        return self.packed_keys.scale.shape[2] * self.quantizer.group

    @property
    def length(self) -> int:
        """Entries of each KV head."""
        return self.packed_length + self.recent_keys.shape[2]

    @property
    def bytes(self) -> int:
        """Bytes of codes, scales, zero points and recent entries."""
        recent = (each.numel() * each.element_size() for each in (self.recent_keys, self.recent_values))
        return self.packed_keys.bytes + self.packed_values.bytes + sum(recent)

    def with_recent(self, keys: Tensor, values: Tensor) -> "PackedEntries":
        """With more entries [B, K, q, d] in full precision; nothing is packed yet."""
        return replace(
            self,
            recent_keys=torch.cat([self.recent_keys, keys], dim=2),
            recent_values=torch.cat([self.recent_values, values], dim=2),
        )

    def settled(self) -> "PackedEntries":
        """With packed whatever the residual has no room for."""
        recent, old = self.recent_keys.shape[2], max(self.recent_values.shape[2] - self.residual, 0)
        full, packed = recent - recent % self.residual, self
        if full:
            keys = self.quantizer.pack_keys(self.recent_keys[:, :, :full])
            rest = self.recent_keys[:, :, full:].clone()  # a slice would keep the whole prompt alive
            packed = replace(packed, packed_keys=self.packed_keys.joined(keys), recent_keys=rest)
        if old:
            values = self.quantizer.pack_values(self.recent_values[:, :, :old])
            rest = self.recent_values[:, :, old:].clone()
            packed = replace(packed, packed_values=self.packed_values.joined(values), recent_values=rest)
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


class PackedLayer(KeptLayer):
    """A cache layer in few bits.

    Args:
        held: Its entries.
        seen: Logical length.
    """

    is_croppable = False

    def __init__(self, held: PackedEntries, seen: int) -> None:
        super().__init__(held.recent_keys, held.recent_values, seen)
        self.held = held

    @property
    def bytes(self) -> int:
        """Bytes on the device."""
        return self.held.bytes

    @override
    def update(self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object) -> Any:
        return RowByRow(self, key_states, value_states), value_states

    def attend(self, query: Tensor, scaling: float) -> Tensor:
        """The attention [B, 1, H, d] of the last token, query [B, H, 1, d]."""
        return attend_packed(query, self.held, scaling)[0]

    def add(self, keys: Tensor, values: Tensor) -> None:
        """Append a token; it is not packed before `settle`."""
        self.hold(self.held.with_recent(keys, values))
        self.seen += keys.shape[2]

    def settle(self) -> None:
        """Pack what the residual has no room for."""
        self.hold(self.held.settled())

    def hold(self, held: PackedEntries) -> None:
        """Take other entries."""
        self.held, self.keys, self.values = held, held.recent_keys, held.recent_values

    @override
    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.held.length + query_length, self.seen - self.held.length

    @override
    def crop(self, tokens_to_remove: int) -> None:
        raise UserError("entries that are packed cannot be cropped; keep a copy of the state from before instead")

    @override
    def entries(self) -> LayerEntries:
        """All entries, unpacked: what an observer sees."""
        length = self.held.length
        return LayerEntries(self.held.keys(0, length), self.held.values(0, length), None)

    @override
    def share(self) -> "PackedLayer":
        return PackedLayer(self.held, self.seen)


class RowByRow(OwnAttention):
    """New tokens of a layer, appended and attended to one at a time.

    Args:
        layer: What they are appended to.
        keys: [B, K, q, d].
        values: [B, K, q, d].
    """

    def __init__(self, layer: PackedLayer, keys: Tensor, values: Tensor) -> None:
        self.layer, self.keys, self.values = layer, keys, values

    @override
    def attend(self, query: Tensor, scaling: float) -> Tensor:
        outputs = []
        for row in zip(*(each.split(1, dim=2) for each in (query, self.keys, self.values)), strict=True):
            self.layer.add(*row[1:])
            outputs.append(self.layer.attend(row[0], scaling))
            self.layer.settle()
        return torch.cat(outputs, dim=1)


def attend_packed(
    query: Tensor, held: PackedEntries, scaling: float, slots: Slots | None = None, watched: int | None = None
) -> tuple[Tensor, Tensor]:
    """Causal attention of the last q of T tokens, of which no more than one block is unpacked at a time.

    Args:
        query: [B, H, q, d].
        held: T entries of K KV heads.
        scaling: Factor of the dot products.
        slots: Read in place of the packed entries with their indices.
        watched: Of how many first entries the attention is returned, at least those in the slots; the packed ones by
            default.

    Returns:
        The output [B, q, H, d], and the attention of the last query to the watched entries, [B, K, H / K, n] float32.
    """
    batch, heads, rows, width = query.shape
    kv_heads, length = held.recent_keys.shape[1], held.length
    watched = held.packed_length if watched is None else watched
    grouped = query.reshape(batch, kv_heads, -1, width)
    softmax, last = _OnlineSoftmax(), []
    if slots is not None:
        slot_logits = softmax.add(grouped, slots.keys, slots.values, scaling)
        hidden = torch.zeros(batch, kv_heads, length, dtype=torch.bool, device=query.device)
        hidden = hidden.scatter_(2, slots.indices, True)[:, :, None]
    block = max(_BLOCK // held.quantizer.group, 1) * held.quantizer.group
    for start in range(0, length, block):
        stop = min(start + block, length)
        mask = _future(start, stop, rows, length, query.device).repeat(heads // kv_heads, 1)
        if slots is not None:
            mask = mask | hidden[..., start:stop]
        logits = softmax.add(grouped, held.keys(start, stop), held.values(start, stop), scaling, mask)
        last.append(logits[:, :, rows - 1 :: rows, : max(watched - start, 0)])
    output, total = softmax.result()
    seen = torch.cat(last, dim=3)
    if slots is not None:
        group = heads // kv_heads
        seen.scatter_(3, slots.indices[:, :, None].expand(-1, -1, group, -1), slot_logits[:, :, rows - 1 :: rows])
    attention = (seen - total[:, :, rows - 1 :: rows]).exp()
    return output.view(batch, heads, rows, width).transpose(1, 2).to(query.dtype).contiguous(), attention


class _OnlineSoftmax:
    """Attention over entries that come in blocks; the first block has an entry that every query sees."""

    def __init__(self) -> None:
        self.best = self.total = self.output = torch.tensor(0.0)

    def add(self, query: Tensor, keys: Tensor, values: Tensor, scaling: float, mask: Tensor | None = None) -> Tensor:
        """Attend to one more block. `mask` is True where a query does not look. Returns the logits, float32."""
        logits = (query @ keys.transpose(-1, -2)).float() * scaling
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

    def result(self) -> tuple[Tensor, Tensor]:
        """The output, and the logarithm of what the softmax divides by."""
        return self.output / self.total, self.best + self.total.log()


def _future(start: int, stop: int, rows: int, length: int, device: torch.device) -> Tensor:
    """[q, stop - start] bool, True where an entry comes after the query."""
    queries = torch.arange(length - rows, length, device=device)
    return torch.arange(start, stop, device=device) > queries[:, None]


@dataclass(frozen=True)
class PackedState(State):
    """A state whose cache is packed."""

    @property
    @override
    def length(self) -> int:
        return max(layer.held.length for layer in packed_layers(self.cache))

    @property
    @override
    def kv_bytes(self) -> int:
        """Bytes on the device: codes, scales, zero points, recent entries and slots."""
        return sum(layer.bytes for layer in packed_layers(self.cache))

    @override
    def held(self) -> Tensor:
        rows = [
            torch.full(layer.keys.shape[:2], layer.held.length, device=layer.keys.device)
            for layer in packed_layers(self.cache)
        ]
        return torch.stack(rows)


def packed_layers(cache: Cache) -> list[PackedLayer]:
    """The layers of a packed cache."""
    return [layer for layer in cache.layers if isinstance(layer, PackedLayer)]


PackLayer = Callable[[Tensor, Tensor, int], PackedLayer]
"""Makes a layer of keys and values [B, K, T, d] in full precision, and of the logical length."""


def pack_state(state: State, pack: PackLayer) -> PackedState:
    """A packed copy of a state; nothing is recorded for observers from here on.

    Raises:
        UserError: entries are padded, or their number differs between the KV heads of a layer.
    """
    require_unpadded(state.mask)
    layers: list[Any] = []
    for keys, values, real in entries(state.cache):
        if real is not None and not real.all():
            raise UserError(
                "KV heads that hold different numbers of entries cannot be packed; use an allocation that keeps the "
                "same number in every KV head of a layer, such as uniform"
            )
        layers.append(pack(keys, values, state.cache.get_seq_length()))
    return PackedState(Cache(layers=layers), None, state.logits, state.tokens, state.lengths, Trace())


@torch.no_grad()
def prefill_packed(model: PreTrainedModel, input_ids: Tensor, chunk: int | None, pack: PackLayer) -> PackedState:
    """Read prompts [B, N] of one length, packing every layer as soon as it has been read.

    The entries in full precision of only one layer are on the device at a time; those of earlier chunks wait in the
    CPU's memory.
    """
    record_attention(model)
    length = input_ids.shape[1]
    count = model.config.get_text_config().num_hidden_layers
    arriving = [_ArrivingLayer(length, pack) for _ in range(count)]
    layers: list[Any] = list(arriving)
    cache = Cache(layers=layers)
    positions = torch.arange(length, device=input_ids.device)[None]
    for ids, at in zip(input_ids.split(chunk or length, dim=1), positions.split(chunk or length, dim=1), strict=True):
        output = model(input_ids=ids, position_ids=at, past_key_values=cache, use_cache=True, logits_to_keep=1)
    lengths = torch.full((len(input_ids),), length, device=input_ids.device)
    packed: list[Any] = [layer.packed for layer in arriving]
    return PackedState(Cache(layers=packed), None, output.logits[:, -1].float(), input_ids, lengths)


class _ArrivingLayer(DynamicLayer):
    """A layer of a prompt that is being read.

    Args:
        length: Tokens of the prompt.
        pack: Makes the layer that remains.
    """

    keys: Tensor
    values: Tensor
    packed: PackedLayer

    def __init__(self, length: int, pack: PackLayer) -> None:
        super().__init__()
        self.length, self.pack = length, pack

    @override
    def update(self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object) -> Any:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
            self.keys, self.values = key_states[:, :, :0].cpu(), value_states[:, :, :0].cpu()
        keys = torch.cat([self.keys.to(key_states.device), key_states], dim=2)
        values = torch.cat([self.values.to(value_states.device), value_states], dim=2)
        if keys.shape[2] == self.length:
            self.packed = self.pack(keys, values, self.length)
            self.keys, self.values = self.keys[:, :, :0].clone(), self.values[:, :, :0].clone()
        else:
            self.keys = torch.cat([self.keys, key_states.cpu()], dim=2)
            self.values = torch.cat([self.values, value_states.cpu()], dim=2)
        return keys, values


def require_unpadded(mask: Tensor | None) -> None:
    """Refuse padded rows: groups would mix tokens with padding, and a row would depend on its neighbours.

    Raises:
        UserError: with one line that says why.
    """
    if mask is not None and not bool(mask.bool().all()):
        raise UserError("prompts of different lengths cannot be packed in one batch; give rows of one length each time")


def require_full_attention(model: PreTrainedModel) -> None:
    """Refuse models whose layers do not keep one key and value of every token.

    Raises:
        UserError: sliding, linear or latent attention.
    """
    config: Any = model.config.get_text_config()
    kinds = set(getattr(config, "layer_types", None) or ()) - {"full_attention"}
    if not getattr(config, "layer_types", None) and getattr(config, "sliding_window", None):
        kinds = {"sliding_attention"}
    if getattr(config, "kv_lora_rank", None):
        kinds = {"latent attention"}
    if kinds:
        raise UserError(
            f"{config.model_type} has layers of {', '.join(sorted(kinds))}; the cache can only be packed where all "
            "layers have full attention"
        )
