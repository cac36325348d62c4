"""What a method kept or would keep, against what the full cache's answer attends to."""

from typing import Any

import numpy as np
import torch
from scipy.stats import kendalltau
from torch import Tensor

_RANKED = 512
"""Max prompt entries for Kendall's tau, evenly spaced over a longer prompt: its cost would grow with the prompt's."""


def recall(kept: Tensor | None, ranks: Tensor) -> float | None:
    """Share of the entries that the full cache's answer attends to most, equally many per head, that are kept.

    Args:
        kept: [L, K, N] bool; None where it is not known, which leaves the recall unknown too.
        ranks: As `SharedPrompt.ranks` gives them.
    """
    if kept is None:
        return None
    wanted = ranks < round(kept.sum(dim=-1).float().mean().item())
    return int((kept & wanted).sum()) / max(int(wanted.sum()), 1)


def attention_mass(kept: Tensor | None, attention: Tensor) -> float | None:
    """Share of the answer's attention to the prompt that falls on what is kept, the mean over layers and KV heads.

    Args:
        kept: [L, K, N] bool; None where it is not known, which leaves the mass unknown too.
        attention: [L, K, N] float32, as `SharedPrompt.attention` gives it.
    """
    return None if kept is None else ((attention * kept).sum(-1) / attention.sum(-1)).mean().item()


def kendall_tau(scores: Tensor, attention: Tensor) -> float:
    """Kendall's tau-b of scores and attention, the mean over layers and KV heads; 0 for a head with constant scores.

    Args:
        scores: [L, K, N] float.
        attention: [L, K, N] float.
    """
    length = scores.shape[-1]
    places = torch.linspace(0, length - 1, min(length, _RANKED)).round().long()
    pairs = (each[..., places.to(each.device)].flatten(0, -2).cpu().numpy() for each in (scores, attention))
    found: list[Any] = [kendalltau(*pair) for pair in zip(*pairs, strict=True)]
    return float(np.mean([np.nan_to_num(each.statistic) for each in found]))
