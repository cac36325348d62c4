"""keepsight bench ops: operators and device syncs of each method, counted on any device as a GPU would see them.

    keepsight bench ops 'methods=[snapkv,lookaheadkv,adakv]'

Prints a line for each method: operators that launch work, and syncs that wait for it, a layer, in observing, selecting
and gathering, and in a decoding step, beside the plain model's. Nothing is timed.
"""

from dataclasses import dataclass, field
from typing import Any

from keepsight.commands.bench.shared import COMPARED, methods_of, print_lines
from keepsight.commands.config import Recipe, at_least_one
from keepsight.commands.from_recipe import target_of
from keepsight.eval.bench.operators import bench_operators


@dataclass
class Config(Recipe):
    """Keys of `keepsight bench ops`.

    Attributes:
        tokens: Prompt length in tokens.
        methods: Names of methods.
        budgets: KV entries per head.
    """

    tokens: int = 512
    methods: list[Any] = field(default_factory=lambda: list(COMPARED))
    budgets: list[int] = field(default_factory=lambda: [64])


def run(config: Config) -> None:
    """Count and print."""
    at_least_one(config, "tokens", "methods", "budgets")
    target = target_of(config)
    methods = methods_of(config, target, config.methods, config.budgets)
    print_lines(bench_operators(target.model, methods, config.tokens))
