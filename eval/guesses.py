"""Greedy answers in fewer passes: guess what an answer says next, read all guesses at once, keep those that hold.

Guesses come from texts that are near: the prompt, the full cache's answer, the answers of other variants, and what an
answer has said so far (prompt lookup; Saxena 2023, and REST, arXiv 2311.08252, with larger texts). They need no model.
A guess is kept only where the model itself would have said the same, so that answers are those of greedy decoding up
to rounding.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

from keepsight.runtime.state import State
from keepsight.runtime.together import forget_last, read_together

_LONGEST = 4
"""Last tokens by which a text is looked up, at most. Every one that matches doubles the length of the guess."""


class Guesses:
    """What followed, in texts that may still grow, the tokens that an answer ends with."""

    def __init__(self) -> None:
        self._places: dict[tuple[int, ...], tuple[list[int], int]] = {}

    def learn(self, text: list[int], start: int = 0) -> None:
        """Add what stands in a text from `start` on. Of equal places the one learned last counts."""
        for place in range(max(start, 1), len(text)):
            for length in range(1, min(_LONGEST, place) + 1):
                self._places[tuple(text[place - length : place])] = text, place

    def after(self, answer: Sequence[int], most: int) -> list[int]:
        """What may come next: at most `most` tokens, more of them the longer the match; none where nothing matches."""
        for length in range(min(_LONGEST, len(answer)), 0, -1):
            if place := self._places.get(tuple(answer[-length:])):
                text, start = place
                return text[start : start + min(2 ** (length - 1), most)]
        return []


@dataclass
class Writing:
    """An answer that is being written.

    Attributes:
        state: Made by `keepsight.runtime.together.apart`; it has read all tokens of the answer but the last.
        ids: The answer so far, at least one token.
        nll: `write` adds the negative log-likelihood in nats of every token that it writes.
    """

    state: State
    ids: list[int]
    nll: list[float]


def write(
    model: PreTrainedModel,
    writings: Sequence[Writing],
    guesses: Guesses,
    max_new_tokens: int,
    end_tokens: Sequence[int],
) -> None:
    """Write answers to their ends: an end token, or `max_new_tokens` tokens.

    Args:
        model: The target.
        writings: Where each answer stands; those that have ended stay as they are.
        guesses: Where guesses are looked up; learns what is written.
        max_new_tokens: Of an answer, what has been written before included.
        end_tokens: Ids that end one.
    """
    for each in writings:
        guesses.learn(each.ids)
    while rows := [each for each in writings if each.ids[-1] not in end_tokens and len(each.ids) < max_new_tokens]:
        guessed = [_until_end(guesses.after(each.ids, max_new_tokens - len(each.ids) - 1), end_tokens) for each in rows]
        tokens = [
            torch.tensor([[each.ids[-1], *guess]], device=model.device)
            for each, guess in zip(rows, guessed, strict=True)
        ]
        states, logits = read_together(model, [each.state for each in rows], tokens)
        best, said = logits.max(dim=-1)
        sizes = [1 + len(guess) for guess in guessed]
        columns = said.split(sizes), (logits.logsumexp(dim=-1) - best).split(sizes)
        for each, state, guess, own, nll in zip(rows, states, guessed, *columns, strict=True):
            written = len(each.ids)
            each.ids += _held(own.tolist(), guess, end_tokens)
            count = len(each.ids) - written
            each.nll += nll[:count].tolist()
            each.state = forget_last(state, len(own) - count)
            guesses.learn(each.ids, written)


def _until_end(guess: list[int], end_tokens: Sequence[int]) -> list[int]:
    """A guess without its end token and what stands after it: the token before tells whether the answer ends."""
    return next((guess[:place] for place, token in enumerate(guess) if token in end_tokens), guess)


def _held(own: list[int], guess: list[int], end_tokens: Sequence[int]) -> list[int]:
    """Of the model's own 1 + g choices, those up to the first that was not guessed or that ends the answer."""
    for place, (token, guessed) in enumerate(zip(own, guess, strict=False)):
        if token != guessed or token in end_tokens:
            return own[: place + 1]
    return own
