"""How similar the queries of pseudo tokens are to the answer's own: by content, and by position.

DapQ (arXiv 2603.11564, section 3, tables 1, 5 and 6, figure 2b): tokens are read after the prompt, at the answer's
positions or earlier ones, and their queries in each layer and head are compared with those of the answer.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from transformers import PreTrainedModel
from typing_extensions import override

from keepsight.errors import UserError
from keepsight.models.decoder import input_shape
from keepsight.runtime.attention import Softmax
from keepsight.runtime.drafting.observer import greedy_draft
from keepsight.runtime.observe import ObservedLayer, read_embeddings
from keepsight.runtime.rotary import Rotary
from keepsight.runtime.state import full_layers, has_bounded, prefill

POSITIONS = (1.0, 0.75, 0.5, 0.25, 0.0)
"""Where the tokens stand, as shares of the prompt's length; 1 is the answer's place."""


class _QueriedLayer(ObservedLayer):
    """A layer that keeps the queries [1, H, T, d] of the tokens that observe it."""

    queries: Tensor

    @override
    def attend(self, query: Tensor, key: Tensor, value: Tensor, softmax: Softmax) -> Tensor:
        self.queries = query
        return super().attend(query, key, value, softmax)


@torch.no_grad()
def query_similarity(
    model: PreTrainedModel, prompt: Sequence[int], answer_tokens: int, seed: int = 0
) -> dict[tuple[str, float], tuple[float, float]]:
    """Compare the queries of tokens after a prompt with those of the model's own greedy answer.

    The result has by content (`same`, or `other`, drawn uniformly from the vocabulary as in appendix A.1.2) and
    position (one of `POSITIONS`) the cosine similarity after and before RoPE, mean over layers, heads and tokens.
    UserError: some layer has no full attention, or its RoPE cannot be undone.
    """
    generator = torch.Generator().manual_seed(seed)
    vocabulary, _ = input_shape(model)
    state = prefill(model, torch.tensor([list(prompt)], device=model.device))
    if has_bounded(state.cache):
        raise UserError(
            "bench queries compares layers with full attention, and this model has others too",
            field="model",
            code="model",
        )
    draft = greedy_draft(model, state.copy(), answer_tokens)
    ids = draft.ids if draft.mask is None else draft.ids[:, draft.mask[0]]
    random_ids = torch.randint(vocabulary, ids.shape, generator=generator).to(ids.device)
    length = int(state.lengths[0])
    queries_of_answer = _queries(model, state.cache, ids, length)
    similarities = {}
    for content, tokens in (("same", ids), ("other", random_ids)):
        for share in POSITIONS:
            queries = _queries(model, state.cache, tokens, round(share * length))
            similarities[content, share] = _similarity(queries_of_answer, queries)
    return similarities


def _queries(model: PreTrainedModel, cache: Any, ids: Tensor, first: int) -> list[tuple[Tensor, Tensor]]:
    """Queries [1, H, T, d] float32 of tokens at positions from `first` on, by layer: after RoPE, and before."""
    layers = [_QueriedLayer(layer, None, None, "mean") for layer in full_layers(cache)]
    embeddings = model.get_input_embeddings()(ids)
    read_embeddings(model, cache, layers, None, embeddings, torch.tensor([first], device=ids.device))
    positions = torch.arange(first, first + ids.shape[1], device=ids.device)[None]
    queries = []
    for index, layer in enumerate(layers):
        after_rope = layer.queries.float()
        queries.append((after_rope, Rotary(model, index).undone(after_rope, positions)))
    return queries


def _similarity(queries: list[tuple[Tensor, Tensor]], others: list[tuple[Tensor, Tensor]]) -> tuple[float, float]:
    """Mean cosine similarity after and before RoPE."""
    similarities_after = []
    similarities_before = []
    for (after, before), (other_after, other_before) in zip(queries, others, strict=True):
        similarities_after.append(functional.cosine_similarity(after, other_after, dim=-1))
        similarities_before.append(functional.cosine_similarity(before, other_before, dim=-1))
    return float(torch.stack(similarities_after).mean()), float(torch.stack(similarities_before).mean())
