"""KIVI (arXiv 2402.02750): the KV cache, or what another method keeps of it, in 1, 2 or 4 bits.

The prompt attends to itself in full precision; later tokens attend to the packed entries. Several tokens read in one
pass give the same result as one by one.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import Cache, DynamicLayer
from typing_extensions import override

from keepsight.errors import UserError
from keepsight.models.decoder import has_latents
from keepsight.runtime.images import Images
from keepsight.runtime.attention import OwnAttention, run
from keepsight.runtime.state import cache_bytes, empty_cache, entries, full_layers, with_full_layers
from keepsight.runtime.attention import is_bounded
from keepsight.runtime.layer import KeptLayer, LayerEntries
from keepsight.runtime.generate import CacheMethod
from keepsight.runtime.quantized.kernel import attend_packed
from keepsight.runtime.quantized.packing import PackedEntries, Quantizer
from keepsight.runtime.attention import Softmax
from keepsight.runtime.state import Needs, State


class PackedLayer(OwnAttention, KeptLayer):
    """A cache layer of packed entries.

    Args:
        packed: The entries.
        seen: Logical length.
    """

    is_croppable = False

    def __init__(self, packed: PackedEntries, seen: int) -> None:
        super().__init__(packed.recent_keys, packed.recent_values, seen)
        self.packed = packed

    @property
    def bytes(self) -> int:
        """Bytes on the device."""
        return self.packed.bytes

    @override
    def attend(self, query: Tensor, key: Tensor, value: Tensor, softmax: Softmax) -> Tensor:
        outputs = []
        for row in zip(*(each.split(1, dim=2) for each in (query, key, value)), strict=True):
            self.append(*row[1:])
            outputs.append(self.attend_last(row[0], softmax))
            self.pack_overflow()
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=1)

    def attend_last(self, query: Tensor, softmax: Softmax) -> Tensor:
        """The attention [B, 1, H, d] of the last token, query [B, H, 1, d]."""
        return attend_packed(query, self.packed, softmax, scored=0)[0]

    def append(self, keys: Tensor, values: Tensor) -> None:
        """Append entries [B, K, q, d] in full precision; `pack_overflow` packs them."""
        self.set_packed(self.packed.append(keys, values))
        self.seen += keys.shape[2]

    def pack_overflow(self) -> None:
        """Pack what exceeds the residual."""
        self.set_packed(self.packed.pack_overflow())

    def set_packed(self, packed: PackedEntries) -> None:
        """Replace the entries."""
        self.packed, self.keys, self.values = packed, packed.recent_keys, packed.recent_values

    @override
    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.packed.length + query_length, self.seen - self.packed.length

    @override
    def crop(self, tokens_to_remove: int) -> None:
        raise UserError("packed entries cannot be cropped; keep a copy of the state from before instead")

    @override
    def entries(self) -> LayerEntries:
        return LayerEntries(self.packed.keys(), self.packed.values(), None)

    @override
    def share(self) -> "PackedLayer":
        return PackedLayer(self.packed, self.seen)


@dataclass(frozen=True)
class PackedState(State):
    """A state whose layers with full attention are packed."""

    @property
    @override
    def length(self) -> int:
        return max((layer.packed.length for layer in packed_layers(self.cache)), default=0)

    @property
    @override
    def kv_bytes(self) -> int:
        """Bytes on the device: codes, scales, zero points, recent and fetched entries, and bounded layers."""
        bounded = Cache(layers=[layer for layer in self.cache.layers if is_bounded(layer)])
        return sum(layer.bytes for layer in packed_layers(self.cache)) + cache_bytes(bounded)

    @override
    def counts(self) -> Tensor:
        layers = packed_layers(self.cache)
        return torch.stack([layer.keys.new_full(layer.keys.shape[:2], layer.packed.length).long() for layer in layers])


def packed_layers(cache: Cache) -> list[PackedLayer]:
    """The packed layers of a cache."""
    return [layer for layer in cache.layers if isinstance(layer, PackedLayer)]


PackLayer = Callable[[Tensor, Tensor, int], PackedLayer]
"""Makes a layer from keys and values [B, K, T, d] in full precision and the logical length."""


@dataclass(frozen=True)
class PackedMethod(CacheMethod):
    """Base of the methods that pack entries.

    Attributes:
        bits: Bits per number of the packed entries: 1, 2 or 4.
        group: Numbers that share a zero point and a scale; it must divide the head dimension.
        residual: Most recent tokens whose values (and at most whose keys) stay in full precision; a multiple of the
            group.
        one_bit: Levels at 1 bit, `middles` or `extremes`; see `keepsight.runtime.quantized.packing.Quantizer`.

    Raises:
        UserError: a value is not supported.
    """

    bits: int = 2
    group: int = 32
    residual: int = 128
    one_bit: str = field(default="middles", kw_only=True)

    def __post_init__(self) -> None:
        group, residual = self.quantizer.group, self.residual
        if type(residual) is not int or residual < group or residual % group:
            raise UserError(f"residual {residual!r} must be a multiple of the group of {group}, and not below it")

    @property
    def quantizer(self) -> Quantizer:
        """Bits and groups."""
        return Quantizer(self.bits, self.group, self.one_bit)

    def pack(self, keys: Tensor, values: Tensor) -> PackedEntries:
        """Pack entries [B, K, T, d]; raises a UserError where the group does not divide the head dimension."""
        self.quantizer.check_head(keys.shape[3])
        return PackedEntries.pack(self.quantizer, self.residual, keys, values)


@dataclass(frozen=True)
class Kivi(PackedMethod):
    """Packs entries in groups; the most recent ones stay in full precision (KIVI, arXiv 2402.02750, section 3.3).

    Attributes:
        inner: Method that decides which of the prompt's entries are packed, the same number in every KV head of a
            layer; all of them by default.
    """

    inner: CacheMethod | None = None

    @override
    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.inner, CacheMethod | None):
            raise UserError(f"inner: {self.inner!r} is no method that evicts; give {{name: NAME, budget: BUDGET}}")
        if isinstance(self.inner, Kivi):
            raise UserError("inner: packed entries cannot be packed again; give a method that evicts")
        if self.inner is not None and self.inner.every:
            raise UserError("inner: a method that evicts while decoding cannot be packed; set its every to 0")

    @override
    def needs(self) -> Needs:
        return Needs() if self.inner is None else self.inner.needs()

    @override
    def check(self, length: int, context: int) -> None:
        if self.inner is not None:
            self.inner.check(length, context)

    @override
    def start(
        self,
        model: PreTrainedModel,
        input_ids: Tensor,
        mask: Tensor | None = None,
        *,
        chunk: int | None = None,
        images: Images | None = None,
    ) -> State:
        require_packable(model, mask)
        if self.inner is not None:
            return pack_state(self.inner.start(model, input_ids, mask, chunk=chunk), self._pack_layer)
        return prefill_packed(model, input_ids, chunk, self._pack_layer)

    @override
    def compress(self, model: PreTrainedModel, state: State) -> State:
        require_packable(model, state.tokens_mask)
        return pack_state(state if self.inner is None else self.inner.compress(model, state), self._pack_layer)

    def _pack_layer(self, keys: Tensor, values: Tensor, seen: int) -> PackedLayer:
        return PackedLayer(self.pack(keys, values), seen)


def pack_state(state: State, pack: PackLayer) -> PackedState:
    """A packed copy of a state, without what was recorded.

    Raises:
        UserError: the number of entries differs between the KV heads of a layer.
    """
    layers: list[KeptLayer] = []
    for keys, values, real in state.entries():
        if real is not None and not real.all():
            raise UserError(
                "KV heads with different numbers of entries cannot be packed; use an allocation that keeps the same "
                "number in every KV head of a layer, such as uniform"
            )
        layers.append(pack(keys, values, state.cache.get_seq_length()))
    cache = with_full_layers(state.cache, layers)
    return state.as_kind(PackedState, cache)


@torch.no_grad()
def prefill_packed(model: PreTrainedModel, input_ids: Tensor, chunk: int | None, pack: PackLayer) -> PackedState:
    """Read prompts [B, N] of one length and pack each layer as soon as it has read all of them.

    Only one layer's entries are on the device in full precision at a time; those of earlier chunks wait in CPU memory.
    """
    length = input_ids.shape[1]
    cache = empty_cache(model)
    arriving = [_ArrivingLayer(length, pack) for _ in full_layers(cache)]
    cache = with_full_layers(cache, arriving)
    positions = torch.arange(length, device=input_ids.device)[None]
    for ids, at in zip(input_ids.split(chunk or length, dim=1), positions.split(chunk or length, dim=1), strict=True):
        output = run(model, cache, input_ids=ids, position_ids=at, logits_to_keep=1)
    lengths = torch.full((len(input_ids),), length, device=input_ids.device)
    packed = with_full_layers(cache, [layer.packed for layer in arriving])
    return PackedState(packed, output.logits[:, -1].float(), input_ids, lengths, padded=False)


class _ArrivingLayer(DynamicLayer):
    """A layer that is packed once it has read a prompt of `length` tokens."""

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
        keys = torch.cat([self.keys.to(key_states.device), key_states], dim=-2)
        values = torch.cat([self.values.to(value_states.device), value_states], dim=-2)
        if keys.shape[2] == self.length:
            self.packed = self.pack(keys, values, self.length)
            self.keys, self.values = keys[:, :, :0].clone(), values[:, :, :0].clone()
        else:
            self.keys, self.values = keys.cpu(), values.cpu()
        return keys, values


def require_packable(model: PreTrainedModel, mask: Tensor | None) -> None:
    """Refuse what cannot be packed.

    Raises:
        UserError: the model's attention is latent, or `mask` marks padding: groups would mix tokens with padding.
    """
    if has_latents(model):
        raise UserError(
            f"{model.config.model_type} has layers of latent attention; only keys and values of each head can be packed"
        )
    if mask is not None and not bool(mask.bool().all()):
        raise UserError("prompts of different lengths cannot be packed in one batch; give rows of one length each time")
