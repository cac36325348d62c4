"""keepsight bench eval: the sweep of an evaluation, which prefills each sample once, against one run per variant.

    keepsight bench eval tokens=1024 answer_tokens=24 samples=3

Prints seconds per sample of both, and their ratio.
"""

from dataclasses import dataclass, field
from typing import Any

from keepsight.commands.bench.shared import COMPARED, methods_of, print_lines
from keepsight.commands.config import Recipe, at_least_one
from keepsight.commands.from_recipe import target_of
from keepsight.eval.bench.sweep import bench_sweep


@dataclass
class Config(Recipe):
    """Keys of `keepsight bench eval`.

    Attributes:
        tokens: Prompt length in tokens.
        answer_tokens: Answer length in tokens.
        methods: Names of the methods.
        budgets: KV entries per head.
        samples: Number of timed samples.
    """

    tokens: int = 1024
    answer_tokens: int = 24
    methods: list[Any] = field(default_factory=lambda: list(COMPARED))
    budgets: list[int] = field(default_factory=lambda: [64, 128, 256])
    samples: int = 3


def run(config: Config) -> None:
    """Measure and print."""
    at_least_one(config, "tokens", "answer_tokens", "methods", "budgets", "samples")
    target = target_of(config)
    methods = methods_of(config, target, config.methods, config.budgets)
    print_lines(bench_sweep(target, methods, config.tokens, config.answer_tokens, config.samples))
