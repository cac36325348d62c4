"""Reconstruction: one paragraph of a text is to be repeated word for word.

KVzip (arXiv 2505.23416) keeps the entries that the model needs to reconstruct its context. Here reconstruction is the
question, asked of the compressed cache.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, takewhile

from typing_extensions import override

from keepsight.corpus import evaluation_paragraphs
from keepsight.errors import UserError
from keepsight.eval.tasks.benchmark import Benchmark, TaskRequest
from keepsight.eval.tasks.samples import RenderedSample, Sample, render

MAX_NEW_TOKENS = 96
ASKED = 4
"""Paragraphs of a text that `question=multi` asks for, one after the other."""
_WORDS = 20, 150
"""Length of the text's paragraphs in words."""
_NAMED_BY, _SCORED = 6, 50
"""Words by which the question names a paragraph, and words of it that are scored."""
_QUESTION = '\n\nRepeat, word for word, the paragraph that begins with "{start}".'


@dataclass
class Reconstruction(Benchmark):
    """Paragraphs of Python's documentation; the score is ROUGE-L on the first 50 words of the one that is asked for."""

    @override
    def samples(self, task: str, request: TaskRequest) -> list[RenderedSample]:
        request.check_lengths()
        sizes = _sizes(request)
        places = [(length, index) for length in request.lengths for index in range(request.samples)]
        return [sample for place in places for sample in _samples(*place, sizes, request)]


def _samples(length: int, index: int, sizes: Sequence[int], request: TaskRequest) -> list[RenderedSample]:
    """The samples of one text that, with an answer, fills `length` tokens up to one paragraph; `sizes` as `_sizes`."""
    name = f"{request.seed}-{index}"
    rng = random.Random(f"reconstruction:{length}:{name}")
    paragraphs = _paragraphs()
    start, limit = rng.randrange(len(paragraphs)), length - MAX_NEW_TOKENS
    order = [(start + row) % len(paragraphs) for row in range(len(paragraphs))]
    count = len([*takewhile(lambda total: total <= limit, accumulate(sizes[place] for place in order))])
    shares = [rng.random() for _ in range(ASKED)]
    for shown in range(count, ASKED - 1, -1):
        texts = [paragraphs[place] for place in order[:shown]]
        asked = _asked(texts, shares if request.every_question else shares[:1])
        made = [render(_sample(texts, each, length, f"{name}-{each}"), request.tokenizer) for each in asked]
        if all(len(each.prompt_ids) <= limit for each in made):
            return made
    raise UserError(f"reconstruction: length {length} is too short for {ASKED} paragraphs; raise lengths=")


def _asked(texts: Sequence[str], shares: Sequence[float]) -> list[int]:
    """A different paragraph for each share: 0 is the first paragraph, and 1 would be behind the last."""
    left = [*range(len(texts))]
    return [left.pop(int(share * len(left))) for share in shares]


def _sample(texts: Sequence[str], asked: int, length: int, name: str) -> Sample:
    words = texts[asked].split()
    question = _QUESTION.format(start=" ".join(words[:_NAMED_BY]))
    return Sample(
        id=name,
        task="reconstruction",
        length=length,
        prompt="\n\n".join(texts) + question,
        question=question,
        references=(" ".join(words[:_SCORED]),),
        metric="rouge_l",
        max_new_tokens=MAX_NEW_TOKENS,
        depth=(asked + 0.5) / len(texts),
    )


def _sizes(request: TaskRequest) -> list[int]:
    """The tokens of each paragraph with the blank line after it."""
    ids = request.tokenizer([f"{each}\n\n" for each in _paragraphs()], add_special_tokens=False)["input_ids"]
    return [len(each) for each in ids]


@lru_cache(maxsize=1)
def _paragraphs() -> tuple[str, ...]:
    """Paragraphs, no two of which begin alike."""
    low, high = _WORDS
    fitting = [each for each in evaluation_paragraphs() if low <= len(each.split()) <= high]
    return tuple({tuple(each.split()[:_NAMED_BY]): each for each in fitting}.values())
