"""Settings of heads in training, and of trainings on what evicting costs.

Nothing heavy is imported: configurations read this file.
"""

import math
from dataclasses import dataclass, field, fields
from typing import Any

from keepsight.errors import UserError
from keepsight.train.settings import TrainSettings, require_at_least

LARGEST_BUDGET = 1 << 24


@dataclass
class DraftHeadSettings:
    """Shape and training of an EAGLE-3 draft head.

    Attributes:
        vocabulary: Size of the draft vocabulary: the most frequent tokens of the training data's answers.
        unroll: Steps the head is unrolled over its own features in training (training-time test).
        decay: Weight of an unrolled step's loss relative to the step before.
        max_tokens: Longest sample in tokens; longer ones are truncated at the end.
        train: Optimisation.
    """

    vocabulary: int = 32000
    unroll: int = 7
    decay: float = 0.8
    max_tokens: int = 4096
    train: TrainSettings = field(default_factory=lambda: TrainSettings(learning_rate=1e-4, clip=0.5))

    def check(self) -> None:
        """Refuse settings that no training can run with.

        Raises:
            UserError: a value is out of range.
        """
        require_at_least(self, "draft_head", {"vocabulary": 1, "unroll": 1, "max_tokens": 3})
        self.train.check("draft_head.train")
        if not 0 < self.decay <= 1:
            raise UserError(f"draft_head.decay={self.decay} must lie above 0 and be at most 1")


@dataclass
class RetrievalHeadSettings:
    """Variant and distillation of a retrieval head.

    Attributes:
        features: What the head reads beside token embeddings: `previous-step`, the target's features of the token
            before, or `none`.
        groups: Groups of neighbouring layers of the target for which the head selects, each with queries and keys of
            its own. 1 is SpeContext's: the same entries in all layers.
        queries: Number of a sample's last tokens whose importance is distilled.
        temperature: Softens the distillation loss: attention weights count to the power of 1 / temperature, so that
            above 1 the entries beyond the few with the largest weights are learned too.
        answers: Share of the loss that is of the answers' tokens alone, half of it over the entries far from them.
        max_tokens: Longest sample in tokens; longer ones are truncated at the end.
        train: Optimisation; `train.budget` adds a budget at which the hit rate is measured.
    """

    features: str = "previous-step"
    groups: int = 1
    queries: int = 128
    temperature: float = 2.0
    answers: float = 0.67
    max_tokens: int = 4096
    train: TrainSettings = field(default_factory=lambda: TrainSettings(learning_rate=1e-3))

    def check(self) -> None:
        """Refuse settings that no training can run with.

        Raises:
            UserError: a value is out of range.
        """
        require_at_least(self, "retrieval_head", {"groups": 1, "queries": 1, "max_tokens": 2})
        self.train.check("retrieval_head.train")
        if self.features not in (known := ("previous-step", "none")):
            raise UserError(f"retrieval_head.features={self.features!r} is unknown; choose one of {', '.join(known)}")
        if not 0 < self.temperature < math.inf:
            raise UserError(f"retrieval_head.temperature={self.temperature} must be above 0")
        if not 0 <= self.answers <= 1:
            raise UserError(f"retrieval_head.answers={self.answers} must be between 0 and 1")


@dataclass
class EvictionSettings:
    """Training on what evicting costs the target's answers.

    Attributes:
        budgets: KV entries per layer and head on average: each use of a sample in training is at one of them, and all
            are measured.
        temperature: Width of the soft selection in nats: lower is closer to the selection itself, and learned from less
            smoothly.
        train: Optimisation.
    """

    budgets: list[int] = field(default_factory=lambda: [64, 128, 256])
    temperature: float = 0.5
    train: TrainSettings = field(default_factory=TrainSettings)

    def deciding(self, key: str) -> dict[str, Any]:
        """The settings beside `train`, by their names in a recipe, in which that of `train` is `key`."""
        section, decide = key.partition(".")[0], (each.name for each in fields(self) if each.name != "train")
        return {f"{section}.{name}": getattr(self, name) for name in decide}

    def check_in(self, section: str) -> None:
        """Refuse settings that no training can run with; `section` is their name in a recipe.

        Raises:
            UserError: a value is out of range.
        """
        self.train.check(f"{section}.train")
        if not self.budgets or not all(1 <= each <= LARGEST_BUDGET for each in self.budgets):
            expected = f"must hold numbers of entries, each from 1 to {LARGEST_BUDGET}"
            raise UserError(f"{section}.budgets={self.budgets} {expected}")
        if not 0 < self.temperature < math.inf:
            raise UserError(f"{section}.temperature={self.temperature} must be above 0")


@dataclass
class HeadWeightsSettings(EvictionSettings):
    """Training of the weights by which a lookahead module's heads share one budget."""

    train: TrainSettings = field(
        default_factory=lambda: TrainSettings(
            learning_rate=0.06, min_learning_rate=0.05, samples_per_step=4, replays=2, measure_every=50
        )
    )

    def check(self) -> None:
        """See `check_in`."""
        self.check_in("head_weights")


@dataclass
class FinetuneSettings(EvictionSettings):
    """Further training of a lookahead module, together with the weights of its heads.

    Attributes:
        head_weights_rate: Peak learning rate of the weights of heads.
    """

    head_weights_rate: float = 0.015
    train: TrainSettings = field(
        default_factory=lambda: TrainSettings(
            learning_rate=5e-4, min_learning_rate=0.05, samples_per_step=4, replays=6, measure_every=50
        )
    )

    def check(self) -> None:
        """See `check_in`."""
        self.check_in("finetune")
        if not 0 < self.head_weights_rate <= 100:
            raise UserError(f"finetune.head_weights_rate={self.head_weights_rate} must be above 0 and at most 100")
