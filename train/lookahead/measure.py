"""How well predicted importance matches the target importance, by layer, on held-out samples."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from scipy.stats import kendalltau
from torch import Tensor

from keepsight.models.distributed import divided
from keepsight.models.lookahead import Lookahead
from keepsight.runtime.importance import reduce_group, top_entries
from keepsight.train.dataset import Batch
from keepsight.train.lookahead.objective import Importances, LookaheadObjective, importance_divergence
from keepsight.train.lookahead.side_by_side import SideBySide


@dataclass(frozen=True)
class Fidelity:
    """Means over held-out samples, for each of L layers.

    Attributes:
        kl: KL(target || predicted) in nats.
        recall: Share of a KV head's top-`budget` entries by target importance that are also in the predicted top.
        tau: Kendall's rank correlation of predicted and target importance per KV head.
    """

    kl: list[float]
    recall: list[float]
    tau: list[float]

    def metrics(self) -> dict[str, float]:
        """Means over layers."""
        means = {"kl": self.kl, "recall": self.recall, "tau": self.tau}
        return {f"eval_{name}": float(np.mean(values)) for name, values in means.items()}

    def by_layer(self) -> dict[str, list[float]]:
        """The values of every layer."""
        return {f"eval_{name}_by_layer": getattr(self, name) for name in ("kl", "recall", "tau")}


def measure_lookahead(objective: LookaheadObjective, batches: Iterable[dict[str, Any]], budget: int) -> Fidelity:
    """Compare predicted with target importance on held-out batches, which the processes divide among themselves.

    Args:
        objective: Holds the lookahead module, which predicts, and the target.
        batches: Made by `keepsight.train.dataset.collate`; the same on every process.
        budget: KV entries per head at which recall is measured; a prompt no longer than that has recall 1.

    Raises:
        FloatingPointError: an importance is NaN or infinite.
    """
    with objective.measuring():
        return _measure(lambda batch: [objective.importances(batch)], batches, objective.lookahead, budget)[0]


def measure_cells(objective: SideBySide, batches: Iterable[dict[str, Any]], budget: int) -> list[Fidelity]:
    """`measure_lookahead` of every cell, on one reading of each batch."""
    with objective.measuring():
        return _measure(objective.importances, batches, objective.cells[0].lookahead, budget)


def _measure(
    compared: Callable[[Batch], Iterable[Importances]],
    batches: Iterable[dict[str, Any]],
    lookahead: Lookahead,
    budget: int,
) -> list[Fidelity]:
    """The fidelity of each prediction, given target and predicted importance of a batch for every one."""
    kv_heads = lookahead.model.config.get_text_config().num_key_value_heads

    def by_sample(values: dict[str, Any]) -> list[np.ndarray]:
        batch = Batch(**values)
        return [np.stack([*_by_sample(*pair, batch, kv_heads, budget)]) for pair in compared(batch)]

    by_batch = divided(by_sample, batches)
    means = [np.concatenate(rows).mean(axis=0) for rows in zip(*by_batch, strict=True)]
    return [Fidelity(*mean.T.tolist()) for mean in means]


def _by_sample(
    target: list[Tensor], predicted: list[Tensor], batch: Batch, kv_heads: int, budget: int
) -> Iterator[np.ndarray]:
    """For each sample of a batch, [L, 3]: KL, recall and tau of every layer."""
    if not all(torch.isfinite(layer).all() for layer in [*target, *predicted]):
        raise FloatingPointError("the importance of held-out samples is not finite")
    for row in range(len(batch.prompt_ids)):
        real = slice(None) if batch.prompt_mask is None else batch.prompt_mask[row].cpu()  # for layers on any device
        layers = zip(target, predicted, strict=True)
        yield np.array([_compare(true[row][:, real], guess[row][:, real], kv_heads, budget) for true, guess in layers])


def _compare(target: Tensor, predicted: Tensor, kv_heads: int, budget: int) -> tuple[float, float, float]:
    """KL, recall and tau of one sample and layer; [H, N] each."""
    kl = importance_divergence([target[None]], [predicted[None]]).item()
    true, guess = (reduce_group(each[None], kv_heads)[0] for each in (target, predicted))
    kept = min(budget, true.shape[-1])
    chosen = torch.zeros_like(true, dtype=torch.bool).scatter_(1, top_entries(guess, kept), True)
    recall = chosen.gather(1, top_entries(true, kept)).float().mean().item()
    taus = [_tau(*pair) for pair in zip(true.cpu().numpy(), guess.cpu().numpy(), strict=True)]
    return kl, recall, float(np.mean(taus))


def _tau(first: np.ndarray, second: np.ndarray) -> float:
    """Kendall's tau-b; 0 where one side is constant, which ranks nothing."""
    result: Any = kendalltau(first, second)
    return float(np.nan_to_num(result.statistic))
