"""Needle-in-a-haystack with the four kinds of needles that RULER defines (arXiv:2404.06654).

Wording, 7-digit values and adjective-noun keys follow RULER; the haystack is prose of the standard documentation, or a
text file. Neither phrases nor words nor text are shared with the training mixture.
"""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any, ClassVar

from typing_extensions import override

from keepsight.errors import UserError
from keepsight.eval.tasks.benchmark import Benchmark, TaskRequest
from keepsight.eval.tasks.haystack import Haystack, fullest, hide, needle_depths, read_haystack
from keepsight.eval.tasks.niah_texts import ADJECTIVES, NEEDLE, NOUNS, ONE, ONE_PREFIX, SOME, SOME_PREFIX
from keepsight.eval.tasks.protocols import Protocol
from keepsight.eval.tasks.samples import RenderedSample, Sample, render


@dataclass(frozen=True)
class NeedleKind:
    """One kind of the task.

    Attributes:
        keys: Keys in the haystack.
        values: Values of each key.
        asked: How many of the keys are asked for.
        max_new_tokens: Enough for the values, with a tokenizer that needs a token a digit. RULER allows 128.
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
        depths: Where the single needle of niah_depth stands, 0 the beginning and 1 the end.
    """

    TASKS: ClassVar[tuple[str, ...]] = (*NEEDLE_KINDS, "depth")

    haystack: str | None = None
    depths: list[float] = field(default_factory=lambda: [round(0.1 * step, 1) for step in range(11)])

    @override
    def groups(self, protocol: Protocol) -> Mapping[str, Sequence[str]]:
        return {"": tuple(NEEDLE_KINDS)}

    @override
    def samples(self, task: str, request: TaskRequest) -> list[RenderedSample]:
        haystack = Path(self.haystack) if self.haystack else None
        if wrong := [depth for depth in self.depths if not 0 <= depth <= 1]:
            raise UserError(f"niah.depths: {wrong[0]} is not a share of the haystack from 0 to 1")
        return [
            sample
            for length in request.lengths
            for sample in (
                depth_grid(self.depths, length, request.samples, request.seed, request.tokenizer, haystack)
                if task == "depth"
                else make_samples(
                    task,
                    length,
                    request.samples,
                    request.seed,
                    request.tokenizer,
                    haystack,
                    every_key=request.every_question,
                )
            )
        ]


def depth_grid(
    depths: Sequence[float], length: int, count: int, seed: int, tokenizer: Any, haystack: Path | None = None
) -> list[RenderedSample]:
    """`count` samples with a single needle at each depth; arguments as for `make_samples`."""
    hay = read_haystack(haystack, tokenizer)
    made = []
    for depth in depths:
        for index in range(count):
            rng = random.Random(f"niah:depth:{depth}:{length}:{seed}:{index}")
            quiz = _quiz("single", length, f"{seed}-{index}-{depth}", NEEDLE_KINDS["single"].max_new_tokens, rng)
            quiz = replace(quiz, task="niah_depth")
            made += _filled([quiz], [depth], hay, rng.randrange(len(hay.sentences)), tokenizer)
    return made


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
    """Samples of one kind whose rendered prompt and answer together fill `length` tokens, or a sentence less.

    Args:
        kind: A key of `NEEDLE_KINDS`; the task is called `niah_` and this.
        length: Tokens of the prompt with chat template and answer prefix, plus `max_new_tokens`.
        count: Number of samples; their needles are spread over all depths. More samples begin with the same ones.
        seed: Same seed, same samples.
        tokenizer: The target's tokenizer, with a chat template.
        haystack: A text file to hide the needles in; None takes the evaluation's own prose.
        max_new_tokens: Length limit of the answer in tokens; None takes the kind's.
        every_key: Ask for each key in turn, so that a haystack of several keys becomes several samples.

    Raises:
        UserError: the kind is unknown, the needles alone are longer than `length`, or the file is unusable.
    """
    if kind not in NEEDLE_KINDS:
        raise UserError(f"niah: unknown kind {kind!r}; choose from {', '.join(NEEDLE_KINDS)}")
    hay = read_haystack(haystack, tokenizer)
    limit = NEEDLE_KINDS[kind].max_new_tokens if max_new_tokens is None else max_new_tokens
    made = []
    for index in range(count):
        rng = random.Random(f"niah:{kind}:{length}:{seed}:{index}")
        depths = needle_depths(index, NEEDLE_KINDS[kind].keys * NEEDLE_KINDS[kind].values, rng)
        quiz = _quiz(kind, length, f"{seed}-{index}", limit, rng)
        quizzes = _for_each_key(quiz) if every_key else [quiz]
        made += _filled(quizzes, depths, hay, rng.randrange(len(hay.sentences)), tokenizer)
    return made


def _for_each_key(quiz: Sample) -> list[Sample]:
    """The quiz once for each key in its haystack."""
    facts: dict[str, list[str]] = {}
    for span in quiz.spans:
        key, _, value = span.removeprefix(NEEDLE.partition("{key}")[0]).removesuffix(".").partition(" is: ")
        facts.setdefault(key, []).append(value)
    asked = []
    for number, (key, values) in enumerate(facts.items()):
        wording, prefix = (ONE, ONE_PREFIX) if len(values) == 1 else (SOME, SOME_PREFIX)
        question = wording.partition("{text}")[2].replace("{keys}", key)
        asked.append(
            replace(
                quiz,
                id=f"{quiz.id}-{number}",
                prompt=quiz.context + question,
                question=question,
                references=tuple(values),
                answer_prefix=prefix.format(keys=key),
            )
        )
    return asked


def _quiz(kind: str, length: int, name: str, max_new_tokens: int, rng: random.Random) -> Sample:
    """The sample with `{text}` where the haystack goes; its spans are the needles, the asked key's first."""
    shape = NEEDLE_KINDS[kind]
    keys = _drawn_keys(shape.keys, rng)
    values = rng.sample(range(10**6, 10**7), shape.keys * shape.values)
    facts = [(key, str(values.pop())) for key in keys for _ in range(shape.values)]
    asked = keys[: shape.asked]
    one = shape.values * shape.asked == 1
    return Sample(
        id=name,
        task=f"niah_{kind}",
        length=length,
        prompt=(ONE if one else SOME).replace("{keys}", _listed(asked)),
        question=(ONE if one else SOME).partition("{text}")[2].replace("{keys}", _listed(asked)),
        references=tuple(value for key, value in facts if key in asked),
        metric="string_match_all",
        max_new_tokens=max_new_tokens,
        answer_prefix=(ONE_PREFIX if one else SOME_PREFIX).format(keys=_listed(asked)),
        spans=tuple(NEEDLE.format(key=key, value=value) for key, value in facts),
    )


def _drawn_keys(count: int, rng: random.Random) -> list[str]:
    """Different adjective-noun keys; no word comes twice in a sample."""
    pairs = zip(rng.sample(ADJECTIVES, count), rng.sample(NOUNS, count), strict=True)
    return [f"{adjective}-{noun}" for adjective, noun in pairs]


def _listed(keys: Sequence[str]) -> str:
    """`a`, or `a, b, and c`."""
    return keys[0] if len(keys) == 1 else f"{', '.join(keys[:-1])}, and {keys[-1]}"


def _filled(
    quizzes: list[Sample], depths: list[float], hay: Haystack, start: int, tokenizer: Any
) -> list[RenderedSample]:
    """The quizzes with one haystack: as many sentences from sentence `start` on as the length allows for all."""
    quiz = quizzes[0]
    room = quiz.length - quiz.max_new_tokens

    quizzes = [replace(each, depth=depths[place * len(depths) // len(quizzes)]) for place, each in enumerate(quizzes)]

    @cache
    def filled(count: int) -> list[RenderedSample]:
        text = hide(list(quiz.spans), depths, hay.cut(start, count))
        return [render(replace(each, prompt=each.prompt.replace("{text}", text)), tokenizer) for each in quizzes]

    def longest(count: int) -> int:
        return max(len(each.prompt_ids) for each in filled(count))

    needed = longest(0)
    count = fullest(lambda count: longest(count) <= room, hay.holds(start, room - needed))
    if count < 0:
        least = needed + quiz.max_new_tokens
        raise UserError(f"{quiz.task}: length {quiz.length} is too short; its needles alone need {least} tokens")
    return filled(count)
