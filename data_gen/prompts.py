"""The interface of prompt sources, and how a prompt is filled to its wanted length."""

import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Annotated, NamedTuple, Protocol

from pydantic import Field

from keepsight.errors import UserError

CountTokens = Callable[[str], int]
Share = Annotated[float, Field(ge=0, le=1)]

QUESTION_INSTRUCTIONS = (
    "Write one question that the text above answers. Reply with the question alone.",
    "Write one question about a detail in the last part of the text above. Reply with the question alone.",
    "Write one question whose answer needs several parts of the text above. Reply with the question alone.",
    "Write one short instruction to summarize or list something from the text above. Reply with the instruction alone.",
)
"""Instructions by which the base model writes a question about a text itself."""
_ATTEMPTS = 8
CHARACTERS_PER_TOKEN = 4.0
_FULL_ENOUGH = 0.93
"""A prompt of this share of the wanted length is accepted; a closer fit is not worth further tokenising."""
_AIM = 0.965
"""The share of the wanted length that the next attempt aims at."""


@dataclass(frozen=True)
class Prompt:
    """One prompt for the base model; `source` is its kind, for the manifest.

    Attributes:
        messages: The turns of the conversation, ending with the user's; each has `role` and `content`.
        response: The answer to use instead of the model's own.
        template: Whether the chat template, if the model has one, is applied; otherwise the first message's content is
            continued as it is.
        answer_prefix: Beginning of the assistant's turn that counts as prompt; empty for most.
        question_instruction: Instruction by which the base model writes the question that follows the last turn's
            text; None for a prompt that is complete.
    """

    source: str
    messages: tuple[dict[str, str], ...]
    response: str | None = None
    template: bool = True
    answer_prefix: str = ""
    question_instruction: str | None = None

    def with_question(self, question: str) -> "Prompt":
        """The complete prompt whose last turn ends with a question or an instruction."""
        *earlier_turns, last_turn = self.messages
        content = f"{last_turn['content']}\n\n{question}"
        turn = {**last_turn, "content": content}
        return replace(self, messages=(*earlier_turns, turn), question_instruction=None)

    @property
    def text(self) -> str:
        """The text of all turns, each on a line of its own."""
        return "\n".join(turn["content"] for turn in self.messages)


@dataclass(frozen=True)
class Request:
    """Parameters of one prompt: all randomness comes from `rng`; `seed` is that of the whole mixture.

    The prompt should have `tokens` tokens, not counting the chat template, or at most `limit` if it is not filled.
    `number` prompts were drawn from this source before.
    """

    rng: random.Random
    tokens: int
    limit: int
    count_tokens: CountTokens
    seed: int = 0
    number: int = 0


class DoesNotFit(UserError):
    """A draw is too long for the wanted length even without filling; another may fit."""


class Source(Protocol):
    """A kind of prompts; its fields are the options of a mixture's entry."""

    def sample(self, request: Request) -> Prompt:
        """Draw one prompt of at most `request.tokens` tokens, else DoesNotFit; BadRow if it cannot be used."""
        ...


def user_prompt(source: str, text: str, *, template: bool = True, answer_prefix: str = "") -> Prompt:
    """A prompt of one user turn, or a text to be continued without the chat template."""
    return Prompt(source, ({"role": "user", "content": text},), template=template, answer_prefix=answer_prefix)


class _Attempt(NamedTuple):
    """A text made with `characters` of filling: its length in characters and in tokens."""

    characters: int
    length: int
    tokens: int


def fit_text(build: Callable[[int], str], request: Request) -> str:
    """The longest text of at most `request.tokens` tokens that `build` makes in a few attempts, else DoesNotFit.

    `build(n)` makes a text with about n characters of filling, the same each time.
    """
    wanted = request.tokens
    best = ""
    fitting: _Attempt | None = None
    too_long: _Attempt | None = None
    characters = int(wanted * CHARACTERS_PER_TOKEN * 0.9)
    for _ in range(_ATTEMPTS):
        text = build(characters)
        attempt = _Attempt(characters, len(text), request.count_tokens(text))
        is_exhausted = text != "" and text == best  # there is no more filling
        if attempt.tokens <= wanted:
            fitting = attempt
            best = max(best, text, key=len)
            if is_exhausted or attempt.tokens >= _FULL_ENOUGH * wanted:
                break
        else:
            too_long = attempt
            if characters == 0:
                break
        characters = _next_filling(attempt, fitting, too_long, _AIM * wanted)
    if not best:
        raise DoesNotFit(
            f"a mixture's prompt does not fit {wanted} tokens; raise its min_tokens", field="min_tokens", code="range"
        )
    return best


def fit_prompt(make: Callable[[int], Prompt], request: Request) -> Prompt:
    """The longest prompt of at most `request.tokens` tokens, all turns counted, that `make` makes; see `fit_text`."""
    prompts: dict[str, Prompt] = {}

    def build(characters: int) -> str:
        prompt = make(characters)
        text = prompt.text
        prompts[text] = prompt
        return text

    return prompts[fit_text(build, request)]


def _next_filling(latest: _Attempt, fitting: _Attempt | None, too_long: _Attempt | None, aim: float) -> int:
    """Characters that should give `aim` tokens: interpolated between two attempts, or by the density of one."""
    if fitting is None or too_long is None:
        more_characters = int((aim - latest.tokens) * latest.length / max(latest.tokens, 1))
        return max(0, latest.characters + more_characters)
    share = (aim - fitting.tokens) / max(too_long.tokens - fitting.tokens, 1)
    return fitting.characters + int(share * (too_long.characters - fitting.characters))


def cut_at_word(text: str, characters: int) -> str:
    """About `characters` characters from the start, ending with a whole word where the language has spaces."""
    if len(text) <= characters:
        return text.rstrip()
    beginning = text[: max(characters, 80)]
    last_space = beginning.rfind(" ")
    if last_space > len(beginning) // 2:
        return beginning[:last_space].rstrip()
    return beginning
