"""What the target attends to while it reads a prompt and its answer: what a retrieval head is distilled from."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from keepsight.models.decoder import decoder_of, full_attention_layers
from keepsight.models.retrieval_head import RetrievalHead, of_the_token_before
from keepsight.runtime.attention import Softmax, recording
from keepsight.runtime.features import RecordFeatures
from keepsight.runtime.importance import attention_weights, reduce_group
from keepsight.runtime.state import positions_of
from keepsight.train.dataset import Batch

SINKS, RECENT = 4, 64
"""Near entries: the first of a text, and those just before each token."""
_ROWS = 32
"""Queries whose attention weights are held at once: B x H x 32 x S float32."""


@dataclass(frozen=True)
class Texts:
    """Prompts with their answers, padded on the left.

    Attributes:
        ids: [B, S] int64.
        mask: [B, S] bool, False for padding; None when nothing is padded.
        positions: [B or 1, S] int64, RoPE positions.
        answers: [B] int64, the answers' lengths: the last tokens of each row.
    """

    ids: Tensor
    mask: Tensor | None
    positions: Tensor
    answers: Tensor

    def real(self, rows: int) -> Tensor:
        """[B, rows] bool: which of the last tokens are not padding."""
        if self.mask is None:
            return torch.ones(len(self.ids), rows, dtype=torch.bool, device=self.ids.device)
        return self.mask[:, -rows:]

    def answered(self, rows: int) -> Tensor:
        """[B, rows] bool: which of the last tokens belong to an answer."""
        return torch.arange(rows, 0, -1, device=self.ids.device) <= self.answers[:, None]

    def far(self, rows: int) -> Tensor:
        """[B, rows, S] bool: entries that are far from each of the last tokens: no sinks, and not among the recent."""
        length = self.ids.shape[1]
        places = torch.arange(length, device=self.ids.device).expand_as(self.ids)
        start = 0 if self.mask is None else (~self.mask).sum(dim=1, keepdim=True)
        queries = torch.arange(length - rows, length, device=self.ids.device)
        return (places >= start + SINKS)[:, None] & (places[:, None] <= queries[:, None] - RECENT)


def left_padded(batch: Batch) -> Texts:
    """Move the padding behind answers to the front of their prompts."""
    ids, mask = batch.joined()
    length, answers = ids.shape[1], torch.full_like(ids[:, 0], batch.answer_ids.shape[1])
    if mask is not None and batch.answer_mask is not None:
        answers = batch.answer_mask.sum(dim=1)
        order = torch.arange(length, device=ids.device) - (~batch.answer_mask).sum(dim=1, keepdim=True)
        ids, mask = ids.gather(1, order % length), mask.gather(1, order % length)
    return Texts(ids, mask, positions_of(mask, length, ids.device), answers)


class StepRecorder:
    """Sums over the layers of each group how important every KV entry is to each of the last queries.

    Args:
        rows: Number of queries.
        mask: [B, S] bool over the KV entries, False for padding; None when nothing is padded.
        groups: The group of each layer that counts, by its index.
    """

    def __init__(self, rows: int, mask: Tensor | None, groups: Mapping[int, int]) -> None:
        self.rows, self.mask, self.groups = rows, mask, groups
        self._total: Tensor | None = None

    def __call__(
        self, layer: int, query: Tensor, key: Tensor, softmax: Softmax, real: Tensor | None, mask: Any
    ) -> None:
        """See `keepsight.runtime.attention.Recorder`."""
        if layer not in self.groups:
            return
        batch, kv_heads, length, _ = key.shape
        if self._total is None:
            all_heads = kv_heads * len({*self.groups.values()})
            self._total = torch.zeros(batch, all_heads, self.rows, length, device=key.device)
        total = self._total.narrow(1, self.groups[layer] * kv_heads, kv_heads)
        first = length - self.rows
        for start in range(0, self.rows, _ROWS):
            stop = min(start + _ROWS, self.rows)
            seen = first + stop
            mask = None if self.mask is None else self.mask[:, :seen].to(key.device)
            weights = attention_weights(query[:, :, first + start : seen], key[:, :, :seen], softmax, mask)
            total[:, :, start:stop, :seen] += reduce_group(weights, kv_heads).to(total.device)

    def importance(self) -> Tensor:
        """The mean over a group's layers: causal, each row sums to 1 (what sinks take is left out).

        Returns:
            [B, K, rows, S] float32; K counts the KV heads of all groups, group after group.
        """
        assert self._total is not None
        return self._total / self._total.sum(dim=-1, keepdim=True).clamp(min=torch.finfo(torch.float32).tiny)


@dataclass(frozen=True)
class ImportanceReading:
    """What the target shows while it reads some texts.

    Attributes:
        importance: [B, K, T, S] float32, of every KV entry to each of the last T tokens; each row sums to 1; K counts
            the KV heads of all groups of layers.
        embeddings: [B, S, hidden].
        features: [B, S, 3 * hidden], those of the token before; None when the head reads none.
    """

    importance: Tensor
    embeddings: Tensor
    features: Tensor | None


@torch.no_grad()
def read_target(target: PreTrainedModel, head: RetrievalHead, batch: Texts, queries: int) -> ImportanceReading:
    """Run the target over texts and record the importance to the last `queries` tokens."""
    rows = min(queries, batch.ids.shape[1])
    layers = full_attention_layers(target.config)
    groups = {layer: head.config.group_of(place, len(layers)) for place, layer in enumerate(layers)}
    recorder = StepRecorder(rows, batch.mask, groups)
    with recording(target), RecordFeatures(target, head.layers_of(target)) as record:
        decoder_of(target)(
            input_ids=batch.ids,
            attention_mask=batch.mask,
            position_ids=batch.positions,
            use_cache=False,
            recorder=recorder,
        )
        outputs = record.outputs()
    features = of_the_token_before(torch.cat(outputs, dim=-1), batch.mask) if outputs else None
    return ImportanceReading(recorder.importance(), target.get_input_embeddings()(batch.ids), features)
