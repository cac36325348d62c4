"""What recipes set for the training of draft heads and retrieval heads."""

from dataclasses import dataclass, field

from keepsight.train.lookahead.trainer import TrainSettings


@dataclass
class DraftHeadSettings:
    """Shape and training of an EAGLE-3 draft head.

    Attributes:
        vocabulary: Tokens the head can draft: the most frequent ones of the training data.
        unroll: Steps that the head is unrolled over its own features in training (training-time test).
        decay: Weight of a step's loss relative to the step before.
        max_tokens: Longer samples are cut at the end.
        train: Optimisation.
    """

    vocabulary: int = 32000
    unroll: int = 7
    decay: float = 0.8
    max_tokens: int = 4096
    train: TrainSettings = field(default_factory=lambda: TrainSettings(learning_rate=1e-4, clip=0.5))


@dataclass
class RetrievalHeadSettings:
    """Variant and distillation of a retrieval head.

    Attributes:
        features: `previous-step`, the target's features of the token before; or `none`, token embeddings alone.
        queries: Tokens of a sample, the last ones, whose importance is distilled.
        temperature: Of the loss: weights count to the power of 1 / temperature, so that above 1 the entries beyond the
            few that get most attention are learned too.
        max_tokens: Longer samples are cut at the end.
        train: Optimisation; `train.budget` is that of the hit rate.
    """

    features: str = "previous-step"
    queries: int = 128
    temperature: float = 2.0
    max_tokens: int = 4096
    train: TrainSettings = field(default_factory=lambda: TrainSettings(learning_rate=1e-3))
