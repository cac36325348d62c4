"""Invented prompts whose answer needs several places of a text, or an earlier turn: moving things, second questions."""

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from keepsight.data_gen.prompts import Prompt, Request, Share, fit, user_prompt
from keepsight.data_gen.synthetic import STREAMS, framed, make_quiz, take, with_needles
from keepsight.data_gen.words import distinct, wordings


def fitted(make: Callable[[int], Prompt], request: Request) -> Prompt:
    """The fullest prompt of at most `request.tokens` tokens, all turns counted, that `make` makes; see `fit`."""
    made: dict[str, Prompt] = {}

    def build(characters: int) -> str:
        prompt = make(characters)
        text = "\n".join(turn["content"] for turn in prompt.messages)
        made[text] = prompt
        return text

    return made[fit(build, request)]


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
    """A story of people who walk, pick things up and put them down; it goes on for ever.

    Args:
        rng: Source of all randomness.
    """

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
        """Where each thing was, in order, by the end of a text that begins as the story does."""
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
