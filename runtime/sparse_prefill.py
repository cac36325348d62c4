"""SpecKV's sparse prefill: a long prompt and its draft are read in one pass that attends to what will matter.

In each layer the window's and the draft's queries score the prompt's entries, from hidden states that earlier layers
computed sparsely; the best of them, by KV head, are the columns that all queries of the layer see beside their local
band. What is kept afterwards comes from the same scores.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import Cache, DynamicCache

from keepsight.errors import UserError, require_whole
from keepsight.runtime.attention import record_attention
from keepsight.runtime.cache import KeptLayer, entries
from keepsight.runtime.importance import top_entries
from keepsight.runtime.sparse_attention import BLOCK, sparse_attention
from keepsight.runtime.state import Needs, State, Trace

Score = Callable[[Tensor, Tensor, float], Tensor]
"""From a layer's queries [B, H, N + L, d], keys [B, K, N + L, d] and the factor of their dot products to the importance
[B, K, N] float32 of the prompt's entries."""


@dataclass(frozen=True)
class SparsePrefill:
    """How a long prompt is read (SpecKV, section 4.2 and table 8).

    Attributes:
        vertical: Columns that every query of a KV head sees, chosen by importance.
        band: Most recent keys that a query sees; a multiple of 64.

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
        """Whether a prompt and its draft, `length` tokens together, are read sparsely; if not, dense attention is."""
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
            needs: What to record of the prompt's queries; only the window is.
            window: The last so many entries of the prompt are never columns.

        Returns:
            The state of the prompt alone, and the importance [B, K, N] of each layer's entries.
        """
        record_attention(model)
        length = input_ids.shape[1]
        attend = _Layers(self, score, length, length - window, needs.window)
        output = model(
            input_ids=torch.cat([input_ids, draft_ids], dim=1),
            past_key_values=DynamicCache(),
            use_cache=True,
            logits_to_keep=torch.tensor([length - 1], device=input_ids.device),
            attend=attend,
        )
        layers = sorted(attend.importance)
        trace = Trace(
            Needs(window=needs.window),
            tuple(attend.queries[layer] for layer in layers) if needs.window else (),
            (),
            tuple(attend.scaling[layer] for layer in layers),
        )
        lengths = torch.full((len(input_ids),), length, device=input_ids.device)
        cache = _first_entries(output.past_key_values, length)
        state = State(cache, None, output.logits[:, -1].float(), input_ids, lengths, trace)
        return state, [attend.importance[layer] for layer in layers]


class _Layers:
    """Attention of the pass, layer by layer; see `keepsight.runtime.attention.Attend`."""

    def __init__(self, sparse: SparsePrefill, score: Score, length: int, candidates: int, window: int) -> None:
        self.sparse, self.score = sparse, score
        self.length, self.candidates, self.recorded = length, candidates, window
        self.importance: dict[int, Tensor] = {}
        self.queries: dict[int, Tensor] = {}
        self.scaling: dict[int, float] = {}

    def __call__(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
        importance = self.score(query, key, scaling)
        self.importance[layer], self.scaling[layer] = importance, scaling
        self.queries[layer] = query[:, :, max(self.length - self.recorded, 0) : self.length].clone()
        columns = top_entries(importance[..., : self.candidates], min(self.sparse.vertical, self.candidates))
        return sparse_attention(query, key, value, columns, self.sparse.band, scaling)


def _first_entries(cache: Cache, length: int) -> Cache:
    return Cache(
        layers=[
            KeptLayer(keys[:, :, :length].contiguous(), values[:, :, :length].contiguous(), length)
            for keys, values, _ in entries(cache)
        ]
    )
