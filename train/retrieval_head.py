"""Distillation of a retrieval head: its attention learns what the base model attends to, step by step.

One pass of the base model over prompt and answer, without gradients, records how important every KV entry is to each of
the last tokens: the mean over layers, and over the query heads of a KV head, of the attention weights. The head scores
the same tokens, and the loss is KL(model || head), both softened by a temperature (Hinton et al. 2015, arXiv
1503.02531), or else only the few entries with the largest weights would count. A part of the loss is over the answer's
tokens alone, and half of that over distant entries: what an answer looks up is distant and has little of the mass.
SpeContext (arXiv 2512.00722) prunes without any training; this distillation is keepsight's own.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from statistics import fmean
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from typing_extensions import override

from keepsight.models.decoder import decoder_of, full_attention_layers, require_full_attention
from keepsight.models.distributed import map_over_processes
from keepsight.models.retrieval_head import RetrievalHead, of_the_token_before
from keepsight.runtime.attention import Softmax, recording
from keepsight.runtime.distance_bias import require_no_distance_bias
from keepsight.runtime.features import RecordFeatures
from keepsight.runtime.importance import attention_weights, reduce_group, top_mask
from keepsight.runtime.state import positions_of
from keepsight.train.dataset import Batch
from keepsight.train.objective import HeadObjective, ReplayedObjective
from keepsight.train.replay import TeacherOutputs
from keepsight.train.settings import RetrievalHeadSettings

SINKS = 4
RECENT = 64
"""Near entries: the first of a text, and the latest before each token."""
_ROWS = 32
"""Queries whose attention weights are in memory at once: B x H x 32 x S float32."""


@dataclass(frozen=True)
class Texts:
    """Prompts with their answers [B, S] int64, padded on the left where `mask` [B, S], if any, is False.

    RoPE positions are [B or 1, S]; `answers` [B] int64 are the answers' lengths: the last tokens of each row.
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
        """[B, rows, S] bool: entries that are far from each of the last tokens: neither sinks nor recent."""
        length = self.ids.shape[1]
        entries = torch.arange(length, device=self.ids.device).expand_as(self.ids)
        start = 0 if self.mask is None else (~self.mask).sum(dim=1, keepdim=True)
        queries = torch.arange(length - rows, length, device=self.ids.device)
        is_no_sink = entries >= start + SINKS
        is_not_recent = entries[:, None] <= queries[:, None] - RECENT
        return is_no_sink[:, None] & is_not_recent


def left_padded(batch: Batch) -> Texts:
    """Move the padding behind answers to the front of their prompts."""
    ids, mask = batch.joined()
    length = ids.shape[1]
    answer_lengths = torch.full_like(ids[:, 0], batch.answer_ids.shape[1])
    if mask is not None and batch.answer_mask is not None:
        answer_lengths = batch.answer_mask.sum(dim=1)
        padding = (~batch.answer_mask).sum(dim=1, keepdim=True)
        order = (torch.arange(length, device=ids.device) - padding) % length
        ids = ids.gather(1, order)
        mask = mask.gather(1, order)
    return Texts(ids, mask, positions_of(mask, length, ids.device), answer_lengths)


class StepRecorder:
    """Records the importance of every KV entry to each of the last queries, summed over the layers of each group.

    Args:
        rows: Number of queries.
        mask: [B, S] bool over the KV entries, False for padding; None when nothing is padded.
        groups: The group of each layer that counts, by its index.
    """

    def __init__(self, rows: int, mask: Tensor | None, groups: Mapping[int, int]) -> None:
        self.rows = rows
        self.mask = mask
        self.groups = groups
        self._total: Tensor | None = None

    def __call__(
        self, layer: int, query: Tensor, key: Tensor, softmax: Softmax, real: Tensor | None, mask: Any
    ) -> None:
        """See `keepsight.runtime.attention.RecordLayer`."""
        if layer not in self.groups:
            return
        batch, kv_heads, length, _ = key.shape
        if self._total is None:
            all_heads = kv_heads * len(set(self.groups.values()))
            self._total = torch.zeros(batch, all_heads, self.rows, length, device=key.device)
        total = self._total.narrow(1, self.groups[layer] * kv_heads, kv_heads)
        first_query = length - self.rows
        for start in range(0, self.rows, _ROWS):
            end = min(start + _ROWS, self.rows)
            entries = first_query + end  # those up to the last of these queries
            key_mask = None if self.mask is None else self.mask[:, :entries].to(key.device)
            queries = query[:, :, first_query + start : entries]
            weights = attention_weights(queries, key[:, :, :entries], softmax, key_mask)
            total[:, :, start:end, :entries] += reduce_group(weights, kv_heads).to(total.device)

    def importance(self) -> Tensor:
        """The mean over a group's layers: causal, each row sums to 1 (the share of attention sinks is left out).

        Returns:
            [B, K, rows, S] float32; K counts the KV heads of all groups, group after group.
        """
        assert self._total is not None
        return self._total / self._total.sum(dim=-1, keepdim=True).clamp(min=torch.finfo(torch.float32).tiny)


@torch.no_grad()
def run_teacher(model: PreTrainedModel, head: RetrievalHead, batch: Texts, queries: int) -> TeacherOutputs:
    """Run the base model over texts and record the importance to the last `queries` tokens.

    Returns:
        `importance`: [B, K, T, S] float32, that of every KV entry to each of the last T tokens; each row sums to 1, and
        K counts the KV heads of all groups of layers. `features`: [B, S, 3 * hidden], those of the previous token;
        none if the head reads none.
    """
    rows = min(queries, batch.ids.shape[1])
    layers = full_attention_layers(model.config)
    groups = {layer: head.config.group_of(number, len(layers)) for number, layer in enumerate(layers)}
    recorder = StepRecorder(rows, batch.mask, groups)
    with recording(model), RecordFeatures(model, head.layers_of(model)) as record:
        decoder_of(model)(
            input_ids=batch.ids,
            attention_mask=batch.mask,
            position_ids=batch.positions,
            use_cache=False,
            recorder=recorder,
        )
        layer_outputs = record.outputs()
    features = []
    if layer_outputs:
        features.append(of_the_token_before(torch.cat(layer_outputs, dim=-1), batch.mask))
    return TeacherOutputs(importance=[recorder.importance()], features=features)


_LOWEST = torch.finfo(torch.float32).min
"""Stands in for minus infinity, which times a weight of zero would be NaN."""


def head_scores(head: RetrievalHead, batch: Texts, rows: int, embeddings: Tensor, features: Tensor | None) -> Tensor:
    """The head's scores for the last T tokens, T = `rows`; gradients flow to its weights.

    The softmax of every query head, then the maximum over the query heads of a KV head (SpeContext, section 4.3; the
    weights have no hidden dimension, the maximum is over the group), then normalised over the entries.

    Returns:
        [B, K, T, S] float32, logarithms of weights that sum to 1; very low where the causal mask hides an entry.
    """
    length = batch.ids.shape[1]
    inputs = head.inputs(embeddings, features)
    query = head.queries(inputs[:, -rows:], batch.positions[:, -rows:]).unflatten(1, (head.kv_heads, -1))
    key = head.keys(inputs, batch.positions)
    logits = (query @ key[:, :, None].transpose(-1, -2)).float() * head.scaling
    unseen = torch.ones(rows, length, dtype=torch.bool, device=key.device).triu(length - rows + 1)
    if batch.mask is not None:
        unseen = unseen | ~batch.mask[:, None, None, None]
    logits = logits.masked_fill(unseen, _LOWEST)
    return logits.log_softmax(dim=-1).amax(dim=2).log_softmax(dim=-1)


def divergence(importance: Tensor, scores: Tensor, real: Tensor) -> Tensor:
    """KL(model || head) in nats, the mean over KV heads and the steps that are `real`, [B, T] bool.

    `importance` [B, K, T, S] float32 is the base model's, each row sums to 1; `scores` are those of `head_scores`.
    """
    negative_entropy = torch.xlogy(importance, importance).sum(dim=-1)
    kl = negative_entropy - (importance * scores).sum(dim=-1)
    return kl.transpose(1, 2)[real].mean()


def soften(importance: Tensor, scores: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """The arguments of `divergence` with all weights raised to the power of 1 / temperature and normalised again."""
    powers = importance.pow(1 / temperature)
    soft_importance = powers / powers.sum(dim=-1, keepdim=True)
    soft_scores = (scores / temperature).clamp(min=_LOWEST).log_softmax(dim=-1)
    return soft_importance, soft_scores


def far_steps_divergence(importance: Tensor, scores: Tensor, far: Tensor, counted: Tensor) -> Tensor:
    """`divergence` over the far entries alone, [B, T, S] bool, both sides normalised there; 0 where there are none.

    `counted` [B, T] bool are the steps that count.
    """
    counted = counted & far.any(dim=-1)
    if not counted.any():
        return scores.new_zeros(())
    expected = importance * far[:, None]
    expected = expected / expected.sum(dim=-1, keepdim=True).clamp(min=torch.finfo(torch.float32).tiny)
    return divergence(expected, scores.masked_fill(~far[:, None], _LOWEST).log_softmax(dim=-1), counted)


class RetrievalObjective(ReplayedObjective, HeadObjective):
    """Distils the importance of the frozen base model into a retrieval head."""

    head: RetrievalHead
    weights_file = "retrieval_head.safetensors"
    settings_key = "retrieval_head.train"

    def __init__(self, head: RetrievalHead, model: PreTrainedModel, settings: RetrievalHeadSettings) -> None:
        super().__init__()
        require_full_attention(model)
        require_no_distance_bias(model)
        self.head = head
        self.settings = settings
        self.model = model.requires_grad_(False).eval()

    @override
    def run_teacher(self, batch: Batch) -> TeacherOutputs:
        return run_teacher(self.model, self.head, left_padded(batch), self.settings.queries)

    @override
    def loss_of(self, outputs: TeacherOutputs, batch: Batch) -> Tensor:
        texts, importance, scores = self.importance_and_scores(outputs, batch)
        rows = scores.shape[2]
        soft_importance, soft_scores = soften(importance, scores, self.settings.temperature)
        loss = divergence(soft_importance, soft_scores, texts.real(rows))
        if not self.settings.answers:
            return loss
        answered = texts.answered(rows)
        answer_loss = divergence(importance, scores, answered)
        far_loss = far_steps_divergence(importance, scores, texts.far(rows), answered)
        return torch.lerp(loss, (answer_loss + far_loss) / 2, self.settings.answers)

    @override
    def measure(self, batches: Iterable[dict[str, Any]], budget: int) -> dict[str, Any]:
        return measure_retrieval_head(self, batches, sorted({*BUDGETS, budget}))

    def importance_and_scores(self, outputs: TeacherOutputs, batch: Batch) -> tuple[Texts, Tensor, Tensor]:
        """The texts of a batch, the base model's importance and the head's scores; see `head_scores`."""
        texts = left_padded(batch)
        (importance,) = outputs.importance
        with torch.no_grad():
            embeddings = self.model.get_input_embeddings()(texts.ids)
        features = outputs.features[0] if outputs.features else None
        return texts, importance, head_scores(self.head, texts, importance.shape[2], embeddings, features)


BUDGETS = (64, 256, 1024)
"""KV entries per head, as in SpeContext's and Quest's tables."""
MEASURES = ("hit", "window_hit", "mass", "window_mass", "best_mass", "overlap")


def measure_retrieval_head(
    objective: RetrievalObjective, batches: Iterable[dict[str, Any]], budgets: Sequence[int]
) -> dict[str, float]:
    """Compare a head's selection with the base model's attention at several budgets; see `Objective.measure`.

    Returns:
        Means over held-out samples: `eval_kl`, KL(model || head) in nats; `eval_NAME_BUDGET` for the measures of
        `at_budget`; `eval_samples_BUDGET`, the number of samples with more entries than the budget, which alone count.

    Raises:
        FloatingPointError: a score is NaN or infinite.
    """

    def measure_batch(values: dict[str, Any]) -> list[tuple[float, list[dict[str, float]]]]:
        """KL of each sample, and its measures at each budget."""
        samples = []
        for importance, scores, is_real in _importance_and_scores_of_samples(objective, Batch(**values)):
            kl = divergence(importance[None], scores[None], is_real[None]).item()
            measures = [at_budget(importance, scores, budget) for budget in budgets]
            samples.append((kl, measures))
        return samples

    with objective.measuring():
        samples = list(chain.from_iterable(map_over_processes(measure_batch, batches)))
    measures_by_budget: dict[int, list[dict[str, float]]] = {}
    for number, budget in enumerate(budgets):
        measures = [sample_measures[number] for _, sample_measures in samples if sample_measures[number]]
        if measures:
            measures_by_budget[budget] = measures

    metrics = {"eval_kl": fmean(kl for kl, _ in samples)}
    for name in MEASURES:
        for budget, measures in measures_by_budget.items():
            values = [sample[name] for sample in measures if name in sample]
            if values:
                metrics[f"eval_{name}_{budget}"] = fmean(values)
    for budget, measures in measures_by_budget.items():
        metrics[f"eval_samples_{budget}"] = len(measures)
    return metrics


def _importance_and_scores_of_samples(
    objective: RetrievalObjective, batch: Batch
) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """For each sample, the model's importance and the head's scores, [K, T, S] without padding, and T times True."""
    texts, importance, scores = objective.importance_and_scores(objective.teacher_outputs(batch), batch)
    if not torch.isfinite(scores).all():
        raise FloatingPointError("the scores of held-out samples are not finite")
    for row, is_real in enumerate(texts.real(scores.shape[2])):
        columns: Any = slice(None) if texts.mask is None else texts.mask[row]
        sample_importance = importance[row][:, is_real][..., columns]
        sample_scores = scores[row][:, is_real][..., columns]
        yield sample_importance, sample_scores, is_real[is_real]


def at_budget(target: Tensor, predicted: Tensor, budget: int) -> dict[str, float]:
    """Measures of one sample at budget B, by name; empty if it has no more than B entries.

    `target` [K, T, S] float32 is the importance of S entries to each of the last T tokens, and `predicted` ranks them.
    Means over steps and KV heads: `hit`, the share of the model's top-B entries that are in the head's; `mass`, the
    share of the model's importance on the head's top-B entries; `window_hit` and `window_mass`, the same for the first
    4 and the last B - 4 entries in place of the head's; `best_mass`, the share on the model's own top-B entries;
    `overlap`, the share of the head's top-B entries that are in the next step's too.
    """
    _, rows, length = target.shape
    first = max(length - rows, budget)  # row i is position length - rows + i, and sees that many entries and itself
    if first >= length:
        return {}
    first_row = first - (length - rows)
    target = target[:, first_row:]
    predicted = predicted[:, first_row:]
    is_model_top = top_mask(target, budget)
    is_head_top = top_mask(predicted, budget)

    entries = torch.arange(length, device=target.device)
    last_entry = torch.arange(first, length, device=target.device)[:, None]
    sinks = min(SINKS, budget)
    is_recent = entries > last_entry - (budget - sinks)
    is_in_window = ((entries < sinks) | is_recent) & (entries <= last_entry)
    measures = {
        "hit": (is_model_top & is_head_top).sum(-1) / budget,
        "window_hit": (is_model_top & is_in_window).sum(-1) / budget,
        "mass": (target * is_head_top).sum(-1),
        "window_mass": (target * is_in_window).sum(-1),
        "best_mass": (target * is_model_top).sum(-1),
        "overlap": (is_head_top[:, 1:] & is_head_top[:, :-1]).sum(-1) / budget,
    }
    means = {}
    for name, values in measures.items():
        if values.numel():
            means[name] = values.float().mean().item()
    return means
