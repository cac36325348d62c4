"""Expected Attention and TriAttention: the attention of future queries, estimated from past ones.

Before RoPE the queries of a head point in much the same direction at all positions. Their statistics, rotated to the
positions of the answer, stand for its queries; no attention is computed. Both work before the question is known.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel
from typing_extensions import override

from keepsight.errors import Positive, Share, UserError, Whole
from keepsight.runtime import registry
from keepsight.runtime.allocate import Adaptive, Allocation
from keepsight.runtime.distance_bias import STATISTICS, require_no_distance_bias
from keepsight.runtime.evict import Evict
from keepsight.runtime.importance import NO_POOL, Pool, Reduce, reduce_group
from keepsight.runtime.layer import KeptLayer
from keepsight.runtime.observe import LayerObserver, Observer
from keepsight.runtime.rotary import QueryStatistics, Rotary
from keepsight.runtime.state import Needs, State

_OFFSETS = [2**power for power in range(17)]


def _statistics(layer: KeptLayer) -> QueryStatistics:
    if layer.recorded is None or layer.recorded.statistics is None:
        raise UserError(
            "statistics of queries were not recorded when the prompt was read; read it with this method, or prefill "
            "with needs=method.needs()",
            field="needs",
            code="state",
        )
    return layer.recorded.statistics


def _rotary(layer: KeptLayer) -> Rotary:
    assert layer.origin is not None
    return Rotary(*layer.origin, latent=True)


@registry.observer("expected_queries")
@dataclass(frozen=True)
class ExpectedQueries(LayerObserver):
    """Mean attention of normally distributed queries at the next positions (arXiv 2510.00636, section 3).

    Mean and covariance are those of the queries read so far without the first 4, rotated by the mean rotation of the
    next positions. A key's logit is then normally distributed too, and the mean of its exponential is known; the
    softmax is over all entries but the sinks.

    Attributes:
        positions_ahead: Number of next positions.
        covariance: Whether the covariance counts, and not the mean alone.
        epsilon: Added to the attention, before a method multiplies it by the norms of the values.
        sinks: Number of first entries that are left out; None for the method's own.
    """

    positions_ahead: Positive = 512
    covariance: bool = True
    epsilon: Share = 0.0
    sinks: Whole | None = None
    signed = False

    @override
    def score(self, layer: KeptLayer, reduction: str) -> Tensor:
        statistics = _statistics(layer)
        rotary = _rotary(layer)
        scaling = layer.softmax.scaling
        entries = layer.attended()
        device = entries.keys.device
        positions = layer.seen + torch.arange(self.positions_ahead, device=device)
        mean = rotary.mean_over_positions(statistics.mean[:, :, None], positions)
        group = mean.shape[1] // entries.keys.shape[1]
        keys = entries.keys.float().repeat_interleave(group, dim=1)

        logits = (mean * keys).sum(dim=-1) * scaling
        if self.covariance:
            # Both sides of the matrix are rotated.
            covariance = rotary.mean_over_positions(statistics.covariance, positions)
            covariance = rotary.mean_over_positions(covariance.mT, positions)
            variance = (keys @ covariance * keys).sum(dim=-1)
            logits = logits + variance * scaling**2 / 2

        real = entries.marks
        after_sinks = real & (real.long().cumsum(dim=-1) > (self.sinks or 0))
        after_sinks = after_sinks.repeat_interleave(group, dim=1)
        return logits.masked_fill(~after_sinks, torch.finfo(torch.float32).min).softmax(dim=-1) + self.epsilon

    @override
    def needs(self) -> Needs:
        return Needs(statistics=True)

    @override
    def check_model(self, model: PreTrainedModel) -> None:
        require_no_distance_bias(model, STATISTICS)


@registry.method("expected_attention", label="Expected Attention")
@dataclass(frozen=True)
class ExpectedAttention(Evict):
    """Keeps 4 sinks and what the next 512 tokens should attend to, weighted by the values' norms (arXiv 2510.00636)."""

    observer: Observer = ExpectedQueries()
    pool: Pool = NO_POOL
    sinks: int = 4
    value_norm: bool = True
    reads_images = False


@registry.method("expected_adakv", label="Expected Attention, AdaKV")
@dataclass(frozen=True)
class ExpectedAdaKV(ExpectedAttention):
    """Expected Attention whose heads share their layer's budget; the method of that name on kvpress's leaderboard."""

    observer: Observer = ExpectedQueries(epsilon=0.01)
    allocate: Allocation = Adaptive(blend=False)


@registry.observer("trigonometric")
@dataclass(frozen=True)
class Trigonometric(Observer):
    """The logit of the mean query, averaged over distances from 1 to 65,536, plus a term of norms.

    TriAttention, arXiv 2604.04921, section 4. For each pair of dimensions that RoPE turns, the term is the key's norm
    times the difference between the queries' mean norm and the norm of their mean. Scores are standardised over the
    entries of each query head.

    The published code takes the statistics of the queries from another text, once for a model. Here they are those of
    the tokens read so far, without the first 4: nothing has to be calibrated.

    Attributes:
        per_layer: Whether each layer chooses for itself; else a KV head keeps the same entries in all layers, by the
            mean over layers, as the published code does by default.
    """

    per_layer: bool = False
    signed = True

    @override
    def __call__(self, model: PreTrainedModel, state: State, reduce: Reduce) -> list[Tensor]:
        scores = []
        for layer in state.layers:
            kv_heads = layer.entries().keys.shape[1]
            scores.append(reduce_group(self._score(layer), kv_heads, reduce.heads))
        if self.per_layer or not scores:
            return scores

        shapes = {layer_scores.shape for layer_scores in scores}
        if len(shapes) > 1:
            raise UserError(
                "TriAttention: layers keep different numbers of entries; give the observer per_layer=True",
                field="per_layer",
                code="conflict",
            )
        device = scores[0].device
        mean = torch.stack([layer_scores.to(device) for layer_scores in scores]).mean(dim=0)
        return [mean.to(layer_scores.device) for layer_scores in scores]

    @override
    def needs(self) -> Needs:
        return Needs(statistics=True)

    @override
    def check_model(self, model: PreTrainedModel) -> None:
        require_no_distance_bias(model, STATISTICS)

    def _score(self, layer: KeptLayer) -> Tensor:
        """A layer's scores by query head, [B, H, C] float32."""
        statistics = _statistics(layer)
        rotary = _rotary(layer)
        entries = layer.attended()
        group = statistics.mean.shape[1] // entries.keys.shape[1]
        keys = entries.keys.float().repeat_interleave(group, dim=1)
        positions = layer.seen + torch.tensor(_OFFSETS, device=keys.device)
        mean = statistics.mean[:, :, None]

        mean_norms = rotary.pair_norms(rotary.mean_over_positions(mean, positions[:1]))
        norms_beyond_mean = statistics.mean_norms[:, :, None] - mean_norms
        norm_term = (norms_beyond_mean * rotary.pair_norms(keys)).sum(dim=-1) / 2  # each pair has two dimensions
        scores = (rotary.mean_over_positions(mean, positions) * keys).sum(dim=-1) + norm_term

        real = entries.marks.float().repeat_interleave(group, dim=1)
        real_entries = real.sum(dim=-1, keepdim=True).clamp(min=1)
        centred = scores - (scores * real).sum(dim=-1, keepdim=True) / real_entries
        deviation = ((centred * real).square().sum(dim=-1, keepdim=True) / real_entries).sqrt()
        return centred / (deviation + 1e-6)


@registry.method("triattention", label="TriAttention")
@dataclass(frozen=True)
class TriAttention(Evict):
    """Keeps what the mean query attends to from near and far, alike in all layers (TriAttention, arXiv 2604.04921).

    Evicts once after the prompt; `every=128` evicts while decoding too, as the paper does. Its cache grows from B to
    B + 128 entries between evictions: that is budget=B + 128. Its prompt is never evicted from; here prompt and answer
    compete, as in its vLLM runtime.
    """

    observer: Observer = Trigonometric()
    reduce: Reduce = Reduce(heads="max")
    pool: Pool = NO_POOL
    reads_images = False
