"""Attention with a bias by distance: to a logit is added what the query makes of how long ago the key was read.

In Inkling's layers each token has relative states, a few numbers for each query head. They mix a bank of trained
profiles into one bias for each distance; it is 0 beyond the bank. Inkling 2 also gives each token a sink of its own.

Models count distances by the size of their cache, which says nothing once entries were evicted. So what the bias needs
travels beside keys and queries, in further channels: a key is followed by its position, a query by its position, its
relative states, and its sink. They share the fate of their entry in every form of a cache, padded or ragged, and
recorded queries hold them too. `keepsight.runtime.attention.Softmax` adds the bias wherever it multiplies the two.

Shapes: B batch, K KV heads, q queries, S keys, d head dimension, R relative states, E distances of the bank.
"""

import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from keepsight.errors import UserError
from keepsight.models.decoder import attention_of, full_attention_layers

CHANNELS = 3
"""Channels of a position: its digits to the base of 256, which every 16-bit float holds exactly."""
_BASE = 256
_BANK = "rel_logits_proj"
"""The name of the module that holds the bank of a layer, in its attention."""


@dataclass(frozen=True)
class DistanceBias:
    """The bias of a layer's logits.

    Attributes:
        bank: [R, E], what each relative state adds at each distance.
        has_sinks: Whether a query's last channel is a sink: a logit that takes its share of the weights and has no
            value.
    """

    bank: Tensor
    has_sinks: bool = False

    def __call__(self, grouped: Tensor, keys: Tensor) -> Tensor:
        """The bias [..., r, S] float32 of queries [..., r, d + 3 + R, or one more] and keys [..., S, d + 3].

        Keys that come after their query have none.
        """
        width = keys.shape[-1]
        states = grouped[..., width : width + len(self.bank)]
        by_distance = (states @ self.bank.to(states)).float()
        query_positions = positions_in(grouped[..., :width])
        distances = query_positions[..., :, None] - positions_in(keys)[..., None, :]
        furthest = by_distance.shape[-1] - 1
        is_without = (distances < 0) | (distances > furthest)
        bias = by_distance.gather(-1, distances.clamp_(0, furthest))  # in place: eight bytes for each logit
        return bias.masked_fill(is_without, 0.0)

    def sinks(self, grouped: Tensor) -> Tensor:
        """The sinks [..., r] float32 of queries [..., r, channels]."""
        return grouped[..., -1].float()


def with_positions(heads: Tensor, positions: Tensor) -> Tensor:
    """Heads [B, h, n, d] of tokens at positions [B or 1, n] int64, which follow them: [B, h, n, d + 3]."""
    return rejoined(heads, positions.to(heads.device)[:, None].expand(heads.shape[:3]))


def without_positions(keys: Tensor) -> Tensor:
    """Keys [..., d + 3] without their positions, [..., d]."""
    return keys[..., :-CHANNELS]


def positions_in(keys: Tensor) -> Tensor:
    """The positions [...] int64 of keys [..., d + 3]."""
    return _numbers(keys[..., -CHANNELS:])


def rejoined(keys: Tensor, positions: Tensor) -> Tensor:
    """Keys [..., d] and their positions [...] int64 -> [..., d + 3]."""
    return torch.cat([keys, _digits(positions).to(keys)], dim=-1)


def _digits(positions: Tensor) -> Tensor:
    """Positions [...] int64 -> [..., 3], the highest digit first."""
    return torch.stack([positions // _BASE**2, positions // _BASE % _BASE, positions % _BASE], dim=-1)


def _numbers(digits: Tensor) -> Tensor:
    """Positions [...] int64 from their digits [..., 3]."""
    highest, middle, lowest = digits.long().unbind(dim=-1)
    return (highest * _BASE + middle) * _BASE + lowest


def has_distance_bias(config: Any) -> bool:
    """Whether layers of a model of this configuration have a bank of profiles by distance."""
    return getattr(config.get_text_config(decoder=True), "rel_extent", None) is not None


def bank_of(attention: nn.Module) -> Tensor | None:
    """The bank [R, E] of an attention layer; None for one without."""
    module: Any = getattr(attention, _BANK, None)
    return None if module is None else module.proj


def log_scaling(config: Any, positions: Tensor) -> Tensor:
    """What a layer's logits are scaled by, with their bias, for queries at positions [...] int64: [...] float32."""
    floor: int | None = config.log_scaling_n_floor
    if floor is None:
        return torch.ones_like(positions, dtype=torch.float32)
    lengths = (positions + 1).float()
    return 1.0 + config.log_scaling_alpha * torch.log((lengths / floor).clamp(min=1.0))


def bias_of(model: PreTrainedModel, index: int, queries: Tensor) -> DistanceBias | None:
    """The bias of a decoder layer that queries [..., channels] of it were recorded for; None for a layer without."""
    if not has_distance_bias(model.config):
        return None
    attention: Any = attention_of(model, index)
    bank = bank_of(attention)
    assert bank is not None
    without_sinks = attention.head_dim + CHANNELS + len(bank)
    return DistanceBias(bank, has_sinks=queries.shape[-1] > without_sinks)


STORES_ENTRIES = "this method stores or reads entries in its own way; take one that evicts"
STATISTICS = "statistics of queries say nothing of it; take a method that observes with queries"
"""Reasons of `left_out`."""


def left_out(reason: str) -> UserError:
    """The refusal of a method that would leave the bias out."""
    return UserError(
        f"this model adds a bias by distance to its attention, and {reason}, such as snapkv",
        field="model",
        code="model",
    )


def require_no_distance_bias(model: PreTrainedModel, reason: str = STORES_ENTRIES) -> None:
    """Refuse (`UserError`) a model with a bias by distance, for a reason of `left_out`."""
    if has_distance_bias(model.config):
        raise left_out(reason)


@contextmanager
def relative_states(model: Any) -> Iterator[None]:
    """Within the block, layers with full attention hand on relative states in place of the bias, in this thread.

    They are [B, H, q, R], scaled as the model scales its bias. Layers with a window keep their own bias: they have all
    entries that it is for. The model computes no bias in the others, which would take H x q x S numbers.
    """
    if not isinstance(model, nn.Module) or not has_distance_bias(model.config):
        yield
        return
    layers = full_attention_layers(model.config)
    thread = threading.get_ident()
    states: dict[nn.Module, Tensor] = {}

    def take(module: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...] | None:
        if threading.get_ident() != thread:
            return None
        states[module] = args[0].transpose(1, 2)
        return args[0][:, :0], args[1][:0], args[2][:0]

    def hand_on(module: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> Tensor | None:
        if threading.get_ident() != thread:
            return None
        return states.pop(module)

    with ExitStack() as hooks:
        for module in model.modules():
            bank: Any = getattr(module, _BANK, None)
            if bank is not None and module.layer_idx in layers:
                hooks.callback(bank.register_forward_pre_hook(take).remove)
                hooks.callback(bank.register_forward_hook(hand_on).remove)
        yield
