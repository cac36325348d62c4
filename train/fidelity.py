"""How predicted importance differs from the target importance: the KL divergence that trains, recall, Kendall's tau."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from keepsight.models.decoder import on_each
from keepsight.models.distributed import divided
from keepsight.runtime.importance import reduce_group, top_mask
from keepsight.train.dataset import Batch

Importances = tuple[list[Tensor], list[Tensor]]
"""Target and predicted importance, for each layer [R, H, M] float32, a row for each sample and cut: see `Cuts`."""
SINKS, RECENT = 4, 32
"""First and last entries that count as near; they receive most of the attention."""


def importance_divergence(target: list[Tensor], predicted: list[Tensor], shares: Tensor | None = None) -> Tensor:
    """KL(target || predicted) of importance normalised over the prompt, averaged over layers, rows and query heads.

    Both are [R, H, N] float32 for each of L layers, which may be on several devices, 0 at padding; `shares` [R] weighs
    the rows. A scalar in nats (LookaheadKV, arXiv 2603.10899, equation 4), on the first layer's device.
    """
    pairs, device = zip(target, predicted, strict=True), target[0].device
    by_layer = (_divergence(*pair).to(device) for pair in pairs)
    weighted = (each.mean() if shares is None else (each.mean(dim=1) * shares).sum() for each in by_layer)
    return torch.stack([*weighted]).mean()


def far_divergence(
    target: list[Tensor], predicted: list[Tensor], mask: Tensor | None, shares: Tensor | None = None
) -> Tensor:
    """`importance_divergence` over the far entries alone: neither a row's first `SINKS` nor its last `RECENT`.

    The near entries receive most of the attention and are learned quickly; at a small budget the others' order
    decides. 0 for a row without far entries. `mask` [R, N] bool is False for padding on either side; None if nothing
    is padded.
    """
    length = target[0].shape[-1] - RECENT
    if length <= SINKS:
        return predicted[0].sum() * 0
    if mask is None:
        true, guess = ([each[..., SINKS:length] for each in layers] for layers in (target, predicted))
        return importance_divergence(true, guess, shares)
    before = mask.cumsum(dim=1)
    far = on_each(((before > SINKS) & (before <= before[:, -1:] - RECENT))[:, None, :length])
    true, guess = ([each[..., :length] * far(each.device) for each in layers] for layers in (target, predicted))
    return importance_divergence(true, guess, shares)


def _divergence(target: Tensor, predicted: Tensor) -> Tensor:
    """KL(target || predicted) [B, H] of importance [B, H, N], 0 where the target has none."""
    tiny = torch.finfo(torch.float32).tiny
    expected = target / target.sum(dim=-1, keepdim=True).clamp(min=tiny)
    log_ratio = expected.clamp(min=tiny).log() - predicted.clamp(min=tiny).log()
    log_mass = predicted.sum(dim=-1).clamp(min=tiny).log()
    return ((expected * log_ratio).sum(dim=-1) + log_mass) * (expected.sum(dim=-1) > 0)


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

    def metrics(self) -> dict[str, Any]:
        """Means over layers, and the values of every layer, by their names in logs."""
        means = {f"eval_{name}": float(np.mean(values)) for name, values in vars(self).items()}
        return means | {f"eval_{name}_by_layer": values for name, values in vars(self).items()}


def measure_fidelity(
    compared: Callable[[Batch], Iterable[Importances]], batches: Iterable[dict[str, Any]], kv_heads: int, budget: int
) -> list[Fidelity]:
    """The fidelity of each of several predictions on held-out batches; see `Objective.measure`.

    `compared` gives target and predicted importance of a batch for every prediction. `budget` is the number of KV
    entries per head at which recall is measured; a prompt no longer than that has recall 1.
    """

    def by_sample(values: dict[str, Any]) -> list[np.ndarray]:
        batch = Batch(**values)
        return [np.stack([*_by_sample(*pair, batch, kv_heads, budget)]) for pair in compared(batch)]

    means = [np.concatenate(rows).mean(axis=0) for rows in zip(*divided(by_sample, batches), strict=True)]
    return [Fidelity(*mean.T.tolist()) for mean in means]


def _by_sample(
    target: list[Tensor], predicted: list[Tensor], batch: Batch, kv_heads: int, budget: int
) -> Iterator[np.ndarray]:
    """For each sample of a batch, KL, recall and tau of every layer, [L, 3]."""
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
    recall = top_mask(guess, kept)[top_mask(true, kept)].float().mean().item()
    from scipy.stats import kendalltau  # imported here: the GPU benchmark does not need it

    tau: Any = kendalltau
    pairs = zip(true.cpu().numpy(), guess.cpu().numpy(), strict=True)
    taus = [tau(*pair).statistic for pair in pairs]
    return kl, recall, float(np.mean(np.nan_to_num(taus)))  # NaN, for a constant ranking, counts as 0
