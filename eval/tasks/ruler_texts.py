"""The generators of RULER (arXiv:2404.06654; NVIDIA/RULER, scripts/data/synthetic): a text for any size of haystack.

Each is a function of a random generator and a size; the same seed gives the same needles at every size, so that the
size can be searched for.
"""

import random
import string
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import pi
from typing import Literal

from keepsight.corpus import sentences
from keepsight.eval.tasks.words import drawn_pair, drawn_words

NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
_DEPTHS = [round(100 * step / 39) for step in range(40)]
"""Percent; a needle in an essay stands at one of these."""


@dataclass(frozen=True)
class RulerText:
    """A prompt in parts, with its answer.

    Attributes:
        before: What stands before the context.
        context: The haystack.
        after: The question.
        prefix: What begins the answer.
        references: What the answer must name.
        depth: Where in the context the first reference stands, 0 to 1; None where that has no meaning.
    """

    before: str
    context: str
    after: str
    prefix: str
    references: tuple[str, ...]
    depth: float | None = None


@dataclass(frozen=True)
class NeedleText:
    """The knobs of a needle task.

    Attributes:
        haystack: Noise, an essay, or other needles.
        key: What keys are.
        value: What values are.
        keys: Keys in the haystack.
        values: Values of each key.
        asked: How many of the keys are asked for.
    """

    haystack: Literal["noise", "essay", "needles"]
    key: Literal["words", "uuids"] = "words"
    value: Literal["numbers", "uuids"] = "numbers"
    keys: int = 1
    values: int = 1
    asked: int = 1


def needles(knobs: NeedleText, essay: Sequence[str], rng: random.Random, size: int) -> RulerText:
    """Key-value sentences in a haystack of `size` words of the essay, or `size` sentences."""
    facts = [
        (_drawn(knobs.key, rng), [_drawn(knobs.value, rng) for _ in range(knobs.values)]) for _ in range(knobs.keys)
    ]
    asked = rng.sample(facts, knobs.asked)
    hidden = [_fact(knobs.value, key, value) for key, values in facts for value in values]
    rng.shuffle(hidden)
    context = (
        _essay_with(hidden, essay, rng, size) if knobs.haystack == "essay" else _lines_with(hidden, knobs, rng, size)
    )
    query = _listed([key for key, _ in asked])
    one = knobs.asked * knobs.values == 1
    kind, many = (knobs.value[:-1], "A special magic") if one else (knobs.value, "Some special magic")
    be = "is" if one else "are"
    first = _fact(knobs.value, asked[0][0], asked[0][1][0])
    return RulerText(
        before=f"{many} {kind} {be} hidden within the following text. Make sure to memorize it. "
        f"I will quiz you about the {kind} afterwards.\n",
        context=context,
        after=f"\nWhat {be if one else 'are all'} the special magic {kind} for {query} mentioned in the provided text?",
        prefix=f" The special magic {kind} for {query} mentioned in the provided text {be}",
        references=tuple(value for _, values in asked for value in values),
        depth=context.index(first) / len(context),
    )


def _drawn(kind: str, rng: random.Random) -> str:
    if kind == "words":
        return drawn_pair(rng)
    if kind == "uuids":
        return str(uuid.UUID(int=rng.getrandbits(128), version=4))
    return str(rng.randint(10**6, 10**7 - 1))


def _fact(kind: str, key: str, value: str) -> str:
    return f"One of the special magic {kind} for {key} is: {value}."


def _listed(keys: Sequence[str]) -> str:
    return f"{', '.join(keys[:-1])}, and {keys[-1]}" if len(keys) > 1 else keys[0]


def _essay_with(hidden: Sequence[str], essay: Sequence[str], rng: random.Random, size: int) -> str:
    """The essay's first words, repeated where it has too few, with sentences hidden between its own."""
    words = [*essay] * (size // len(essay)) + [*essay[: size % len(essay)]]
    hay = sentences(" ".join(words))
    places = sorted(len(hay) * depth // 100 for depth in rng.sample(_DEPTHS, len(hidden)))
    for place, sentence in sorted(zip(places, hidden, strict=True), key=lambda each: each[0], reverse=True):
        hay.insert(place, sentence)
    return " ".join(hay)


def _lines_with(hidden: Sequence[str], knobs: NeedleText, rng: random.Random, size: int) -> str:
    lines = [NOISE] * size
    if knobs.haystack == "needles":
        others = random.Random(rng.random())  # so that what comes after does not depend on the size
        lines = [_fact(knobs.value, _drawn(knobs.key, others), _drawn(knobs.value, others)) for _ in range(size)]
    depths = sorted((rng.random() for _ in hidden), reverse=True)
    for depth, sentence in zip(depths, hidden, strict=True):
        lines.insert(int(depth * size), sentence)
    return "\n".join(lines)


_VARIABLES = "Memorize and track the chain(s) of variable assignment hidden in the following text.\n\n"
_HOPS = 4


def variables(shown: int, rng: random.Random, size: int) -> RulerText:
    """A chain of assignments among `size` lines of noise, after an example among `shown` lines."""
    example = _chain(3, rng, shown)
    asked = _chain(5, rng, size)
    whole = example.before + example.context + example.after + example.prefix + " " + " ".join(example.references)
    return RulerText(f"{whole}\n\n{asked.before}", asked.context, asked.after, asked.prefix, asked.references)


def _chain(letters: int, rng: random.Random, size: int) -> RulerText:
    names: dict[str, None] = {}
    while len(names) <= _HOPS:
        names["".join(rng.choices(string.ascii_uppercase, k=letters))] = None
    chain, value = [*names], str(rng.randint(10000, 99998))
    lines = [f"VAR {chain[0]} = {value}"]
    lines += [f"VAR {name} = VAR {source} " for source, name in pairwise(chain)]
    places = sorted(rng.random() for _ in lines)
    text = [NOISE] * size
    for place, line in sorted(zip(places, lines, strict=True), reverse=True):
        text.insert(int(place * size), line)
    return RulerText(
        before=_VARIABLES,
        context="\n".join(text).replace(". \n", ".\n"),
        after=f"\nQuestion: Find all variables that are assigned the value {value} in the text above.",
        prefix=" Answer: According to the chain(s) of variable assignment in the text above, "
        f"{len(chain)} variables are assigned the value {value}, they are: ",
        references=tuple(chain),
    )


_COMMON = 10


def common_words(short: bool, rng: random.Random, size: int) -> RulerText:
    """A numbered list in which 10 of `size` different words come more often, after an example.

    Args:
        short: Whether the length is below 4096, where words are repeated less often.
        rng: Draws the words.
        size: Number of different words, at least 10.
    """
    example = _numbered(20 if short else 40, 3 if short else 10, 1 if short else 3, rng)
    asked = _numbered(size, 6 if short else 30, 1 if short else 3, rng)
    answer = " ".join(f"{place}. {word}" for place, word in enumerate(example.references, start=1))
    whole = f"{example.before}{example.context}{example.after}{example.prefix} {answer}"
    return RulerText(f"{whole}\n{asked.before}", asked.context, asked.after, asked.prefix, asked.references)


def _numbered(size: int, often: int, seldom: int, rng: random.Random) -> RulerText:
    words = drawn_words(size, rng)
    listed = words[:_COMMON] * often + words[_COMMON:] * seldom
    rng.shuffle(listed)
    return RulerText(
        before="Below is a numbered list of words. In these words, some appear more often than others. "
        "Memorize the ones that appear most often.\n",
        context=" ".join(f"{place}. {word}" for place, word in enumerate(listed, start=1)),
        after=f"\nQuestion: What are the {_COMMON} most common words in the above list?",
        prefix=f" Answer: The top {_COMMON} words that appear most often in the list are:",
        references=tuple(words[:_COMMON]),
    )


def frequent_words(vocabulary: int, rng: random.Random, size: int) -> RulerText:
    """About `size` coded words whose frequencies follow a zeta distribution (alpha 2); the most frequent is noise."""
    coded: dict[str, None] = {}
    while len(coded) < vocabulary:
        coded["".join(rng.choices(string.ascii_lowercase, k=6))] = None
    words = ["...", *list(coded)[1:]]
    zeta = pi**2 / 6
    listed = [word for rank, word in enumerate(words, start=1) for _ in range(int(size * rank**-2 / zeta))]
    rng.shuffle(listed)
    return RulerText(
        before="Read the following coded text and track the frequency of each coded word. "
        "Find the three most frequently appeared coded words. ",
        context=" ".join(listed),
        after="\nQuestion: Do not provide any explanation. Please ignore the dots '....'. "
        "What are the three most frequently appeared words in the above coded text?",
        prefix=" Answer: According to the coded text above, the three most frequently appeared words are:",
        references=tuple(words[1:4]),
    )


@dataclass(frozen=True)
class Question:
    """A question about documents.

    Attributes:
        text: The question.
        answers: Accepted answers.
        needed: Indices of the documents that hold the answer.
        near: Indices of documents that come with it, such as other paragraphs of its article.
    """

    text: str
    answers: tuple[str, ...]
    needed: tuple[int, ...]
    near: tuple[int, ...] = ()


_ONLY = "Answer the question based on the given documents. Only give me the answer and do not output any other words."


def question_over(question: Question, texts: Sequence[str], rng: random.Random, size: int) -> RulerText:
    """A question over `size` documents, those that it needs among them; where there are too few, they are repeated."""
    near = rng.sample(question.near, len(question.near))
    known = {*question.needed, *near}
    others = [index for index in range(len(texts)) if index not in known]
    order = [*question.needed, *near, *rng.sample(others, len(others))]
    order = (order * (size // len(order) + 1))[: max(size, len(question.needed))]
    rng.shuffle(order)
    return RulerText(
        before=f"{_ONLY}\n\nThe following are given documents.\n\n",
        context="\n\n".join(f"Document {place}:\n{texts[index]}" for place, index in enumerate(order, start=1)),
        after=f"\n\n{_ONLY}\n\nQuestion: {question.text}",
        prefix=" Answer:",
        references=question.answers,
    )
