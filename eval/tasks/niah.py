"""Needle-in-a-haystack with the four kinds of needles that RULER defines (arXiv:2404.06654).

Wording, 7-digit values and adjective-noun keys follow RULER; the haystack is prose of Python's documentation, or a
text file. Neither phrases nor words nor text are shared with the training mixture.
"""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

from typing_extensions import override

from keepsight.corpus import evaluation_paragraphs, sentences
from keepsight.errors import UserError
from keepsight.eval.tasks.benchmark import Benchmark, Protocol, TaskRequest, read_text
from keepsight.eval.tasks.samples import RenderedSample, Sample, render
from keepsight.files import package_yaml

TEXTS = package_yaml("keepsight.eval.tasks", "niah")
"""The words of keys, the sentence of a needle, and the prompt and the answer's prefix for one value and for several."""
_LONGEST_PIECE = 60
"""Words; needles stand between pieces of the haystack of at most this length."""
_GOLDEN = (5**0.5 - 1) / 2
"""The multiples of the golden ratio, modulo 1, are spread more evenly than those of any other number."""


class NeedleKind(NamedTuple):
    """One kind of the task: keys in the haystack, values of each key, keys asked for.

    `max_new_tokens` is enough for the values with a tokenizer that needs a token a digit; RULER allows 128.
    """

    keys: int
    values: int
    asked: int
    max_new_tokens: int


NEEDLE_KINDS = {
    "single": NeedleKind(keys=1, values=1, asked=1, max_new_tokens=32),
    "multikey": NeedleKind(keys=4, values=1, asked=1, max_new_tokens=64),
    "multivalue": NeedleKind(keys=1, values=4, asked=1, max_new_tokens=64),
    "multiquery": NeedleKind(keys=4, values=1, asked=4, max_new_tokens=64),
}


@dataclass
class Niah(Benchmark):
    """Needles in prose: niah_single, niah_multikey, niah_multivalue, niah_multiquery; niah_depth for a grid of depths.

    Attributes:
        haystack: Text file to hide needles in, instead of Python's documentation.
        depths: Positions of the single needle of niah_depth, 0 the beginning and 1 the end.
    """

    TASKS: ClassVar[tuple[str, ...]] = (*NEEDLE_KINDS, "depth")

    haystack: str | None = None
    depths: list[float] = field(default_factory=lambda: [round(0.1 * step, 1) for step in range(11)])

    @override
    def groups(self, protocol: Protocol) -> Mapping[str, Sequence[str]]:
        return {"": tuple(NEEDLE_KINDS)}

    @override
    def samples(self, task: str, request: TaskRequest) -> list[RenderedSample]:
        request.check_lengths()
        for depth in self.depths:
            if not 0 <= depth <= 1:
                raise UserError(
                    f"niah.depths: {depth} is not a share of the haystack from 0 to 1",
                    field="niah.depths",
                    code="range",
                )
        haystack = Path(self.haystack) if self.haystack else None
        samples: list[RenderedSample] = []
        for length in request.lengths:
            arguments = (length, request.samples, request.seed, request.tokenizer, haystack)
            if task == "depth":
                samples += _depth_grid(self.depths, *arguments)
            else:
                samples += make_samples(task, *arguments, every_key=request.every_question)
        return samples


def make_samples(
    kind: str,
    length: int,
    count: int,
    seed: int,
    tokenizer: Any,
    haystack: Path | None = None,
    max_new_tokens: int | None = None,
    every_key: bool = False,
) -> list[RenderedSample]:
    """Samples of a kind in `NEEDLE_KINDS` whose rendered prompt and answer fill `length` tokens, up to one sentence.

    Args:
        kind: The task is called `niah_` and this.
        length: Tokens of the prompt with chat template and answer prefix, plus `max_new_tokens`.
        count: Number of samples; their needles are spread over all depths. More samples begin with the same ones.
        seed: Same seed, same samples.
        tokenizer: The model's tokenizer.
        haystack: A text file to hide the needles in; None for the evaluation's own prose.
        max_new_tokens: Length limit of the answer in tokens; None for the kind's.
        every_key: Ask for each key in turn, so that a haystack of several keys becomes several samples.

    Raises:
        UserError: the kind is unknown, the needles alone are longer than `length`, or the file is unusable.
    """
    if kind not in NEEDLE_KINDS:
        raise UserError(
            f"niah: unknown kind {kind!r}; choose from {', '.join(NEEDLE_KINDS)}", field="kind", code="unknown"
        )
    shape = NEEDLE_KINDS[kind]
    hay = read_haystack(haystack, tokenizer)
    limit = shape.max_new_tokens if max_new_tokens is None else max_new_tokens
    samples = []
    for index in range(count):
        rng = random.Random(f"niah:{kind}:{length}:{seed}:{index}")
        depths = needle_depths(index, shape.keys * shape.values, rng)
        quizzes = _quizzes(kind, length, f"{seed}-{index}", limit, rng, every_key)
        samples += _fill(quizzes, depths, hay, rng.randrange(len(hay.sentences)), tokenizer)
    return samples


def _depth_grid(
    depths: Sequence[float], length: int, count: int, seed: int, tokenizer: Any, haystack: Path | None
) -> list[RenderedSample]:
    """`count` samples with a single needle at each depth; arguments as for `make_samples`."""
    hay = read_haystack(haystack, tokenizer)
    limit = NEEDLE_KINDS["single"].max_new_tokens
    samples = []
    for depth in depths:
        for index in range(count):
            rng = random.Random(f"niah:depth:{depth}:{length}:{seed}:{index}")
            (quiz,) = _quizzes("single", length, f"{seed}-{index}-{depth}", limit, rng)
            quiz = replace(quiz, task="niah_depth")
            samples += _fill([quiz], [depth], hay, rng.randrange(len(hay.sentences)), tokenizer)
    return samples


def _quizzes(
    kind: str, length: int, name: str, max_new_tokens: int, rng: random.Random, every_key: bool = False
) -> list[Sample]:
    """The samples of one haystack, with `{text}` in its place and the needles as spans; arguments as `make_samples`."""
    shape = NEEDLE_KINDS[kind]
    # No word comes twice in a haystack.
    adjectives = rng.sample(TEXTS["adjectives"], shape.keys)
    nouns = rng.sample(TEXTS["nouns"], shape.keys)
    keys = [f"{adjective}-{noun}" for adjective, noun in zip(adjectives, nouns, strict=True)]
    values = rng.sample(range(10**6, 10**7), shape.keys * shape.values)
    facts = []
    spans = []
    for key in keys:
        for _ in range(shape.values):
            value = str(values.pop())
            facts.append((key, value))
            spans.append(TEXTS["needle"].format(key=key, value=value))
    intro = _wording(shape.values * shape.asked)["prompt"].partition("{text}")[0]

    quizzes = []
    keys_of_quizzes = [[key] for key in keys] if every_key else [keys[: shape.asked]]
    for number, asked_keys in enumerate(keys_of_quizzes):
        references = []
        for key, value in facts:
            if key in asked_keys:
                references.append(value)
        wording = _wording(len(references))
        question = wording["prompt"].partition("{text}")[2].replace("{keys}", listed(asked_keys))
        sample_id = f"{name}-{number}" if every_key else name
        quizzes.append(
            Sample(
                id=sample_id,
                task=f"niah_{kind}",
                length=length,
                prompt=f"{intro}{{text}}{question}",
                question=question,
                references=tuple(references),
                metric="string_match_all",
                max_new_tokens=max_new_tokens,
                answer_prefix=wording["prefix"].format(keys=listed(asked_keys)),
                spans=tuple(spans),
            )
        )
    return quizzes


def _wording(values: int) -> dict[str, str]:
    return dict(TEXTS["one" if values == 1 else "some"])


def listed(keys: Sequence[str]) -> str:
    """`a`, or `a, b, and c`."""
    return keys[0] if len(keys) == 1 else f"{', '.join(keys[:-1])}, and {keys[-1]}"


@dataclass(frozen=True)
class Haystack:
    """Sentences read as a ring, so that it has no end; each one's tokens are counted alone, after a space."""

    sentences: tuple[str, ...]
    tokens: tuple[int, ...]

    def cut(self, start: int, count: int) -> list[str]:
        """`count` sentences from sentence `start` on."""
        return [self.sentences[(start + step) % len(self.sentences)] for step in range(count)]

    def count_in(self, start: int, tokens: int) -> int:
        """About how many sentences from `start` on have at most `tokens` tokens."""
        count = 0
        while True:
            tokens -= self.tokens[(start + count) % len(self.tokens)]
            if tokens < 0:
                return count
            count += 1


def read_haystack(path: Path | None, tokenizer: Any) -> Haystack:
    """Prose of the evaluation's part of Python's documentation, or of a text file (UserError as of `read_text`)."""
    paragraphs = evaluation_paragraphs() if path is None else [" ".join(read_text(path).split())]
    pieces: list[str] = []
    for paragraph in paragraphs:
        for sentence in sentences(paragraph):
            pieces += _pieces(sentence)
    ids = tokenizer([f" {piece}" for piece in pieces], add_special_tokens=False)["input_ids"]
    return Haystack(tuple(pieces), tuple(max(1, len(ids_of_piece)) for ids_of_piece in ids))


def _pieces(sentence: str) -> list[str]:
    """The sentence, split where it has more words than `_LONGEST_PIECE`, so that text without full stops works too."""
    words = sentence.split()
    pieces = []
    for start in range(0, len(words), _LONGEST_PIECE):
        pieces.append(" ".join(words[start : start + _LONGEST_PIECE]))
    return pieces


def needle_depths(index: int, needles: int, rng: random.Random) -> list[float]:
    """Depths of a sample's needles, the first one's from its number alone: any number of samples covers all depths."""
    return [(0.5 + index * _GOLDEN) % 1, *(rng.random() for _ in range(needles - 1))]


def _fill(
    quizzes: Sequence[Sample], depths: Sequence[float], hay: Haystack, start: int, tokenizer: Any
) -> list[RenderedSample]:
    """The quizzes with one haystack: as many sentences from sentence `start` on as the length allows for all."""
    first = quizzes[0]
    limit = first.length - first.max_new_tokens

    @cache
    def filled(count: int) -> list[RenderedSample]:
        text = hay.cut(start, count)
        for depth, needle in sorted(zip(depths, first.spans, strict=True), reverse=True):
            text.insert(round(depth * count), needle)
        haystack_text = " ".join(text)
        samples = []
        for index, quiz in enumerate(quizzes):
            prompt = quiz.prompt.replace("{text}", haystack_text)
            depth = depths[index * len(depths) // len(quizzes)]
            samples.append(render(replace(quiz, prompt=prompt, depth=depth), tokenizer))
        return samples

    def longest(count: int) -> int:
        tokens = 0
        for sample in filled(count):
            tokens = max(tokens, len(sample.prompt_ids))
        return tokens

    tokens_without_haystack = longest(0)
    if tokens_without_haystack > limit:
        least = tokens_without_haystack + first.max_new_tokens
        raise UserError(
            f"{first.task}: length {first.length} is too short; its needles alone need {least} tokens",
            field="lengths",
            code="range",
        )
    guess = hay.count_in(start, limit - tokens_without_haystack)
    count = guess
    while longest(count) > limit:
        count -= 1
    while count >= guess and longest(count + 1) <= limit:
        count += 1
    return filled(count)
