"""How well a draft head predicts the answers of held-out samples, by unrolled step and position in a draft."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from keepsight.models.distributed import divided
from keepsight.train.dataset import Batch
from keepsight.train.draft_head.objective import DraftHeadObjective

_ROWS = 512


@dataclass(frozen=True)
class HeadFidelity:
    """Means over the answer tokens of held-out samples, for each of S unrolled steps.

    Attributes:
        kl: KL(target || head) over the draft vocabulary, in nats, where the target's top-1 token lies in it.
        agreement: Top-1 agreement of head and target over the target's vocabulary.
        acceptance: Share of greedy drafts whose i-th token is accepted, among those whose earlier tokens are.
    """

    kl: list[float]
    agreement: list[float]
    acceptance: list[float]

    def accepted_length(self) -> float:
        """Tokens of a greedy draft of length S that the target accepts, on average."""
        shares = torch.tensor(self.acceptance, dtype=torch.float64)
        return float(shares.cumprod(0).sum())

    def values(self) -> dict[str, Any]:
        """Means over steps and the accepted length, then the lists behind them."""
        count = max(1, len(self.kl))
        return {
            "eval_kl": sum(self.kl) / count,
            "eval_agreement": sum(self.agreement) / count,
            "eval_accepted_length": self.accepted_length(),
            "eval_kl_by_step": self.kl,
            "eval_agreement_by_step": self.agreement,
            "eval_acceptance_by_position": self.acceptance,
        }


def measure_draft_head(objective: DraftHeadObjective, batches: Iterable[dict[str, Any]]) -> HeadFidelity:
    """Compare a head with its target on the answers of held-out samples.

    The answers are the target's own greedy ones, so a draft whose tokens so far are right has read what the answer
    holds, and the steps unrolled over the answer tell what each position of a draft would be. The processes divide the
    batches among themselves.

    Args:
        objective: Holds the head and its target.
        batches: Made by `keepsight.train.dataset.collate`; the same on every process.

    Raises:
        FloatingPointError: a logit of the head is NaN or infinite.
    """

    def sums_of(batch: Batch) -> Tensor:
        texts = zip(batch.texts(), batch.prompt_lengths(), strict=True)
        return torch.stack([_sums(objective, ids[: objective.max_tokens], length) for ids, length in texts]).sum(0)

    with objective.measuring():
        sums = divided(lambda values: sums_of(Batch(**values)), batches)
    kl, known, agreeing, rows, right, tried = torch.stack(sums).sum(0).T
    shares = [kl / known.clamp(min=1), agreeing / rows.clamp(min=1), right / tried.clamp(min=1)]
    return HeadFidelity(*(share.tolist() for share in shares))


def _sums(objective: DraftHeadObjective, ids: Tensor, prompt_length: int) -> Tensor:
    """[S, 6] for one sample: KL sum, rows it is over; agreeing rows, all rows; accepted drafts, drafts tried."""
    sums = torch.zeros(objective.unroll, 6, dtype=torch.float64)
    steps, hidden = objective.states(ids)
    start = max(0, prompt_length - 2)  # the row that guesses the answer's first token
    teacher = objective.teacher(hidden[start + 1 :], torch.float32)
    choices = objective.head.target_ids(teacher.probabilities.argmax(-1))  # the target's, where it is known
    alive = torch.ones(len(ids), dtype=torch.bool, device=ids.device)
    for step, rows in enumerate(steps):
        guessed, divergence = _guess(objective, rows[start:], teacher.probabilities[step:])
        known, actual = teacher.known[step:], ids[start + 2 + step :]
        agreeing = known & (guessed == choices[step:])
        tried = alive[: len(actual)]
        alive = tried & (guessed[: len(actual)] == actual)
        counts = (divergence[known].sum(), known.sum(), agreeing.sum(), len(known), alive.sum(), tried.sum())
        sums[step] = torch.tensor([float(count) for count in counts])
    return sums


def _guess(objective: DraftHeadObjective, hidden: Tensor, probabilities: Tensor) -> tuple[Tensor, Tensor]:
    """The head's top-1 tokens as the target's ids, and KL(target || head) of each row."""
    choices, divergences = [hidden.new_zeros(0, dtype=torch.long)], [hidden.new_zeros(0, dtype=torch.float32)]
    for rows, expected in zip(hidden.split(_ROWS), probabilities.split(_ROWS), strict=True):
        logits = objective.head.lm_head(rows).float()
        if not torch.isfinite(logits).all():
            raise FloatingPointError("the head's logits on held-out samples are not finite")
        choices.append(objective.head.target_ids(logits.argmax(-1)))
        divergences.append(torch.nn.functional.kl_div(logits.log_softmax(-1), expected, reduction="none").sum(-1))
    return torch.cat(choices), torch.cat(divergences)
