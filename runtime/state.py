"""The state of a prompt that a model has read: its KV entries, the next position, and a trace for observers.

Entries, and whatever is listed by layer, are those of the layers with full attention; see `keepsight.runtime.cache`.

`prefill` makes a state, a method's `compress` makes a smaller one, `read` appends tokens to one, `decode` answers
from one. Whole and compressed states have one type, so that a method can be applied to an evicted cache again, in the
middle of an answer or at the next turn of a conversation.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from transformers.cache_utils import Cache

from keepsight.models.decoder import on_each
from keepsight.runtime.cache import cache_bytes, entries, is_bounded, share
from keepsight.runtime.cache_layers import LayerEntries
from keepsight.runtime.importance import observed_attention, seen_ahead
from keepsight.runtime.softmax import Softmax


@dataclass(frozen=True)
class Needs:
    """What observers need of the tokens read; nothing else is recorded.

    Attributes:
        window: Number of last queries kept in every layer.
        received: Whether to sum the attention that each entry receives from all queries.
        features: Layers whose outputs are kept for every token; indices from 0, ascending.
    """

    window: int = 0
    received: bool = False
    features: tuple[int, ...] = ()

    def __or__(self, other: "Needs") -> "Needs":
        features = tuple(sorted({*self.features, *other.features}))
        return Needs(max(self.window, other.window), self.received or other.received, features)


@dataclass(frozen=True)
class Trace:
    """What is recorded of the tokens read, for observers.

    Attributes:
        needs: What to record.
        queries: For each layer, the queries [B, H, w, d] of the last w tokens, after RoPE; w is at most `needs.window`.
        received: For each layer, the attention that each entry has received from all queries, [B, H, C] float32;
            empty unless needed.
        softmax: The softmax of each layer.
        features: For each of the layers in `needs.features`, its output [B, M, hidden] for every token read.
        seconds: Time spent summing `received`; on a GPU, only the time that the CPU was blocked.
        ahead: [B, needs.window] int64, how many tokens after its own each of the last tokens saw, 0 where there are
            fewer; None where each saw none. See `keepsight.runtime.importance.seen_ahead`.
    """

    needs: Needs = Needs()
    queries: tuple[Tensor, ...] = ()
    received: tuple[Tensor, ...] = ()
    softmax: tuple[Softmax, ...] = ()
    features: tuple[Tensor, ...] = ()
    seconds: float = 0.0
    ahead: Tensor | None = None

    def features_of(self, layers: Sequence[int], tokens: slice = slice(None)) -> Tensor:
        """Concatenated outputs of some of the recorded layers, [B, M, len(layers) * hidden], of all or some tokens."""
        return torch.cat([self.features[self.needs.features.index(layer)][:, tokens] for layer in layers], dim=-1)


@dataclass(frozen=True)
class State:
    """What a model has read so far. Reading and decoding append to the cache; methods leave it unchanged.

    Attributes:
        cache: C entries per layer and KV head (C may differ), of M >= C tokens.
        mask: [B, C] bool, False for padding; None without padding, or when the cache's layers mark it.
        logits: [B, V] float32, of the last token.
        tokens: [B, M] int64: everything read, evicted tokens included, padded on the left.
        lengths: [B] int64: number of each row's tokens without padding.
        trace: What was recorded for observers.
        shift: [B] int64: how far a row's next position is beyond its number of tokens, where the model counts positions
            otherwise (an image's tokens under M-RoPE); None for none.
        padded: Whether a row has padding; None where that has to be looked up, for which the CPU has to wait.
    """

    cache: Cache
    mask: Tensor | None
    logits: Tensor
    tokens: Tensor
    lengths: Tensor
    trace: Trace = field(default_factory=Trace)
    shift: Tensor | None = None
    padded: bool | None = None

    @property
    def length(self) -> int:
        """Number of entries of the longest KV head, padding included; 0 where every layer is bounded by itself."""
        return max((layer.keys.shape[2] for layer in self.entries()), default=0)

    @property
    def next_position(self) -> Tensor:
        """[B] int64: the position of each row's next token."""
        return self.lengths if self.shift is None else self.lengths + self.shift

    @property
    def kv_bytes(self) -> int:
        """Bytes of all keys and values."""
        return cache_bytes(self.cache)

    @property
    def joins(self) -> bool:
        """Whether it can be read together with others; states of subclasses store entries in their own form."""
        return type(self) is State

    @property
    def tokens_mask(self) -> Tensor | None:
        """[B, M] bool, False where `tokens` is padding; None when nothing is."""
        width = self.tokens.shape[1]
        if self.padded is False or (self.padded is None and bool((self.lengths == width).all())):
            return None
        return torch.arange(width, device=self.lengths.device) >= width - self.lengths[:, None]

    def entries(self) -> list[LayerEntries]:
        """Keys, values [B, K, C, d] of each layer, and which of them are real, [B, 1 or K, C] or None for all."""
        own, held = on_each(None if self.mask is None else self.mask[:, None]), entries(self.cache)
        return [each if each.real is not None else each._replace(real=own(each.keys.device)) for each in held]

    def held(self) -> Tensor:
        """[L, B, K] int64: number of real entries per layer, row and KV head."""
        device = self.lengths.device
        return torch.stack([_held(each).to(device) for each in self.entries()])

    def select_all(self) -> list[Tensor]:
        """For each layer, a selection [B, K, C] bool of all real entries."""
        whole = [(each.keys.new_ones(each.keys.shape[:3], dtype=torch.bool), each.real) for each in self.entries()]
        return [every if real is None else every & real for every, real in whole]

    def copy(self) -> "State":
        """The same state with an independent cache to append to."""
        return replace(self, cache=share(self.cache))

    def attention_mask(self) -> Tensor | None:
        """[B, M] as transformers expects it; only its last C columns stand for entries.

        Once entries were evicted, full-attention layers know their padding, and the mask is for the bounded layers.
        """
        if self.mask is None:
            return self.tokens_mask if any(map(is_bounded, self.cache.layers)) else None
        return functional.pad(self.mask, (self.cache.get_seq_length() - self.mask.shape[1], 0))


def _held(layer: LayerEntries) -> Tensor:
    batch, kv_heads, length, _ = layer.keys.shape
    if layer.real is None:
        return torch.full((batch, kv_heads), length, device=layer.keys.device)
    return layer.real.sum(dim=-1).expand(-1, kv_heads)


class TraceRecorder:
    """Records what `needs` asks for over one or more forward passes that append to a trace.

    Args:
        trace: The trace so far.
        mask: [B, C + q] bool over the entries after the pass, False for padding; None when none is.
    """

    def __init__(self, trace: Trace, mask: Tensor | None = None) -> None:
        self.before, self.mask = trace, mask
        self.queries: dict[int, Tensor] = {}
        self.received: dict[int, Tensor] = {}
        self.softmax: dict[int, Softmax] = {}
        self.seconds = trace.seconds
        self.ahead: Tensor | None = None
        self._own_ahead: Tensor | None = None

    def __call__(
        self, layer: int, query: Tensor, key: Tensor, softmax: Softmax, real: Tensor | None, mask: Any
    ) -> None:
        """See `keepsight.runtime.attention.Recorder`."""
        place = len(self.softmax)  # among the layers with full attention, which have one mask
        self.softmax[layer] = softmax
        needs, rows = self.before.needs, query.shape[2]
        if not place:
            self._own_ahead = seen_ahead(mask, rows if needs.received else min(rows, needs.window))
            self.ahead = self._ahead_in_window(rows)
        if needs.window:
            recent = query[:, :, -needs.window :]
            if place < len(self.before.queries) and recent.shape[2] < needs.window:
                recent = torch.cat([self.before.queries[place], recent], dim=2)[:, :, -needs.window :]
            self.queries[layer] = recent.clone()  # a slice would keep the whole prompt's queries alive
        if needs.received:
            start = time.perf_counter()
            self.received[layer] = self._received(place, query, key, softmax, real)
            self.seconds += time.perf_counter() - start

    def _received(self, place: int, query: Tensor, key: Tensor, softmax: Softmax, real: Tensor | None) -> Tensor:
        rows = query.shape[2]
        key_mask = self.mask if real is None else real
        rows_mask = None if self.mask is None else self.mask[:, -rows:]
        options: dict[str, Any] = {"key_mask": key_mask, "query_mask": rows_mask, "ahead": self._own_ahead}
        total = observed_attention(query, key, softmax, key.shape[2], reduction="sum", **options)
        if place < len(self.before.received):
            total[..., :-rows] += self.before.received[place]
        return total

    def _ahead_in_window(self, rows: int) -> Tensor | None:
        """`Trace.ahead` after a pass over `rows` tokens, whose own is known."""
        window = self.before.needs.window
        pairs = (self.before.ahead, (0, rows)), (self._own_ahead, (window, 0))
        parts = [functional.pad(each, pad)[:, -window:] for each, pad in pairs if each is not None]
        return torch.stack(parts).sum(dim=0) if parts and window else None

    def trace(self, features: tuple[Tensor, ...] = ()) -> Trace:
        """The trace after the pass, whose own tokens have these `Trace.features`."""
        layers = sorted(self.softmax)
        before = self.before.features
        joined = tuple(torch.cat(pair, dim=1) for pair in zip(before, features, strict=True)) if before else features
        return Trace(
            self.before.needs,
            tuple(self.queries[layer] for layer in layers if layer in self.queries),
            tuple(self.received[layer] for layer in layers if layer in self.received),
            tuple(self.softmax[layer] for layer in layers),
            joined,
            self.seconds,
            self.ahead,
        )
