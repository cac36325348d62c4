"""How well a retrieval head finds what the target attends to, on held-out samples."""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from statistics import fmean
from typing import Any

import torch
from torch import Tensor

from keepsight.models.distributed import divided
from keepsight.runtime.importance import top_mask
from keepsight.train.dataset import Batch
from keepsight.train.retrieval_head.objective import RetrievalObjective, divergence

BUDGETS = (64, 256, 1024)
"""KV entries per head, as in SpeContext's and Quest's tables."""
SINKS = 4
MEASURES = ("hit", "window_hit", "mass", "window_mass", "best_mass", "overlap")


@dataclass(frozen=True)
class Retrieved:
    """Means over held-out samples. Only steps with more entries than the budget count.

    Attributes:
        kl: KL(target || head) in nats.
        hit: Top-B hit rate by budget B: share of the target's top-B entries of a step and KV head in the head's top-B.
        window_hit: The share that the first 4 and the last B - 4 entries hold, without any head.
        mass: The share of the target's importance that the head's top-B entries get.
        window_mass: The share that the first 4 and the last B - 4 entries get.
        best_mass: The share that the target's own top-B entries get: the upper bound of `mass`.
        overlap: The share of the head's top-B entries of a step that the next step's top-B holds too.
        samples: Held-out samples that counted.
    """

    kl: float
    hit: dict[int, float]
    window_hit: dict[int, float]
    mass: dict[int, float]
    window_mass: dict[int, float]
    best_mass: dict[int, float]
    overlap: dict[int, float]
    samples: dict[int, int]

    def metrics(self) -> dict[str, float]:
        """By the names that logs have: `eval_kl`, `eval_hit_64`, `eval_mass_64`, ..."""
        named = {f"eval_{name}_{budget}": value for name in MEASURES for budget, value in getattr(self, name).items()}
        counted = {f"eval_samples_{budget}": count for budget, count in self.samples.items()}
        return {"eval_kl": self.kl, **named, **counted}


def measure_retrieval_head(
    objective: RetrievalObjective, batches: Iterable[dict[str, Any]], budgets: Sequence[int]
) -> Retrieved:
    """Compare what a head selects with what the target attends to; the processes divide the batches among themselves.

    Args:
        objective: Holds the head and its target.
        batches: Made by `keepsight.train.dataset.collate`; the same on every process.
        budgets: KV entries per head.

    Raises:
        FloatingPointError: a score is NaN or infinite.
    """

    def compare(values: dict[str, Any]) -> list[tuple[float, dict[int, dict[str, float]]]]:
        return [
            (
                divergence(target[None], guess[None], real[None]).item(),
                {budget: at_budget(target, guess, budget) for budget in budgets},
            )
            for target, guess, real in _by_sample(objective, Batch(**values))
        ]

    with objective.measuring():
        compared = [*chain.from_iterable(divided(compare, batches))]
    found: dict[str, dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
    for _, measured in compared:
        for budget, values in measured.items():
            for name, value in values.items():
                found[name][budget].append(value)
    means = {name: {budget: fmean(each) for budget, each in found[name].items()} for name in MEASURES}
    return Retrieved(
        fmean(kl for kl, _ in compared), **means, samples={budget: len(each) for budget, each in found["hit"].items()}
    )


def _by_sample(objective: RetrievalObjective, batch: Batch) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """For each sample, the target's importance and the head's scores, [K, T, S] without padding, and T times True."""
    texts, reading, scores = objective.compared(batch)
    if not torch.isfinite(scores).all():
        raise FloatingPointError("the scores of held-out samples are not finite")
    for row, real in enumerate(texts.real(scores.shape[2])):
        shown = slice(None) if texts.mask is None else texts.mask[row]
        target, guess = (each[row][:, real][..., shown] for each in (reading.importance, scores))
        yield target, guess, real[real]


def at_budget(target: Tensor, guess: Tensor, budget: int) -> dict[str, float]:
    """The measures of `Retrieved` for one sample and budget; empty if it has no more entries than the budget.

    Args:
        target: [K, T, S] float32, the importance of S entries to each of the last T tokens.
        guess: [K, T, S], scores that rank them.
        budget: KV entries per head.
    """
    _, rows, length = target.shape
    first = max(length - rows, budget)  # row i is position length - rows + i, and sees that many entries and itself
    if first >= length:
        return {}
    target, guess = (each[:, first - (length - rows) :] for each in (target, guess))
    true, chosen = top_mask(target, budget), top_mask(guess, budget)
    places = torch.arange(length, device=target.device)
    last = torch.arange(first, length, device=target.device)[:, None]
    sinks = min(SINKS, budget)
    window = ((places < sinks) | (places > last - (budget - sinks))) & (places <= last)
    measured = {
        "hit": (true & chosen).sum(-1) / budget,
        "window_hit": (true & window).sum(-1) / budget,
        "mass": (target * chosen).sum(-1),
        "window_mass": (target * window).sum(-1),
        "best_mass": (target * true).sum(-1),
        "overlap": (chosen[:, 1:] & chosen[:, :-1]).sum(-1) / budget,
    }
    return {name: value.float().mean().item() for name, value in measured.items() if value.numel()}
