"""Lookahead modules as training might leave them, on tiny random models."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from keepsight.models.card import Provenance
from keepsight.models.lookahead import Lookahead, LookaheadAdapter
from keepsight.models.lookahead_settings import LookaheadSettings
from keepsight.runtime.observe import observe
from keepsight.runtime.state import State
from tests.tiny import tiny_model

SHAPE = LookaheadSettings(tokens=5, rank=2, alpha=8)


def random_module(family: str = "llama", settings: LookaheadSettings = SHAPE, seed: int = 7) -> Lookahead:
    """`random_on` a tiny model."""
    return random_on(tiny_model(family), settings, seed)


def random_on(model: Any, settings: LookaheadSettings = SHAPE, seed: int = 7) -> Lookahead:
    """A module as training might leave it: LoRA starts with B = 0, which would hide every mistake."""
    module = Lookahead(model, settings)
    torch.manual_seed(seed)
    with torch.no_grad():
        for parameter in lora_parameters(module).values():
            parameter.normal_(std=0.2)
        module.tokens.normal_()
    return module


def lora_parameters(module: Lookahead) -> dict[str, torch.nn.Parameter]:
    return {} if module.lora is None else module.lora.tensors()


def importance(module: Lookahead, state: State) -> Tensor:
    """[layers, B, H, N] as the module predicts it."""
    with torch.no_grad(), module.active():
        return torch.stack(observe(module.model, state.cache, state.mask, module.observers(2)))


def importance_of(artifact: LookaheadAdapter, model: Any, state: State) -> Tensor:
    """The same, of a saved module."""
    with torch.no_grad(), artifact.attached(model) as tokens:
        return torch.stack(observe(model, state.cache, state.mask, tokens.expand(2, -1, -1)))


def save(module: Lookahead, folder: Path, base: str = "ada/tiny") -> Path:
    module.adapter().save(folder, Provenance(base), "---\nlicense: apache-2.0\n---\n# Card\n")
    return folder
