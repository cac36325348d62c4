"""Distillation of a retrieval head: its attention learns what the target attends to, step by step.

One pass of the target over prompt and answer, without gradients, records how important every KV entry is to each of
the last tokens: the mean over layers, and over the query heads of a KV head, of the attention weights. The head scores
the same tokens, and the loss is KL(target || head), both softened by a temperature (Hinton et al. 2015, arXiv
1503.02531), or else the few entries with the largest weights would be all that counts. A part of the loss is of the
answer's tokens alone, and there half of it of the far entries: what an answer looks up is far from it and has little
of the mass. SpeContext (arXiv 2512.00722) prunes without any training; this step is keepsight's own.
"""

import torch
from torch import Tensor
from transformers import PreTrainedModel
from typing_extensions import Self, override

from keepsight.models.decoder import require_full_attention
from keepsight.models.retrieval_head import RetrievalHead
from keepsight.train.dataset import Batch
from keepsight.train.objective import HeadObjective, ReplayedObjective
from keepsight.train.replay import Reading
from keepsight.train.retrieval_head.reading import ImportanceReading, Texts, left_padded, read_target

_LEAST = torch.finfo(torch.float32).min
"""Stands in for minus infinity, which times a weight of zero would be NaN."""


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
        require_full_attention(target)
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
