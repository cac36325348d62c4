"""R-KV (arXiv 2505.24133): entries that are attended to and unlike later ones stay while a long answer is decoded."""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional
from typing_extensions import override

from keepsight.errors import Positive, Share
from keepsight.runtime import registry
from keepsight.runtime.evict import Evict
from keepsight.runtime.importance import NO_POOL, ROWS_AT_ONCE, Pool, recorded_queries
from keepsight.runtime.layer import KeptLayer
from keepsight.runtime.observe import LayerObserver, Observer


@registry.observer("redundancy")
@dataclass(frozen=True)
class Redundancy(LayerObserver):
    """Attention of the last tokens minus the similarity of an entry's key to the others' (R-KV, section 3).

    The softmax of the attention is over the entries before the window alone, of each KV head's largest logits. For a
    key that is similar to no other, the published code ignores its similarity to the first key; neither the paper nor
    this class does.

    Attributes:
        share: Weight of the attention, lambda; the redundancy has the rest. 0.1 in the paper, 0.07 in its code.
        window: Number of last tokens that observe; None for the method's window.
        threshold: Cosine above which two keys are similar. The last of the keys that are similar to a key is not
            penalised for it.
        kernel: Of the max pooling of the attention.
    """

    share: Share = 0.1
    window: Positive | None = None
    threshold: Share = 0.5
    kernel: int = 7
    signed = True

    def __post_init__(self) -> None:
        Pool(kernel=self.kernel)  # refuses kernels that cannot pool

    @override
    def score(self, layer: KeptLayer, reduction: str) -> Tensor:
        assert self.window is not None
        attention = self._attention(layer, self.window)
        redundancy = self._redundancy(layer)[..., : attention.shape[-1]]
        score = self.share * attention - (1 - self.share) * redundancy
        return functional.pad(score, (0, layer.entries().keys.shape[2] - score.shape[-1]))

    def _attention(self, layer: KeptLayer, window: int) -> Tensor:
        """[B, K, C - w] float32, pooled, of the w last queries."""
        recorded = recorded_queries(layer, window)
        queries: Tensor = recorded.queries
        observers = queries.shape[2]
        keys, _, real = layer.attended()
        before_window = max(keys.shape[2] - observers, 1)

        grouped = queries.reshape(len(queries), keys.shape[1], -1, queries.shape[-1])
        logits = layer.softmax.logits(grouped, keys[:, :, :before_window])
        logits = logits.unflatten(2, (-1, observers)).amax(dim=2)
        if real is not None:
            logits = logits.masked_fill(~real[:, :, None, :before_window], torch.finfo(torch.float32).min)
        weights = logits.softmax(dim=-1)

        if recorded.query_mask is None:
            mean = weights.mean(dim=2)
        else:
            is_real = recorded.query_mask.to(weights.device)
            total = (weights * is_real[:, None, :, None]).sum(dim=2)
            mean = total / is_real.sum(dim=1).clamp(min=1)[:, None, None]
        return functional.max_pool1d(mean, self.kernel, stride=1, padding=self.kernel // 2)

    def _redundancy(self, layer: KeptLayer) -> Tensor:
        """[B, K, C] float32: the softmax over entries of their mean similarity to others, computed block by block."""
        keys, _, real = layer.contents()
        directions = functional.normalize(keys.float(), dim=-1)
        if real is not None:
            directions = directions * real[..., None]
        length = keys.shape[2]
        positions = torch.arange(length, device=keys.device)
        total = torch.zeros_like(directions[..., 0])
        for start in range(0, length, ROWS_AT_ONCE):
            block = positions[start : start + ROWS_AT_ONCE]
            cosines = directions[:, :, block] @ directions.mT
            cosines.masked_fill_(positions == block[:, None], 0.0)
            last_similar = torch.where(cosines > self.threshold, positions, -1).amax(dim=-1, keepdim=True)
            total += cosines.masked_fill_(positions == last_similar, 0.0).sum(dim=2)
        if real is None:
            return (total / length).softmax(dim=-1)
        mean = total / real.sum(dim=-1, keepdim=True).clamp(min=1)
        return mean.masked_fill(~real, torch.finfo(torch.float32).min).softmax(dim=-1)


@registry.method("rkv", label="R-KV")
@dataclass(frozen=True)
class RKV(Evict):
    """Keeps the last 8 entries and the important, non-redundant ones (R-KV, arXiv 2505.24133).

    Evicts once after the prompt, which the published code does for the first prompt alone; `every=128` evicts while
    decoding, as the paper does. Its cache grows from B to B + 128 entries between evictions: that is budget=B + 128.
    """

    observer: Observer = Redundancy()
    pool: Pool = NO_POOL
    window: int = 8
