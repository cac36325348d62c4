"""Compactor: keys that are unlike the others, and what tokens near an entry, before and after it, attend to."""

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional
from transformers import PreTrainedModel
from typing_extensions import override

from keepsight.errors import Budget, Positive, Share, UserError, Whole
from keepsight.runtime import registry
from keepsight.runtime.attention import Softmax
from keepsight.runtime.distance_bias import without_positions
from keepsight.runtime.evict import Evict
from keepsight.runtime.importance import NO_POOL, Pool, recorded_queries
from keepsight.runtime.layer import KeptLayer, LayerEntries, kept_columns
from keepsight.runtime.observe import LayerObserver, Observer
from keepsight.runtime.rotary import Rotary
from keepsight.runtime.state import ALL_QUERIES, Needs, State

_RIDGE = 0.01
"""Added to the diagonal of the keys' Gram matrix, so that it can be inverted."""


@registry.observer("leverage_and_blocks")
@dataclass(frozen=True)
class LeverageAndBlocks(LayerObserver):
    """Leverage scores of keys, blended with attention within blocks that is not causal (Compactor, arXiv 2507.08143).

    Leverage is that of the keys before RoPE, less their mean, after a random projection. The attention to an entry is
    summed over the queries of its block, multiplied by the norm of its value and averaged over three neighbours. Both
    are standardised over the entries and heads of a layer. Sinks and window take no part.

    Entries that stayed in an earlier eviction keep the score that they got there; tokens read since then are scored
    among themselves.

    Attributes:
        block: Entries of a block.
        sketch: Dimensions that keys are projected to; keys of no more dimensions are not projected.
        blend: Weight of the leverage; None for the share of entries that is evicted.
        seed: Seed of the projection.
        budget: Entries that stay, for the share that is evicted; None for the method's own.
        sinks: Number of first entries that are kept anyway; None for the method's own.
        window: Number of last entries that are kept anyway; None for the method's own.
    """

    block: Positive = 256
    sketch: Positive = 48
    blend: Share | None = None
    seed: Whole = 0
    budget: Budget | None = None
    sinks: Whole | None = None
    window: Whole | None = None
    signed = True

    @override
    def needs(self) -> Needs:
        return Needs(window=ALL_QUERIES)

    @override
    def score(self, layer: KeptLayer, reduction: str) -> Tensor:
        queries: Tensor = recorded_queries(layer, ALL_QUERIES).queries
        entries = layer.attended()
        keys, _, real = entries
        batch, kv_heads, width, _ = keys.shape
        unscored = layer.croppable
        scores = torch.zeros(batch, kv_heads, width, dtype=torch.float32, device=keys.device)
        lengths = [width] * batch
        if unscored < width:
            scores[..., : width - unscored] = self._scores_before(layer, width - unscored)
        elif real is not None:
            lengths = real[:, 0].sum(dim=-1).tolist()
        if queries.shape[2] < unscored:
            raise self._unknown()

        for row, length in enumerate(lengths):
            first = width - min(unscored, length)
            if unscored == width:
                first = min(first + (self.sinks or 0), width)
            end = max(width - (self.window or 0), first)
            if first < end:
                padding = width - length
                scores[row, :, first:end] = self._scores_of(layer, entries, row, slice(first, end), padding)
        return scores

    def _scores_of(self, layer: KeptLayer, entries: LayerEntries, row: int, columns: slice, padding: int) -> Tensor:
        """The scores [K, n] of the n entries in some columns of a row, all of them read since the last eviction."""
        keys, values, _ = entries
        width = keys.shape[2]
        row_keys = keys[row, :, columns]
        recorded = recorded_queries(layer, ALL_QUERIES).queries
        unrecorded = width - recorded.shape[2]
        queries = recorded[row, :, columns.start - unrecorded : columns.stop - unrecorded]
        attention = attention_in_blocks(queries, row_keys, layer.softmax, self.block)
        attention = attention * torch.linalg.vector_norm(values[row, :, columns].float(), dim=-1)
        attention = functional.avg_pool1d(attention, kernel_size=3, stride=1, padding=1)

        assert layer.origin is not None
        first_position = layer.get_seq_length() - width - padding
        positions = torch.arange(columns.start, columns.stop, device=keys.device) + first_position
        bare_keys = without_positions(row_keys) if layer.has_positions else row_keys
        unrotated = Rotary(*layer.origin, latent=True).undone(bare_keys[None].float(), positions[None])[0]
        leverage = leverage_scores(unrotated, self.sketch, self.seed)
        blend = self._evicted_share(width - padding) if self.blend is None else self.blend
        return blend * _standardised(leverage) + _standardised(attention)

    def _scores_before(self, layer: KeptLayer, entries: int) -> Tensor:
        """[B, K, C] float32: what the last eviction scored the C entries by that it kept."""
        before = None if layer.recorded is None else layer.recorded.scored
        if before is None or before.shape[2] != entries or bool(before.isnan().any()):
            raise self._unknown()
        return before

    def _unknown(self) -> UserError:
        return UserError(
            "compactor: entries were evicted, or come from a file, without the scores that they stay by; read the "
            "whole prompt with this method",
            field="state",
            code="state",
        )

    def _evicted_share(self, entries: int) -> float:
        budget = self.budget or 0
        kept = budget if isinstance(budget, float) else budget / max(entries, 1)
        return min(max(1 - kept, 0.0), 1.0)


def leverage_scores(keys: Tensor, sketch: int, seed: int) -> Tensor:
    """Leverage [K, n] float32 of keys [K, n, d], less their mean, projected to `sketch` dimensions."""
    kv_heads, _, width = keys.shape
    centred = keys - keys.mean(dim=1, keepdim=True)
    if sketch < width:
        generator = torch.Generator().manual_seed(seed)
        projection = torch.randn(kv_heads, width, sketch, generator=generator, dtype=torch.float32, device="cpu")
        centred = centred @ (projection / math.sqrt(sketch)).to(centred)
    precise = centred.double()
    gram = precise.mT @ precise
    gram = gram + _RIDGE * torch.eye(gram.shape[-1], dtype=gram.dtype, device=gram.device)
    solved = torch.linalg.solve(gram, precise.mT)
    return (precise * solved.mT).sum(dim=-1).clamp(min=0).float()


def attention_in_blocks(queries: Tensor, keys: Tensor, softmax: Softmax, block: int) -> Tensor:
    """[K, n] float32: the attention to each key, summed over the queries of its block and averaged over query heads.

    Queries [H, n, d] and keys [K, n, d] of the same tokens; a query sees all keys of its block, later ones too.
    """
    kv_heads, length, _ = keys.shape
    blocks = []
    for start in range(0, length, block):
        block_keys = keys[None, :, start : start + block]
        block_queries = queries[None, :, start : start + block]
        grouped = block_queries.reshape(1, kv_heads, -1, block_queries.shape[3])
        logits = softmax.logits(grouped, block_keys)
        weights = softmax.normalised(logits.unflatten(2, (-1, block_keys.shape[2])), grouped)
        blocks.append(weights[0].sum(dim=2).mean(dim=1))
    return torch.cat(blocks, dim=-1)


def _standardised(scores: Tensor) -> Tensor:
    """Scores [K, n] less their mean, in standard deviations."""
    if scores.numel() < 2:
        return torch.zeros_like(scores)
    return (scores - scores.mean()) / scores.std().clamp(min=1e-6)


@registry.method("compactor")
@dataclass(frozen=True)
class Compactor(Evict):
    """Keeps 8 sinks, the last 4, unusual keys, and what tokens nearby attend to (Compactor, arXiv 2507.08143).

    As kvpress has it, which blends by the share that is evicted. Its products are not scaled before the softmax; here
    they are, as the layer does it. The last block is shorter here, and is filled up with zeros there. The question is
    not looked at in particular: it is meant for contexts whose questions come later. The queries of the whole prompt
    are held until all of it is read.
    """

    cost = "scores after the prefill; the prompt's queries are held"
    observer: Observer = LeverageAndBlocks()
    pool: Pool = NO_POOL
    sinks: int = 8
    window: int = 4
    evicts_after_prefill = True
    needs_model = True
    reads_images = False

    @override
    @torch.no_grad()
    def evict(
        self, model: PreTrainedModel, state: State, scores: list[Tensor] | None = None
    ) -> tuple[State, list[Tensor]]:
        if self.fits(state):
            return state.copy(), state.select_all()  # with all queries, which a later eviction needs
        if scores is None:
            scores = self.bound_observer(model, state, self.reduce)
        after, selected = super().evict(model, state, scores)
        for layer, layer_scores, mask in zip(after.layers, scores, selected, strict=True):
            assert layer.recorded is not None
            counts = mask.sum(dim=-1).cpu().numpy()
            layer.recorded = replace(layer.recorded, scored=kept_columns(layer_scores, mask, counts))
        return after, selected
