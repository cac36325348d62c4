"""Distil a retrieval head."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor
from typing_extensions import override

from keepsight.data_gen.shards import TrainingSample
from keepsight.errors import UserError
from keepsight.train.head_settings import RetrievalHeadSettings
from keepsight.train.module_trainer import ModuleTrainer, run
from keepsight.train.retrieval_head.measure import BUDGETS, measure
from keepsight.train.retrieval_head.objective import RetrievalObjective


class RetrievalTrainer(ModuleTrainer):
    """Saves the head alone; measures what it finds at SpeContext's budgets and `train.budget`."""

    weights_file = "retrieval_head.safetensors"
    settings_key = "retrieval_head.train"
    objective: RetrievalObjective

    def __init__(
        self, objective: RetrievalObjective, settings: RetrievalHeadSettings, work: Path, samples: list[TrainingSample]
    ) -> None:
        super().__init__(objective, settings.train, work, samples)
        self.objective = objective

    @override
    def weights(self) -> dict[str, Tensor]:
        return {name: value.detach().cpu() for name, value in self.objective.head.state_dict().items()}

    @override
    def load_weights(self, weights: dict[str, Tensor]) -> None:
        self.objective.head.load_state_dict(weights)

    @override
    def measure(self) -> dict[str, Any]:
        budgets = sorted({*BUDGETS, self.settings.budget})
        return measure(self.objective, self.held_out_batches(), budgets).metrics()

    def first_and_last(self) -> tuple[dict[str, float], dict[str, float]]:
        """What was measured before the first step and last; both empty without held-out samples."""
        rows = self.measurements()
        return (rows[0], rows[-1]) if rows else ({}, {})


def distil(
    objective: RetrievalObjective, settings: RetrievalHeadSettings, work: Path, samples: list[TrainingSample], head: str
) -> tuple[RetrievalTrainer, bool]:
    """Train, going on from the last checkpoint in `work` when there is one.

    Args:
        objective: With head and target.
        settings: Variant and optimisation.
        work: Folder for checkpoints, logs and measurements.
        samples: From `cut`.
        head: What the head was pruned from, for the comparison with a training that is gone on with.

    Returns:
        The trainer, and whether the training ran to its end (False after Ctrl-C).

    Raises:
        UserError: too few samples, other settings than the checkpoint's, or a loss that is not a number.
    """
    trainer = RetrievalTrainer(objective, settings, work, samples)
    names = ("features", "queries", "temperature", "max_tokens")
    shape = {f"retrieval_head.{name}": getattr(settings, name) for name in names} | {"command.head": head}
    return trainer, run(trainer, shape)


def cut(samples: Sequence[TrainingSample], max_tokens: int) -> list[TrainingSample]:
    """The samples, each with at most its first `max_tokens` tokens; at least the last of them counts as answer.

    Raises:
        UserError: fewer than 2 tokens are left.
    """
    if max_tokens < 2:
        raise UserError(f"retrieval_head.max_tokens={max_tokens} must be at least 2")
    return [_cut(sample, max_tokens) for sample in samples]


def _cut(sample: TrainingSample, max_tokens: int) -> TrainingSample:
    ids = [*sample.prompt_ids, *sample.answer_ids][:max_tokens]
    prompt = min(len(sample.prompt_ids), len(ids) - 1)
    return replace(sample, prompt_ids=ids[:prompt], answer_ids=ids[prompt:])
