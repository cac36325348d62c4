"""Choosing the entries that get the most attention: with a retrieval head before the model runs, or in each layer.

Weights are normalised for each query head (softmax over all entries and the token's own), and those of a group are
reduced by their maximum: heads of one group can look at different entries, and logits of two heads do not compare.
SpeContext (arXiv 2512.00722), section 4.3.
"""

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional
from typing_extensions import override

from keepsight.runtime.importance import attention_weights, reduce_group
from keepsight.runtime.selected_cache import Chosen, Selection, real_entries

_ROOM = 64
"""Keys for which there is room when they have to be copied to grow."""


@dataclass(frozen=True)
class Limits:
    """How many entries a KV head reads a step, beside the token's own.

    Attributes:
        budget: Entries; all where there are fewer.
        sinks: First entries that are always read, within the budget.
        window: Last entries that are always read, within the budget.
    """

    budget: int
    sinks: int = 0
    window: int = 0

    def top(self, importance: Tensor, padding: Tensor | None) -> Chosen:
        """The most important of C entries.

        Args:
            importance: [B, K, C] float, at least 0; it may be written to.
            padding: [B] int64, how many of the first entries are padding; None for none.

        Returns:
            k = min(budget, C) different entries of each head. Where a row has fewer real ones, padding fills up.
        """
        length = importance.shape[2]
        importance[..., max(length - self.window, 0) :] = torch.inf
        if padding is None:
            importance[..., : self.sinks] = torch.inf
        else:
            real = real_entries(padding, length)[:, None]
            first = ~real_entries(padding + self.sinks, length)[:, None]
            importance = importance.masked_fill(first, torch.inf).masked_fill(~real, -1.0)
        indices = importance.topk(min(self.budget, length), dim=-1, sorted=False).indices
        return Chosen(indices, None if padding is None else indices >= padding[:, None, None])


def most_attended(query: Tensor, keys: Tensor, scaling: float, padding: Tensor | None, limits: Limits) -> Chosen:
    """The entries that one token attends to most.

    Args:
        query: [B, H, 1, d] after RoPE.
        keys: [B, K, C + 1, d] after RoPE, the token's own key last.
        scaling: Factor of the dot products.
        padding: [B] int64, how many of the first entries are padding; None for none.
        limits: How many.
    """
    mask = None if padding is None else real_entries(padding, keys.shape[2])
    weights = attention_weights(query, keys, scaling, mask)[:, :, 0, :-1]
    return limits.top(reduce_group(weights, keys.shape[1], "max"), padding)


@dataclass(frozen=True)
class TopAttention(Selection):
    """What a layer's own attention weights are largest for: all keys are read to choose, the upper bound of others.

    Attributes:
        limits: How many.
    """

    limits: Limits

    @override
    def choose(self, query: Tensor, scaling: float, keys: Tensor, padding: Tensor | None) -> Chosen:
        return most_attended(query, keys, scaling, padding, self.limits)


class Head(Protocol):
    """A retrieval head; see `keepsight.models.retrieval_head.RetrievalHead`."""

    @property
    def scaling(self) -> float:
        """Factor of the dot products."""
        ...

    def project(self, embeddings: Tensor, features: Tensor | None, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Queries [B, H, q, d] and keys [B, K, q, d] of tokens, after RoPE."""
        ...


class HeadKeys:
    """Keys that grow in place; those of a copy do not change with them.

    Args:
        keys: [B, K, C, d].
    """

    def __init__(self, keys: Tensor) -> None:
        self._room, self.length = keys, keys.shape[2]

    @property
    def keys(self) -> Tensor:
        """[B, K, C, d]."""
        return self._room[:, :, : self.length]

    def append(self, keys: Tensor) -> None:
        """With more keys [B, K, q, d]."""
        end = self.length + keys.shape[2]
        if end > self._room.shape[2]:
            self._room = functional.pad(self.keys, (0, 0, 0, end + _ROOM - self.length))
        self._room[:, :, self.length : end] = keys
        self.length = end

    def crop(self, length: int) -> None:
        """Keep only the first so many."""
        if length < self.length:
            self._room, self.length = self._room[:, :, :length], length  # no room: a copy may share what follows


class HeadSelector:
    """Chooses for all layers before the model runs, with the attention of a retrieval head over keys of its own.

    Args:
        head: The retrieval head.
        layers: The target's layers whose outputs are its features; none when it reads embeddings alone.
        keys: [B, K, C, d], the head's, of all tokens so far.
        features: [B, 1, w], the target's, of the last token; None when the head reads none.
        padding: [B] int64, how many of the first tokens are padding; None for none.
        limits: How many entries it chooses.
    """

    def __init__(
        self,
        head: Head,
        layers: tuple[int, ...],
        keys: Tensor,
        features: Tensor | None,
        padding: Tensor | None,
        limits: Limits,
    ) -> None:
        self.head, self.layers, self.features = head, layers, features
        self.padding, self.limits = padding, limits
        self.keys = HeadKeys(keys)

    @property
    def bytes(self) -> int:
        """Bytes of its keys."""
        return self.keys.keys.numel() * self.keys.keys.element_size()

    def choose(self, embeddings: Tensor, positions: Tensor) -> Chosen:
        """What the target reads for a token, whose key is appended to the head's.

        Args:
            embeddings: [B, 1, hidden], the target's, of the token.
            positions: [B or 1, 1] int64.
        """
        query, key = self.head.project(embeddings, self.features, positions)
        self.keys.append(key)
        return most_attended(query, self.keys.keys, self.head.scaling, self.padding, self.limits)

    def share(self) -> "HeadSelector":
        """One that goes on by itself from here."""
        return HeadSelector(self.head, self.layers, self.keys.keys, self.features, self.padding, self.limits)
