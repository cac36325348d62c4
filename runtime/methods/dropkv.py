"""DropKV keeps the entries whose eviction, one at a time, would change the last tokens' attention output most."""

from dataclasses import dataclass

import torch
from torch import Tensor
from typing_extensions import override

from keepsight.errors import Positive
from keepsight.runtime import registry
from keepsight.runtime.evict import Evict
from keepsight.runtime.importance import Pool, attention_weights, recorded_queries
from keepsight.runtime.layer import KeptLayer
from keepsight.runtime.observe import LayerObserver, Observer


@registry.observer("perturbation")
@dataclass(frozen=True)
class Perturbation(LayerObserver):
    """How far the outputs of the last tokens move if an entry alone is evicted, squared and summed over these tokens.

    Without entry j the softmax is over the others, and the output o of a query moves by p / (1 - p) times o - v, where
    p is its attention to j and v the value of j. This is exact for one entry; for several, each entry's change is
    computed as if it were evicted alone.

    Attributes:
        window: Number of last tokens that observe; None for the method's window.
        epsilon: Added to 1 - p.
    """

    window: Positive | None = None
    epsilon: float = 1e-6
    signed = False

    @override
    def score(self, layer: KeptLayer, reduction: str) -> Tensor:
        assert self.window is not None
        recorded = recorded_queries(layer, self.window)
        queries: Tensor = recorded.queries
        observers = queries.shape[2]
        keys, values, real = layer.attended()
        unseen = None
        if recorded.ahead is not None:
            positions = torch.arange(observers, device=queries.device)
            unseen = positions > (positions + recorded.ahead.to(queries.device))[..., None]

        kv_heads = keys.shape[1]
        weights = attention_weights(queries, keys, recorded.softmax, real, unseen)
        weights = weights.unflatten(1, (kv_heads, -1))  # [B, K, H / K, q, C]
        values = values.float()[:, :, None]
        outputs = weights @ values
        squares = (weights / (1 - weights + self.epsilon)).square()
        if recorded.query_mask is not None:
            squares = squares * recorded.query_mask.to(squares.device)[:, None, None, :, None]

        of_values = squares.sum(dim=3) * values.square().sum(dim=-1)
        of_products = (squares.mT @ outputs * values).sum(dim=-1)
        of_outputs = (squares.mT @ outputs.square().sum(dim=-1, keepdim=True))[..., 0]
        moved = (of_values - 2 * of_products + of_outputs).clamp(min=0)
        return moved.flatten(1, 2)


@registry.method("dropkv", label="DropKV")
@dataclass(frozen=True)
class DropKV(Evict):
    """Keeps the last 32 entries, and those whose loss alone would move the outputs of these tokens the most.

    The paper is https://openreview.net/forum?id=MqfNzH3TVH. As in kvpress's pull request 285 the moves are averaged
    over the query heads of a KV head, and over 7 neighbouring entries. Sinks of attention keep their share.
    """

    observer: Observer = Perturbation()
    pool: Pool = Pool("avg", 7)
    window: int = 32
