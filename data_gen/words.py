"""Words and wordings of the training prompts, read from wordings.yaml, and keys and values drawn from them."""

import random
import re
import string
import uuid
from collections.abc import Callable
from functools import lru_cache
from typing import Any

from keepsight.files import own_yaml


@lru_cache(maxsize=1)
def texts() -> dict[str, Any]:
    """The content of wordings.yaml."""
    return own_yaml("keepsight.data_gen", "wordings")


def wordings(name: str) -> list[Any]:
    """A list of wordings.yaml, such as `one_value`."""
    return list(texts()[name])


def words(kind: str) -> list[str]:
    """The words of a kind in wordings.yaml, such as `city`."""
    return list(texts()["words"][kind])


def draw(kind: str, rng: random.Random) -> str:
    """A random word, key or value of a kind: one of `_MAKERS`, or a list of words of wordings.yaml."""
    return _MAKERS[kind](rng) if kind in _MAKERS else rng.choice(words(kind))


def distinct(kind: str, count: int, rng: random.Random) -> list[str]:
    """`count` different strings of a kind; a number is appended where the kind's words run out."""
    drawn: dict[str, None] = {}
    for attempt in range(20 * count):
        text = draw(kind, rng)
        drawn[text if attempt < 10 * count else f"{text} {attempt}"] = None
        if len(drawn) == count:
            break
    return list(drawn)


def filled(template: str, rng: random.Random, **fixed: str) -> str:
    """A template in which each `{kind}` becomes a random word of that kind, or its value in `fixed`."""
    return re.sub(r"\{(\w+)\}", lambda found: fixed.get(found[1]) or draw(found[1], rng), template)


def told(name: str, rng: random.Random, **fixed: str) -> str:
    """One of a list's templates, filled; all are filled before one is chosen."""
    return rng.choice([filled(template, rng, **fixed) for template in wordings(name)])


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
    "device": lambda rng: f"{rng.choice(words('device'))} {rng.choice(string.ascii_uppercase)}{rng.randint(1, 99)}",
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
