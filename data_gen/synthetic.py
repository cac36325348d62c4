"""Synthetic prompts whose answer is in a long text: needles in a haystack, key-value lists, everyday texts.

Other prompts need several parts of the text, or an earlier turn: moved objects, second questions.
"""

import json
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Annotated

from pydantic import Field, FiniteFloat

from keepsight.corpus import Document, docstrings, is_topic, prose, sentences, source_documents, topic_documents
from keepsight.data_gen.prompts import Prompt, Request, Share, fit, fitted, user_prompt
from keepsight.data_gen.words import distinct, draw, filled, told, wordings, words
from keepsight.errors import UserError

Weights = tuple[Annotated[FiniteFloat, Field(ge=0)], ...]
Pairs = list[tuple[str, str]]

FORMS = ("single", "multi_key", "multi_value", "multi_query")


def framed(question: str, seed: int, text: str) -> str:
    """The text with the question, in one of many wordings."""
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
        prefixed: Share of prompts that contain the beginning of the answer.
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
    """The facts as sentences: at random all in one wording, or each in its own."""
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
    """As many pairs as a prompt of the wanted length can contain at most."""
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


@dataclass(frozen=True)
class StateTracking:
    """People carry things from place to place; where is one of them in the end, or after each move?

    Attributes:
        each_move: Share of questions about every place where the thing was; the others ask for the last one.
        truthful: Use the true places as the response; see `Needles`.
    """

    each_move: Share = 0.5
    truthful: bool = False

    def sample(self, request: Request) -> Prompt:
        """Draw one prompt; see `Source`."""
        rng = request.rng
        form = "each_move" if rng.random() < self.each_move else "last_place"
        seed, choice, wording = rng.getrandbits(64), rng.random(), rng.choice(wordings(form))

        def make(characters: int) -> Prompt:
            told = _Journeys(random.Random(seed))
            text = "".join(take(told.sentences(), characters)).strip()
            moved = told.moved(text)
            asked = [thing for thing, places in moved.items() if len(places) > 1] or [*moved]
            thing = asked[int(choice * len(asked))]
            places = moved[thing]
            answer = ", then ".join(places) if form == "each_move" else places[-1]
            prompt = user_prompt(f"state_tracking/{form}", framed(wording.format(thing=thing), seed, text))
            return replace(prompt, response=f"{answer[:1].upper()}{answer[1:]}." if self.truthful else None)

        return fitted(make, request)


class _Journeys:
    """An endless story of people who walk, pick things up and put them down."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        count = rng.randint(2, 5)
        self.places = distinct("place", rng.randint(3, 7), rng)
        self.people = {name: rng.choice(self.places) for name in distinct("first_names", count, rng)}
        self.things = {name: [rng.choice(self.places)] for name in distinct("pair", rng.randint(2, 5), rng)}
        self._carried: dict[str, str] = {}  # who has a thing
        self._ends: list[tuple[int, str, str]] = []  # length of the text with a sentence, and what it moved where
        self._length = 0

    def moved(self, text: str) -> dict[str, list[str]]:
        """The places of each thing, in order, up to the end of a text that is the story's beginning."""
        places = {thing: list(first) for thing, first in self.things.items()}
        for end, thing, place in self._ends:
            if end <= len(text) + 1:  # the space after the last sentence was cut off
                places[thing].append(place)
        return places

    def sentences(self) -> Iterator[str]:
        """The story's sentences, each with the space after it."""
        for thing, (place,) in self.things.items():
            yield self._said(f"The {thing} is in {place}. ")
        for person, place in self.people.items():
            yield self._said(f"{person} is in {place}. ")
        while True:
            yield self._next(self._rng.choice([*self.people, *self._carried.values()]))

    def _said(self, sentence: str) -> str:
        self._length += len(sentence)
        return sentence

    def _next(self, person: str) -> str:
        rng, place = self._rng, self.people[person]
        own = [thing for thing, carrier in self._carried.items() if carrier == person]
        here = [thing for thing, last in self._last().items() if last == place and thing not in self._carried]
        if here and not own and rng.random() < 0.8:
            self._carried[rng.choice(here)] = person
            thing = [*self._carried][-1]
            return self._said(rng.choice(wordings("takes")).format(person=person, thing=thing) + " ")
        if own and rng.random() < 0.25:
            del self._carried[own[0]]
            return self._said(rng.choice(wordings("puts_down")).format(person=person, thing=own[0]) + " ")
        self.people[person] = rng.choice([each for each in self.places if each != place])
        walk = rng.choice(wordings("walks")).format(person=person, place=self.people[person])
        sentence = self._said(walk + " ")
        self._ends += [(self._length, thing, self.people[person]) for thing in own]
        return sentence

    def _last(self) -> dict[str, str]:
        last = {thing: first[0] for thing, first in self.things.items()}
        return last | {thing: place for _, thing, place in self._ends}


@dataclass(frozen=True)
class SecondTurn:
    """A text with a question and its answer, and in a further turn another question.

    Attributes:
        about_all: Share of second questions about the whole text, which the model answers; the others ask for a second
            hidden fact, whose true value is the response.
    """

    about_all: Share = 0.5

    def sample(self, request: Request) -> Prompt:
        """Draw one prompt; see `Source`."""
        rng = request.rng
        first, second = make_quiz("single", rng), make_quiz("single", rng)
        stream = STREAMS[rng.choice(tuple(STREAMS) if rng.random() < 0.5 else ("documentation", "stories"))]
        depths, seeds = [rng.random(), rng.random()], [rng.getrandbits(64), rng.getrandbits(64)]
        whole = rng.choice(wordings("whole_passage")) if rng.random() < self.about_all else None
        answer = f"{first.prefix} {first.answer}." if rng.random() < 0.5 else f"{first.answer}."

        def make(characters: int) -> Prompt:
            hay = take(stream(random.Random(seeds[0])), characters)
            text = with_needles([*first.needles, *second.needles], depths, hay)
            question, reply = framed(first.question, seeds[1], text), {"role": "assistant", "content": answer}
            opened = ({"role": "user", "content": question}, reply)
            if whole is not None:
                return Prompt("second_turn/whole", (*opened, {"role": "user", "content": whole}))
            asked = {"role": "user", "content": second.question}
            return Prompt("second_turn/fact", (*opened, asked), response=f"{second.prefix} {second.answer}.".strip())

        return fitted(make, request)
