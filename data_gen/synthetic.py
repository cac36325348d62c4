"""Synthetic prompts whose answer is in a long text: needles in a haystack, key-value lists, everyday texts.

Other prompts need several parts of the text, or an earlier turn: moved objects, second questions.
"""

import json
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Annotated, NamedTuple

from pydantic import Field, FiniteFloat

from keepsight.corpus import Document, docstrings, is_topic, prose, sentences, source_documents, topic_documents
from keepsight.data_gen.prompts import Prompt, Request, Share, fit_prompt, fit_text, user_prompt
from keepsight.data_gen.words import distinct, draw, draw_sentence, fill_template, word_list, wordings
from keepsight.errors import UserError

Weights = tuple[Annotated[FiniteFloat, Field(ge=0)], ...]
KeyValueList = list[tuple[str, str]]

FORMS = ("single", "multi_key", "multi_value", "multi_query")


def frame_question(question: str, seed: int, text: str) -> str:
    """The text with the question, in one of many wordings."""
    rng = random.Random(seed)
    frame = rng.choice(wordings("frames"))
    introduction = rng.choice(wordings("introductions"))
    style = rng.choice(wordings("answer_styles"))
    framed = str(frame.format(text=text, question=question, intro=introduction, style=style))
    return framed.replace(" \n", "\n").strip()


def take_pieces(stream: Iterator[str], characters: int) -> list[str]:
    """Pieces from the stream, as many as have at most `characters` characters in total."""
    pieces: list[str] = []
    for piece in stream:
        characters -= len(piece)
        if characters < 0:
            break
        pieces.append(piece)
    return pieces


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
        _check_weights("forms", self.forms, FORMS)
        _check_weights("haystacks", self.haystacks, tuple(HAYSTACKS))

    def sample(self, request: Request) -> Prompt:
        """Draw one prompt; see `Source`."""
        rng = request.rng
        form = rng.choices(FORMS, self.forms)[0]
        quiz = make_quiz(form, rng)
        haystack = rng.choices(tuple(HAYSTACKS), self.haystacks)[0]
        depths = [rng.random() for _ in quiz.needles]
        frame_seed = rng.getrandbits(64)
        haystack_seed = rng.getrandbits(64)

        def build(characters: int) -> str:
            stream = HAYSTACKS[haystack](random.Random(haystack_seed))
            text = hide_needles(quiz.needles, depths, take_pieces(stream, characters))
            return frame_question(quiz.question, frame_seed, text)

        text = fit_text(build, request)
        prefix = quiz.prefix if rng.random() < self.prefixed else ""
        prompt = user_prompt(f"needles/{form}", text, answer_prefix=prefix)
        if not self.truthful:
            return prompt
        if prefix:
            return replace(prompt, response=f" {quiz.answer}.")
        return replace(prompt, response=f"{quiz.prefix} {quiz.answer}.".strip())


def _check_weights(option: str, weights: Weights, names: tuple[str, ...]) -> None:
    if len(weights) != len(names) or sum(weights) <= 0:
        raise UserError(
            f"{option} needs {len(names)} weights ({', '.join(names)}), got {list(weights)}", field=option, code="range"
        )


def make_quiz(form: str, rng: random.Random) -> Quiz:
    """Random facts of one attribute and a question about them."""
    attribute = rng.choice(wordings("attributes"))
    value_kind = rng.choice(attribute["values"])
    key_kind = rng.choice(attribute["keys"])
    key_count = 1 if form in ("single", "multi_value") else rng.randint(2, 5)
    keys = distinct(key_kind, key_count, rng)
    facts = [(key, draw(value_kind, rng)) for key in keys]
    if form == "multi_value":
        values = distinct(value_kind, rng.randint(2, 4), rng)
        facts = [(keys[0], value) for value in values]

    attribute_names = {"noun": attribute["noun"], "plural": attribute["plural"]}
    needles = _state_facts(facts, attribute_names, rng)
    key_names = {"key": keys[0], "keys": ", ".join(keys[:-1]) + " and " + keys[-1]}

    if form == "multi_value":
        question_list = "many_values"
    elif form == "multi_query":
        question_list = "many_keys"
    else:
        question_list = "one_value"
    question = rng.choice(wordings(question_list)).format(**attribute_names, **key_names)

    if question_list == "one_value":
        prefix = rng.choice(wordings("prefixes")).format(**attribute_names, **key_names)
        answer = facts[0][1]
    else:
        prefix = ""
        answer = ", ".join(value for _, value in facts)
    return Quiz(needles, _capitalize(question), _capitalize(prefix), answer)


def _state_facts(facts: KeyValueList, attribute_names: dict[str, str], rng: random.Random) -> list[str]:
    """The facts as sentences: at random all in one wording, or each in its own."""
    wording_count = len(facts) if rng.random() < 0.5 else 1
    statements = rng.sample(wordings("statements"), wording_count)
    needles = []
    for number, (key, value) in enumerate(facts):
        statement = statements[number % wording_count]
        needles.append(_capitalize(statement.format(key=key, value=value, **attribute_names)))
    return needles


def _capitalize(text: str) -> str:
    return text[:1].upper() + text[1:]


def hide_needles(needles: list[str], depths: list[float], hay: list[str]) -> str:
    """The hay's text with each needle between two pieces, at its depth (0 to 1)."""
    positions = [int(depth * (len(hay) + 1)) for depth in depths]
    text = ""
    start = 0
    for position, needle in sorted(zip(positions, needles, strict=True)):
        text += "".join(hay[start:position])
        text += needle + ("\n" if text.endswith("\n") else " ")
        start = position
    return (text + "".join(hay[start:])).strip()


def _documentation(rng: random.Random) -> Iterator[str]:
    while True:
        documents = topic_documents if rng.random() < 0.4 else source_documents
        paragraphs = _paragraphs(rng.choice(documents("training")))
        start = rng.randrange(len(paragraphs)) if paragraphs else 0
        for paragraph in paragraphs[start : start + 12]:
            *sentences_before, last_sentence = sentences(paragraph)
            for sentence in sentences_before:
                yield sentence + " "
            yield last_sentence + "\n\n"


@lru_cache(maxsize=1024)
def _paragraphs(document: Document) -> tuple[str, ...]:
    """The prose of a topic, or of a source file's docstrings."""
    if is_topic(document):
        return tuple(prose(document.text))
    paragraphs: list[str] = []
    for entry in docstrings(document):
        paragraphs += prose(entry.text)
    return tuple(paragraphs)


def _stories(rng: random.Random) -> Iterator[str]:
    while True:
        yield _story(rng) + rng.choice((" ", " ", "\n"))


def _story(rng: random.Random) -> str:
    return draw_sentence("stories", rng, person=draw("person", rng))


def _noise(rng: random.Random) -> Iterator[str]:
    noise_sentences = rng.sample(wordings("noise"), rng.randint(3, 6))
    while True:
        for sentence in noise_sentences:
            yield sentence + " "


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
        for line in lines[start : start + 60]:
            yield line + "\n"


HAYSTACKS: dict[str, Callable[[random.Random], Iterator[str]]] = {
    "documentation": _documentation,
    "stories": _stories,
    "noise": _noise,
    "log": _log,
    "code": _code,
}
"""Endless haystacks in small pieces; each piece ends in the space or line break that follows it."""

_KEY_KINDS = ("uuid", "pair", "person", "code", "device", "project", "order")
_VALUE_KINDS = ("uuid", "digits", "pair", "code", "mixed", "city", "date", "price", "person")


def _as_json(pairs: KeyValueList) -> str:
    return json.dumps(dict(pairs), indent=1)


def _as_json_line(pairs: KeyValueList) -> str:
    return json.dumps(dict(pairs))


def _as_json_rows(pairs: KeyValueList) -> str:
    return "\n".join(json.dumps({"key": key, "value": value}) for key, value in pairs)


@dataclass(frozen=True)
class LineFormat:
    """Writes a key and its value on each line, with `{row}` (from 1), `{key}` and `{value}` filled in."""

    line: str
    header: str = ""

    def __call__(self, pairs: KeyValueList) -> str:
        """The list as text."""
        lines = []
        for row, (key, value) in enumerate(pairs, 1):
            lines.append(self.line.format(row=row, key=key, value=value))
        return self.header + "\n".join(lines)


FORMATS: dict[str, Callable[[KeyValueList], str]] = {
    "json": _as_json,
    "json_line": _as_json_line,
    "json_rows": _as_json_rows,
    "colon": LineFormat("{key}: {value}"),
    "equals": LineFormat('{key} = "{value}"'),
    "arrow": LineFormat("{row}. {key} -> {value}"),
    "csv": LineFormat("{key},{value}", header="key,value\n"),
    "table": LineFormat("| {key} | {value} |", header="| key | value |\n|---|---|\n"),
}
"""Functions that write keys and values as text, by the name of the format."""


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
        most_pairs = max(3, request.tokens // 4)
        keys = distinct(rng.choice(_KEY_KINDS), most_pairs, rng)
        value_kind = rng.choice(_VALUE_KINDS)
        pairs = [(key, draw(value_kind, rng)) for key in keys]
        asked_position = rng.random()
        other_position = rng.random()
        by_key = max(0.0, 1 - self.by_value - self.two_keys)
        weights = (by_key, self.by_value, self.two_keys)
        question_list = rng.choices(("value_of", "key_of", "values_of"), weights)[0]
        wording = rng.choice(wordings(question_list))
        seed = rng.getrandbits(64)
        asked_list = _AskedList(pairs, FORMATS[form], wording, asked_position, other_position, seed)
        return user_prompt(f"key_values/{form}", fit_text(asked_list.text, request))


@dataclass(frozen=True)
class _AskedList:
    """Keys and values in a format, and a question about those at two positions (0 to 1)."""

    pairs: KeyValueList
    write: Callable[[KeyValueList], str]
    wording: str
    asked_position: float
    other_position: float
    seed: int

    def text(self, characters: int) -> str:
        """The first pairs, about `characters` characters of them, shuffled, with the question."""
        characters_per_pair = len(self.write(self.pairs[:2])) / 2
        shown = self.pairs[: max(3, int(characters / characters_per_pair))]
        key, value = shown[int(self.asked_position * len(shown))]
        other_key, _ = shown[int(self.other_position * len(shown))]
        question = self.wording.format(key=key, value=value, other=other_key)
        shuffled = random.Random(self.seed).sample(shown, len(shown))
        return frame_question(question, self.seed, self.write(shuffled))


@dataclass(frozen=True)
class Everyday:
    """Profiles of people, group chats and diaries, each with a question or a task."""

    def sample(self, request: Request) -> Prompt:
        """Draw one prompt; see `Source`."""
        rng = request.rng
        kind = rng.choice(sorted(_EVERYDAY))
        stream = _EVERYDAY[kind]
        wording = rng.choice(wordings(f"about_{kind}"))
        asked_position = rng.random()
        seed = rng.getrandbits(64)

        def build(characters: int) -> str:
            lines = take_pieces(stream(random.Random(seed)), characters)
            if not lines:
                lines = [next(stream(random.Random(seed)))]
            asked_line = lines[int(asked_position * len(lines))]
            name = asked_line.split(":")[0]
            return frame_question(wording.format(name=name), seed, "".join(lines).strip())

        return user_prompt(f"everyday/{kind}", fit_text(build, request))


def _profiles(rng: random.Random) -> Iterator[str]:
    (template,) = wordings("profiles")
    while True:
        yield fill_template(template, rng) + "\n"


def _chat(rng: random.Random) -> Iterator[str]:
    speakers = rng.sample(word_list("first_names"), rng.randint(2, 4))
    while True:
        speaker = rng.choice(speakers)
        addressee = rng.choice(speakers)
        day = draw("day", rng)
        spot = draw("spot", rng)
        word = draw("word", rng)
        message = draw_sentence("messages", rng, other=addressee, day=day, place=spot, thing=word)
        yield f"{speaker}: {message}\n"


def _diary(rng: random.Random) -> Iterator[str]:
    months = word_list("month")
    for month in range(10**6):
        story_count = rng.randint(2, 4)
        entry = " ".join(_story(rng) for _ in range(story_count))
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
        seed = rng.getrandbits(64)
        asked_position = rng.random()
        wording = rng.choice(wordings(form))

        def make(characters: int) -> Prompt:
            journeys = _Journeys(random.Random(seed))
            text = "".join(take_pieces(journeys.sentences(), characters)).strip()
            item_locations = journeys.item_locations(text)
            moved_items = [item for item, locations in item_locations.items() if len(locations) > 1]
            items = moved_items or list(item_locations)
            item = items[int(asked_position * len(items))]
            prompt = user_prompt(f"state_tracking/{form}", frame_question(wording.format(thing=item), seed, text))
            if not self.truthful:
                return prompt
            locations = item_locations[item]
            answer = ", then ".join(locations) if form == "each_move" else locations[-1]
            return replace(prompt, response=f"{_capitalize(answer)}.")

        return fit_prompt(make, request)


class _Move(NamedTuple):
    """A move of an item to a location; `length` characters has the text up to the end of the sentence that tells it."""

    length: int
    item: str
    location: str


class _Journeys:
    """An endless story of people who walk, pick things up and put them down."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        person_count = rng.randint(2, 5)
        self.locations = distinct("place", rng.randint(3, 7), rng)
        self.people: dict[str, str] = {}  # where a person is
        for person in distinct("first_names", person_count, rng):
            self.people[person] = rng.choice(self.locations)
        self.first_locations: dict[str, str] = {}  # of the items
        for item in distinct("pair", rng.randint(2, 5), rng):
            self.first_locations[item] = rng.choice(self.locations)
        self._carriers: dict[str, str] = {}  # who has an item
        self._moves: list[_Move] = []
        self._length = 0

    def item_locations(self, text: str) -> dict[str, list[str]]:
        """The locations of each item, in order, up to the end of a text that is the story's beginning."""
        locations = {item: [first_location] for item, first_location in self.first_locations.items()}
        for move in self._moves:
            if move.length <= len(text) + 1:  # the space after the last sentence was cut off
                locations[move.item].append(move.location)
        return locations

    def sentences(self) -> Iterator[str]:
        """The story's sentences, each with the space after it."""
        for item, location in self.first_locations.items():
            yield self._count(f"The {item} is in {location}. ")
        for person, location in self.people.items():
            yield self._count(f"{person} is in {location}. ")
        while True:
            person = self._rng.choice([*self.people, *self._carriers.values()])
            yield self._next_sentence(person)

    def _count(self, sentence: str) -> str:
        """The sentence, after its length was added to the story's."""
        self._length += len(sentence)
        return sentence

    def _next_sentence(self, person: str) -> str:
        """Let a person take an item, put one down or walk to another location; the sentence that tells it."""
        rng = self._rng
        location = self.people[person]
        carried = [item for item, carrier in self._carriers.items() if carrier == person]
        within_reach = self._items_lying_at(location)

        if within_reach and not carried and rng.random() < 0.8:
            item = rng.choice(within_reach)
            self._carriers[item] = person
            return self._count(rng.choice(wordings("takes")).format(person=person, thing=item) + " ")

        if carried and rng.random() < 0.25:
            item = carried[0]
            del self._carriers[item]
            return self._count(rng.choice(wordings("puts_down")).format(person=person, thing=item) + " ")

        next_location = rng.choice([other for other in self.locations if other != location])
        self.people[person] = next_location
        sentence = self._count(rng.choice(wordings("walks")).format(person=person, place=next_location) + " ")
        for item in carried:
            self._moves.append(_Move(self._length, item, next_location))
        return sentence

    def _items_lying_at(self, location: str) -> list[str]:
        last_locations = dict(self.first_locations)
        for move in self._moves:
            last_locations[move.item] = move.location
        items = []
        for item, last_location in last_locations.items():
            if last_location == location and item not in self._carriers:
                items.append(item)
        return items


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
        first_quiz = make_quiz("single", rng)
        second_quiz = make_quiz("single", rng)
        haystacks = tuple(HAYSTACKS) if rng.random() < 0.5 else ("documentation", "stories")
        stream = HAYSTACKS[rng.choice(haystacks)]
        depths = [rng.random(), rng.random()]
        haystack_seed = rng.getrandbits(64)
        frame_seed = rng.getrandbits(64)
        is_about_all = rng.random() < self.about_all
        question_about_all = rng.choice(wordings("whole_passage")) if is_about_all else ""
        first_answer = f"{first_quiz.answer}."
        if rng.random() < 0.5:
            first_answer = f"{first_quiz.prefix} {first_quiz.answer}."

        def make(characters: int) -> Prompt:
            hay = take_pieces(stream(random.Random(haystack_seed)), characters)
            text = hide_needles([*first_quiz.needles, *second_quiz.needles], depths, hay)
            first_turn = {"role": "user", "content": frame_question(first_quiz.question, frame_seed, text)}
            answer_turn = {"role": "assistant", "content": first_answer}
            if is_about_all:
                last_turn = {"role": "user", "content": question_about_all}
                return Prompt("second_turn/whole", (first_turn, answer_turn, last_turn))
            last_turn = {"role": "user", "content": second_quiz.question}
            response = f"{second_quiz.prefix} {second_quiz.answer}.".strip()
            return Prompt("second_turn/fact", (first_turn, answer_turn, last_turn), response=response)

        return fit_prompt(make, request)
