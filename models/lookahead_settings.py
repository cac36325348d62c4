"""Settings of a lookahead module. Nothing heavy is imported: configurations read this file."""

from dataclasses import dataclass


@dataclass
class LookaheadSettings:
    """The shape of a lookahead module and how its observations are reduced.

    Attributes:
        tokens: Number of soft tokens, n.
        rank: LoRA rank; 0 trains the soft tokens alone.
        alpha: LoRA alpha: the update is scaled by alpha / rank.
        dropout: LoRA dropout in training.
        group: Reduction over the query heads of a KV head: `mean` or `max`.
        pooling: `max` or `avg`.
        kernel: Pooling kernel at selection; training compares unpooled importance.
    """

    tokens: int = 32
    rank: int = 8
    alpha: float = 32
    dropout: float = 0.0
    group: str = "mean"
    pooling: str = "max"
    kernel: int = 7
