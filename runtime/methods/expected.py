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
            "with needs=method.needs()"
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
        statistics, rotary = _statistics(layer), _rotary(layer)
        entries = layer.attended()
        keys, real = entries.keys, entries.marks
        ahead = layer.seen + torch.arange(self.positions_ahead, device=keys.device)
        mean, scaling = rotary.spread(statistics.mean[:, :, None], ahead), layer.softmax.scaling
        by_kv_head = keys.float().repeat_interleave(mean.shape[1] // keys.shape[1], dim=1)
        logits = (mean * by_kv_head).sum(dim=-1) * scaling
        if self.covariance:
            half = rotary.spread(statistics.covariance, ahead)
            spread = by_kv_head @ rotary.spread(half.mT, ahead)
            logits = logits + (spread * by_kv_head).sum(dim=-1) * scaling**2 / 2
        counted = real & (real.long().cumsum(dim=-1) > (self.sinks or 0))
        counted = counted.repeat_interleave(mean.shape[1] // keys.shape[1], dim=1)
        return logits.masked_fill(~counted, torch.finfo(torch.float32).min).softmax(dim=-1) + self.epsilon

    @override
    def needs(self) -> Needs:
        return Needs(statistics=True)


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
        layers = state.layers
        scores = [reduce_group(self._score(each), each.entries().keys.shape[1], reduce.heads) for each in layers]
        if self.per_layer or not scores:
            return scores
        if len({each.shape for each in scores}) > 1:
            raise UserError("TriAttention: layers keep different numbers of entries; give the observer per_layer=True")
        mean = torch.stack([each.to(scores[0].device) for each in scores]).mean(dim=0)
        return [mean.to(each.device) for each in scores]

    @override
    def needs(self) -> Needs:
        return Needs(statistics=True)

    def _score(self, layer: KeptLayer) -> Tensor:
        """[B, H, C] float32."""
        statistics, rotary = _statistics(layer), _rotary(layer)
        entries = layer.attended()
        keys, marks = entries.keys, entries.marks.float()
        group = statistics.mean.shape[1] // keys.shape[1]
        by_head = keys.float().repeat_interleave(group, dim=1)
        ahead = layer.seen + torch.tensor(_OFFSETS, device=keys.device)
        mean = statistics.mean[:, :, None]
        of_mean = rotary.pair_norms(rotary.spread(mean, ahead[:1]))
        beyond = statistics.mean_norms[:, :, None] - of_mean
        both = (beyond * rotary.pair_norms(by_head)).sum(dim=-1)  # the two dimensions of each pair
        scores = (rotary.spread(mean, ahead) * by_head).sum(dim=-1) + both / 2
        marks = marks.repeat_interleave(group, dim=1)
        count = marks.sum(dim=-1, keepdim=True).clamp(min=1)
        centred = scores - (scores * marks).sum(dim=-1, keepdim=True) / count
        spread = ((centred * marks).square().sum(dim=-1, keepdim=True) / count).sqrt()
        return centred / (spread + 1e-6)


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
