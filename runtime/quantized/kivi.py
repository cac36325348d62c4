"""KIVI (arXiv 2402.02750): a cache whose entries are packed, keys by channel and values by token."""

import copy
from abc import abstractmethod
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import DynamicLayer
from typing_extensions import Self, override

from keepsight.errors import UserError, Whole
from keepsight.models.decoder import full_attention_layers, has_latents, head_width
from keepsight.runtime import registry
from keepsight.runtime.attention import OwnAttention, Softmax, run
from keepsight.runtime.distance_bias import require_no_distance_bias
from keepsight.runtime.evict import Evict
from keepsight.runtime.generate import CacheMethod
from keepsight.runtime.layer import Counts, KeptLayer, LayerEntries
from keepsight.runtime.offload import Traffic
from keepsight.runtime.quantized.kernel import attend_packed
from keepsight.runtime.quantized.packing import Bits, Group, Levels, PackedEntries, Quantizer
from keepsight.runtime.state import Needs, State, empty_cache, full_layers, with_full_layers


class PackedLayer(OwnAttention, KeptLayer):
    """A low-bit cache layer.

    Args:
        packed: The entries.
        seen: Logical length.
    """

    is_croppable = False

    def __init__(self, packed: PackedEntries, seen: int) -> None:
        super().__init__(packed.recent_keys, packed.recent_values, seen)
        self.packed = packed

    @property
    @override
    def longest(self) -> int:
        return self.packed.length

    @override
    def head_sizes(self) -> Counts:
        return np.full(self.keys.shape[:2], self.packed.length)

    @property
    @override
    def nbytes(self) -> int:
        return self.packed.bytes

    @override
    def attend(self, query: Tensor, key: Tensor, value: Tensor, softmax: Softmax) -> Tensor:
        tokens = zip(query.split(1, dim=2), key.split(1, dim=2), value.split(1, dim=2), strict=True)
        outputs = []
        for token_query, token_key, token_value in tokens:
            self.append(token_key, token_value)
            outputs.append(self.attend_last(token_query, softmax))
            self.pack()
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=1)

    def attend_last(self, query: Tensor, softmax: Softmax) -> Tensor:
        """The attention [B, 1, H, d] of the last token, query [B, H, 1, d]."""
        return attend_packed(query, self.packed, softmax, scored=0)[0]

    def append(self, keys: Tensor, values: Tensor) -> None:
        """Append entries [B, K, q, d] in full precision; `pack` packs them."""
        self.replace(self.packed.with_recent(keys, values))
        self.seen += keys.shape[2]

    def pack(self) -> None:
        """Pack what exceeds the residual."""
        self.replace(self.packed.packed())

    def replace(self, packed: PackedEntries) -> None:
        """Replace the entries."""
        self.packed = packed
        self.keys = packed.recent_keys
        self.values = packed.recent_values

    @override
    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.packed.length + query_length, self.seen - self.packed.length

    @override
    def crop(self, tokens_to_remove: int) -> None:
        raise UserError(
            "entries that are packed cannot be cropped; keep a copy of the state from before instead",
            field="crop",
            code="state",
        )

    @override
    def entries(self) -> LayerEntries:
        """All entries, unpacked, as observers see them."""
        return LayerEntries(self.packed.keys(), self.packed.values(), None)

    @override
    def share(self) -> Self:
        return copy.copy(self)  # packed entries are immutable


class PackedState(State):
    """A state whose cache is packed."""


RAGGED = (
    "KV heads that hold different numbers of entries cannot be packed; use an allocation that keeps the same number in "
    "every KV head of a layer, such as uniform"
)


class _ArrivingLayer(DynamicLayer):
    """A layer of a prompt of `length` tokens, packed at its end; entries of earlier chunks wait in CPU memory."""

    keys: Tensor
    values: Tensor
    packed: PackedLayer

    def __init__(self, length: int, method: "PackedMethod", traffic: Traffic) -> None:
        super().__init__()
        self.length = length
        self.method = method
        self.traffic = traffic

    @override
    def update(self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object) -> Any:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
            self.keys = key_states[:, :, :0].cpu()
            self.values = value_states[:, :, :0].cpu()

        keys = torch.cat([self.keys.to(key_states.device), key_states], dim=2)
        values = torch.cat([self.values.to(key_states.device), value_states], dim=2)
        if keys.shape[2] == self.length:
            self.packed = self.method.packed_layer(keys, values, self.length, self.traffic)
            self.keys = self.keys[:, :, :0].clone()
            self.values = self.values[:, :, :0].clone()
        else:
            self.keys = torch.cat([self.keys, key_states.cpu()], dim=2)
            self.values = torch.cat([self.values, value_states.cpu()], dim=2)
        return keys, values


@dataclass(frozen=True)
class PackedMethod(CacheMethod):
    """A method that packs entries.

    Attributes:
        bits: Bits per number of the packed entries: 1, 2 or 4.
        group: Numbers that share a zero point and a scale; it must divide the head dimension.
        residual: Number of last tokens whose values stay in full precision, and at most as many keys; a multiple of the
            group.
        one_bit: Levels at 1 bit; see `Quantizer`.
    """

    section = "quantize"
    cost = "packing after the prefill"
    bits: Bits = 2
    group: Group = 32
    residual: Whole = 128
    one_bit: Levels = field(default="middles", kw_only=True)

    def __post_init__(self) -> None:
        if not self.residual or self.residual % self.group:
            raise UserError(
                f"residual {self.residual!r} must be a multiple of the group of {self.group}, above 0",
                field="residual",
                code="range",
            )

    @property
    def quantizer(self) -> Quantizer:
        """Bits and groups."""
        return Quantizer(self.bits, self.group, self.one_bit)

    def packed_entries(self, keys: Tensor, values: Tensor) -> PackedEntries:
        """Keys and values [B, K, T, d], packed; a `UserError` if the group does not divide the head dimension."""
        self.quantizer.check_head(keys.shape[3])
        return PackedEntries.pack(self.quantizer, self.residual, keys, values)

    @abstractmethod
    def packed_layer(self, keys: Tensor, values: Tensor, seen: int, traffic: Traffic) -> PackedLayer:
        """A layer of keys and values [B, K, T, d] in full precision, whose logical length is `seen`.

        `traffic` counts what moves between CPU and device, for all layers of a state.
        """

    @override
    def check_model(self, model: PreTrainedModel) -> None:
        require_no_distance_bias(model)
        if has_latents(model):
            raise UserError(
                f"{model.config.model_type} has layers of latent attention; the cache can only be packed where it "
                "holds keys and values of each head",
                field="model",
                code="model",
            )
        if full_attention_layers(model.config):
            self.quantizer.check_head(head_width(model.config.get_text_config(decoder=True)))

    def check_prompts(self, model: PreTrainedModel, tokens: Tensor) -> None:
        """Refuse a model, or prompts [B, N], that cannot be packed."""
        self.check_model(model)

    @override
    @torch.no_grad()
    def start(self, model: PreTrainedModel, input_ids: Tensor, mask: Tensor | None = None, **options: Any) -> State:
        """Read prompts of one length; only one layer at a time is in full precision on the device."""
        self.check_prompts(model, input_ids)
        require_unpadded(mask)
        batch, length = input_ids.shape
        cache = empty_cache(model)
        traffic = Traffic()
        arriving = [_ArrivingLayer(length, self, traffic) for _ in full_layers(cache)]
        cache = with_full_layers(cache, arriving)

        positions = torch.arange(length, device=input_ids.device)[None]
        lengths = torch.full((batch,), length, device=input_ids.device)
        chunk = options.get("chunk") or length
        for start in range(0, length, chunk):
            chunk_range = slice(start, start + chunk)
            output = run(
                model,
                cache,
                rope_lengths=lengths,
                input_ids=input_ids[:, chunk_range],
                position_ids=positions[:, chunk_range],
                logits_to_keep=1,
            )

        packed = with_full_layers(cache, [layer.packed for layer in arriving])
        return PackedState(packed, output.logits[:, -1].float(), input_ids, lengths, padded=False)

    @override
    def compress_state(self, model: PreTrainedModel, state: State) -> State:
        """A packed copy of a state; nothing is recorded for observers from here on."""
        self.check_prompts(model, state.tokens)
        require_unpadded(state.tokens_mask)
        seen = state.cache.get_seq_length()
        traffic = Traffic()
        layers: list[KeptLayer] = []
        for keys, values, real in state.entries():
            require_equal_heads(real)
            layers.append(self.packed_layer(keys, values, seen, traffic))
        return state.as_kind(PackedState, with_full_layers(state.cache, layers))


def require_evicts_once(inner: Any) -> None:
    """Refuse (`UserError`) an inner method that does not evict, or that evicts again from entries in another form."""
    if not isinstance(inner, Evict):
        raise UserError(
            f"inner: {inner!r} is not a method that evicts; give {{name: NAME, budget: BUDGET}}",
            field="inner",
            code="type",
        )
    if inner.every:
        raise UserError(
            "inner: a method that evicts while decoding needs entries as the model made them; set its every to 0",
            field="inner",
            code="conflict",
        )


def require_equal_heads(real: Tensor | None) -> None:
    """Refuse (`UserError`) KV heads with different numbers of entries; `real` [B, K, C] is False for padding."""
    if real is not None and not real.all():
        raise UserError(RAGGED, field="allocate", code="conflict")


def require_unpadded(mask: Tensor | None) -> None:
    """Refuse padded rows: groups would mix tokens with padding, and a row would depend on its neighbours."""
    if mask is not None and not bool(mask.bool().all()):
        raise UserError(
            "prompts of different lengths cannot be packed in one batch; give rows of one length each time",
            field="prompt",
            code="conflict",
        )


@registry.method("kivi")
@dataclass(frozen=True)
class Kivi(PackedMethod):
    """Packs entries in groups; the most recent ones stay in full precision (KIVI, arXiv 2402.02750, section 3.3).

    Attributes:
        inner: Method that decides which of the prompt's entries are packed, the same number in every KV head of a
            layer; all of them by default.
    """

    inner: Evict | None = None

    @override
    def __post_init__(self) -> None:
        super().__post_init__()
        if self.inner is None:
            return
        require_evicts_once(self.inner)
        if self.inner.allocate.reads_scores and getattr(self.inner.allocate, "floor", 0) < 1:
            raise UserError(f"inner: {RAGGED}", field="inner", code="conflict")

    @override
    def check_model(self, model: PreTrainedModel) -> None:
        super().check_model(model)
        if self.inner is not None:
            self.inner.check_model(model)

    @override
    def needs(self) -> Needs:
        return Needs() if self.inner is None else self.inner.needs()

    @override
    def check(self, length: int, context: int) -> None:
        if self.inner is not None:
            self.inner.check(length, context)

    @override
    def start(self, model: PreTrainedModel, input_ids: Tensor, mask: Tensor | None = None, **options: Any) -> State:
        if self.inner is None:
            return super().start(model, input_ids, mask, **options)
        self.check_prompts(model, input_ids)
        require_unpadded(mask)
        return super().compress_state(model, self.inner.start(model, input_ids, mask, **options))

    @override
    def compress_state(self, model: PreTrainedModel, state: State) -> State:
        if self.inner is not None:
            state = self.inner.compress_state(model, state)
        return super().compress_state(model, state)

    @override
    def packed_layer(self, keys: Tensor, values: Tensor, seen: int, traffic: Traffic) -> PackedLayer:
        return PackedLayer(self.packed_entries(keys, values), seen)
