"""KIVI (arXiv 2402.02750): a cache whose entries are packed, keys by channel and values by token."""

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
from keepsight.runtime import registry
from keepsight.runtime.allocate import Uniform
from keepsight.runtime.attention import OwnAttention, Softmax, is_bounded, run
from keepsight.runtime.evict import Evict
from keepsight.runtime.generate import CacheMethod
from keepsight.runtime.images import Images
from keepsight.runtime.layer import KeptLayer, LayerEntries
from keepsight.runtime.quantized.kernel import attend_packed
from keepsight.runtime.quantized.packing import PackedEntries, Quantizer
from keepsight.runtime.state import Needs, State, cache_bytes, empty_cache, full_layers, with_full_layers


class PackedLayer(OwnAttention, KeptLayer):
    """A low-bit cache layer.

    Args:
        held: The entries.
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
    def attend(self, query: Tensor, key: Tensor, value: Tensor, softmax: Softmax) -> Tensor:
        outputs = []
        for row in zip(*(each.split(1, dim=2) for each in (query, key, value)), strict=True):
            self.add(*row[1:])
            outputs.append(self.look(row[0], softmax))
            self.settle()
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=1)

    def look(self, query: Tensor, softmax: Softmax) -> Tensor:
        """The attention [B, 1, H, d] of the last token, query [B, H, 1, d]."""
        return attend_packed(query, self.held, softmax, watched=0)[0]

    def add(self, keys: Tensor, values: Tensor) -> None:
        """Append a token in full precision; `settle` packs it."""
        self.hold(self.held.with_recent(keys, values))
        self.seen += keys.shape[2]

    def settle(self) -> None:
        """Pack what exceeds the residual."""
        self.hold(self.held.settled())

    def hold(self, held: PackedEntries) -> None:
        """Replace the entries."""
        self.held, self.keys, self.values = held, held.recent_keys, held.recent_values

    @override
    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.held.length + query_length, self.seen - self.held.length

    @override
    def crop(self, tokens_to_remove: int) -> None:
        raise UserError("entries that are packed cannot be cropped; keep a copy of the state from before instead")

    @override
    def entries(self) -> LayerEntries:
        """All entries, unpacked, as observers see them."""
        return LayerEntries(self.held.keys(), self.held.values(), None)

    @override
    def share(self) -> "PackedLayer":
        return PackedLayer(self.held, self.seen)


@dataclass(frozen=True)
class PackedState(State):
    """A state whose cache is packed."""

    @property
    @override
    def length(self) -> int:
        return max((layer.held.length for layer in packed_layers(self.cache)), default=0)

    @property
    @override
    def kv_bytes(self) -> int:
        """Bytes on the device: codes, scales, zero points, recent entries and slots, and what bounded layers hold."""
        bounded = [layer for layer in self.cache.layers if is_bounded(layer)]
        return sum(layer.bytes for layer in packed_layers(self.cache)) + cache_bytes(Cache(layers=bounded))

    @override
    def counts(self) -> Tensor:
        rows = [
            torch.full(layer.keys.shape[:2], layer.held.length, device=layer.keys.device)
            for layer in packed_layers(self.cache)
        ]
        return torch.stack(rows)


def packed_layers(cache: Cache) -> list[PackedLayer]:
    """The layers of a packed cache."""
    return [layer for layer in cache.layers if isinstance(layer, PackedLayer)]


PackLayer = Callable[[Tensor, Tensor, int], PackedLayer]
"""Makes a layer from keys and values [B, K, T, d] in full precision and the logical length."""


_RAGGED = (
    "KV heads that hold different numbers of entries cannot be packed; use an allocation that keeps the same number in "
    "every KV head of a layer, such as uniform"
)


def pack_state(state: State, pack: PackLayer) -> PackedState:
    """A packed copy of a state; nothing is recorded for observers from here on.

    Raises:
        UserError: entries are padded, or their number differs between the KV heads of a layer.
    """
    require_unpadded(state.tokens_mask)
    layers: list[KeptLayer] = []
    for keys, values, real in state.entries():
        if real is not None and not real.all():
            raise UserError(_RAGGED)
        layers.append(pack(keys, values, state.cache.get_seq_length()))
    cache = with_full_layers(state.cache, layers)
    return state.as_kind(PackedState, cache)


@torch.no_grad()
def prefill_packed(model: PreTrainedModel, input_ids: Tensor, chunk: int | None, pack: PackLayer) -> PackedState:
    """Read prompts [B, N] of one length, packing each layer as soon as it has been read.

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
    """A layer of a prompt that is being read.

    Args:
        length: Length of the prompt in tokens.
        pack: Makes the packed layer.
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


def require_packable(model: PreTrainedModel) -> None:
    """Refuse models whose cache cannot be packed.

    Raises:
        UserError: attention is latent.
    """
    if has_latents(model):
        raise UserError(
            f"{model.config.model_type} has layers of latent attention; the cache can only be packed where it holds "
            "keys and values of each head"
        )


def require_unpadded(mask: Tensor | None) -> None:
    """Refuse padded rows: groups would mix tokens with padding, and a row would depend on its neighbours.

    Raises:
        UserError: with one line that says why.
    """
    if mask is not None and not bool(mask.bool().all()):
        raise UserError("prompts of different lengths cannot be packed in one batch; give rows of one length each time")


@dataclass(frozen=True)
class PackedMethod(CacheMethod):
    """What methods that pack entries have in common.

    Attributes:
        bits: Bits per number of the packed entries: 1, 2 or 4.
        group: Numbers that share a zero point and a scale; it must divide the head dimension.
        residual: Most recent tokens whose values (and at most whose keys) stay in full precision; a multiple of the
            group.
        one_bit: Levels at 1 bit; see `keepsight.runtime.quantized.packing.Quantizer`.

    Raises:
        UserError: a value is not offered; one line names it.
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


@registry.method("kivi")
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
            raise UserError("inner: entries that are packed cannot be packed again; give a method that evicts")
        if self.inner is not None and self.inner.every:
            raise UserError("inner: a method that evicts while decoding cannot be packed; set its every to 0")
        allocate = self.inner.allocate if isinstance(self.inner, Evict) else Uniform()
        if allocate.reads_scores and getattr(allocate, "floor", 0) < 1:
            raise UserError(f"inner: {_RAGGED}")

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
        require_packable(model)
        require_unpadded(mask)
        if self.inner is not None:
            return pack_state(self.inner.start(model, input_ids, mask, chunk=chunk), self._pack)
        return prefill_packed(model, input_ids, chunk, self._pack)

    @override
    def compress(self, model: PreTrainedModel, state: State) -> State:
        require_packable(model)
        return pack_state(state if self.inner is None else self.inner.compress(model, state), self._pack)

    def _pack(self, keys: Tensor, values: Tensor, seen: int) -> PackedLayer:
        self.quantizer.check_head(keys.shape[3])
        return PackedLayer(PackedEntries.pack(self.quantizer, self.residual, keys, values), seen)
