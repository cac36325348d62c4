"""keepsight bench evict: time and memory of observing and selecting, for each method, against the prefill.

    keepsight bench evict lengths=1024,4096 methods=snapkv,lookaheadkv budgets=128

Prints a line for each prompt length and method: milliseconds, share of the prefill's time, peak memory, and the
peak of KV entries in bytes, which eviction during the prefill (`during_prefill`) keeps low. The prefill and the methods
take turns, so that a machine whose speed varies slows both.
"""

from dataclasses import dataclass, field
from typing import Any

from keepsight.commands.bench.shared import COMPARED, methods_of, print_lines
from keepsight.commands.config import Recipe, at_least_one
from keepsight.commands.from_recipe import target_of
from keepsight.commands.variants import require_evict
from keepsight.eval.bench.eviction import bench_evict


@dataclass
class Config(Recipe):
    """Keys of `keepsight bench evict`.

    Attributes:
        lengths: Prompt lengths in tokens.
        methods: Names of methods that evict.
        budgets: KV entries per head.
        repeats: Turns of the prefill and all methods, after one to warm up.
    """

    lengths: list[int] = field(default_factory=lambda: [1024, 4096])
    methods: list[Any] = field(default_factory=lambda: list(COMPARED))
    budgets: list[int] = field(default_factory=lambda: [64])
    repeats: int = 5


def run(config: Config) -> None:
    """Measure and print."""
    at_least_one(config, "lengths", "methods", "budgets", "repeats")
    target = target_of(config)
    evicting = {
        name: require_evict(method, f"method {name.split()[0]!r} evicts nothing from the cache; name methods that do")
        for name, method in methods_of(config, target, config.methods, config.budgets).items()
    }
    print_lines(bench_evict(target, evicting, config.lengths, config.repeats))
