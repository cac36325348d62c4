"""Everyday texts, made up: people, conversations and diaries, with the questions that one asks about such texts."""

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

from keepsight.data_gen.haystacks import story_sentence, take
from keepsight.data_gen.prompts import Prompt, Request, fit, user_prompt
from keepsight.data_gen.retrieval import framed
from keepsight.data_gen.words import (
    CITIES,
    DAYS,
    FIRST_NAMES,
    FOODS,
    HOBBIES,
    JOBS,
    MAKERS,
    MONTHS,
    NOUNS,
    PETS,
    PLACES,
)

ABOUT_PERSON = (
    "What does {name} do for a living?",
    "Where does {name} live?",
    "What does {name} like to do?",
    "Tell me everything about {name}.",
    "Write a short introduction of {name}.",
    "What do we know about {name}?",
    "Does {name} have a pet?",
    "Write a birthday card for {name} that mentions a detail of the text.",
)
ABOUT_CHAT = (
    "Summarize this conversation.",
    "What did they decide?",
    "Write a short summary of the conversation in the third person.",
    "List who has to do what.",
    "Which dates are mentioned, and what for?",
    "What did {name} say?",
    "What does {name} want?",
    "Write the next message of {name}.",
    "Is anyone unhappy? Explain.",
    "Write an email that tells the others what was agreed.",
)
ABOUT_DIARY = (
    "What happened on {name}?",
    "Summarize the year in a few sentences.",
    "List the places in the order in which they appear.",
    "Which entry is the most important one? Explain your choice.",
    "Write one more entry in the same style.",
    "Tell this as a short story.",
    "Which people are mentioned?",
)


@dataclass(frozen=True)
class Everyday:
    """Profiles of people, group chats and diaries, each with a question or a task."""

    def sample(self, request: Request) -> Prompt:
        """Draw one prompt; see `Source`."""
        rng = request.rng
        kind = rng.choice(sorted(TEXTS))
        stream, wordings = TEXTS[kind]
        build = partial(_fill, stream, rng.choice(wordings), rng.random(), rng.getrandbits(64))
        return user_prompt(f"everyday/{kind}", fit(build, request))


def _fill(
    stream: Callable[[random.Random], Iterator[str]], wording: str, place: float, seed: int, characters: int
) -> str:
    lines = take(stream(random.Random(seed)), characters) or [next(stream(random.Random(seed)))]
    name = lines[int(place * len(lines))].split(":")[0]
    return framed(wording.format(name=name), seed, "".join(lines).strip())


def _profiles(rng: random.Random) -> Iterator[str]:
    while True:
        name = MAKERS["person"](rng)
        yield (
            f"{name}: a {rng.choice(JOBS)} from {rng.choice(CITIES)}, now living in {rng.choice(CITIES)} with a "
            f"{rng.choice(PETS)}. Born on {MAKERS['date'](rng)}; spends the weekends with {rng.choice(HOBBIES)} and "
            f"would eat {rng.choice(FOODS)} every day.\n"
        )


def _chat(rng: random.Random) -> Iterator[str]:
    speakers = rng.sample(FIRST_NAMES, rng.randint(2, 4))
    while True:
        yield f"{rng.choice(speakers)}: {_message(rng, rng.choice(speakers))}\n"


def _message(rng: random.Random, other: str) -> str:
    day, place, thing = rng.choice(DAYS), rng.choice(PLACES), rng.choice(NOUNS)
    return rng.choice(
        (
            f"Can we meet at the {place} on {day}?",
            f"{day} does not work for me, I have to be in {rng.choice(CITIES)}.",
            f"{other}, did you bring the {thing} back?",
            f"I will pay for the {thing}, it was {MAKERS['price'](rng)}.",
            f"Fine with me. Let us say {MAKERS['time'](rng)} then.",
            f"I can cook {rng.choice(FOODS)} if somebody takes care of the drinks.",
            f"Who has the key to the {place}? I thought {other} had it.",
            f"Has anyone tried {rng.choice(HOBBIES)}? I would love to start.",
            "Sorry, I was on the phone. What did I miss?",
            f"We should ask {MAKERS['person'](rng)}, who knows more about it.",
            f"No, we moved that to {rng.choice(MONTHS)} because of the {thing}.",
            "Sounds good!",
            f"I do not agree. The {place} is too far away for {other}.",
        )
    )


def _diary(rng: random.Random) -> Iterator[str]:
    for month in range(10**6):
        entry = " ".join(story_sentence(rng) for _ in range(rng.randint(2, 4)))
        yield f"{rng.randint(1, 28)} {MONTHS[month % 12]} {1990 + month // 12}: {entry}\n"


TEXTS: dict[str, tuple[Callable[[random.Random], Iterator[str]], tuple[str, ...]]] = {
    "profiles": (_profiles, ABOUT_PERSON),
    "chat": (_chat, ABOUT_CHAT),
    "diary": (_diary, ABOUT_DIARY),
}
