"""The text that evaluation's needles are hidden in: prose that the training mixture never uses, or the user's own."""

import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from keepsight.corpus import evaluation_paragraphs, sentences
from keepsight.errors import UserError

LONGEST = 60
"""Words; needles stand between pieces of the haystack of at most this length."""

GOLDEN = (5**0.5 - 1) / 2
"""The multiples of the golden ratio, modulo 1, are spread more evenly than those of any other number."""


@dataclass(frozen=True)
class Haystack:
    """Sentences in order, read as a ring so that it has no end.

    Attributes:
        sentences: The text.
        tokens: Number of tokens of each sentence with a space before it, taken alone.
    """

    sentences: tuple[str, ...]
    tokens: tuple[int, ...]

    def cut(self, start: int, count: int) -> list[str]:
        """`count` sentences from sentence `start` on."""
        return [self.sentences[(start + row) % len(self.sentences)] for row in range(count)]

    def holds(self, start: int, room: int) -> int:
        """About how many sentences from `start` on have at most `room` tokens."""
        count = 0
        while (room := room - self.tokens[(start + count) % len(self.tokens)]) >= 0:
            count += 1
        return count


def read_haystack(path: Path | None, tokenizer: Any) -> Haystack:
    """The prose of the evaluation's part of the documentation, or of a text file.

    Raises:
        UserError: the file is missing, is not UTF-8, or is empty.
    """
    paragraphs = evaluation_paragraphs() if path is None else (" ".join(_read(path).split()),)
    pieces = [piece for paragraph in paragraphs for sentence in sentences(paragraph) for piece in _parts(sentence)]
    ids = tokenizer([" " + sentence for sentence in pieces], add_special_tokens=False)["input_ids"]
    return Haystack(tuple(pieces), tuple(max(1, len(row)) for row in ids))


def _parts(sentence: str) -> list[str]:
    """The sentence, in parts where it has more words than `LONGEST`, so that a text without full stops works too."""
    words = sentence.split()
    return [" ".join(words[start : start + LONGEST]) for start in range(0, len(words), LONGEST)]


def _read(path: Path) -> str:
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise UserError(f"{path}: the haystack cannot be read ({error.strerror}); name a text file") from None
    except UnicodeDecodeError:
        raise UserError(f"{path}: the haystack is not UTF-8 text; convert it first") from None
    if not text.strip():
        raise UserError(f"{path}: the haystack is empty; name a file with at least some sentences")
    return text


def fullest(fits: Callable[[int], bool], guess: int) -> int:
    """The largest count that fits, found by steps from a good guess; -1 when not even 0 fits."""
    count = guess
    while count >= 0 and not fits(count):
        count -= 1
    while count >= guess and fits(count + 1):
        count += 1
    return count


def hide(needles: list[str], depths: list[float], hay: list[str]) -> str:
    """The sentences as one text, each needle standing at its depth (0 the beginning, 1 the end)."""
    text = list(hay)
    for depth, needle in sorted(zip(depths, needles, strict=True), reverse=True):
        text.insert(round(depth * len(hay)), needle)
    return " ".join(text)


def needle_depths(index: int, needles: int, rng: random.Random) -> list[float]:
    """Depths of a sample's needles, the first one's from its number alone: any number of samples covers all depths."""
    return [(0.5 + index * GOLDEN) % 1, *(rng.random() for _ in range(needles - 1))]
