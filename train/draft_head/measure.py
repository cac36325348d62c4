"""How well a draft head guesses the answers of held-out samples, by unroll step and by place in a draft."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from keepsight.train.draft_head.objective import DraftHeadObjective, join

_ROWS = 512


@dataclass(frozen=True)
class HeadFidelity:
    """Means over the answers' tokens of held-out samples, for each of S unroll steps.

    Attributes:
        kl: KL(target || head) over the draft vocabulary, in nats, where the target's first choice lies in it.
        agreement: Share of tokens for which head and target have the same first choice in the target's vocabulary.
        acceptance: Share of greedy drafts whose i-th token is right, among those whose tokens before it are.
    """

    kl: list[float]
    agreement: list[float]
    acceptance: list[float]

    def accepted_length(self) -> float:
        """Tokens of a greedy draft of length S that the target accepts, on average."""
        shares = torch.tensor(self.acceptance, dtype=torch.float64)
        return float(shares.cumprod(0).sum())

    def values(self) -> dict[str, Any]:
        """Means over steps and the accepted length, then what they are made of."""
        count = max(1, len(self.kl))
        return {
            "eval_kl": sum(self.kl) / count,
            "eval_agreement": sum(self.agreement) / count,
            "eval_accepted_length": self.accepted_length(),
            "eval_kl_by_step": self.kl,
            "eval_agreement_by_step": self.agreement,
            "eval_acceptance_by_position": self.acceptance,
        }


@torch.no_grad()
def measure_head(objective: DraftHeadObjective, batches: Iterable[dict[str, Any]]) -> HeadFidelity:
    """Compare a head with its target on the answers of held-out samples.

    The answers are the target's own greedy ones. So a draft whose tokens so far are right has read what the answer
    holds, and the unrolled steps over the answer tell what each place of a draft would be.

    Args:
        objective: Holds the head.
        batches: As `keepsight.train.dataset.collate` makes them.

    Raises:
        FloatingPointError: what the head puts out is NaN or infinite.
    """
    training = objective.training
    objective.eval()
    sums = torch.zeros(objective.unroll, 6, dtype=torch.float64)
    for batch in batches:
        prompts, prompt_mask = batch["prompt_ids"], batch["prompt_mask"]
        ids, mask = join(prompts, prompt_mask, batch["answer_ids"], batch["answer_mask"])
        lengths = mask[:, : prompts.shape[1]].sum(1).tolist()
        for row, real, length in zip(ids, mask, lengths, strict=True):
            sums += _sums(objective, row[real][: objective.max_tokens], length)
    objective.train(training)
    kl, known, agreeing, rows, right, tried = sums.T
    shares = [kl / known.clamp(min=1), agreeing / rows.clamp(min=1), right / tried.clamp(min=1)]
    return HeadFidelity(*(share.tolist() for share in shares))


def _sums(objective: DraftHeadObjective, ids: Tensor, prompt_length: int) -> Tensor:
    """[S, 6] for one sample: KL, its rows; agreeing rows, all rows; right drafts, tried drafts."""
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
    """The head's first choices as the target's ids, and KL(target || head) of each row."""
    choices, divergences = [hidden.new_zeros(0, dtype=torch.long)], [hidden.new_zeros(0, dtype=torch.float32)]
    for rows, expected in zip(hidden.split(_ROWS), probabilities.split(_ROWS), strict=True):
        logits = objective.head.lm_head(rows).float()
        if not torch.isfinite(logits).all():
            raise FloatingPointError("the head's logits on held-out samples are not finite")
        choices.append(objective.head.target_ids(logits.argmax(-1)))
        divergences.append(torch.nn.functional.kl_div(logits.log_softmax(-1), expected, reduction="none").sum(-1))
    return torch.cat(choices), torch.cat(divergences)
