"""keepsight bench train: a training step of a lookahead module against one inference prefill of its batch.

    keepsight bench train tokens=1024 answer_tokens=64
    keepsight bench train train.replays=8 train.batch_size=4
    keepsight bench train cells=4

Prints seconds and peak memory of both, and how many prefills a step takes.
"""

from dataclasses import dataclass

from keepsight.commands.bench.shared import print_lines
from keepsight.commands.config import Recipe, at_least_one
from keepsight.commands.from_recipe import target_of
from keepsight.models.lookahead import Lookahead
from keepsight.train.lookahead.bench import bench_step


@dataclass
class Config(Recipe):
    """Keys of `keepsight bench train`.

    Attributes:
        tokens: Prompt length in tokens.
        answer_tokens: Answer length in tokens.
        cells: Number of modules that learn side by side from one reading of the target, as in `keepsight ablate`.
        repeats: Timed repetitions, after one to warm up.
    """

    tokens: int = 1024
    answer_tokens: int = 24
    cells: int = 1
    repeats: int = 5


def run(config: Config) -> None:
    """Measure and print."""
    at_least_one(config, "tokens", "answer_tokens", "cells", "repeats")
    model = target_of(config).model
    cells = [Lookahead(model, config.lookahead) for _ in range(config.cells)]
    print_lines(bench_step(cells, config.tokens, config.answer_tokens, config.repeats, config.train))
