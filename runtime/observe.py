"""Observe: a second, short pass over a prefilled prompt whose queries score the prompt's entries.

What follows a prompt cannot change the prompt's keys and values (causality), so any observers can be run after the
prefill, and none of them leaves a trace in the cache.
"""

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from keepsight.runtime.attention import record_attention
from keepsight.runtime.cache import view
from keepsight.runtime.importance import observed_attention


class AttentionRecorder:
    """Records, for each layer, the mean attention of the last `rows` queries to the first `prompt_length` entries.

    Attributes:
        by_layer: layer -> [B, H, N] float32.
    """

    def __init__(
        self, prompt_length: int, rows: int, *, key_mask: Tensor | None = None, query_mask: Tensor | None = None
    ) -> None:
        self.prompt_length, self.rows = prompt_length, rows
        self.key_mask, self.query_mask = key_mask, query_mask
        self.by_layer: dict[int, Tensor] = {}

    def __call__(self, layer: int, query: Tensor, key: Tensor, scaling: float) -> None:
        """See `keepsight.runtime.attention.Recorder`."""
        self.by_layer[layer] = observed_attention(
            query[:, :, -self.rows :],
            key,
            scaling,
            self.prompt_length,
            key_mask=self.key_mask,
            query_mask=self.query_mask,
        )

    def layers(self) -> list[Tensor]:
        """The recorded tensors in the order of the layers."""
        return [self.by_layer[layer] for layer in sorted(self.by_layer)]


def observe(
    model: PreTrainedModel,
    cache: Cache,
    mask: Tensor | None,
    embeddings: Tensor,
    *,
    prompt_length: int | None = None,
    observer_mask: Tensor | None = None,
) -> list[Tensor]:
    """Let observers look back at a prompt.

    Args:
        model: The model that filled the cache, with whatever adapter the observers need switched on.
        cache: Its first N entries are the prompt's; it is not changed.
        mask: [B, N] bool, False for left padding; None when no row is padded.
        embeddings: [B, n, hidden], the observers' input embeddings; they take the positions after the prompt.
        prompt_length: N; the whole cache by default.
        observer_mask: [B, n] bool, False for padding on the right of the observers.

    Returns:
        For each layer, [B, H, N] float32: mean attention of the observers. Gradients flow to `embeddings` and to the
        model's trainable parameters.
    """
    record_attention(model)
    length = prompt_length if prompt_length is not None else cache.get_seq_length()
    batch, count, _ = embeddings.shape
    first = mask.sum(dim=1) if mask is not None else torch.full((batch,), length, device=embeddings.device)
    key_mask = join_masks(mask, observer_mask, batch, length, count, embeddings.device)
    recorder = AttentionRecorder(length, count, key_mask=key_mask, query_mask=observer_mask)
    model.base_model(
        inputs_embeds=embeddings,
        attention_mask=key_mask,
        position_ids=first[:, None] + torch.arange(count, device=embeddings.device),
        past_key_values=view(cache, length),
        use_cache=True,
        recorder=recorder,
    )
    return recorder.layers()


def join_masks(
    prompt: Tensor | None, rest: Tensor | None, batch: int, length: int, count: int, device: torch.device
) -> Tensor | None:
    """[B, length + count] bool from the masks of a prompt and of what follows it; None when nothing is padded."""
    if prompt is None and rest is None:
        return None
    real = torch.ones(batch, 1, dtype=torch.bool, device=device)
    parts = (
        prompt if prompt is not None else real.expand(-1, length),
        rest if rest is not None else real.expand(-1, count),
    )
    return torch.cat(parts, dim=1)
