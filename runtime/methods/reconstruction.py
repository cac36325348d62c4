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
from torch import Tensor, nn
from torch.nn import functional
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from typing_extensions import override

from keepsight.errors import Positive, UserError
from keepsight.models.chat import chat_text, encode, has_chat_template
from keepsight.models.decoder import decoder_layers, full_attention_layers, output_projection
from keepsight.models.lora import hooked
from keepsight.runtime import registry
from keepsight.runtime.allocate import Allocation, Global
from keepsight.runtime.attention import Softmax, grouped_attention, visible
from keepsight.runtime.evict import Evict
from keepsight.runtime.features import RecordFeatures, WatchInputs
from keepsight.runtime.importance import NO_POOL, Pool, Reduce, observed_attention, reduce_group
from keepsight.runtime.layer import KeptLayer, LayerEntries
from keepsight.runtime.methods.geometry import output_norms
from keepsight.runtime.observe import Observer, ViewedLayer, read_embeddings
from keepsight.runtime.resources import Resources
from keepsight.runtime.state import State, full_layers, with_observers

_FIRST_INSTRUCTION = "\n\nRepeat the previous context exactly."
_LATER_INSTRUCTION = "\n\nRepeat the part of the previous context exactly, starting with"
_CARRIED = 8  # last tokens of the chunk before, which the instruction ends with
_SINKS = 4  # first entries that take part in the softmax over a later chunk
_QUERIES_AT_ONCE = 512


class Probe(NamedTuple):
    """A chunk of the context, and the tokens that repeat it.

    `ids` [B, q] int64 are instruction, carried tokens, beginning of the answer and chunk, padded on the right, where
    `mask` [B, q] is False. `positions` [B, 4 + n] int64 are those of the sinks and the chunk's n tokens among the
    tokens read; `valid` [B, 4 + n] is False for tokens that a row lacks, and for sinks in the chunk itself.
    """

    ids: Tensor
    mask: Tensor
    positions: Tensor
    valid: Tensor


class ProbedLayer(ViewedLayer):
    """A layer that records its observers: queries [B, H, q, d], their own keys [B, K, q, d] and the softmax."""

    query: Tensor
    key: Tensor
    softmax: Softmax

    @override
    def attend(self, query: Tensor, key: Tensor, value: Tensor, softmax: Softmax) -> Tensor:
        self.query = query.detach()
        self.key = key.detach()
        self.softmax = softmax

        stored = self.keys.shape[2]
        queries = query.shape[2]
        keys = torch.cat([self.keys, key], dim=2)
        values = torch.cat([self.values, value], dim=2)
        real = self.real
        if real is None:
            real = torch.ones(len(keys), 1, stored, dtype=torch.bool, device=keys.device)
        real = functional.pad(real, (0, queries), value=True)

        blocks = []
        for start in range(0, queries, _QUERIES_AT_ONCE):
            end = min(start + _QUERIES_AT_ONCE, queries)
            seen = stored + end
            mask = visible(end - start, real[..., :seen])
            block = query[:, :, start:end]
            blocks.append(grouped_attention(block, keys[:, :, :seen], values[:, :, :seen], mask, softmax))
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
        scores = []
        for layer in state.layers:
            keys = layer.entries().keys
            scores.append(torch.zeros(keys.shape[:3], dtype=torch.float32, device=keys.device))

        # Where entries were evicted, the positions of the others are unknown.
        has_all_entries = (state.counts() == state.lengths[:, None]).flatten(1).all(dim=1).tolist()
        for probe in probes:
            read = self._read_probe(model, state, probe, rope_lengths)
            for layer, layer_scores, is_whole, probe_queries in zip(
                state.layers, scores, has_all_entries, read, strict=True
            ):
                if is_whole:
                    _update_chunk_maxima(layer_scores, layer, probe, probe_queries, reduce)
                else:
                    _update_all_maxima(layer_scores, layer, probe, probe_queries, reduce)
        return scores

    def probes(self, state: State) -> Iterator[Probe]:
        """The probe of each chunk; rows with fewer chunks get probes of padding alone."""
        tokens = state.tokens
        device = tokens.device
        batch, width = tokens.shape
        lengths = state.lengths[:, None]
        first = width - lengths
        before_context = self._tokens_before_context(tokens, lengths)
        context_start = first + before_context
        context_lengths = lengths - before_context
        longest = int(context_lengths.max())
        sinks = torch.arange(_SINKS, device=device)

        for start in range(0, longest, self.chunk):
            offsets = torch.arange(start, min(start + self.chunk, longest), device=device)
            in_context = offsets < context_lengths
            has_chunk = in_context[:, :1]
            positions = torch.cat([first + sinks, context_start + offsets], dim=1).clamp(max=width - 1)
            valid = torch.cat([(sinks < before_context + start) & has_chunk, in_context], dim=1)

            carried = context_start + torch.arange(max(start - _CARRIED, 0), start, device=device)
            instruction, answer_start = self._request(is_first=start == 0)
            request = torch.cat(
                [
                    instruction.to(device).expand(batch, -1),
                    tokens.gather(1, carried.clamp(max=width - 1)),
                    answer_start.to(device).expand(batch, -1),
                ],
                dim=1,
            )
            chunk = tokens.gather(1, positions[:, _SINKS:])
            ids = torch.cat([request, chunk], dim=1)
            mask = torch.cat([has_chunk.expand(-1, request.shape[1]), in_context], dim=1)
            yield Probe(ids, mask, positions, valid)

    def longest(self, length: int) -> int:
        """Positions that the observers take after a prompt of `length` tokens."""
        first_instruction, answer_start = self._request(is_first=True)
        later_instruction, _ = self._request(is_first=False)
        instruction = max(len(first_instruction), len(later_instruction))
        return instruction + len(answer_start) + _CARRIED + min(self.chunk, length)

    def _request(self, *, is_first: bool) -> tuple[Tensor, Tensor]:
        """The instruction, and the chat template's beginning of an answer; int64."""
        instruction = _FIRST_INSTRUCTION if is_first else _LATER_INSTRUCTION
        _, after_user = _template_parts(self.tokenizer)
        return torch.tensor(_encoded(self.tokenizer, instruction)), torch.tensor(_encoded(self.tokenizer, after_user))

    def _tokens_before_context(self, tokens: Tensor, lengths: Tensor) -> Tensor:
        """[B, 1] int64: how many of a row's first tokens the chat template puts before a user's words."""
        before_user, _ = _template_parts(self.tokenizer)
        template = torch.tensor(_encoded(self.tokenizer, before_user), dtype=torch.long)
        count = len(template)
        width = tokens.shape[1]
        positions = width - lengths + torch.arange(count, device=tokens.device)
        same = tokens.gather(1, positions.clamp(max=width - 1)) == template.to(tokens.device)
        return count * (same.all(dim=1, keepdim=True) & (lengths > count))

    def _read_probe(
        self, model: PreTrainedModel, state: State, probe: Probe, rope_lengths: Tensor
    ) -> Iterator["ProbeQueries"]:
        """Read a probe after a state; its queries and keys in one layer after the other."""
        attention_inputs = list[Tensor]()

        def record(index: int, attention: nn.Module, hidden: Tensor) -> None:
            attention_inputs.append(hidden)

        watch = WatchInputs(model, record) if self.normalized else nullcontext()
        with torch.inference_mode(), watch:
            layers = _read(model, state, model.get_input_embeddings()(probe.ids), rope_lengths)
        for index, layer in enumerate(layers):
            weights = None
            if self.normalized:
                norms = attention_inputs[index].float().norm(dim=-1)
                weights = torch.where(norms > 0, 1 / norms, 0.0)  # a token's hidden state may be 0
            yield ProbeQueries(layer.query, layer.key, layer.softmax, weights, self.normalized)


class ProbeQueries(NamedTuple):
    """A probe's queries [B, H, q, d] in a layer, keys [B, K, q, d] of the same tokens, and the layer's softmax.

    `weights` [B, q] float32 multiply the attention of each query, None for 1; `by_output` says whether attention is
    also multiplied by the norm of the value's share of the layer's output.
    """

    query: Tensor
    key: Tensor
    softmax: Softmax
    weights: Tensor | None
    by_output: bool


@functools.lru_cache(maxsize=8)
def _template_parts(tokenizer: Any) -> tuple[str, str]:
    """The parts of the chat template before and after a user's text."""
    if not has_chat_template(tokenizer):
        return "", "\n"
    mark = "#####"
    before, _, after = chat_text(tokenizer, [{"role": "user", "content": mark}]).rpartition(mark)
    return before, after


@functools.lru_cache(maxsize=16)
def _encoded(tokenizer: Any, text: str) -> list[int]:
    (ids,) = encode(tokenizer, [text], special=False)
    return ids


def _read(model: PreTrainedModel, state: State, embeddings: Tensor, rope_lengths: Tensor) -> list[ProbedLayer]:
    """The layers with full attention, after a probe [B, q, hidden] was read from the state's next position on.

    `rope_lengths` is as for `observe`.
    """
    mask = state.tokens_mask
    layers = [ProbedLayer(_usable(layer), mask) for layer in full_layers(state.cache)]
    first = state.lengths + state.rope_offset
    read_embeddings(model, state.cache, layers, mask, embeddings, first, rope_lengths)
    return layers


def _usable(layer: KeptLayer) -> LayerEntries:
    """A layer's entries; inference tensors are copied if gradients are enabled."""
    stored = layer.attended()
    if not torch.is_grad_enabled() or not stored.keys.is_inference():
        return stored
    return LayerEntries(stored.keys.clone(), stored.values.clone(), stored.real)


def _update_chunk_maxima(scores: Tensor, layer: KeptLayer, probe: Probe, queries: ProbeQueries, reduce: Reduce) -> None:
    """Update `scores` [B, K, C], a layer's largest attention so far, in place by that of a probe to its chunk."""
    keys = layer.attended().keys
    positions = probe.positions.to(keys.device)
    valid = probe.valid[:, None].to(keys.device)
    keys = keys.gather(2, positions[:, None, :, None].expand(-1, keys.shape[1], -1, keys.shape[3]))
    attention = _probe_attention(keys, valid, probe, queries, reduce)
    if queries.by_output:
        attention = attention * output_norms(layer, 2, positions)
    # The sinks take part in the softmax alone.
    chunk_scores = reduce_group(attention, scores.shape[1], reduce.heads).masked_fill(~valid, 0.0)[..., _SINKS:]
    chunk_positions = positions[:, None, _SINKS:].expand_as(chunk_scores)
    scores.scatter_reduce_(2, chunk_positions, chunk_scores, "amax")


def _update_all_maxima(scores: Tensor, layer: KeptLayer, probe: Probe, queries: ProbeQueries, reduce: Reduce) -> None:
    """Update `scores` [B, K, C], a layer's largest attention so far, in place by that of a probe to all entries."""
    keys, _, real = layer.attended()
    if real is None:
        real = torch.ones(len(keys), 1, keys.shape[2], dtype=torch.bool, device=keys.device)
    attention = _probe_attention(keys, real, probe, queries, reduce)
    if queries.by_output:
        attention = attention * output_norms(layer, 2)
    probe_scores = reduce_group(attention, scores.shape[1], reduce.heads).masked_fill(~real, 0.0)
    scores.clamp_(min=probe_scores)


def _probe_attention(keys: Tensor, valid: Tensor, probe: Probe, queries: ProbeQueries, reduce: Reduce) -> Tensor:
    """Attention [B, H, n] of a probe to keys [B, K, n, d], `valid` [B, 1 or K, n], in a softmax with its own keys."""
    query_mask = probe.mask.to(keys.device)
    if queries.weights is not None:
        query_mask = query_mask * queries.weights.to(keys.device)
    return observed_attention(
        queries.query,
        torch.cat([keys, queries.key], dim=2),
        queries.softmax,
        keys.shape[2],
        key_mask=functional.pad(valid, (0, queries.key.shape[2]), value=True),
        query_mask=query_mask,
        reduction=reduce.queries,
    )


@registry.observer("attribution")
@dataclass(frozen=True)
class Attribution(Reconstruction):
    """`Reconstruction` by the first-order effect of an entry on the last layer's outputs (KVgrad, kvpress PR 279).

    An entry's score is the largest of: its attention from a token p that repeats its chunk, times the norm of v W_O,
    times the norm of the gradient of all tokens' squared outputs at the last layer, before the final norm, with respect
    to the attention output at p.

    Attributes:
        chunk: See `Reconstruction`; smaller here, since one gradient is shared by the tokens of a chunk. 256 as in
            kvpress since its pull request 286; 512 in kvpress 0.5.5 and its pull request 279.
    """

    chunk: int = 256
    normalized: bool = False

    def __post_init__(self) -> None:
        if self.normalized:
            raise UserError(
                "attribution: normalized belongs to KVzip+; leave it out", field="normalized", code="conflict"
            )

    @override
    def _read_probe(
        self, model: PreTrainedModel, state: State, probe: Probe, rope_lengths: Tensor
    ) -> Iterator[ProbeQueries]:
        last_layer = len(decoder_layers(model)) - 1
        attention_outputs = list[Tensor]()

        def record(module: nn.Module, inputs: Any, output: Tensor) -> None:
            attention_outputs.append(output)

        with torch.inference_mode(False), torch.enable_grad():
            with torch.no_grad():
                embeddings = model.get_input_embeddings()(probe.ids.clone()).clone()
            hooks = [(output_projection(model, index), record) for index in full_attention_layers(model.config)]
            with hooked(hooks), RecordFeatures(model, [last_layer]) as recorded:
                layers = _read(model, state, embeddings.requires_grad_(), rope_lengths)
            outputs = recorded.outputs()[0]
            squares = outputs.float().square().sum(dim=-1)
            total = (squares * probe.mask.clone().to(outputs.device)).sum()
            gradients = torch.autograd.grad(total, attention_outputs)
        for layer, gradient in zip(layers, gradients, strict=True):
            weights = gradient.float().norm(dim=-1)
            yield ProbeQueries(layer.query, layer.key, layer.softmax, weights, True)


@registry.method("kvzip", label="KVzip")
@dataclass(frozen=True)
class KVzip(Evict):
    """Keeps 4 sinks and what repeating the context attends to; all heads share one budget (arXiv 2505.23416).

    `KVzip(64, Reconstruction(tokenizer))`; by name, the tokenizer is the base model's.
    """

    cost = "another two prefills"
    reduce: Reduce = Reduce("max", "max")
    pool: Pool = NO_POOL
    allocate: Allocation = Global(floor=0)
    sinks: int = _SINKS
    reads_images = False

    @staticmethod
    def observer_of(tokenizer: Any) -> Observer:
        """The observer of the paper."""
        return Reconstruction(tokenizer)

    @classmethod
    @override
    def fields_from(cls, resources: Resources, options: dict[str, Any]) -> dict[str, Any]:
        return {"observer": cls.observer_of(resources.find("tokenizer"))}

    @override
    def check(self, length: int, context: int) -> None:
        super().check(length, context)
        observer = self.bound_observer
        if length <= self.budget_for(length) or not isinstance(observer, Reconstruction):
            return
        positions = observer.longest(length)
        if length + positions > context:
            raise UserError(
                f"{type(self).__name__}: {positions} tokens that repeat a chunk of a prompt of {length} do not fit the "
                f"context of {context}; lower the observer's chunk, or shorten the prompt",
                field="prompt",
                code="range",
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

    The paper is https://openreview.net/forum?id=cg1wTCJjjk. Takes a backward pass through the base model for each
    chunk.
    """

    cost = "another four prefills: a backward pass for each chunk"

    @staticmethod
    @override
    def observer_of(tokenizer: Any) -> Observer:
        return Attribution(tokenizer)
