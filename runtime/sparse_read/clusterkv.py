"""ClusterKV (arXiv 2412.03213): a step reads the clusters of keys whose centroids fit its query best."""

import copy
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional
from typing_extensions import override

from keepsight.errors import Positive, Whole
from keepsight.runtime import registry
from keepsight.runtime.attention import Softmax
from keepsight.runtime.importance import top_indices
from keepsight.runtime.sparse_read.cache import Selection
from keepsight.runtime.sparse_read.selection import Summaries, SummaryRead, row_starts


class Clusters(NamedTuple):
    """Clusters of n consecutive entries of each KV head; rows may have fewer of both than others.

    Attributes:
        centroids: [B, K, c, d].
        sizes: [B, K, c] int64; 0 for a cluster that a row does not have.
        members: [B, K, n] int32: the entries, those of a cluster side by side and ascending.
        firsts: [B, K, c] int64: where a cluster's entries begin in `members`.
    """

    centroids: Tensor
    sizes: Tensor
    members: Tensor
    firsts: Tensor

    @classmethod
    def of(cls, keys: Tensor, starts: list[int], end: int, tokens: int, iterations: int) -> "Clusters":
        """Cluster keys [B, K, C, d] between each row's start, or that of all rows, and `end`; see `kmeans`."""
        rows = keys.split(1) if len(starts) > 1 else [keys]
        found = [
            cls._of_rows(row[:, :, start:end], start, tokens, iterations)
            for row, start in zip(rows, starts, strict=True)
        ]
        return cls(*(_joined([each[part] for each in found]) for part in range(4)))

    @classmethod
    def _of_rows(cls, keys: Tensor, start: int, tokens: int, iterations: int) -> "Clusters":
        centroids, labels = kmeans(keys, -(-keys.shape[2] // tokens), iterations)
        sizes = torch.zeros(centroids.shape[:3], dtype=torch.long, device=keys.device)
        sizes.scatter_add_(2, labels, torch.ones_like(labels))
        members = start + labels.argsort(dim=2, stable=True)
        return cls(centroids, sizes, members.int(), sizes.cumsum(dim=2) - sizes)

    def and_then(self, later: "Clusters") -> "Clusters":
        """These clusters followed by those of later entries."""
        firsts = later.firsts + self.members.shape[2]
        return Clusters(*(torch.cat(pair, dim=2) for pair in zip(self, later._replace(firsts=firsts), strict=True)))


def _joined(rows: list[Tensor]) -> Tensor:
    """Tensors [1, K, n, ...] -> [B, K, n, ...], padded with zeros to the largest n."""
    most = max(each.shape[2] for each in rows)
    return torch.cat([functional.pad(each, (0, 0) * (each.dim() - 3) + (0, most - each.shape[2])) for each in rows])


def kmeans(keys: Tensor, count: int, iterations: int) -> tuple[Tensor, Tensor]:
    """k-means: cluster the keys [B, K, n, d] of each head by cosine into `count` <= n, from evenly spaced keys on.

    Assignments end after `iterations`, or when one changes nothing. Returns the centroids [B, K, count, d], means of a
    cluster's keys (one without keys keeps its centroid), and each key's cluster [B, K, n] int64.
    """
    first = torch.arange(count, device=keys.device) * keys.shape[2] // max(count, 1)
    directions, centroids, labels = functional.normalize(keys.float(), dim=3), keys[:, :, first].float(), None
    for _ in range(iterations):
        before, labels = labels, _nearest(directions, functional.normalize(centroids, dim=3))
        if before is not None and torch.equal(before, labels):
            break
        index = labels[..., None].expand_as(keys)
        sums = torch.zeros_like(centroids).scatter_add_(2, index, keys.float())
        ones = torch.ones_like(labels, dtype=centroids.dtype)
        sizes = torch.zeros_like(centroids[..., 0]).scatter_add_(2, labels, ones)[..., None]
        centroids = torch.where(sizes > 0, sums / sizes.clamp(min=1), centroids)
    assert labels is not None
    return centroids.to(keys.dtype), labels


_BLOCK = 4096
"""Bounds the memory of cosines, in keys."""


def _nearest(directions: Tensor, centroids: Tensor) -> Tensor:
    """[B, K, n, d] and [B, K, c, d], of length 1 -> [B, K, n] int64, the centroid of the largest cosine."""
    if not centroids.shape[2]:
        return torch.zeros(directions.shape[:3], dtype=torch.long, device=directions.device)
    with torch.autocast(directions.device.type, enabled=False):
        blocks = directions.split(_BLOCK, dim=2)
        return torch.cat([(block @ centroids.mT).argmax(dim=3) for block in blocks], dim=2)


class TopClusters(Summaries):
    """Selects whole clusters, the last of them cut to the budget, sinks, and the entries that are in no cluster yet.

    A cluster's score is the dot product of query and centroid, neither normalised nor scaled (section III-C). Query
    heads of a group vote with the largest of theirs: the paper selects for each query head, and one set is read here.
    The budget, for all rows or each, counts sinks and entries in clusters; those in no cluster, at most `window`, come
    on top. For the other arguments see `ClusterKV`.
    """

    def __init__(self, budget: int | tuple[int, ...], sinks: int, tokens: int, window: int, iterations: int) -> None:
        self.budget, self.sinks, self.tokens, self.window = budget, sinks, tokens, window
        self.iterations = iterations
        self._clusters: Clusters | None = None
        self._end = 0  # entries before it are sinks or in clusters

    @property
    @override
    def nbytes(self) -> int:
        return 0 if self._clusters is None else sum(each.nbytes for each in self._clusters)

    @override
    def share(self) -> "TopClusters":
        return copy.copy(self)  # clusters are never written to

    @override
    def select(self, query: Tensor, softmax: Softmax, keys: Tensor, padding: Tensor | None) -> Selection:
        length, starts = keys.shape[2] - 1, row_starts(padding)
        self.summarise(keys[:, :, :length], padding)
        budgets = self.budget if isinstance(self.budget, tuple) else (self.budget,) * len(starts)
        sinks = [min(self.sinks, self._end - start) for start in starts]
        counts = [max(budget - sink, 0) for budget, sink in zip(budgets, sinks, strict=False)]
        chosen, within_budget = self.best(query, counts)
        first = chosen.new_tensor(starts)[:, None, None] + torch.arange(max(sinks), device=chosen.device)
        tail = torch.arange(self._end, length, device=chosen.device)
        indices = [each.expand(*chosen.shape[:2], -1) for each in (first, chosen, tail)]
        if padding is None:
            return Selection(torch.cat(indices, dim=2), None)
        real = [first < self._end, within_budget, tail >= padding[:, None, None]]
        real = [each.expand(*chosen.shape[:2], -1) for each in real]
        return Selection(torch.cat(indices, dim=2).clamp(max=length - 1), torch.cat(real, dim=2))

    def best(self, query: Tensor, counts: list[int]) -> tuple[Tensor, Tensor]:
        """The entries of the best clusters, [B, K, k] int64, and which of them are real, up to `counts` of a row."""
        assert self._clusters is not None
        _, sizes, members, firsts = self._clusters
        order = top_indices(self.scores(query), sizes.shape[2], signed=True)
        until = sizes.gather(2, order).cumsum(dim=2)  # number of entries in the best clusters
        place = torch.arange(min(max(counts), members.shape[2]), device=query.device)
        place = place.expand(*sizes.shape[:2], -1).contiguous()
        rank = torch.searchsorted(until, place, right=True).clamp(max=max(sizes.shape[2] - 1, 0))
        cluster = order.gather(2, rank)
        within = place - (until - sizes.gather(2, order)).gather(2, rank)
        chosen = members.gather(2, (firsts.gather(2, cluster) + within).clamp(max=members.shape[2] - 1))
        return chosen.long(), place < until[..., -1:].clamp(max=place.new_tensor(counts)[:, None, None])

    def scores(self, query: Tensor) -> Tensor:
        """Query [B, H, 1, d] -> [B, K, c] float32, -inf for clusters that a row does not have."""
        assert self._clusters is not None
        centroids, sizes, _, _ = self._clusters
        grouped = query.view(len(query), centroids.shape[1], -1, query.shape[3]).float()
        with torch.autocast(query.device.type, enabled=False):
            scores = (grouped @ centroids.float().mT).amax(dim=2)
        return scores.masked_fill(sizes == 0, -torch.inf)

    @override
    def summarise(self, keys: Tensor, padding: Tensor | None) -> None:
        """Cluster the keys [B, K, C, d] of a prompt, then every `window` more; start over if some were cropped."""
        length, starts = keys.shape[2], row_starts(padding)
        if self._clusters is None or length < self._end:
            first = [min(start + self.sinks, length) for start in starts]
            self._clusters, self._end = Clusters.of(keys, first, length, self.tokens, self.iterations), length
        while length - self._end >= self.window:
            end = self._end + self.window
            first = [max(self._end, min(start + self.sinks, end)) for start in starts]
            later = Clusters.of(keys, first, end, self.tokens, self.iterations)
            self._clusters, self._end = self._clusters.and_then(later), end


@registry.method("clusterkv", colour="#999933", marker="X")
@dataclass(frozen=True)
class ClusterKV(SummaryRead):
    """Reads clusters of entries with similar keys, by their centroids (ClusterKV, arXiv 2412.03213, section III).

    k-means begins with evenly spaced keys, where the paper draws them at random: answers are reproducible, also in a
    batch. The query heads of a KV head read one selection, by the largest of their scores; in the authors' code each
    has its own. An answer has as many clusters per token as the prompt, 4 for 320 tokens; the authors' fast code makes
    8, and that of their accuracy tables reads all tokens since the prompt (here: a `window` longer than the answer).

    Attributes:
        sinks: Number of first entries that are always read (16 in the paper).
        tokens: Entries per cluster, on average: a prompt of L tokens has L / 80 clusters.
        window: Tokens of the answer that are clustered at a time; until then they are read besides the budget.
        dense_layers: Number of first layers that read all entries.
        iterations: Most assignments of k-means.
    """

    sinks: Whole = 16
    tokens: Positive = 80
    window: Positive = 320
    dense_layers: Whole = 2
    iterations: Positive = 20

    @override
    def least(self) -> tuple[int, str]:
        return self.sinks + 1, "sinks + one entry to choose"

    @override
    def selector(self, budgets: tuple[int, ...]) -> Summaries:
        return TopClusters(budgets, self.sinks, self.tokens, self.window, self.iterations)
