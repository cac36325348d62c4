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
from keepsight.runtime.sparse_read.cache import Selection, consecutive, on_device
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
    def from_keys(cls, keys: Tensor, starts: list[int], end: int, tokens: int, iterations: int) -> "Clusters":
        """Cluster keys [B, K, C, d] between each row's start, or that of all rows, and `end`; see `kmeans`."""
        rows = keys.split(1) if len(starts) > 1 else [keys]
        row_clusters = []
        for row, start in zip(rows, starts, strict=True):
            row_clusters.append(cls._from_range(row[:, :, start:end], start, tokens, iterations))
        return cls(
            _joined([clusters.centroids for clusters in row_clusters]),
            _joined([clusters.sizes for clusters in row_clusters]),
            _joined([clusters.members for clusters in row_clusters]),
            _joined([clusters.firsts for clusters in row_clusters]),
        )

    @classmethod
    def _from_range(cls, keys: Tensor, start: int, tokens: int, iterations: int) -> "Clusters":
        """Cluster keys [B, K, n, d], which are those of the entries from `start` on."""
        centroids, labels = kmeans(keys, -(-keys.shape[2] // tokens), iterations)
        sizes = torch.zeros(centroids.shape[:3], dtype=torch.long, device=keys.device)
        sizes.scatter_add_(2, labels, torch.ones_like(labels))
        members = start + labels.argsort(dim=2, stable=True)
        return cls(centroids, sizes, members.int(), sizes.cumsum(dim=2) - sizes)

    def followed_by(self, later: "Clusters") -> "Clusters":
        """These clusters followed by those of later entries."""
        return Clusters(
            torch.cat([self.centroids, later.centroids], dim=2),
            torch.cat([self.sizes, later.sizes], dim=2),
            torch.cat([self.members, later.members], dim=2),
            torch.cat([self.firsts, later.firsts + self.members.shape[2]], dim=2),
        )


def _joined(rows: list[Tensor]) -> Tensor:
    """Tensors [1, K, n, ...] -> [B, K, n, ...], padded with zeros to the largest n."""
    longest = max(row.shape[2] for row in rows)
    padded_rows = []
    for row in rows:
        no_padding = (0, 0) * (row.dim() - 3)  # of the dimensions after n
        padded_rows.append(functional.pad(row, (*no_padding, 0, longest - row.shape[2])))
    return torch.cat(padded_rows)


def kmeans(keys: Tensor, count: int, iterations: int) -> tuple[Tensor, Tensor]:
    """k-means: cluster the keys [B, K, n, d] of each head by cosine into `count` <= n, from evenly spaced keys on.

    Assignments end after `iterations`, or when one changes nothing. Returns the centroids [B, K, count, d], means of a
    cluster's keys (one without keys keeps its centroid), and each key's cluster [B, K, n] int64.
    """
    evenly_spaced = torch.arange(count, device=keys.device) * keys.shape[2] // max(count, 1)
    centroids = keys[:, :, evenly_spaced].float()
    directions = functional.normalize(keys.float(), dim=3)
    labels = None
    for _ in range(iterations):
        nearest = _nearest(directions, functional.normalize(centroids, dim=3))
        if labels is not None and torch.equal(labels, nearest):
            break
        labels = nearest

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
    `budgets` holds one number per row, the same one without padding. It counts sinks and entries in clusters; those in
    no cluster, at most `window`, come on top. For the other arguments see `ClusterKV`.
    """

    def __init__(self, budgets: tuple[int, ...], sinks: int, tokens: int, window: int, iterations: int) -> None:
        self.budgets = budgets
        self.sinks = sinks
        self.tokens = tokens
        self.window = window
        self.iterations = iterations
        self._clusters: Clusters | None = None
        self._end = 0  # entries before it are sinks or in clusters

    @property
    @override
    def nbytes(self) -> int:
        if self._clusters is None:
            return 0
        return sum(tensor.nbytes for tensor in self._clusters)

    @override
    def share(self) -> "TopClusters":
        return copy.copy(self)  # clusters are never written to

    @override
    def select(self, query: Tensor, softmax: Softmax, keys: Tensor, padding: Tensor | None) -> Selection:
        length = keys.shape[2] - 1
        starts = row_starts(padding)
        self.summarise(keys[:, :, :length], padding)

        budgets = self.budgets[: len(starts)]
        sink_counts = [min(self.sinks, self._end - start) for start in starts]
        cluster_budgets = [max(budget - count, 0) for budget, count in zip(budgets, sink_counts, strict=True)]
        clustered, within_budget = self.best_entries(query, cluster_budgets)

        batch, kv_heads, _ = clustered.shape
        sinks = consecutive(0, max(sink_counts), clustered.device).view(1, 1, -1)
        if padding is not None:
            sinks = sinks + padding[:, None, None]
        tail = consecutive(self._end, length, clustered.device)
        indices = torch.cat(
            [sinks.expand(batch, kv_heads, -1), clustered, tail.expand(batch, kv_heads, -1)],
            dim=2,
        )
        if padding is None:
            return Selection(indices, None)

        real_sinks = sinks < self._end
        real_tail = tail >= padding[:, None, None]
        real = torch.cat(
            [real_sinks.expand(batch, kv_heads, -1), within_budget, real_tail.expand(batch, kv_heads, -1)],
            dim=2,
        )
        return Selection(indices.clamp(max=length - 1), real)

    def best_entries(self, query: Tensor, budgets: list[int]) -> tuple[Tensor, Tensor]:
        """The entries of the best clusters, [B, K, k] int64, and which of them are real, up to a row's budget."""
        assert self._clusters is not None
        _, sizes, members, firsts = self._clusters
        clusters = sizes.shape[2]
        order = top_indices(self.scores(query), clusters, signed=True)
        ordered_sizes = sizes.gather(2, order)
        ends = ordered_sizes.cumsum(dim=2)  # number of entries in the best clusters up to each

        # The n-th entry to read is in the first of these clusters that ends after n.
        numbers = consecutive(0, min(max(budgets), members.shape[2]), query.device)
        numbers = numbers.expand(*sizes.shape[:2], -1).contiguous()
        ranks = torch.searchsorted(ends, numbers, right=True).clamp(max=max(clusters - 1, 0))
        within_cluster = numbers - (ends - ordered_sizes).gather(2, ranks)
        member_index = firsts.gather(2, order.gather(2, ranks)) + within_cluster
        entries = members.gather(2, member_index.clamp(max=members.shape[2] - 1)).long()
        real_counts = ends[..., -1:].clamp(max=on_device(tuple(budgets), query.device)[:, None, None])
        return entries, numbers < real_counts

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
        length = keys.shape[2]
        starts = row_starts(padding)
        if self._clusters is None or length < self._end:
            cluster_starts = [min(start + self.sinks, length) for start in starts]
            self._clusters = Clusters.from_keys(keys, cluster_starts, length, self.tokens, self.iterations)
            self._end = length

        while length - self._end >= self.window:
            end = self._end + self.window
            cluster_starts = [max(self._end, min(start + self.sinks, end)) for start in starts]
            later = Clusters.from_keys(keys, cluster_starts, end, self.tokens, self.iterations)
            self._clusters = self._clusters.followed_by(later)
            self._end = end


@registry.method("clusterkv", colour="#999933", marker="X")
@dataclass(frozen=True)
class ClusterKV(SummaryRead):
    """Reads clusters of entries with similar keys, by their centroids (ClusterKV, arXiv 2412.03213, section III).

    k-means begins with evenly spaced keys, where the paper draws them at random: answers are reproducible, also in a
    batch. The query heads of a KV head read one selection, by the largest of their scores; in the authors' code each
    has its own. k-means is by cosine; the code of their accuracy tables leaves it to a library whose k-means is
    Euclidean, and then labels keys by cosine. An answer has as many clusters per token as the prompt, 4 for 320 tokens;
    the authors' fast code makes 8, and that of their accuracy tables reads all tokens since the prompt (here: a
    `window` longer than the answer).

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
    def smallest_budget(self) -> tuple[int, str]:
        return self.sinks + 1, "sinks + one entry to choose"

    @override
    def selector(self, budgets: tuple[int, ...]) -> Summaries:
        return TopClusters(budgets, self.sinks, self.tokens, self.window, self.iterations)
