"""Distillation of a retrieval head: its attention learns what the target attends to, step by step.

One pass of the target over prompt and answer, without gradients, records how important every KV entry is to each of
the last tokens: the mean over layers, and over the query heads of a KV head, of the attention weights. The head scores
the same tokens, and the loss is KL(target || head), both softened by a temperature (Hinton et al. 2015, arXiv
1503.02531), or else the few entries with the largest weights would be all that counts. SpeContext (arXiv 2512.00722)
prunes without any training; this step is keepsight's own.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel
from typing_extensions import Self, override

from keepsight.models.decoder import decoder_of, full_attention_layers
from keepsight.models.retrieval_head import RetrievalHead, of_the_token_before
from keepsight.runtime.attention import recording
from keepsight.runtime.features import RecordFeatures
from keepsight.runtime.importance import attention_weights, reduce_group
from keepsight.runtime.prefill import positions_of
from keepsight.runtime.softmax import Softmax
from keepsight.train.dataset import Batch
from keepsight.train.objective import HeadObjective

_ROWS = 32
"""Queries whose attention weights are held at once: B x H x 32 x S float32."""
_LEAST = torch.finfo(torch.float32).min
"""In place of minus infinity, of which a weight of zero would make NaN."""


@dataclass(frozen=True)
class Texts:
    """Prompts with their answers, padded on the left.

    Attributes:
        ids: [B, S] int64.
        mask: [B, S] bool, False for padding; None when nothing is padded.
        positions: [B or 1, S] int64, RoPE positions.
    """

    ids: Tensor
    mask: Tensor | None
    positions: Tensor

    def real(self, rows: int) -> Tensor:
        """[B, rows] bool: which of the last tokens are not padding."""
        if self.mask is None:
            return torch.ones(len(self.ids), rows, dtype=torch.bool, device=self.ids.device)
        return self.mask[:, -rows:]


def left_padded(batch: Batch) -> Texts:
    """Move the padding behind answers to the front of their prompts."""
    ids, mask = batch.joined()
    length = ids.shape[1]
    if mask is not None and batch.answer_mask is not None:
        order = torch.arange(length, device=ids.device) - (~batch.answer_mask).sum(dim=1, keepdim=True)
        ids, mask = ids.gather(1, order % length), mask.gather(1, order % length)
    return Texts(ids, mask, positions_of(mask, length, ids.device))


class StepRecorder:
    """Sums over layers how important every KV entry is to each of the last queries.

    Args:
        rows: Number of queries.
        mask: [B, S] bool over the KV entries, False for padding; None when nothing is padded.
        layers: Indices of the layers that count; None for all.
    """

    def __init__(self, rows: int, mask: Tensor | None, layers: Sequence[int] | None = None) -> None:
        self.rows, self.mask, self.layers = rows, mask, layers
        self._layers = 0
        self._total: Tensor | None = None

    def __call__(self, layer: int, query: Tensor, key: Tensor, softmax: Softmax, real: Tensor | None) -> None:
        """See `keepsight.runtime.attention.Recorder`."""
        if self.layers is not None and layer not in self.layers:
            return
        batch, kv_heads, length, _ = key.shape
        if self._total is None:
            self._total = torch.zeros(batch, kv_heads, self.rows, length, device=key.device)
        first = length - self.rows
        for start in range(0, self.rows, _ROWS):
            stop = min(start + _ROWS, self.rows)
            seen = first + stop
            mask = None if self.mask is None else self.mask[:, :seen]
            weights = attention_weights(query[:, :, first + start : seen], key[:, :, :seen], softmax, mask)
            self._total[:, :, start:stop, :seen] += reduce_group(weights, kv_heads)
        self._layers += 1

    def importance(self) -> Tensor:
        """[B, K, rows, S] float32, the mean over layers: causal, each row sums to 1."""
        assert self._total is not None
        return self._total / self._layers


@dataclass(frozen=True)
class ImportanceReading:
    """What the target shows while it reads some texts.

    Attributes:
        importance: [B, K, T, S] float32, of every KV entry to each of the last T tokens; each row sums to 1.
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
    recorder = StepRecorder(rows, batch.mask, full_attention_layers(target.config))
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


def head_scores(head: RetrievalHead, batch: Texts, read: ImportanceReading) -> Tensor:
    """The head's scores for the last T tokens; gradients flow to its weights.

    The softmax of every query head, then the maximum over the query heads of a KV head (SpeContext, section 4.3; the
    weights have no hidden dimension, the maximum is over the group), then normalised over the entries.

    Returns:
        [B, K, T, S] float32, logarithms of weights that sum to 1; very low where the causal mask hides an entry.
    """
    rows, length = read.importance.shape[2:]
    inputs = head.inputs(read.embeddings, read.features)
    query = head.queries(inputs[:, -rows:], batch.positions[:, -rows:]).unflatten(1, (head.kv_heads, -1))
    key = head.keys(inputs, batch.positions)
    logits = (query @ key[:, :, None].transpose(-1, -2)).float() * head.scaling
    hidden = torch.ones(rows, length, dtype=torch.bool, device=key.device).triu(length - rows + 1)
    if batch.mask is not None:
        hidden = hidden | ~batch.mask[:, None, None, None]
    logits = logits.masked_fill(hidden, _LEAST)
    return logits.log_softmax(dim=-1).amax(dim=2).log_softmax(dim=-1)


def divergence(importance: Tensor, scores: Tensor, real: Tensor) -> Tensor:
    """KL(target || head) in nats, the mean over KV heads and steps.

    Args:
        importance: [B, K, T, S] float32, the target's, each row sums to 1.
        scores: [B, K, T, S] float32, from `head_scores`.
        real: [B, T] bool, False for padding.
    """
    known = torch.xlogy(importance, importance).sum(dim=-1) - (importance * scores).sum(dim=-1)
    return known.transpose(1, 2)[real].mean()


def soften(importance: Tensor, scores: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """What `divergence` takes, with all weights raised to the power of 1 / temperature and normalised again."""
    powers = importance.pow(1 / temperature)
    return powers / powers.sum(dim=-1, keepdim=True), (scores / temperature).clamp(min=_LEAST).log_softmax(dim=-1)


class RetrievalObjective(HeadObjective):
    """Distils the target's importance into a retrieval head.

    Args:
        head: The head in training.
        target: Its target; frozen.
        queries: Number of a sample's last tokens whose importance is distilled.
        temperature: See `soften`.
    """

    head: RetrievalHead

    def __init__(self, head: RetrievalHead, target: PreTrainedModel, queries: int, temperature: float = 1.0) -> None:
        super().__init__()
        self.head, self.queries, self.temperature = head, queries, temperature
        self.target = target.requires_grad_(False)

    @override
    def train(self, mode: bool = True) -> Self:
        super().train(mode)
        self.target.eval()
        return self

    @override
    def loss(self, batch: Batch) -> Tensor:
        texts, reading, scores = self.compared(batch)
        return divergence(*soften(reading.importance, scores, self.temperature), texts.real(scores.shape[2]))

    def compared(self, batch: Batch) -> tuple[Texts, ImportanceReading, Tensor]:
        """The texts of a batch, what the target shows of them, and the head's scores; see `head_scores`."""
        texts = left_padded(batch)
        reading = read_target(self.target, self.head, texts, self.queries)
        return texts, reading, head_scores(self.head, texts, reading)
