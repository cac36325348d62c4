"""Haystacks for training needles: an endless stream of short pieces of text of each kind."""

import random
from collections.abc import Callable, Iterator
from functools import lru_cache

from keepsight.corpus import Document, docstrings, is_topic, prose, sentences, source_documents, topic_documents
from keepsight.data_gen import words

NOISE = (
    "The train was late again this morning.",
    "A light rain fell over the roofs.",
    "Nobody had watered the plants for a week.",
    "The bakery on the corner smelled of bread.",
    "Two dogs were chasing each other in the park.",
    "Coffee tastes better when someone else makes it.",
    "The meeting ended without any decision.",
    "Leaves gathered at the foot of the stairs.",
    "A radio was playing in the next room.",
    "The bus turned left at the old cinema.",
    "They painted the fence for the third time.",
    "Clouds moved slowly towards the sea.",
)


def hay_pieces(kind: str, rng: random.Random) -> Iterator[str]:
    """An endless stream of pieces of a haystack; each ends in the space or line break that follows it."""
    return STREAMS[kind](rng)


def take(stream: Iterator[str], characters: int) -> list[str]:
    """Pieces from the stream, as many as have at most `characters` characters together."""
    taken: list[str] = []
    left = characters
    for piece in stream:
        left -= len(piece)
        if left < 0:
            break
        taken.append(piece)
    return taken


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
        paragraphs = _paragraphs(rng.choice(_DOCUMENTS[rng.random() < 0.4]("training")))
        start = rng.randrange(len(paragraphs)) if paragraphs else 0
        for paragraph in paragraphs[start : start + 12]:
            *first, last = sentences(paragraph)
            yield from (sentence + " " for sentence in first)
            yield last + "\n\n"


_DOCUMENTS = (source_documents, topic_documents)


@lru_cache(maxsize=1024)
def _paragraphs(document: Document) -> tuple[str, ...]:
    """The prose of a topic, or of a source file's docstrings."""
    texts = [document.text] if is_topic(document) else [entry.text for entry in docstrings(document)]
    return tuple(paragraph for text in texts for paragraph in prose(text))


def _noise(rng: random.Random) -> Iterator[str]:
    chosen = rng.sample(NOISE, rng.randint(3, 6))
    while True:
        yield from (sentence + " " for sentence in chosen)


def _stories(rng: random.Random) -> Iterator[str]:
    while True:
        yield story_sentence(rng) + rng.choice((" ", " ", "\n"))


def story_sentence(rng: random.Random) -> str:
    """A made-up sentence about a made-up person."""
    person = words.MAKERS["person"](rng)
    return rng.choice(
        (
            f"{person} works as a {rng.choice(words.JOBS)} in {rng.choice(words.CITIES)}.",
            f"On {rng.choice(words.DAYS)} {person} bought a {rng.choice(words.COLORS)} {rng.choice(words.NOUNS)}.",
            f"{person} likes {rng.choice(words.HOBBIES)} and cooks {rng.choice(words.FOODS)} for friends.",
            f"In {rng.choice(words.MONTHS)} {person} moved from {rng.choice(words.CITIES)} "
            f"to {rng.choice(words.CITIES)} together with a {rng.choice(words.PETS)}.",
            f"Nobody knew why {person} left the {rng.choice(words.NOUNS)} beside the {rng.choice(words.PLACES)}.",
            f"{person} waited at the {rng.choice(words.PLACES)} until {words.MAKERS['time'](rng)}.",
        )
    )


def _code(rng: random.Random) -> Iterator[str]:
    modules = source_documents("training")
    while True:
        lines = rng.choice(modules).text.splitlines()
        start = rng.randrange(len(lines)) if lines else 0
        yield from (line + "\n" for line in lines[start : start + 60])


def _log(rng: random.Random) -> Iterator[str]:
    minute = rng.randrange(1000)
    while True:
        minute += rng.randint(1, 9)
        state = rng.choice(("started", "finished", "waiting", "retried", "skipped", "failed"))
        device = words.MAKERS["device"](rng)
        yield f"[{minute // 60:02}:{minute % 60:02}] {device}: task {rng.randrange(10000)} {state}\n"


STREAMS: dict[str, Callable[[random.Random], Iterator[str]]] = {
    "documentation": _documentation,
    "noise": _noise,
    "stories": _stories,
    "code": _code,
    "log": _log,
}
