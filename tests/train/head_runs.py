"""Small trainings of draft heads."""

from pathlib import Path
from typing import Any

import torch

from keepsight.data_gen.store import TrainingSample
from keepsight.models.draft_head import DraftHead
from keepsight.train.draft_head import DraftHeadObjective, RunModel, frequent_tokens, new_draft_head
from keepsight.train.settings import DraftHeadSettings
from keepsight.train.trainer import ModuleTrainer, TrainingRun
from tests.tiny import tiny_model
from tests.train.runs import samples
from tests.train.runs import settings as train_settings


def deep_model(family: str = "llama", **changes: Any) -> Any:
    """A tiny model with layers enough for three taps."""
    return tiny_model(family, num_hidden_layers=7, **changes)


def head_settings(**changes: Any) -> DraftHeadSettings:
    """Settings of a draft head; what belongs to `train` goes there."""
    head_values: dict[str, Any] = {"vocabulary": 96, "unroll": 4}
    for name in ("vocabulary", "unroll", "decay", "loss_on", "max_tokens"):
        if name in changes:
            head_values[name] = changes.pop(name)
    return DraftHeadSettings(**head_values, train=train_settings(**changes))


def head_objective(family: str = "llama", settings: DraftHeadSettings | None = None) -> DraftHeadObjective:
    """A new head on a tiny model; the same one for the same arguments."""
    model = deep_model(family)
    settings = settings or head_settings()
    torch.manual_seed(0)
    vocabulary = frequent_tokens(samples(), settings.vocabulary, [2], 128)
    head = new_draft_head(model, vocabulary)
    return objective_of(head, model, settings)


def objective_of(head: DraftHead, model: Any, settings: DraftHeadSettings) -> DraftHeadObjective:
    return DraftHeadObjective(head, model, RunModel(model, head.layers_of(model)), settings)


def train_draft_head(
    objective: DraftHeadObjective, work: Path, samples: list[TrainingSample]
) -> tuple[ModuleTrainer, bool]:
    """The trainer, and whether the training ran to its end."""
    trainer = ModuleTrainer(objective, objective.settings.train, TrainingRun(work, samples))
    return trainer, trainer.fit()
