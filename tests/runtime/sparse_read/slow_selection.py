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
"""Queries [G, d] of a KV head's group, its keys [C + 1, d] and the scaling -> places among the first C."""


def turned(key: Tensor, position: int, base: float) -> Tensor:
    """RoPE of a key or query [d], further by `position`."""
    half = len(key) // 2
    out = key.clone()
    for pair in range(half):
        angle = torch.tensor(position * base ** (-pair / half))
        one, two = key[pair], key[half + pair]
        out[pair] = one * angle.cos() - two * angle.sin()
        out[half + pair] = two * angle.cos() + one * angle.sin()
    return out


def weights_of(query: Tensor, keys: Tensor, scaling: float) -> Tensor:
    """[G, C + 1]: softmax of each head."""
    return torch.softmax(query @ keys.T * scaling, dim=-1)


def top_attention(budget: int, sinks: int = 0, window: int = 0) -> Choose:
    """The entries with the largest weight in any head of the group; sinks and window come first."""

    def select(query: Tensor, keys: Tensor, scaling: float) -> list[int]:
        count = len(keys) - 1
        largest = weights_of(query, keys, scaling).amax(dim=0).tolist()
        kept = [place for place in range(count) if place < sinks or place >= count - window]
        rest = sorted(set(range(count)) - set(kept), key=lambda place: -largest[place])
        return (kept + rest)[:budget]

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
        full, rest = divmod(count, page)
        places = [list(range(page * number, page * (number + 1))) for number in range(full)]
        bounds = [max(page_bound(head, keys[each]) for head in query) for each in places]
        best = sorted(range(full), key=lambda number: -bounds[number])[: max(budget - rest, 0) // page]
        return [place for number in best for place in places[number]] + list(range(count - rest, count))

    return select


def clusters_of(keys: Tensor, tokens: int) -> list[tuple[Tensor, list[int]]]:
    """Centroids and members of the clusters of some keys, by cosine, until none changes its cluster."""
    count = -(-len(keys) // tokens)
    centroids, labels = [keys[number * len(keys) // count] for number in range(count)], list[int]()
    while True:
        cosines = [[float(torch.cosine_similarity(key, each, dim=0)) for each in centroids] for key in keys]
        found = [each.index(max(each)) for each in cosines]
        members = [[place for place, label in enumerate(found) if label == each] for each in range(count)]
        if found == labels:
            return list(zip(centroids, members, strict=True))
        labels = found
        centroids = [keys[own].mean(dim=0) if own else old for own, old in zip(members, centroids, strict=True)]


def top_clusters(budget: int, sinks: int, tokens: int, window: int, prompt: int) -> Choose:
    """The clusters with the largest dot product in any head of the group, and what is in none: sinks and the newest."""
    known: dict[bytes, list[tuple[Tensor, list[int]]]] = {}  # the same keys are seen at every step

    def select(query: Tensor, keys: Tensor, scaling: float) -> list[int]:
        count, found = len(keys) - 1, []
        bounds = [sinks, *range(prompt, count + 1, window)]
        for start, end in itertools.pairwise(bounds):
            own = keys[start:end].contiguous()
            clusters = known.get(own.numpy().tobytes()) or clusters_of(own, tokens)
            known[own.numpy().tobytes()] = clusters
            found += [(centroid, [start + place for place in members]) for centroid, members in clusters]
        best = sorted(found, key=lambda each: -max(float(head @ each[0]) for head in query))
        chosen = [place for _, members in best for place in members][: budget - sinks]
        return list(range(sinks)) + chosen + list(range(bounds[-1], count))

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
        self.model, self.tokens, self.choose, self.head = model, ids, choose, head
        self.layers = head.layers_of(model) if head is not None else ()
        state = prefill(model, ids, needs=Needs(features=self.layers))
        self.cache, self.logits = asking(state.cache), state.logits
        self.features = state.features_of(self.layers) if self.layers else None
        self.read_last: list[list[list[int]]] = []

    def read(self, token: Tensor) -> Tensor:
        """[1, 1] -> logits [1, 1, V]."""
        position = torch.tensor([[self.tokens.shape[1]]])
        self.tokens = torch.cat([self.tokens, token], dim=1)
        self.read_last = [[] for _ in self.choose]
        chosen = self._by_head() if self.head is not None else None

        def attend(layer: int, query: Tensor, keys: Tensor, values: Tensor, scaling: float) -> Tensor:
            group, outputs = query.shape[1] // keys.shape[1], []
            for kv_head in range(keys.shape[1]):
                rows = query[0, kv_head * group : (kv_head + 1) * group, 0]
                own = self._of_group(chosen, layer)[kv_head] if chosen is not None else None
                places = own if own is not None else self.choose[layer](rows, keys[0, kv_head], scaling)
                self.read_last[layer].append(sorted(places))
                places = [*places, keys.shape[2] - 1]
                outputs.append(weights_of(rows, keys[0, kv_head, places], scaling) @ values[0, kv_head, places])
            return torch.cat(outputs)[None, None]

        with torch.no_grad(), RecordFeatures(self.model, self.layers) as recorded:
            answer_with(self.cache, attend)
            output = run(self.model, self.cache, input_ids=token, position_ids=position)
        if self.features is not None:
            self.features = torch.cat([self.features, torch.cat(recorded.outputs(), dim=-1)], dim=1)
        return output.logits

    def _of_group(self, chosen: list[list[int]], layer: int) -> list[list[int]]:
        """Of what the head chooses, group after group, that of the layer's group."""
        assert self.head is not None
        groups, layers = self.head.config.groups, len(self.choose)
        starts = [min(at for at in range(layers) if at * groups >= group * layers) for group in range(groups)]
        group = sum(layer >= start for start in starts) - 1
        each = len(chosen) // groups
        return chosen[group * each : (group + 1) * each]

    def _by_head(self) -> list[list[int]]:
        """What the head's own attention chooses, over all tokens from scratch."""
        assert self.head is not None
        features, count = None, self.tokens.shape[1]
        if self.features is not None:
            features = torch.cat([torch.zeros_like(self.features[:, :1]), self.features], dim=1)
        with torch.no_grad():
            embeddings = self.model.get_input_embeddings()(self.tokens)
            query, keys = self.head.project(embeddings, features, torch.arange(count)[None])
        group = query.shape[1] // keys.shape[1]
        return [
            self.choose[0](query[0, kv_head * group : (kv_head + 1) * group, -1], keys[0, kv_head], self.head.scaling)
            for kv_head in range(keys.shape[1])
        ]
