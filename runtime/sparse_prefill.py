"""SpecKV's sparse prefill (arXiv 2506.08373, section 4.2): a long prompt and its draft are read in one sparse pass.

In each layer the window's and the draft's queries score the prompt's entries, from hidden states that earlier layers
computed sparsely; the top entries per KV head are the columns that all queries of the layer see beside their local
band. The same scores decide what is kept afterwards.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import DynamicLayer
from typing_extensions import override

from keepsight.errors import UserError, require_whole
from keepsight.models.decoder import has_latents
from keepsight.runtime.attention import OwnAttention, Softmax, run
from keepsight.runtime.importance import top_entries
from keepsight.runtime.layer import KeptLayer, Recorded
from keepsight.runtime.sparse_attention import BLOCK, sparse_attention
from keepsight.runtime.state import (
    Needs,
    State,
    empty_cache,
    full_layers,
    record_past,
    roll_back,
    with_full_layers,
)

Score = Callable[[Tensor, Tensor, Softmax], Tensor]
"""Scores the prompt's entries, [B, K, N] float32, from a layer's queries [B, H, N + L, d], its keys [B, K, N + L, d]
and its softmax."""


@dataclass(frozen=True)
class SparsePrefill:
    """How a long prompt is read (SpecKV, section 4.2 and table 8).

    Attributes:
        vertical: Number of columns that every query of a KV head sees, selected by importance.
        band: Number of most recent keys that a query sees; a multiple of 64.

    Raises:
        UserError: a value is out of range.
    """

    vertical: int = 2048
    band: int = 2048

    def __post_init__(self) -> None:
        require_whole("sparse prefill", 1, vertical=self.vertical)
        if type(self.band) is not int or self.band < BLOCK or self.band % BLOCK:
            raise UserError(f"sparse prefill: band {self.band!r} must be a multiple of {BLOCK}, at least {BLOCK}")

    def active(self, length: int) -> bool:
        """Whether a prompt and its draft, `length` tokens together, are read sparsely."""
        return length > self.vertical + self.band

    @torch.no_grad()
    def __call__(
        self, model: PreTrainedModel, input_ids: Tensor, draft_ids: Tensor, score: Score, *, needs: Needs, window: int
    ) -> tuple[State, list[Tensor]]:
        """Read a prompt and its draft.

        Args:
            model: The target.
            input_ids: [B, N] int64, without padding.
            draft_ids: [B, L] int64, padded on the right.
            score: Scores the prompt's entries.
            needs: What to record of the prompt; only the window is.
            window: Number of last prompt entries that are never columns.

        Returns:
            The state of the prompt alone, and the importance [B, K, N] of each layer's entries.
        """
        if has_latents(model):
            raise UserError(f"SpecKV: sparse does not read the latents of {model.config.model_type}; leave out sparse")
        length = input_ids.shape[1]
        cache = empty_cache(model)
        layers = [_SparseLayer(self, score, length, length - window, needs.window) for _ in full_layers(cache)]
        cache = with_full_layers(cache, layers)
        record_past(cache)
        output = run(
            model,
            cache,
            input_ids=torch.cat([input_ids, draft_ids], dim=1),
            logits_to_keep=draft_ids.shape[1] + 1,
        )
        lengths = torch.full((len(input_ids),), length, device=input_ids.device)
        roll_back(cache, draft_ids.shape[1])
        cache = with_full_layers(cache, [layer.first_entries(length) for layer in layers])
        logits, recorded = output.logits[:, 0].float(), Needs(window=needs.window)
        state = State(cache, logits, input_ids, lengths, recorded, padded=False)
        return state, [layer.importance for layer in layers]


class _SparseLayer(DynamicLayer, OwnAttention):
    """A layer of the pass, which scores its entries and attends to some of them.

    Attributes:
        importance: [B, K, N] float32.
        queries: [B, H, w, d] of the prompt's last tokens.
        softmax: The layer's.
    """

    keys: Tensor
    values: Tensor
    importance: Tensor
    queries: Tensor
    softmax: Softmax

    def __init__(self, sparse: SparsePrefill, score: Score, length: int, candidates: int, window: int) -> None:
        super().__init__()
        self.sparse, self.score = sparse, score
        self.length, self.candidates, self.window = length, candidates, window

    @override
    def attend(self, query: Tensor, key: Tensor, value: Tensor, softmax: Softmax) -> Tensor:
        self.importance, self.softmax = self.score(query, key, softmax), softmax
        self.queries = query[:, :, max(self.length - self.window, 0) : self.length].clone()
        columns = top_entries(self.importance[..., : self.candidates], min(self.sparse.vertical, self.candidates))
        return sparse_attention(query, key, value, columns, self.sparse.band, softmax)

    def first_entries(self, length: int) -> KeptLayer:
        """A layer of the first `length` entries alone."""
        keys, values = (each[:, :, :length].contiguous() for each in (self.keys, self.values))
        layer = KeptLayer(keys, values, length)
        layer.recorded = Recorded(self.softmax, self.queries if self.window else None)
        return layer
