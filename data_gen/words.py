"""Words and wordings of the training prompts, read from wordings.yaml, and keys and values drawn from them."""

import random
import re
import string
import uuid
from collections.abc import Callable
from functools import lru_cache
from typing import Any

from keepsight.files import package_yaml


@lru_cache(maxsize=1)
def all_wordings() -> dict[str, Any]:
    """The content of wordings.yaml."""
    return package_yaml("keepsight.data_gen", "wordings")


def wordings(name: str) -> list[Any]:
    """A list of wordings.yaml, such as `one_value`."""
    return list(all_wordings()[name])


def word_list(kind: str) -> list[str]:
    """The words of a kind in wordings.yaml, such as `city`."""
    return list(all_wordings()["words"][kind])


def draw(kind: str, rng: random.Random) -> str:
    """A random word, key or value of a kind: one of `_MAKERS`, or a list of words of wordings.yaml."""
    if kind in _MAKERS:
        return _MAKERS[kind](rng)
    return rng.choice(word_list(kind))


def distinct(kind: str, count: int, rng: random.Random) -> list[str]:
    """`count` different strings of a kind; a number is appended where the kind's words run out."""
    texts: dict[str, None] = {}
    for attempt in range(20 * count):
        text = draw(kind, rng)
        if attempt >= 10 * count:
            text = f"{text} {attempt}"
        texts[text] = None
        if len(texts) == count:
            break
    return list(texts)


def fill_template(template: str, rng: random.Random, **values: str) -> str:
    """A template in which each `{kind}` becomes its value in `values`, or else a random word of that kind."""

    def word(match: re.Match[str]) -> str:
        kind = match[1]
        return values.get(kind) or draw(kind, rng)

    return re.sub(r"\{(\w+)\}", word, template)


def draw_sentence(name: str, rng: random.Random, **values: str) -> str:
    """One of a list's templates, filled; all are filled before one is drawn."""
    return rng.choice([fill_template(template, rng, **values) for template in wordings(name)])


def _digits(rng: random.Random) -> str:
    size = rng.choice((3, 4, 4, 5, 6, 6, 7, 7, 7, 8, 9, 10))
    return str(rng.randrange(10 ** (size - 1), 10**size))


def _code(rng: random.Random) -> str:
    letters = "".join(rng.choices(string.ascii_uppercase, k=rng.randint(2, 3)))
    return f"{letters}-{rng.randrange(100, 100000)}"


_MAKERS: dict[str, Callable[[random.Random], str]] = {
    "person": lambda rng: f"{draw('first_names', rng)} {draw('last_names', rng)}",
    "place": lambda rng: f"the {draw('adjectives', rng)} {draw('spot', rng)}",
    "project": lambda rng: f"Project {draw('adjectives', rng).title()} {draw('word', rng).title()}",
    "device": lambda rng: f"{rng.choice(word_list('device'))} {rng.choice(string.ascii_uppercase)}{rng.randint(1, 99)}",
    "order": lambda rng: f"order {rng.randrange(1000, 1000000)}",
    "pair": lambda rng: f"{draw('adjectives', rng)}-{draw('word', rng)}",
    "digits": _digits,
    "code": _code,
    "mixed": lambda rng: "".join(rng.choices(string.ascii_letters + string.digits, k=rng.randint(6, 12))),
    "uuid": lambda rng: str(uuid.UUID(int=rng.getrandbits(128), version=4)),
    "date": lambda rng: f"{rng.randint(1, 28)} {draw('month', rng)} {rng.randint(1950, 2030)}",
    "time": lambda rng: f"{rng.randint(0, 23):02}:{rng.choice((0, 5, 10, 15, 20, 30, 40, 45, 50)):02}",
    "price": lambda rng: f"${rng.randrange(1, 9000)}.{rng.randrange(100):02}",
}
"""Functions that draw the keys and values that are not plain words."""
