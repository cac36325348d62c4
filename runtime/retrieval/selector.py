"""A retrieval head selects entries once for all layers, or for each group of layers, before the model runs.

SpeContext (arXiv 2512.00722), section 4.3.
"""

import torch
from torch import Tensor
from torch.nn import functional

from keepsight.models.retrieval_head import RetrievalHead
from keepsight.runtime.attention import Softmax
from keepsight.runtime.layer import spare
from keepsight.runtime.sparse_read.cache import Selection
from keepsight.runtime.sparse_read.top_k import StepBudget, most_attended


class HeadKeys:
    """Keys that grow in place; copies are independent.

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
        """Append keys [B, K, q, d]."""
        end = self.length + keys.shape[2]
        if end > self._room.shape[2]:
            self._room = functional.pad(self.keys, (0, 0, 0, end + spare(end) - self.length))
        self._room[:, :, self.length : end] = keys
        self.length = end

    def crop(self, length: int) -> None:
        """Keep the first `length` keys."""
        if length < self.length:
            self._room, self.length = self._room[:, :, :length], length  # no room: a copy may share what follows


class HeadSelector:
    """Selects for all layers before the model runs, by the attention of a retrieval head over its own keys.

    Args:
        head: The retrieval head, for as many positions as there are keys; it is extended as they grow.
        layers: The target's layers whose outputs are the head's features; empty when it reads embeddings alone.
        keys: [B, K, C, d], the head's keys of all tokens so far; K counts the KV heads of all groups.
        features: [B, 1, w], the target's features of the last token; None when the head reads none.
        padding: [B] int64, number of padding tokens on the left; None for none.
        budget: How many entries to select.
    """

    def __init__(
        self,
        head: RetrievalHead,
        layers: tuple[int, ...],
        keys: Tensor,
        features: Tensor | None,
        padding: Tensor | None,
        budget: StepBudget,
    ) -> None:
        self.head, self.layers, self.features = head, layers, features
        self.padding, self.budget = padding, budget
        self.keys = HeadKeys(keys)

    @property
    def bytes(self) -> int:
        """Bytes of its keys."""
        return self.keys.keys.nbytes

    def select(self, embeddings: Tensor, positions: Tensor) -> Selection:
        """Select what the target reads for a token, group after group; its key is appended to the head's.

        Args:
            embeddings: [B, 1, hidden], the target's embedding of the token.
            positions: [B or 1, 1] int64.
        """
        self._reach(self.keys.length + 1)
        query, key = self.head.project(embeddings, self.features, positions)
        self.keys.append(key)
        return most_attended(query, self.keys.keys, Softmax(self.head.scaling), self.padding, self.budget)

    def read(self, embeddings: Tensor, features: Tensor | None, positions: Tensor) -> None:
        """Append the keys of tokens that the target has read without it.

        Args:
            embeddings: [B, q, hidden], the target's embeddings of the tokens.
            features: [B, q, w], the target's features of these tokens; None when the head reads none.
            positions: [B or 1, q] int64.
        """
        self._reach(self.keys.length + embeddings.shape[1])
        before = None
        if features is not None and self.features is not None:
            before = torch.cat([self.features, features[:, :-1]], dim=1)
            self.features = features[:, -1:]
        self.keys.append(self.head.keys(self.head.inputs(embeddings, before), positions))

    def _reach(self, length: int) -> None:
        """Extend the head, and turn its keys to the angles that it then has."""
        if (head := self.head.reaching(length)) is not self.head:
            places = torch.arange(self.keys.length, device=self.keys.keys.device)[None]
            positions = places if self.padding is None else (places - self.padding[:, None]).clamp(min=0)
            self.keys, self.head = HeadKeys(head.turned(self.keys.keys, positions, self.head)), head

    def share(self) -> "HeadSelector":
        """An independent copy."""
        return HeadSelector(self.head, self.layers, self.keys.keys, self.features, self.padding, self.budget)
