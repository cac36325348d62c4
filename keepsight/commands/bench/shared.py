"""What several benchmarks share: the methods to measure, and printing."""

import sys
from collections.abc import Iterable, Sequence
from typing import Any

from tqdm import tqdm

from keepsight.commands.config import Recipe
from keepsight.commands.from_recipe import resources_of
from keepsight.models.targets import Target
from keepsight.runtime.method import Method
from keepsight.runtime.methods import make_method

COMPARED = ("lookaheadkv", "snapkv", "pyramidkv", "adakv", "tova", "streamingllm")


def print_lines(lines: Iterable[str]) -> None:
    """Print each line as soon as it is measured."""
    for line in lines:
        tqdm.write(line)
        sys.stdout.flush()


def methods_of(config: Recipe, target: Target, names: Sequence[str], budgets: Sequence[Any]) -> dict[str, Method]:
    """Every method at every budget, by `NAME BUDGET`."""
    resources = resources_of(config, target)
    return {f"{name} {budget}": make_method(name, budget, resources) for name in names for budget in budgets}
