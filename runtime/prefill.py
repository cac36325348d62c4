"""Prefill: the prompt becomes KV entries, once, whatever observes them later."""

from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import Cache, DynamicCache

from keepsight.runtime.attention import record_attention


@dataclass(frozen=True)
class Prefilled:
    """A prompt's full cache and what the prefill alone can tell about it.

    Attributes:
        cache: The entries of N positions. Observers and selections never change it.
        mask: [B, N] bool, False for left padding; None when no row is padded.
        logits: [B, V], of the last prompt token: the answer's first token comes from them.
        window: For each layer, the queries [B, H, w, d] of the last w prompt tokens, after RoPE.
        scaling: Factor of the attention's dot products, by layer.
    """

    cache: Cache
    mask: Tensor | None
    logits: Tensor
    window: tuple[Tensor, ...]
    scaling: tuple[float, ...]

    @property
    def length(self) -> int:
        """N, padding included."""
        return self.cache.get_seq_length()

    @property
    def lengths(self) -> Tensor:
        """[B] int64: each row's prompt tokens, padding excluded; also the position of its next token."""
        if self.mask is not None:
            return self.mask.sum(dim=1)
        return torch.full((len(self.logits),), self.length, device=self.logits.device)


class _WindowRecorder:
    """Keeps the queries of the last `size` positions over all chunks of a prefill."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.queries: dict[int, Tensor] = {}
        self.scaling: dict[int, float] = {}

    def __call__(self, layer: int, query: Tensor, key: Tensor, scaling: float) -> None:
        recent = query[:, :, -self.size :]
        if layer in self.queries and recent.shape[2] < self.size:
            recent = torch.cat([self.queries[layer], recent], dim=2)[:, :, -self.size :]
        self.queries[layer] = recent.clone()  # a slice would keep the whole prompt's queries alive
        self.scaling[layer] = scaling


@torch.no_grad()
def prefill(
    model: PreTrainedModel,
    input_ids: Tensor,
    attention_mask: Tensor | None = None,
    *,
    chunk: int | None = None,
    window: int = 32,
) -> Prefilled:
    """Run the prompt through the model.

    Args:
        model: A causal language model with full attention in every layer.
        input_ids: [B, N] int64, padded on the left.
        attention_mask: [B, N], 0 for padding; None when no row is padded.
        chunk: Tokens a forward pass; None for the whole prompt in one. The result is the same.
        window: How many of the last queries to keep for the methods that observe from there.
    """
    record_attention(model)
    mask = attention_mask.bool() if attention_mask is not None and not attention_mask.bool().all() else None
    positions = positions_of(mask, input_ids.shape[1], input_ids.device)
    cache, recorder = DynamicCache(), _WindowRecorder(window)
    step = chunk or input_ids.shape[1]
    for start in range(0, input_ids.shape[1], step):
        end = min(start + step, input_ids.shape[1])
        output = model(
            input_ids=input_ids[:, start:end],
            attention_mask=None if mask is None else mask[:, :end],
            position_ids=positions[:, start:end],
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=1,
            recorder=recorder,
        )
    layers = range(len(recorder.queries))
    return Prefilled(
        cache,
        mask,
        output.logits[:, -1].float(),
        tuple(recorder.queries[layer] for layer in layers),
        tuple(recorder.scaling[layer] for layer in layers),
    )


def positions_of(mask: Tensor | None, length: int, device: torch.device) -> Tensor:
    """Position ids [B, N] (or [1, N] without a mask): real tokens count from 0, padding gets 0."""
    if mask is None:
        return torch.arange(length, device=device)[None]
    return (mask.long().cumsum(dim=1) - 1).clamp(min=0)
