"""What a source of prompts is asked for and gives, and how a prompt is filled up to its length."""

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from keepsight.errors import UserError

CountTokens = Callable[[str], int]

ATTEMPTS = 8
CHARACTERS_PER_TOKEN = 4.0
FULL_ENOUGH = 0.93
"""A prompt of this share of the wanted length is taken; a closer fit would cost more tokenising than it is worth."""

AIM = 0.965
"""The share of the wanted length that the next attempt aims at."""


@dataclass(frozen=True)
class Prompt:
    """One prompt for the target.

    Attributes:
        source: Where it comes from, for the manifest.
        messages: The turns of the conversation, ending with the user's; each has `role` and `content`.
        response: The answer to use instead of the target's own.
        template: Whether the chat template is applied; otherwise the first message's content is continued as it is.
        answer_prefix: Text that begins the assistant's turn and counts as prompt; empty for most.
    """

    source: str
    messages: tuple[dict[str, str], ...]
    response: str | None = None
    template: bool = True
    answer_prefix: str = ""


@dataclass(frozen=True)
class Request:
    """What one prompt is drawn from.

    Attributes:
        rng: Decides everything that is random.
        tokens: Wanted length of the prompt in tokens, chat template not counted.
        limit: Longest length of the source, for prompts that come as they are.
        count_tokens: Number of tokens of a text.
        seed: Of the whole mixture.
        number: How many prompts the mixture has drawn from this source before.
    """

    rng: random.Random
    tokens: int
    limit: int
    count_tokens: CountTokens
    seed: int = 0
    number: int = 0


class DoesNotFit(UserError):
    """A draw that is too long for the wanted length even without any filling; another draw may fit."""


class Source(Protocol):
    """A kind of prompts; its fields are the options of a mixture's entry."""

    def sample(self, request: Request) -> Prompt:
        """Draw one prompt of about, and at most, `request.tokens` tokens.

        Raises:
            DoesNotFit: what was drawn needs more tokens.
        """
        ...


def user_prompt(source: str, text: str, *, answer_prefix: str = "") -> Prompt:
    """A prompt of one user turn."""
    return Prompt(source, ({"role": "user", "content": text},), answer_prefix=answer_prefix)


def raw_prompt(source: str, text: str) -> Prompt:
    """A text to be continued without the chat template."""
    return Prompt(source, ({"role": "user", "content": text},), template=False)


@dataclass(frozen=True)
class Attempt:
    """With so many characters of filling a text had this length in characters and this count of tokens."""

    characters: int
    length: int
    count: int


def fit(build: Callable[[int], str], request: Request) -> str:
    """The fullest text of at most `request.tokens` tokens that `build` makes in a few attempts.

    Args:
        build: Makes the text with about so many characters of filling; must give the same for the same number.
        request: Its length and its way of counting.

    Raises:
        DoesNotFit: even without filling the text is too long.
    """
    wanted, best = request.tokens, ""
    fitting, too_long = None, None
    characters = int(wanted * CHARACTERS_PER_TOKEN * 0.9)
    for _ in range(ATTEMPTS):
        text = build(characters)
        tried = Attempt(characters, len(text), request.count_tokens(text))
        exhausted = bool(text) and text == best
        if tried.count > wanted:
            too_long = tried
        else:
            fitting, best = tried, max(best, text, key=len)
        if exhausted or FULL_ENOUGH * wanted <= tried.count <= wanted or (tried is too_long and characters == 0):
            break
        characters = _next_filling(tried, fitting, too_long, AIM * wanted)
    if not best:
        raise DoesNotFit(f"a mixture's prompt does not fit {wanted} tokens; raise its min_tokens")
    return best


def _next_filling(tried: Attempt, fitting: Attempt | None, too_long: Attempt | None, aim: float) -> int:
    """Characters that should give `aim` tokens: between two attempts, or by the density of the one there is."""
    if fitting is None or too_long is None:
        return max(0, tried.characters + int((aim - tried.count) * tried.length / max(tried.count, 1)))
    share = (aim - fitting.count) / max(too_long.count - fitting.count, 1)
    return fitting.characters + int(share * (too_long.characters - fitting.characters))
