"""keepsight bench train: a training step of a lookahead module against one inference prefill of its batch.

    keepsight bench train tokens=1024 answer_tokens=64
    keepsight bench train train.replays=8 train.batch_size=4

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
        repeats: Timed repetitions, after one to warm up.
    """

    tokens: int = 1024
    answer_tokens: int = 24
    repeats: int = 5


def run(config: Config) -> None:
    """Measure and print."""
    at_least_one(config, "tokens", "answer_tokens", "repeats")
    lookahead = Lookahead(target_of(config).model, config.lookahead)
    print_lines(bench_step(lookahead, config.tokens, config.answer_tokens, config.repeats, config.train))
