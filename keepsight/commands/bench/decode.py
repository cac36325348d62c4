"""keepsight bench decode: a decoding step from what each method keeps, against the full cache.

    keepsight bench decode tokens=4096 methods=snapkv,adakv,pyramidkv budgets=128

Prints a line for each method: milliseconds a step, tokens per second, the ratio to the full cache's step and to that of
the first method named, and the memory of the KV entries held. Methods take turns, so that ratios hold on a machine
whose speed varies; all caches are held at once. Reading the prompt and evicting are not timed: `keepsight bench evict`
does that.
"""

from dataclasses import dataclass, field
from typing import Any

from keepsight.commands.bench.shared import COMPARED, methods_of, print_lines
from keepsight.commands.config import Recipe, at_least_one
from keepsight.commands.from_recipe import target_of
from keepsight.eval.bench.decode import bench_decode


@dataclass
class Config(Recipe):
    """Keys of `keepsight bench decode`.

    Attributes:
        tokens: Prompt length in tokens.
        methods: Names of methods.
        budgets: KV entries per head.
        batch: Number of prompts read together.
        answer_tokens: Decoding steps that are timed, after three to warm up.
    """

    tokens: int = 4096
    methods: list[Any] = field(default_factory=lambda: list(COMPARED))
    budgets: list[int] = field(default_factory=lambda: [128])
    batch: int = 1
    answer_tokens: int = 32


def run(config: Config) -> None:
    """Measure and print."""
    at_least_one(config, "tokens", "methods", "budgets", "batch", "answer_tokens")
    target = target_of(config)
    methods = methods_of(config, target, config.methods, config.budgets)
    print_lines(bench_decode(target.model, methods, config.tokens, config.batch, config.answer_tokens))
