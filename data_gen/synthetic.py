"""Invented prompts whose answer stands in a long text: needles in a haystack, key-value lists, everyday texts."""

import json
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Annotated

from pydantic import Field, FiniteFloat

from keepsight.corpus import Document, docstrings, is_topic, prose, sentences, source_documents, topic_documents
from keepsight.data_gen.prompts import Prompt, Request, Share, fit, user_prompt
from keepsight.data_gen.words import distinct, draw, filled, told, wordings, words
from keepsight.errors import UserError

Weights = tuple[Annotated[FiniteFloat, Field(ge=0)], ...]
Pairs = list[tuple[str, str]]

FORMS = ("single", "multi_key", "multi_value", "multi_query")


def framed(question: str, seed: int, text: str) -> str:
    """The question about the text, put in one of many ways."""
    rng = random.Random(seed)
    frame = rng.choice(wordings("frames"))
    parts = {"intro": rng.choice(wordings("introductions")), "style": rng.choice(wordings("answer_styles"))}
    return str(frame.format(text=text, question=question, **parts)).replace(" \n", "\n").strip()


def take(stream: Iterator[str], characters: int) -> list[str]:
    """Pieces from the stream, as many as have at most `characters` characters in total."""
    taken: list[str] = []
    for piece in stream:
        characters -= len(piece)
        if characters < 0:
            break
        taken.append(piece)
    return taken


@dataclass(frozen=True)
class Quiz:
    """What is hidden (`needles`), what is asked and its true `answer`; `prefix` may begin the answer."""

    needles: list[str]
    question: str
    prefix: str
    answer: str


@dataclass(frozen=True)
class Needles:
    """Facts hidden in a text, and a question about one, about some, or about a key with several values.

    Attributes:
        forms: Weights of `FORMS`.
        haystacks: Weights of the texts: documentation, stories, noise, log, code.
        prefixed: Share of prompts that hold the beginning of the answer.
        truthful: Use the hidden values as the response, where a small model would often answer something else
            (LookaheadKV, appendix D: responses need not be the model's own).
    """

    forms: Weights = (0.45, 0.3, 0.12, 0.13)
    haystacks: Weights = (0.5, 0.2, 0.1, 0.1, 0.1)
    prefixed: Share = 0.3
    truthful: bool = False

    def __post_init__(self) -> None:
        for name, weights, kinds in (("forms", self.forms, FORMS), ("haystacks", self.haystacks, tuple(STREAMS))):
            if len(weights) != len(kinds) or sum(weights) <= 0:
                raise UserError(f"{name} needs {len(kinds)} weights ({', '.join(kinds)}), got {list(weights)}")

    def sample(self, request: Request) -> Prompt:
        """Draw one prompt; see `Source`."""
        rng = request.rng
        form = rng.choices(FORMS, self.forms)[0]
        quiz = make_quiz(form, rng)
        stream = STREAMS[rng.choices(tuple(STREAMS), self.haystacks)[0]]
        depths = [rng.random() for _ in quiz.needles]
        frame_seed, hay_seed = rng.getrandbits(64), rng.getrandbits(64)

        def build(characters: int) -> str:
            hay = take(stream(random.Random(hay_seed)), characters)
            return framed(quiz.question, frame_seed, with_needles(quiz.needles, depths, hay))

        text = fit(build, request)
        prefix = quiz.prefix if rng.random() < self.prefixed else ""
        true_answer = f" {quiz.answer}." if prefix else f"{quiz.prefix} {quiz.answer}.".strip()
        made = user_prompt(f"needles/{form}", text, answer_prefix=prefix)
        return replace(made, response=true_answer if self.truthful else None)


def make_quiz(form: str, rng: random.Random) -> Quiz:
    """Random facts of one attribute and a question about them."""
    attribute = rng.choice(wordings("attributes"))
    kind = rng.choice(attribute["values"])
    names = {"noun": attribute["noun"], "plural": attribute["plural"]}
    keys = distinct(rng.choice(attribute["keys"]), 1 if form in ("single", "multi_value") else rng.randint(2, 5), rng)
    facts = [(key, draw(kind, rng)) for key in keys]
    if form == "multi_value":
        facts = [(keys[0], value) for value in distinct(kind, rng.randint(2, 4), rng)]
    needles = _stated(facts, names, rng)
    asked = {"key": keys[0], "keys": ", ".join(keys[:-1]) + " and " + keys[-1]}
    questions = {"multi_value": "many_values", "multi_query": "many_keys"}.get(form, "one_value")
    question = rng.choice(wordings(questions)).format(**names, **asked)
    single = form in ("single", "multi_key")
    prefix = rng.choice(wordings("prefixes")).format(**names, **asked) if single else ""
    answer = facts[0][1] if single else ", ".join(value for _, value in facts)
    return Quiz(needles, _capital(question), _capital(prefix), answer)


def _stated(facts: Pairs, names: dict[str, str], rng: random.Random) -> list[str]:
    """The facts as sentences: now all in one wording, now each in its own."""
    chosen = rng.sample(wordings("statements"), len(facts) if rng.random() < 0.5 else 1) * len(facts)
    return [
        _capital(wording.format(key=key, value=value, **names))
        for wording, (key, value) in zip(chosen, facts, strict=False)
    ]


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]


def with_needles(needles: list[str], depths: list[float], hay: list[str]) -> str:
    """The hay's text with each needle between two pieces, at its depth (0 to 1)."""
    places = sorted(zip((int(depth * (len(hay) + 1)) for depth in depths), needles, strict=True))
    text, start = "", 0
    for place, needle in places:
        text += "".join(hay[start:place])
        text += needle + ("\n" if text.endswith("\n") else " ")
        start = place
    return (text + "".join(hay[start:])).strip()


def _documentation(rng: random.Random) -> Iterator[str]:
    while True:
        documents = topic_documents if rng.random() < 0.4 else source_documents
        paragraphs = _paragraphs(rng.choice(documents("training")))
        start = rng.randrange(len(paragraphs)) if paragraphs else 0
        for paragraph in paragraphs[start : start + 12]:
            *first, last = sentences(paragraph)
            yield from (sentence + " " for sentence in first)
            yield last + "\n\n"


@lru_cache(maxsize=1024)
def _paragraphs(document: Document) -> tuple[str, ...]:
    """The prose of a topic, or of a source file's docstrings."""
    texts = [document.text] if is_topic(document) else [entry.text for entry in docstrings(document)]
    return tuple(paragraph for text in texts for paragraph in prose(text))


def _stories(rng: random.Random) -> Iterator[str]:
    while True:
        yield _story(rng) + rng.choice((" ", " ", "\n"))


def _story(rng: random.Random) -> str:
    return told("stories", rng, person=draw("person", rng))


def _noise(rng: random.Random) -> Iterator[str]:
    chosen = rng.sample(wordings("noise"), rng.randint(3, 6))
    while True:
        yield from (sentence + " " for sentence in chosen)


def _log(rng: random.Random) -> Iterator[str]:
    minute = rng.randrange(1000)
    while True:
        minute += rng.randint(1, 9)
        state = rng.choice(("started", "finished", "waiting", "retried", "skipped", "failed"))
        device = draw("device", rng)
        yield f"[{minute // 60:02}:{minute % 60:02}] {device}: task {rng.randrange(10000)} {state}\n"


def _code(rng: random.Random) -> Iterator[str]:
    modules = source_documents("training")
    while True:
        lines = rng.choice(modules).text.splitlines()
        start = rng.randrange(len(lines)) if lines else 0
        yield from (line + "\n" for line in lines[start : start + 60])


STREAMS: dict[str, Callable[[random.Random], Iterator[str]]] = {
    "documentation": _documentation,
    "stories": _stories,
    "noise": _noise,
    "log": _log,
    "code": _code,
}
"""Endless haystacks in small pieces; each piece ends in the space or line break that follows it."""

_KEY_KINDS = ("uuid", "pair", "person", "code", "device", "project", "order")
_VALUE_KINDS = ("uuid", "digits", "pair", "code", "mixed", "city", "date", "price", "person")

FORMATS: dict[str, Callable[[Pairs], str]] = {
    "json": lambda pairs: json.dumps(dict(pairs), indent=1),
    "json_line": lambda pairs: json.dumps(dict(pairs)),
    "json_rows": lambda pairs: "\n".join(json.dumps({"key": key, "value": value}) for key, value in pairs),
    "colon": lambda pairs: "\n".join(f"{key}: {value}" for key, value in pairs),
    "equals": lambda pairs: "\n".join(f'{key} = "{value}"' for key, value in pairs),
    "arrow": lambda pairs: "\n".join(f"{row}. {key} -> {value}" for row, (key, value) in enumerate(pairs, 1)),
    "csv": lambda pairs: "key,value\n" + "\n".join(f"{key},{value}" for key, value in pairs),
    "table": lambda pairs: "| key | value |\n|---|---|\n" + "\n".join(f"| {key} | {value} |" for key, value in pairs),
}


@dataclass(frozen=True)
class KeyValues:
    """Key-value lists of several formats, asked by key, by value, or by two keys.

    Attributes:
        by_value: Share of questions that name the value and ask for the key.
        two_keys: Share of questions that ask for two values.
    """

    by_value: Share = 0.15
    two_keys: Share = 0.15

    def sample(self, request: Request) -> Prompt:
        """Draw one prompt; see `Source`."""
        rng = request.rng
        form = rng.choice(sorted(FORMATS))
        pairs = _pairs(request)
        places = rng.random(), rng.random()
        weights = (max(0.0, 1 - self.by_value - self.two_keys), self.by_value, self.two_keys)
        wording = rng.choice(wordings(rng.choices(("value_of", "key_of", "values_of"), weights)[0]))
        fill = partial(_listed, pairs, FORMATS[form], wording, places, rng.getrandbits(64))
        return user_prompt(f"key_values/{form}", fit(fill, request))


def _pairs(request: Request) -> Pairs:
    """As many pairs as a prompt of the wanted length can hold at most."""
    count = max(3, request.tokens // 4)
    keys = distinct(request.rng.choice(_KEY_KINDS), count, request.rng)
    kind = request.rng.choice(_VALUE_KINDS)
    return [(key, draw(kind, request.rng)) for key in keys]


def _listed(
    pairs: Pairs, form: Callable[[Pairs], str], wording: str, places: tuple[float, float], seed: int, characters: int
) -> str:
    overhead = len(form(pairs[:2])) / 2
    shown = pairs[: max(3, int(characters / overhead))]
    asked, other = (shown[int(place * len(shown))] for place in places)
    question = wording.format(key=asked[0], value=asked[1], other=other[0])
    return framed(question, seed, form(random.Random(seed).sample(shown, len(shown))))


@dataclass(frozen=True)
class Everyday:
    """Profiles of people, group chats and diaries, each with a question or a task."""

    def sample(self, request: Request) -> Prompt:
        """Draw one prompt; see `Source`."""
        rng = request.rng
        kind = rng.choice(sorted(_EVERYDAY))
        wording, place, seed = rng.choice(wordings(f"about_{kind}")), rng.random(), rng.getrandbits(64)

        def build(characters: int) -> str:
            stream = _EVERYDAY[kind]
            lines = take(stream(random.Random(seed)), characters) or [next(stream(random.Random(seed)))]
            name = lines[int(place * len(lines))].split(":")[0]
            return framed(wording.format(name=name), seed, "".join(lines).strip())

        return user_prompt(f"everyday/{kind}", fit(build, request))


def _profiles(rng: random.Random) -> Iterator[str]:
    (template,) = wordings("profiles")
    while True:
        yield filled(template, rng) + "\n"


def _chat(rng: random.Random) -> Iterator[str]:
    speakers = rng.sample(words("first_names"), rng.randint(2, 4))
    while True:
        speaker, other = rng.choice(speakers), rng.choice(speakers)
        fixed = {"day": draw("day", rng), "place": draw("spot", rng), "thing": draw("word", rng)}
        yield f"{speaker}: {told('messages', rng, other=other, **fixed)}\n"


def _diary(rng: random.Random) -> Iterator[str]:
    months = words("month")
    for month in range(10**6):
        entry = " ".join(_story(rng) for _ in range(rng.randint(2, 4)))
        yield f"{rng.randint(1, 28)} {months[month % 12]} {1990 + month // 12}: {entry}\n"


_EVERYDAY = {"profiles": _profiles, "chat": _chat, "diary": _diary}
