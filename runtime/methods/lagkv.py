"""LagKV: entries are scored by keys and values alone, relative to those of the text that follows."""

from dataclasses import dataclass

import torch
from torch import Tensor
from typing_extensions import override

from keepsight.errors import Positive, Whole
from keepsight.runtime import registry
from keepsight.runtime.evict import Evict
from keepsight.runtime.importance import NO_POOL, Pool
from keepsight.runtime.layer import KeptLayer
from keepsight.runtime.observe import LayerObserver, Observer


@registry.observer("lag_relative")
@dataclass(frozen=True)
class LagRelative(LayerObserver):
    """How unlike the next partition's keys and values each entry's are, as a rank in its partition (LagKV).

    Entries after the sinks form partitions of `lag`. Each channel of a partition is scaled by the range that it has in
    the partition after it; an entry's score is the standard deviation of its scaled channels, as a softmax over the
    partition, averaged over key and value. The rank, divided by `lag`, takes its place, so that a budget takes the same
    share of each partition. The last whole partition has none after it: it and what follows count more than all ranks,
    the most recent entries the most. So do all entries of a prompt of fewer than two partitions.

    Attributes:
        lag: Number of entries of a partition.
        sinks: Number of first entries outside all partitions; None for the method's own.
    """

    lag: Positive = 128
    sinks: Whole | None = None
    signed = False

    @override
    def score(self, layer: KeptLayer, reduction: str) -> Tensor:
        entries = layer.contents()
        batch, kv_heads, width, _ = entries.keys.shape
        lengths = entries.marks.sum(dim=-1).expand(batch, kv_heads)
        scores = torch.zeros(batch, kv_heads, width, dtype=torch.float32, device=entries.keys.device)
        for length in lengths.unique().tolist():
            has_length = lengths == length
            keys = entries.keys[has_length][:, width - length :]  # real entries are on the right
            values = entries.values[has_length][:, width - length :]
            scores[..., width - length :][has_length] = self._scores_of_heads(keys.float(), values.float())
        return scores

    def _scores_of_heads(self, keys: Tensor, values: Tensor) -> Tensor:
        """Scores [M, n] of M heads with n entries each, from their keys and values [M, n, d]."""
        heads, length, _ = keys.shape
        # Ranks are below 1, so that entries without one come first, the most recent before the others.
        recency = torch.arange(length, device=keys.device, dtype=torch.float32) / max(length, 1)
        scores = (1 + recency).repeat(heads, 1)
        sinks = min(self.sinks or 0, length)
        partitions = (length - sinks) // self.lag
        if partitions < 2:
            return scores

        in_partitions = slice(sinks, sinks + partitions * self.lag)
        unlikeness = self._unlikeness(keys[:, in_partitions]) + self._unlikeness(values[:, in_partitions])
        ranks = unlikeness.argsort(dim=-1).argsort(dim=-1) / self.lag
        ranked = slice(sinks, sinks + (partitions - 1) * self.lag)
        scores[:, ranked] = ranks.flatten(start_dim=1)
        return scores

    def _unlikeness(self, states: Tensor) -> Tensor:
        """[M, partitions - 1, lag]: of keys or values [M, partitions x lag, d], each relative to the next partition."""
        partitions = states.unflatten(1, (-1, self.lag))
        following = partitions[:, 1:]
        smallest = following.amin(dim=2, keepdim=True)
        extent = following.amax(dim=2, keepdim=True) - smallest
        scaled = (partitions[:, :-1] - smallest) / extent.clamp(min=torch.finfo(torch.float32).tiny)
        return scaled.std(dim=-1).softmax(dim=-1)


@registry.method("lagkv", label="LagKV")
@dataclass(frozen=True)
class LagKV(Evict):
    """Keeps 4 sinks, the end, and what is least like the 128 entries that follow it (LagKV, arXiv 2504.04704).

    As kvpress has it. A budget below the last partition and the sinks keeps the most recent entries alone.
    """

    observer: Observer = LagRelative()
    pool: Pool = NO_POOL
    sinks: int = 4
