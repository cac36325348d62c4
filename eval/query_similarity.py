"""How similar the queries of pseudo tokens are to the answer's own: by content, and by position.

DapQ (arXiv 2603.11564, section 3, tables 1, 5 and 6, figure 2): tokens are read after the prompt, at the answer's
positions or earlier ones, and their queries in each layer and head are compared with those of the answer.
"""

from collections.abc import Mapping, Sequence
from itertools import product
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
"""Where the tokens begin, as shares of the prompt's length; 1 is where the answer begins."""


class _QueriedLayer(ObservedLayer):
    """A layer that keeps the queries [1, H, T, d] of the tokens that observe it."""

    queries: Tensor

    @override
    def attend(self, query: Tensor, key: Tensor, value: Tensor, softmax: Softmax) -> Tensor:
        self.queries = query
        return super().attend(query, key, value, softmax)


@torch.no_grad()
def query_similarity(
    model: PreTrainedModel,
    prompt: Sequence[int],
    answer_tokens: int,
    seed: int = 0,
    text: Sequence[int] = (),
    drawn: Mapping[str, int] | None = None,
) -> dict[tuple[str, str], tuple[Tensor, Tensor]]:
    """Compare the queries of tokens after a prompt with those of the model's own greedy answer.

    Args:
        model: The base model.
        prompt: Its token ids.
        answer_tokens: Longest answer.
        seed: Seed of random tokens and drawn positions.
        text: Token ids that are repeated up to the answer's length, as a further content.
        drawn: Further positions by name: one drawn below this number (appendix A.1.2).

    Returns:
        By content (`same`; `other`, drawn uniformly from the vocabulary; `text`) and position (one of `POSITIONS`
        as text, or a name of `drawn`) the cosine similarity after and before RoPE, [L, H] float32 each, means over
        tokens.

    Raises:
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
    contents = {"same": ids, "other": torch.randint(vocabulary, ids.shape, generator=generator).to(ids.device)}
    if text:
        repeated = [text[index % len(text)] for index in range(ids.shape[1])]
        contents["text"] = torch.tensor([repeated], device=ids.device)
    length = int(state.lengths[0])
    first_positions = {f"{share:g}": round(share * length) for share in POSITIONS}
    for name, end in (drawn or {}).items():
        first_positions[name] = int(torch.randint(min(end, length), (1,), generator=generator))

    queries_of_answer = _queries(model, state.cache, ids, length)
    similarities = {}
    for (content, tokens), (position, first) in product(contents.items(), first_positions.items()):
        queries = _queries(model, state.cache, tokens, first)
        similarities[content, position] = _similarity(queries_of_answer, queries)
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


def _similarity(queries: list[tuple[Tensor, Tensor]], others: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Cosine similarity after and before RoPE, [L, H] each, mean over tokens."""
    similarities_after = []
    similarities_before = []
    for (after, before), (other_after, other_before) in zip(queries, others, strict=True):
        similarities_after.append(functional.cosine_similarity(after, other_after, dim=-1)[0].mean(dim=-1))
        similarities_before.append(functional.cosine_similarity(before, other_before, dim=-1)[0].mean(dim=-1))
    return torch.stack(similarities_after), torch.stack(similarities_before)
