"""Distillation of a retrieval head: its attention learns what the target attends to, step by step.

One pass of the target over prompt and answer, without gradients, records how important every KV entry is to each of
the last tokens: the mean over layers, and over the query heads of a KV head, of the attention weights. The head scores
the same tokens, and the loss is KL(target || head), both softened by a temperature (Hinton et al. 2015, arXiv
1503.02531), or else the few entries with the largest weights would be all that counts. A part of the loss is of the
answer's tokens alone, and there half of it of the far entries: what an answer looks up is far from it and has little
of the mass. SpeContext (arXiv 2512.00722) prunes without any training; this step is keepsight's own.
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
from keepsight.train.objective import HeadObjective, ReplayedObjective
from keepsight.train.replay import Reading

SINKS, RECENT = 4, 64
"""Entries at the beginning of a text, and at each token's heels, that are not far."""
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


def far_steps_divergence(importance: Tensor, scores: Tensor, far: Tensor, counted: Tensor) -> Tensor:
    """`divergence` over the far entries alone, both sides normalised there; 0 where there are none.

    Args:
        importance: [B, K, T, S] float32, the target's.
        scores: [B, K, T, S] float32, from `head_scores`.
        far: [B, T, S] bool, see `Texts.far`.
        counted: [B, T] bool, the steps that count.
    """
    counted = counted & far.any(dim=-1)
    if not counted.any():
        return scores.new_zeros(())
    expected = importance * far[:, None]
    expected = expected / expected.sum(dim=-1, keepdim=True).clamp(min=torch.finfo(torch.float32).tiny)
    return divergence(expected, scores.masked_fill(~far[:, None], _LEAST).log_softmax(dim=-1), counted)


class RetrievalObjective(ReplayedObjective, HeadObjective):
    """Distils the target's importance into a retrieval head.

    Args:
        head: The head in training.
        target: Its target; frozen.
        queries: Number of a sample's last tokens whose importance is distilled.
        temperature: See `soften`.
        answers: Share of the loss that is of the answer's tokens, half of it over the far entries; the rest is of all
            `queries`, softened.
    """

    head: RetrievalHead

    def __init__(
        self,
        head: RetrievalHead,
        target: PreTrainedModel,
        queries: int,
        temperature: float = 1.0,
        answers: float = 0.0,
    ) -> None:
        super().__init__()
        self.head, self.queries, self.temperature, self.answers = head, queries, temperature, answers
        self.target = target.requires_grad_(False)

    @override
    def train(self, mode: bool = True) -> Self:
        super().train(mode)
        self.target.eval()
        return self

    @override
    def read(self, batch: Batch) -> Reading:
        read = read_target(self.target, self.head, left_padded(batch), self.queries)
        return {"importance": read.importance} | ({} if read.features is None else {"features": read.features})

    @override
    def loss_of(self, reading: Reading, batch: Batch) -> Tensor:
        texts, read, scores = self._compared(reading, batch)
        rows = scores.shape[2]
        whole = divergence(*soften(read.importance, scores, self.temperature), texts.real(rows))
        if not self.answers:
            return whole
        answered = texts.answered(rows)
        near = divergence(read.importance, scores, answered)
        far = far_steps_divergence(read.importance, scores, texts.far(rows), answered)
        return torch.lerp(whole, (near + far) / 2, self.answers)

    def compared(self, batch: Batch) -> tuple[Texts, ImportanceReading, Tensor]:
        """The texts of a batch, what the target shows of them, and the head's scores; see `head_scores`."""
        return self._compared(self.reading(batch), batch)

    def _compared(self, reading: Reading, batch: Batch) -> tuple[Texts, ImportanceReading, Tensor]:
        texts = left_padded(batch)
        with torch.no_grad():
            embeddings = self.target.get_input_embeddings()(texts.ids)
        read = ImportanceReading(reading["importance"], embeddings, reading.get("features"))
        return texts, read, head_scores(self.head, texts, read)
