"""Reconstruction: one paragraph of a text is to be repeated word for word.

KVzip (arXiv 2505.23416) keeps the entries that the model needs to reconstruct its context. Here reconstruction is the
question, asked of the compressed cache.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from typing_extensions import override

from keepsight.corpus import evaluation_paragraphs
from keepsight.errors import UserError
from keepsight.eval.tasks.benchmark import Benchmark, TaskRequest
from keepsight.eval.tasks.samples import RenderedSample, Sample, render

MAX_NEW_TOKENS = 96
ASKED = 4
"""Paragraphs of a text that `question=multi` asks for, one after the other."""
_MIN_WORDS = 20
_MAX_WORDS = 150
"""Length of the text's paragraphs in words."""
_NAMING_WORDS = 6
"""Words by which the question names a paragraph."""
_SCORED_WORDS = 50
"""Words of the paragraph that are scored."""
_QUESTION = '\n\nRepeat, word for word, the paragraph that begins with "{start}".'


@dataclass
class ReconstructionTask(Benchmark):
    """Paragraphs of Python's documentation; the score is ROUGE-L on the first 50 words of the one that is asked for."""

    @override
    def samples(self, task: str, request: TaskRequest) -> list[RenderedSample]:
        request.check_lengths()
        sizes = _sizes(request)
        samples = []
        for length in request.lengths:
            for index in range(request.samples):
                samples += _samples_of_text(length, index, sizes, request)
        return samples


def _samples_of_text(length: int, index: int, sizes: Sequence[int], request: TaskRequest) -> list[RenderedSample]:
    """The samples of one text that, with an answer, fills `length` tokens up to one paragraph; `sizes` as `_sizes`."""
    name = f"{request.seed}-{index}"
    rng = random.Random(f"reconstruction:{length}:{name}")
    paragraphs = _paragraphs()
    start = rng.randrange(len(paragraphs))
    order = [(start + step) % len(paragraphs) for step in range(len(paragraphs))]
    limit = length - MAX_NEW_TOKENS
    most = _fitting(order, sizes, limit)
    shares = [rng.random() for _ in range(ASKED)]
    if not request.every_question:
        shares = shares[:1]
    for count in range(most, ASKED - 1, -1):
        texts = [paragraphs[paragraph] for paragraph in order[:count]]
        samples = []
        longest = 0
        for asked in _asked(count, shares):
            sample = render(_sample(texts, asked, length, f"{name}-{asked}"), request.tokenizer)
            samples.append(sample)
            longest = max(longest, len(sample.prompt_ids))
        if longest <= limit:
            return samples
    raise UserError(
        f"reconstruction: length {length} is too short for {ASKED} paragraphs; raise lengths=",
        field="lengths",
        code="range",
    )


def _fitting(order: Sequence[int], sizes: Sequence[int], limit: int) -> int:
    """How many of the first paragraphs have at most `limit` tokens together."""
    tokens = 0
    for count, paragraph in enumerate(order):
        tokens += sizes[paragraph]
        if tokens > limit:
            return count
    return len(order)


def _asked(count: int, shares: Sequence[float]) -> list[int]:
    """A different paragraph for each share: 0 is the first of `count` paragraphs, and 1 would be behind the last."""
    paragraphs = list(range(count))
    return [paragraphs.pop(int(share * len(paragraphs))) for share in shares]


def _sample(texts: Sequence[str], asked: int, length: int, name: str) -> Sample:
    words = texts[asked].split()
    question = _QUESTION.format(start=" ".join(words[:_NAMING_WORDS]))
    return Sample(
        id=name,
        task="reconstruction",
        length=length,
        prompt="\n\n".join(texts) + question,
        question=question,
        references=(" ".join(words[:_SCORED_WORDS]),),
        metric="rouge_l",
        max_new_tokens=MAX_NEW_TOKENS,
        depth=(asked + 0.5) / len(texts),
    )


def _sizes(request: TaskRequest) -> list[int]:
    """The tokens of each paragraph with the blank line after it."""
    texts = [f"{paragraph}\n\n" for paragraph in _paragraphs()]
    return list(map(len, request.tokenizer(texts, add_special_tokens=False)["input_ids"]))


@lru_cache(maxsize=1)
def _paragraphs() -> tuple[str, ...]:
    """Paragraphs, no two of which begin alike."""
    by_beginning: dict[tuple[str, ...], str] = {}
    for paragraph in evaluation_paragraphs():
        words = paragraph.split()
        if _MIN_WORDS <= len(words) <= _MAX_WORDS:
            by_beginning[tuple(words[:_NAMING_WORDS])] = paragraph
    return tuple(by_beginning.values())
