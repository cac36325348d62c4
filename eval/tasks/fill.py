"""Prompts that fill a length: each is made with as much haystack as there is room for, in the target's tokens."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import mean
from typing import Any

from keepsight.errors import UserError
from keepsight.eval.tasks.samples import RenderedSample, Sample, render_all

Make = Callable[[int], Sample]
"""A sample whose haystack has the given number of units (words, sentences, documents); the same for the same size."""

_AT_ONCE = 16
"""Prompts are rendered together, since tokenizers then work in parallel; more would hold too much text."""
_ROUNDS = 12


@dataclass
class _Search:
    """Where the search for one sample's size stands.

    Attributes:
        make: The sample by size.
        size: What to try next.
        low: The largest size known to fit; below the least before one is.
        high: The smallest size known to be too long.
        best: The sample of size `low`.
    """

    make: Make
    size: int
    low: int
    high: float = math.inf
    best: RenderedSample | None = None


def filled(makes: Sequence[Make], length: int, tokenizer: Any, least: int = 0) -> list[RenderedSample]:
    """Samples whose prompt and answer fill `length` tokens to within one unit or 2 percent.

    The size comes from how tokens grow with units, after the first prompts from the number of characters, and is then
    corrected by what the whole prompt measures, so that most prompts are rendered once or twice.

    Args:
        makes: One for each sample.
        length: Tokens of the prompt, chat template and answer prefix included, and of the answer.
        tokenizer: The target's tokenizer.
        least: The smallest size that makes a valid sample.

    Raises:
        UserError: a sample of the least size is too long.
    """
    if not makes:
        return []
    small, larger = render_all([makes[0](least), makes[0](least + 32)], tokenizer)
    fixed, rate = len(small.prompt_ids), max((len(larger.prompt_ids) - len(small.prompt_ids)) / 32, 0.1)
    characters = max((len(larger.prompt) - len(small.prompt)) / 32, 0.1)
    size, wanted = max(least, least + int((_room(small, length) - fixed) / rate)), 0.0
    made: list[RenderedSample] = []
    for start in range(0, len(makes), _AT_ONCE):
        block = [
            _Search(make, _by_characters(make, size, wanted, characters, least), least - 1)
            for make in makes[start : start + _AT_ONCE]
        ]
        _search(block, length, rate, least, tokenizer)
        best = [each.best for each in block if each.best is not None]
        size = block[0].low
        wanted = mean(len(each.prompt) * _room(each, length) / len(each.prompt_ids) for each in best)
        made += [replace(each, length=length) for each in best]
    return made


def _by_characters(make: Make, size: int, wanted: float, rate: float, least: int) -> int:
    """The size at which a prompt has about as many characters as earlier ones that filled their length."""
    for _ in range(3 if wanted else 0):
        step = math.floor((wanted - len(make(size).prompt)) / rate)
        if not step:
            break
        size = max(size + step, least)
    return size


def _search(block: list[_Search], length: int, rate: float, least: int, tokenizer: Any) -> None:
    """Fill every sample of a block."""
    pending = block
    for _ in range(_ROUNDS):
        rendered = render_all([each.make(each.size) for each in pending], tokenizer)
        pending = [each for each, sample in zip(pending, rendered, strict=True) if _goes_on(each, sample, length, rate)]
        if not pending:
            return
        for each in pending:
            if each.high <= least:
                _refuse(each.make(least), length, tokenizer)
    for each in pending:
        if each.best is None:
            each.low, each.best = least, render_all([each.make(least)], tokenizer)[0]
            if len(each.best.prompt_ids) > _room(each.best, length):
                _refuse(each.best, length, tokenizer)


def _goes_on(search: _Search, sample: RenderedSample, length: int, rate: float) -> bool:
    """Take in what a size measures; whether another one is worth a try, which then is `search.size`."""
    spare = _room(sample, length) - len(sample.prompt_ids)
    if spare >= 0:
        search.low, search.best = search.size, sample
        step = int(spare / rate)
        if spare <= length // 50 or step < 1:
            return False
        search.size = int(min(search.low + step, search.high - 1))
    else:
        search.high = search.size
        search.size = max(search.size - math.ceil(-spare / rate), search.low + 1)
    return search.low < search.size < search.high or search.best is None


def _room(sample: Sample, length: int) -> int:
    return length - sample.max_new_tokens


def _refuse(sample: Sample, length: int, tokenizer: Any) -> None:
    needed = len(render_all([sample], tokenizer)[0].prompt_ids) + sample.max_new_tokens
    raise UserError(f"{sample.task}: length {length} is too short; a sample without haystack needs {needed} tokens")
