"""Allocations of importance that says itself what is held and what is protected."""

import torch
from torch import Tensor

from keepsight.runtime.allocate import Allocation, HeadSizes


def divide(allocate: Allocation, importance: list[Tensor], budget: int) -> list[Tensor]:
    """For each layer [B, K] int64, entries to keep, of [B, K, C]: +inf where protected, -inf for padding."""
    every = torch.stack(importance)
    held = HeadSizes((every != -torch.inf).sum(-1).numpy(), (every == torch.inf).sum(-1).numpy())
    return list(torch.from_numpy(allocate(held, [budget] * every.shape[1], importance)))
