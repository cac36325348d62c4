"""Greedy answers in fewer passes: guess what an answer says next, read all guesses at once, keep those that hold.

Guesses come from texts that are near: the prompt, the full cache's answer, the answers of other variants and to other
samples, and what an answer has said so far (prompt lookup; Saxena 2023, and REST, arXiv 2311.08252, with larger texts).
They need no model. A guess is kept only where the model itself would have said the same, so that answers are those of
greedy decoding up to rounding.
"""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from keepsight.runtime.together import Rows

_LONGEST = 4
"""Last tokens by which a text is looked up, at most. Every one that matches doubles the length of the guess."""
_PLACES = 100_000
"""What is remembered, the latest: each place of a text counts once for each length of a match; tens of MB."""


class Guesses:
    """What followed, in texts that may still grow, the tokens that an answer ends with.

    Args:
        wider: Where a longer match, or one that is not known here, is looked for too.
    """

    def __init__(self, wider: "Guesses | None" = None) -> None:
        self.wider = wider
        self._places: OrderedDict[tuple[int, ...], tuple[list[int], int]] = OrderedDict()

    def learn(self, text: list[int], start: int = 0) -> None:
        """Add a text from `start` on. Where places are equal the one learned last counts."""
        for place in range(max(start, 1, len(text) - _PLACES // _LONGEST), len(text)):
            for length in range(1, min(_LONGEST, place) + 1):
                last = tuple(text[place - length : place])
                self._places[last] = text, place
                self._places.move_to_end(last)
        while len(self._places) > _PLACES:
            self._places.popitem(last=False)

    def after(self, answer: Sequence[int], most: int) -> list[int]:
        """What may come next: at most `most` tokens, more of them the longer the match; none where nothing matches."""
        for length in range(min(_LONGEST, len(answer)), 0, -1):
            if place := self._known(tuple(answer[-length:])):
                text, start = place
                return text[start : start + min(2 ** (length - 1), most)]
        return []

    def _known(self, last: tuple[int, ...]) -> tuple[list[int], int] | None:
        return self._places.get(last) or (self.wider._known(last) if self.wider else None)


@dataclass
class Writing:
    """An answer that is being written.

    Attributes:
        row: Which of the rows that are written; it has read all tokens of the answer but the last.
        ids: The answer so far, at least one token.
    """

    row: int
    ids: list[int]


def write(
    rows: Rows, writings: Sequence[Writing], guesses: Guesses, max_new_tokens: int, end_tokens: Sequence[int]
) -> None:
    """Write answers to their ends: an end token, or `max_new_tokens` tokens.

    Args:
        rows: What reads.
        writings: Where the answer of each of the rows stands; those that have ended stay as they are.
        guesses: Where guesses are looked up; learns what is written.
        max_new_tokens: Maximum length of an answer, including what has been written before.
        end_tokens: Ids that end one.
    """
    device = rows.model.device
    for each in writings:
        guesses.learn(each.ids)
    while open_ := [each for each in writings if each.ids[-1] not in end_tokens and len(each.ids) < max_new_tokens]:
        tokens = [torch.empty(0, dtype=torch.long, device=device)] * len(writings)
        guessed = {}
        for each in open_:
            guess = _until_end(guesses.after(each.ids, max_new_tokens - len(each.ids) - 1), end_tokens)
            guessed[each.row] = guess
            tokens[each.row] = torch.tensor([each.ids[-1], *guess], device=device)
        logits = rows.read(tokens)
        for each in open_:
            own = logits[each.row].max(dim=-1).indices
            held = _held(own.tolist(), guessed[each.row], end_tokens)
            each.ids += held
            rows.forget(each.row, len(own) - len(held))
            guesses.learn(each.ids, len(each.ids) - len(held))


def _until_end(guess: list[int], end_tokens: Sequence[int]) -> list[int]:
    """A guess without its end token and what stands after it: the token before tells whether the answer ends."""
    return next((guess[:place] for place, token in enumerate(guess) if token in end_tokens), guess)


def _held(own: list[int], guess: list[int], end_tokens: Sequence[int]) -> list[int]:
    """Of the model's own 1 + g choices, those up to the first that was not guessed or that ends the answer."""
    for place, (token, guessed) in enumerate(zip(own, guess, strict=False)):
        if token != guessed or token in end_tokens:
            return own[: place + 1]
    return own
