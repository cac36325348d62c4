"""KVzip, KVzip+ and KVgrad: they keep the entries that the base model needs to repeat the context.

After the prefill the context is repeated chunk by chunk, as if a user had asked for it: an instruction, the last tokens
of the chunk before, the chat template's beginning of an answer, and the chunk itself. These tokens are read, not
generated; they look back at the whole cache, which does not change. The question need not be known: in the evaluation
`question=unseen` compresses before it, as the papers do.
"""

import functools
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from typing_extensions import override

from keepsight.errors import Positive, UserError
from keepsight.models.chat import chat_text, encode, has_chat_template
from keepsight.models.decoder import decoder_of, full_attention_layers, output_projection
from keepsight.models.lora import hooked
from keepsight.runtime import registry
from keepsight.runtime.allocate import Allocation, Global
from keepsight.runtime.attention import Softmax, grouped_attention, visible
from keepsight.runtime.evict import Evict
from keepsight.runtime.features import RecordFeatures, WatchInputs
from keepsight.runtime.importance import NO_POOL, Pool, Reduce, observed_attention, reduce_group
from keepsight.runtime.layer import KeptLayer, LayerEntries
from keepsight.runtime.methods.geometry import output_norms
from keepsight.runtime.observe import Observer, ViewedLayer, read_with
from keepsight.runtime.state import State, full_layers, with_observers

_FIRST, _LATER = (
    "\n\nRepeat the previous context exactly.",
    ("\n\nRepeat the part of the previous context exactly, starting with"),
)
_CARRIED = 8  # last tokens of the chunk before, which the instruction ends with
_SINKS = 4  # first entries that take part in the softmax over a later chunk
_ROWS = 512  # queries whose attention is computed at once


class Probe(NamedTuple):
    """A chunk of the context, and the tokens that repeat it.

    `ids` [B, q] int64 are instruction, carried tokens, beginning of the answer and chunk, padded on the right, where
    `mask` [B, q] is False. `places` [B, 4 + n] int64 are the places of the sinks and the chunk's n tokens among the
    tokens read; `valid` [B, 4 + n] is False for tokens that a row lacks, and for sinks in the chunk itself.
    """

    ids: Tensor
    mask: Tensor
    places: Tensor
    valid: Tensor


class Replayed(ViewedLayer):
    """A layer that records its observers: queries [B, H, q, d], their own keys [B, K, q, d] and the softmax."""

    observed: tuple[Tensor, Tensor, Softmax]

    @override
    def attend(self, query: Tensor, key: Tensor, value: Tensor, softmax: Softmax) -> Tensor:
        self.observed = query.detach(), key.detach(), softmax
        stored, count = self.keys.shape[2], query.shape[2]
        keys, values = torch.cat([self.keys, key], dim=2), torch.cat([self.values, value], dim=2)
        real = self.real
        if real is None:
            real = torch.ones(len(keys), 1, stored, dtype=torch.bool, device=keys.device)
        real = functional.pad(real, (0, count), value=True)
        blocks = []
        for start in range(0, count, _ROWS):
            end = min(start + _ROWS, count)
            until = stored + end
            mask = visible(end - start, real[..., :until])
            rows = query[:, :, start:end]
            blocks.append(grouped_attention(rows, keys[:, :, :until], values[:, :, :until], mask, softmax))
        return torch.cat(blocks, dim=1)


@registry.observer("reconstruction")
@dataclass(frozen=True)
class Reconstruction(Observer):
    """The tokens that repeat the context observe it (KVzip, arXiv 2505.23416, section 3).

    An entry's score is its largest attention from the tokens that repeat its chunk, by a softmax over the first 4
    entries, the chunk and those tokens themselves. Other entries take no part in it, though they are seen.

    The chat template's tokens before a user's words are not repeated, and score 0, as in kvpress; the authors never
    evict them. In a cache that was evicted from before the places of entries are unknown: the softmax is then over all
    of them.

    Attributes:
        tokenizer: The base model's.
        chunk: Tokens that are repeated in one pass. 2,048 in kvpress, 2,000 in the authors' code.
        normalized: Whether attention is multiplied by the norm of v W_O, the value's share of the output, and divided
            by that of the observing token's hidden state: KVzip+ (KVzap, arXiv 2601.07891). As in kvpress the hidden
            state is the input of the attention, after the layer's norm.
    """

    tokenizer: PreTrainedTokenizerBase = field(repr=False)
    chunk: Positive = 2048
    normalized: bool = False
    signed = False

    @override
    def __call__(self, model: PreTrainedModel, state: State, reduce: Reduce) -> list[Tensor]:
        probes = list(self.probes(state))
        longest = max((probe.ids.shape[1] for probe in probes), default=0)
        rope_lengths = state.rope_lengths + longest
        state = with_observers(model, state, longest)
        layers, scores = state.layers, list[Tensor]()
        for layer in layers:
            keys = layer.entries().keys
            scores.append(torch.zeros(keys.shape[:3], dtype=torch.float32, device=keys.device))
        whole = (state.counts() == state.lengths[:, None]).flatten(1).all(dim=1).tolist()
        for probe in probes:
            found = self._replayed(model, state, probe, rope_lengths)
            for layer, is_whole, total, each in zip(layers, whole, scores, found, strict=True):
                _add(total, layer, probe if is_whole else None, probe.mask, reduce, each)
        return scores

    def probes(self, state: State) -> Iterator[Probe]:
        """The probe of each chunk; rows with fewer chunks get probes of padding alone."""
        tokens, lengths, device = state.tokens, state.lengths[:, None], state.tokens.device
        first, before = tokens.shape[1] - lengths, self._before_context(tokens, lengths)
        context, last, sinks = lengths - before, tokens.shape[1] - 1, torch.arange(_SINKS, device=device)
        longest = int(context.max())
        for start in range(0, longest, self.chunk):
            own = torch.arange(start, min(start + self.chunk, longest), device=device)
            chunk = own < context
            places = torch.cat([first + sinks, first + before + own], dim=1).clamp(max=last)
            valid = torch.cat([(sinks < before + start) & chunk[:, :1], chunk], dim=1)
            carried = first + before + torch.arange(max(start - _CARRIED, 0), start, device=device)
            text, answer = self._asked(start > 0)
            parts = [
                text.to(device).expand(len(tokens), -1),
                tokens.gather(1, carried.clamp(max=last)),
                answer.to(device).expand(len(tokens), -1),
            ]
            asked = torch.cat(parts, dim=1)
            real = torch.cat([chunk[:, :1].expand(-1, asked.shape[1]), chunk], dim=1)
            yield Probe(torch.cat([asked, tokens.gather(1, places[:, _SINKS:])], dim=1), real, places, valid)

    def longest(self, length: int) -> int:
        """Positions that the observers take after a prompt of `length` tokens."""
        asked = [sum(part.shape[0] for part in self._asked(later)) for later in (False, True)]
        return max(asked) + _CARRIED + min(self.chunk, length)

    def _asked(self, later: bool) -> tuple[Tensor, Tensor]:
        """The instruction, and the chat template's beginning of an answer; int64."""
        texts = _LATER if later else _FIRST, _around(self.tokenizer)[1]
        instruction, answer = (torch.tensor(_encoded(self.tokenizer, each)) for each in texts)
        return instruction, answer

    def _before_context(self, tokens: Tensor, lengths: Tensor) -> Tensor:
        """[B, 1] int64: how many of a row's first tokens the chat template puts before a user's words."""
        before = torch.tensor(_encoded(self.tokenizer, _around(self.tokenizer)[0]), dtype=torch.long)
        count = len(before)
        places = tokens.shape[1] - lengths + torch.arange(count, device=tokens.device)
        same = tokens.gather(1, places.clamp(max=tokens.shape[1] - 1)) == before.to(tokens.device)
        return count * (same.all(dim=1, keepdim=True) & (lengths > count))

    def _replayed(
        self, model: PreTrainedModel, state: State, probe: Probe, rope_lengths: Tensor
    ) -> Iterator["Observed"]:
        """The queries and keys of a probe in each layer."""
        read = list[Tensor]()
        watch = WatchInputs(model, lambda *seen: read.append(seen[2])) if self.normalized else nullcontext()
        with torch.inference_mode(), watch:
            layers = _read(model, state, model.get_input_embeddings()(probe.ids), rope_lengths)
        for place, layer in enumerate(layers):
            weights = None
            if self.normalized:
                norms = read[place].float().norm(dim=-1)
                weights = torch.where(norms > 0, 1 / norms, 0.0)  # a token's hidden state may be 0
            yield Observed(*layer.observed, weights, self.normalized)


class Observed(NamedTuple):
    """Observing queries [B, H, q, d] of a layer, keys [B, K, q, d] of the same tokens, and its softmax.

    `weights` [B, q] float32 multiply the attention of each query, None for 1; `by_output` says whether attention is
    also multiplied by the norm of the value's share of the layer's output.
    """

    query: Tensor
    key: Tensor
    softmax: Softmax
    weights: Tensor | None
    by_output: bool


@functools.lru_cache(maxsize=8)
def _around(tokenizer: Any) -> tuple[str, str]:
    """The parts of the chat template before and after a user's text."""
    mark = "#####"
    if not has_chat_template(tokenizer):
        return "", "\n"
    before, _, after = chat_text(tokenizer, [{"role": "user", "content": mark}]).rpartition(mark)
    return before, after


@functools.lru_cache(maxsize=16)
def _encoded(tokenizer: Any, text: str) -> list[int]:
    (ids,) = encode(tokenizer, [text], special=False)
    return ids


def _read(model: PreTrainedModel, state: State, embeddings: Tensor, rope_lengths: Tensor) -> list[Replayed]:
    """The layers with full attention, after a probe [B, q, hidden] was read from the state's next position on.

    `rope_lengths` is as for `observe`.
    """
    mask = state.tokens_mask
    layers = [Replayed(_usable(layer), mask) for layer in full_layers(state.cache)]
    first = state.lengths + state.rope_offset
    read_with(model, state.cache, layers, mask, embeddings, first, rope_lengths)
    return layers


def _usable(layer: KeptLayer) -> LayerEntries:
    """A layer's entries; inference tensors are copied if gradients are enabled."""
    stored = layer.attended()
    if not torch.is_grad_enabled() or not stored.keys.is_inference():
        return stored
    return LayerEntries(stored.keys.clone(), stored.values.clone(), stored.real)


def _add(scores: Tensor, layer: KeptLayer, probe: Probe | None, mask: Tensor, reduce: Reduce, seen: Observed) -> None:
    """Raise a layer's scores [B, K, C], in place, to those of a probe with mask [B, q] bool, as `seen`.

    Without a probe all entries are scored.
    """
    keys, _, real = layer.attended()
    sinks, kv_heads = 0, scores.shape[1]
    if probe is None:
        places = torch.arange(keys.shape[2], device=keys.device).expand(len(keys), -1)
        valid = torch.ones_like(places, dtype=torch.bool)[:, None] if real is None else real
    else:
        places, valid, sinks = probe.places.to(keys.device), probe.valid[:, None].to(keys.device), _SINKS
        keys = keys.gather(2, places[:, None, :, None].expand(-1, keys.shape[1], -1, keys.shape[3]))
    observing = mask.to(keys.device)
    attention = observed_attention(
        seen.query,
        torch.cat([keys, seen.key], dim=2),
        seen.softmax,
        keys.shape[2],
        key_mask=functional.pad(valid, (0, seen.key.shape[2]), value=True),
        query_mask=observing if seen.weights is None else observing * seen.weights.to(keys.device),
        reduction=reduce.queries,
    )
    if seen.by_output:
        attention = attention * output_norms(layer, 2, places)
    found = reduce_group(attention, kv_heads, reduce.heads).masked_fill(~valid, 0.0)[..., sinks:]
    scores.scatter_reduce_(2, places[:, None, sinks:].expand_as(found), found, "amax")


@registry.observer("attribution")
@dataclass(frozen=True)
class Attribution(Reconstruction):
    """`Reconstruction` by the first-order effect of an entry on the last layer's outputs (KVgrad, kvpress PR 279).

    An entry's score is the largest of: its attention from a token p that repeats its chunk, times the norm of v W_O,
    times the norm of the gradient of all tokens' squared outputs at the last layer, before the final norm, with respect
    to the attention output at p.

    Attributes:
        chunk: See `Reconstruction`; smaller here, since one gradient is shared by the tokens of a chunk.
    """

    chunk: int = 512
    normalized: bool = False

    def __post_init__(self) -> None:
        if self.normalized:
            raise UserError("attribution: normalized belongs to KVzip+; leave it out")

    @override
    def _replayed(self, model: PreTrainedModel, state: State, probe: Probe, rope_lengths: Tensor) -> Iterator[Observed]:
        last = len(decoder_of(model).layers) - 1
        with torch.inference_mode(False), torch.enable_grad():
            with torch.no_grad():
                embeddings = model.get_input_embeddings()(probe.ids.clone()).clone()
            added = list[Tensor]()
            projections = (output_projection(model, place) for place in full_attention_layers(model.config))
            hooks = ((each, lambda *seen: added.append(seen[2])) for each in projections)
            with hooked(hooks), RecordFeatures(model, [last]) as recorded:
                layers = _read(model, state, embeddings.requires_grad_(), rope_lengths)
            outputs = recorded.outputs()[0]
            squares = (outputs.float().square().sum(dim=-1) * probe.mask.clone().to(outputs.device)).sum()
            gradients = torch.autograd.grad(squares, added)
        for layer, gradient in zip(layers, gradients, strict=True):
            yield Observed(*layer.observed, gradient.float().norm(dim=-1), True)


@registry.method("kvzip", label="KVzip")
@dataclass(frozen=True)
class KVzip(Evict):
    """Keeps 4 sinks and what repeating the context attends to; all heads share one budget (arXiv 2505.23416).

    `KVzip(64, Reconstruction(tokenizer))`; by name, the tokenizer is the base model's.
    """

    reduce: Reduce = Reduce("max", "max")
    pool: Pool = NO_POOL
    allocate: Allocation = Global(floor=0)
    sinks: int = _SINKS
    reads_images = False

    @staticmethod
    def observer_of(tokenizer: Any) -> Observer:
        """The observer of the paper."""
        return Reconstruction(tokenizer)

    @override
    def check(self, length: int, context: int) -> None:
        super().check(length, context)
        observer = self.bound_observer
        if length <= self.budget_for(length) or not isinstance(observer, Reconstruction):
            return
        if (positions := observer.longest(length)) + length > context:
            raise UserError(
                f"{type(self).__name__}: {positions} tokens that repeat a chunk of a prompt of {length} do not fit the "
                f"context of {context}; lower the observer's chunk, or shorten the prompt"
            )


@registry.method("kvzip+", label="KVzip+")
@dataclass(frozen=True)
class KVzipPlus(KVzip):
    """KVzip by each entry's share of a layer's output, relative to the layer's input (arXiv 2601.07891)."""

    @staticmethod
    @override
    def observer_of(tokenizer: Any) -> Observer:
        return Reconstruction(tokenizer, normalized=True)


@registry.method("kvgrad", label="KVgrad")
@dataclass(frozen=True)
class KVgrad(KVzip):
    """KVzip by each entry's effect on the last layer's outputs (KVgrad, kvpress PR 279): gradients, no training.

    Takes a backward pass through the base model for each chunk.
    """

    @staticmethod
    @override
    def observer_of(tokenizer: Any) -> Observer:
        return Attribution(tokenizer)
