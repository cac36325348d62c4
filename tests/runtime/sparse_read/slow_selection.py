"""Methods that read a few entries a step, written down from their definitions: dense caches, dense attention, loops.

One prompt without padding. Before every step, or in every layer of it, a list of entries is chosen for each KV head.
"""

import itertools
from collections.abc import Callable

import torch
from torch import Tensor

from keepsight.models.retrieval_head import RetrievalHead
from keepsight.runtime.attention import run
from keepsight.runtime.features import RecordFeatures
from keepsight.runtime.state import Needs, prefill
from tests.runtime.asked import answer_with, asking

Choose = Callable[[Tensor, Tensor, float], list[int]]
"""Queries [G, d] of a KV head's group, its keys [C + 1, d] and the scaling -> positions among the first C."""


def rotate(key: Tensor, position: int, base: float) -> Tensor:
    """A key or query [d] that RoPE has moved on by `position`."""
    half = len(key) // 2
    rotated = key.clone()
    for pair in range(half):
        angle = torch.tensor(position * base ** (-pair / half))
        real = key[pair]
        imaginary = key[half + pair]
        rotated[pair] = real * angle.cos() - imaginary * angle.sin()
        rotated[half + pair] = imaginary * angle.cos() + real * angle.sin()
    return rotated


def weights_of(query: Tensor, keys: Tensor, scaling: float) -> Tensor:
    """[G, C + 1]: softmax of each head."""
    return torch.softmax(query @ keys.T * scaling, dim=-1)


def ranked(scores: list[float]) -> list[int]:
    """The indices from the highest score to the lowest, lowest index first among equals."""
    return sorted(range(len(scores)), key=lambda index: -scores[index])


def top_attention(budget: int, sinks: int = 0, window: int = 0) -> Choose:
    """The entries with the largest weight in any head of the group; sinks and window come first."""

    def select(query: Tensor, keys: Tensor, scaling: float) -> list[int]:
        count = len(keys) - 1
        largest = weights_of(query, keys, scaling).amax(dim=0).tolist()
        protected = [position for position in range(count) if position < sinks or position >= count - window]
        by_weight = [position for position in ranked(largest[:count]) if position not in protected]
        return (protected + by_weight)[:budget]

    return select


def page_bound(query: Tensor, keys: Tensor) -> float:
    """The largest dot product that a key within the smallest and largest numbers of a page's keys could have."""
    bound = 0.0
    for number, column in zip(query.tolist(), keys.T, strict=True):
        bound += max(number * column.min().item(), number * column.max().item())
    return bound


def top_pages(budget: int, page: int) -> Choose:
    """The pages with the largest bound in any head of the group, and the entries after the last full page."""

    def select(query: Tensor, keys: Tensor, scaling: float) -> list[int]:
        count = len(keys) - 1
        page_count, remainder = divmod(count, page)
        pages = [list(range(page * index, page * (index + 1))) for index in range(page_count)]
        bounds = []
        for positions in pages:
            bounds.append(max(page_bound(head, keys[positions]) for head in query))
        selected = []
        for index in ranked(bounds)[: max(budget - remainder, 0) // page]:
            selected += pages[index]
        return selected + list(range(count - remainder, count))

    return select


def clusters_of(keys: Tensor, tokens: int) -> list[tuple[Tensor, list[int]]]:
    """Centroids and members of the clusters of some keys, by cosine, until none changes its cluster."""
    count = -(-len(keys) // tokens)
    centroids = [keys[index * len(keys) // count] for index in range(count)]
    labels: list[int] = []
    while True:
        closest = []
        for key in keys:
            cosines = [float(torch.cosine_similarity(key, centroid, dim=0)) for centroid in centroids]
            closest.append(cosines.index(max(cosines)))
        members: list[list[int]] = [[] for _ in range(count)]
        for position, label in enumerate(closest):
            members[label].append(position)
        if closest == labels:
            return list(zip(centroids, members, strict=True))
        labels = closest
        for index, positions in enumerate(members):
            if positions:
                centroids[index] = keys[positions].mean(dim=0)


def top_clusters(budget: int, sinks: int, tokens: int, window: int, prompt: int) -> Choose:
    """The clusters with the largest dot product in any head of the group, and what is in none: sinks and the newest."""
    clusters_of_keys: dict[bytes, list[tuple[Tensor, list[int]]]] = {}  # the same keys are seen at every step

    def select(query: Tensor, keys: Tensor, scaling: float) -> list[int]:
        count = len(keys) - 1
        fits = []
        clusters = []
        bounds = [sinks, *range(prompt, count + 1, window)]
        for start, end in itertools.pairwise(bounds):
            segment = keys[start:end].contiguous()
            identity = segment.numpy().tobytes()
            if identity not in clusters_of_keys:
                clusters_of_keys[identity] = clusters_of(segment, tokens)
            for centroid, members in clusters_of_keys[identity]:
                fits.append(max(float(head @ centroid) for head in query))
                clusters.append([start + member for member in members])
        selected = []
        for index in ranked(fits):
            selected += clusters[index]
        return list(range(sinks)) + selected[: budget - sinks] + list(range(bounds[-1], count))

    return select


def everything(query: Tensor, keys: Tensor, scaling: float) -> list[int]:
    return list(range(len(keys) - 1))


class SlowReader:
    """Reads a prompt densely, and then token after token what is chosen.

    Args:
        model: The base model.
        ids: [1, N].
        choose: For each layer.
        head: A retrieval head, whose own attention is what is chosen by, for all layers of a group alike.
    """

    def __init__(self, model, ids: Tensor, choose: list[Choose], head: RetrievalHead | None = None) -> None:
        self.model = model
        self.tokens = ids
        self.choose = choose
        self.head = head
        self.layers = head.layers_of(model) if head is not None else ()
        state = prefill(model, ids, needs=Needs(features=self.layers))
        self.cache = asking(state.cache)
        self.logits = state.logits
        self.features = state.features_of(self.layers) if self.layers else None
        self.read_last: list[list[list[int]]] = []

    def read(self, token: Tensor) -> Tensor:
        """[1, 1] -> logits [1, 1, V]."""
        position = torch.tensor([[self.tokens.shape[1]]])
        self.tokens = torch.cat([self.tokens, token], dim=1)
        self.read_last = [[] for _ in self.choose]
        by_head = self._by_head() if self.head is not None else None

        def attend(layer: int, query: Tensor, keys: Tensor, values: Tensor, scaling: float) -> Tensor:
            group = query.shape[1] // keys.shape[1]
            outputs = []
            for kv_head in range(keys.shape[1]):
                queries = query[0, kv_head * group : (kv_head + 1) * group, 0]
                if by_head is not None:
                    selected = self._of_group(by_head, layer)[kv_head]
                else:
                    selected = self.choose[layer](queries, keys[0, kv_head], scaling)
                self.read_last[layer].append(sorted(selected))
                with_newest = [*selected, keys.shape[2] - 1]
                weights = weights_of(queries, keys[0, kv_head, with_newest], scaling)
                outputs.append(weights @ values[0, kv_head, with_newest])
            return torch.cat(outputs)[None, None]

        with torch.no_grad(), RecordFeatures(self.model, self.layers) as recorded:
            answer_with(self.cache, attend)
            output = run(self.model, self.cache, input_ids=token, position_ids=position)
        if self.features is not None:
            self.features = torch.cat([self.features, torch.cat(recorded.outputs(), dim=-1)], dim=1)
        return output.logits

    def _of_group(self, by_head: list[list[int]], layer: int) -> list[list[int]]:
        """Of what the head chooses, group after group, that of the layer's group."""
        assert self.head is not None
        groups = self.head.config.groups
        layers = len(self.choose)
        starts = []
        for group in range(groups):
            starts.append(min(index for index in range(layers) if index * groups >= group * layers))
        group = sum(layer >= start for start in starts) - 1
        kv_heads = len(by_head) // groups
        return by_head[group * kv_heads : (group + 1) * kv_heads]

    def _by_head(self) -> list[list[int]]:
        """What the head's own attention chooses, over all tokens from scratch."""
        assert self.head is not None
        features = None
        if self.features is not None:
            features = torch.cat([torch.zeros_like(self.features[:, :1]), self.features], dim=1)
        positions = torch.arange(self.tokens.shape[1])[None]
        with torch.no_grad():
            embeddings = self.model.get_input_embeddings()(self.tokens)
            query, keys = self.head.project(embeddings, features, positions)
        group = query.shape[1] // keys.shape[1]
        by_head = []
        for kv_head in range(keys.shape[1]):
            queries = query[0, kv_head * group : (kv_head + 1) * group, -1]
            by_head.append(self.choose[0](queries, keys[0, kv_head], self.head.scaling))
        return by_head
