"""keepsight bench specache: a decoding step with packed KV entries, as a whole and by part.

    keepsight bench specache tokens=2048 bits=1

Prints a line for each cache and for each part of a step, for each number of bits.
"""

from dataclasses import dataclass, field

from keepsight.commands.bench.shared import print_lines
from keepsight.commands.config import Recipe, at_least_one
from keepsight.commands.from_recipe import target_of
from keepsight.eval.bench.specache import bench_specache
from keepsight.runtime.methods import SpeCache


@dataclass
class Config(Recipe):
    """Keys of `keepsight bench specache`.

    Attributes:
        tokens: Prompt length in tokens.
        answer_tokens: Decoding steps that are timed.
        batch: Batch size.
        bits: Bits per packed value.
    """

    tokens: int = 1024
    answer_tokens: int = 24
    batch: int = 1
    bits: list[int] = field(default_factory=lambda: [1, 2])


def run(config: Config) -> None:
    """Measure and print."""
    at_least_one(config, "tokens", "answer_tokens", "batch", "bits")
    target = target_of(config)
    for bits in config.bits:
        print_lines(bench_specache(target, SpeCache(bits), config.tokens, config.batch, config.answer_tokens))
