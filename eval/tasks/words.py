"""The words that RULER draws its keys and lists from: those of the package `wonderwords`."""

import random
from functools import lru_cache
from importlib.resources import files


@lru_cache(maxsize=4)
def words_of(kind: str) -> tuple[str, ...]:
    """All words of a kind, `noun`, `adjective` or `verb`, in alphabetical order, each once."""
    text = (files("wonderwords") / "assets" / f"{kind}list.txt").read_text(encoding="utf-8")
    return tuple(sorted({line.strip() for line in text.splitlines() if line.strip()}))


@lru_cache(maxsize=1)
def _all_words() -> tuple[str, ...]:
    return tuple(sorted({*words_of("noun"), *words_of("adjective"), *words_of("verb")}))


def drawn_words(count: int, rng: random.Random) -> list[str]:
    """So many different words; where there are not enough, pairs of an adjective and a noun as well."""
    words = _all_words()
    if count <= len(words):
        return rng.sample(words, count)
    missing = count - len(words)
    pairs = dict.fromkeys(drawn_pair(rng) for _ in range(2 * missing))
    return [*rng.sample(words, len(words)), *list(pairs)[:missing]]


def drawn_pair(rng: random.Random) -> str:
    """Such as `dirty-testimony`, the keys of needles."""
    return f"{rng.choice(words_of('adjective'))}-{rng.choice(words_of('noun'))}"
