"""How predicted importance differs from the target importance: the KL divergence that trains, recall, Kendall's tau."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from keepsight.models.decoder import on_each
from keepsight.models.distributed import map_over_processes
from keepsight.runtime.importance import reduce_group, top_mask
from keepsight.train.dataset import Batch

Importances = tuple[list[Tensor], list[Tensor]]
"""Target and predicted importance, for each layer [R, H, M] float32, a row for each sample and cut: see `Cuts`."""
SINKS = 4
RECENT = 32
"""First and last entries that count as near; they receive most of the attention."""


def importance_divergence(target: list[Tensor], predicted: list[Tensor], row_weights: Tensor | None = None) -> Tensor:
    """KL(target || predicted) of importance normalised over the prompt, averaged over layers, rows and query heads.

    Both are [R, H, N] float32 for each of L layers, which may be on several devices, 0 at padding; `row_weights` [R]
    weighs the rows. A scalar in nats (LookaheadKV, arXiv 2603.10899, equation 4), on the first layer's device.
    """
    layer_means = []
    for layer_target, layer_predicted in zip(target, predicted, strict=True):
        head_divergences = _divergence(layer_target, layer_predicted).to(target[0].device)
        if row_weights is None:
            layer_means.append(head_divergences.mean())
        else:
            layer_means.append((head_divergences.mean(dim=1) * row_weights).sum())
    return torch.stack(layer_means).mean()


def far_divergence(
    target: list[Tensor], predicted: list[Tensor], mask: Tensor | None, row_weights: Tensor | None = None
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
        far_target = [layer[..., SINKS:length] for layer in target]
        far_predicted = [layer[..., SINKS:length] for layer in predicted]
        return importance_divergence(far_target, far_predicted, row_weights)

    numbers = mask.cumsum(dim=1)  # of the real entries, from 1
    is_far = (numbers > SINKS) & (numbers <= numbers[:, -1:] - RECENT)
    far_on = on_each(is_far[:, None, :length])
    far_target = [layer[..., :length] * far_on(layer.device) for layer in target]
    far_predicted = [layer[..., :length] * far_on(layer.device) for layer in predicted]
    return importance_divergence(far_target, far_predicted, row_weights)


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
        metrics: dict[str, Any] = {}
        for name, values in vars(self).items():
            metrics[f"eval_{name}"] = float(np.mean(values))
        for name, values in vars(self).items():
            metrics[f"eval_{name}_by_layer"] = values
        return metrics


def measure_fidelity(
    importances: Callable[[Batch], Importances], batches: Iterable[dict[str, Any]], kv_heads: int, budget: int
) -> Fidelity:
    """The fidelity of a prediction on held-out batches; see `Objective.measure`.

    `importances` gives target and predicted importance of a batch. `budget` is the number of KV entries per head at
    which recall is measured; a prompt no longer than that has recall 1.
    """

    def measure_batch(values: dict[str, Any]) -> np.ndarray:
        """KL, recall and tau of every sample and layer, [B, L, 3]."""
        batch = Batch(**values)
        target, predicted = importances(batch)
        return np.stack(list(_measure_samples(target, predicted, batch, kv_heads, budget)))

    means = np.concatenate(list(map_over_processes(measure_batch, batches))).mean(axis=0)
    return Fidelity(*means.T.tolist())


def _measure_samples(
    target: list[Tensor], predicted: list[Tensor], batch: Batch, kv_heads: int, budget: int
) -> Iterator[np.ndarray]:
    """For each sample of a batch, KL, recall and tau of every layer, [L, 3]."""
    if not all(torch.isfinite(layer).all() for layer in [*target, *predicted]):
        raise FloatingPointError("the importance of held-out samples is not finite")
    for row in range(len(batch.prompt_ids)):
        columns: Any = slice(None)
        if batch.prompt_mask is not None:
            columns = batch.prompt_mask[row].cpu()  # for layers on any device
        layers = []
        for layer_target, layer_predicted in zip(target, predicted, strict=True):
            sample_target = layer_target[row][:, columns]
            sample_predicted = layer_predicted[row][:, columns]
            layers.append(_measure_layer(sample_target, sample_predicted, kv_heads, budget))
        yield np.array(layers)


def _measure_layer(target: Tensor, predicted: Tensor, kv_heads: int, budget: int) -> tuple[float, float, float]:
    """KL, recall and tau of one sample and layer; [H, N] each."""
    from scipy.stats import kendalltau  # imported here: the GPU benchmark does not need it

    kl = importance_divergence([target[None]], [predicted[None]]).item()
    head_target = reduce_group(target[None], kv_heads)[0]
    head_predicted = reduce_group(predicted[None], kv_heads)[0]

    entries = min(budget, head_target.shape[-1])
    is_top_target = top_mask(head_target, entries)
    recall = top_mask(head_predicted, entries)[is_top_target].float().mean().item()

    correlate: Any = kendalltau
    taus = []
    for target_row, predicted_row in zip(head_target.cpu().numpy(), head_predicted.cpu().numpy(), strict=True):
        taus.append(correlate(target_row, predicted_row).statistic)
    return kl, recall, float(np.mean(np.nan_to_num(taus)))  # NaN, for a constant ranking, counts as 0
