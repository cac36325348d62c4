"""What several benchmarks share: the methods to measure, and printing."""

import sys
from collections.abc import Iterable
from typing import Any

from tqdm import tqdm

from keepsight.commands.config import Recipe
from keepsight.commands.from_recipe import resources_of
from keepsight.commands.variants import variants_of
from keepsight.models.targets import Target
from keepsight.runtime.generate import Method

COMPARED = ("lookaheadkv", "snapkv", "pyramidkv", "adakv", "tova", "streamingllm")


def print_lines(lines: Iterable[str]) -> None:
    """Print each line as soon as it is measured."""
    for line in lines:
        tqdm.write(line)
        sys.stdout.flush()


def methods_of(config: Recipe, target: Target, methods: list[Any], budgets: list[Any]) -> dict[str, Method]:
    """Every method, given as for `keepsight eval`, at every budget, by `LABEL BUDGET`."""
    variants = variants_of(methods, budgets, [], resources_of(config, target))
    return {each.name if each.budget is None else f"{each.name} {each.budget}": each.method for each in variants}
