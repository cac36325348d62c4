"""Lookahead adapters of random weights, whose LoRA changes queries and keys as much as that of a trained one."""

from pathlib import Path
from typing import Any

import torch

from keepsight import LookaheadKV
from keepsight.models.card import Provenance
from keepsight.models.lookahead import Lookahead
from keepsight.models.lookahead_settings import LookaheadSettings


def random_adapter(target: Any, folder: Path, seed: int = 3) -> None:
    """Save an adapter to a folder."""
    lookahead = Lookahead(target.model, LookaheadSettings(tokens=16))
    torch.manual_seed(seed)
    for _, _, update in lookahead.lora.parts():  # type: ignore[union-attr]
        torch.nn.init.normal_(update.lora_B, std=0.05)
    torch.nn.init.normal_(lookahead.tokens)
    lookahead.adapter().save(folder, Provenance(base_model=target.name))


def adapters_of(target: Any, folder: Path, budget: int, count: int = 2, **options: Any) -> list[LookaheadKV]:
    """Methods with so many adapters, which differ."""
    methods = []
    for seed in range(count):
        random_adapter(target, folder / str(seed), seed)
        methods.append(LookaheadKV.from_pretrained(folder / str(seed), budget, **options))
    return methods
