"""Observers that a model reads in one pass with a prompt, after its last tokens.

Causality leaves the prompt's rows as they are whatever follows them. So soft tokens, pseudo queries and drafts that are
known before the prefill need no forward pass of their own: they are appended to the last chunk of the prompt, score its
entries in each layer while that layer is read, and are then dropped from it (LookaheadKV, arXiv 2603.10899, section 3,
reads its soft tokens so). An adapter is applied to their rows alone.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from keepsight.runtime.attention import Softmax
from keepsight.runtime.importance import Reduce, combine, observed_attention, reduce_group
from keepsight.runtime.layer import Recorded


def without_adapter() -> AbstractContextManager[None]:
    """The context of observers that the plain model reads."""
    return nullcontext()


@dataclass(frozen=True)
class Tail:
    """Observers after a prompt, read in its last forward pass.

    Attributes:
        embeddings: [B, n, hidden], their input embeddings, in the model's dtype.
        reduce: Reduction over the observing queries and over the query heads of a KV head.
        mask: [B, n] bool, False for padding on the right of the observers, which does not count; None for none.
        window: Number of last prompt tokens that observe too; their queries must be recorded.
        adapter: Makes a context within which an adapter changes the last n rows of a pass, and no others.
        prompt: [B, N, hidden], the prompt's own input embeddings where it holds images (`Images.embeddings_alone`);
            None where they are those of its tokens.
    """

    embeddings: Tensor
    reduce: Reduce
    mask: Tensor | None = None
    window: int = 0
    adapter: Callable[[], AbstractContextManager[object]] = without_adapter
    prompt: Tensor | None = None

    @property
    def count(self) -> int:
        """Number of observers, n."""
        return self.embeddings.shape[1]

    def score(
        self, queries: Tensor, keys: Tensor, softmax: Softmax, real: Tensor | None, recorded: Recorded, kv_heads: int
    ) -> Tensor:
        """Score a layer's N entries by the observers, and by the prompt's last tokens with a window.

        Args:
            queries: [B, H, n, d], those of the observers, after RoPE.
            keys: [B, K, N + n, d], the prompt's and the observers'.
            softmax: The layer's.
            real: [B, N] bool, False for padding of the prompt; None when no row is padded.
            recorded: What the layer recorded of the prompt.
            kv_heads: K of the scores.

        Returns:
            [B, K, N] float32.
        """
        length = keys.shape[2] - self.count
        key_mask = None if real is None else functional.pad(real, (0, self.count), value=True)
        over_queries = self.reduce.queries
        attention = observed_attention(
            queries, keys, softmax, length, key_mask=key_mask, query_mask=self.mask, reduction=over_queries
        )

        if self.window and recorded.queries is not None:
            last = recorded.last(self.window)
            assert last.queries is not None
            window_attention = observed_attention(
                last.queries,
                keys[:, :, :length],
                softmax,
                length,
                key_mask=real,
                query_mask=last.query_mask,
                reduction=over_queries,
            )
            mask = self.mask
            if mask is None:
                mask = self.embeddings.new_ones(self.embeddings.shape[:2], dtype=torch.bool)
            attention = combine(window_attention, attention, last.queries.shape[2], mask, over_queries)
        return reduce_group(attention, kv_heads, self.reduce.heads)
