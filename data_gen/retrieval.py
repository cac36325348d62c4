"""Prompts whose answer stands somewhere in a long text: needles with many wordings."""

import random
from dataclasses import dataclass, replace
from functools import partial

from keepsight.data_gen import haystacks, phrases
from keepsight.data_gen.prompts import Prompt, Request, fit, user_prompt
from keepsight.data_gen.words import MAKERS, distinct
from keepsight.errors import UserError

FORMS = ("single", "multi_key", "multi_value", "multi_query")
HAYSTACKS = ("documentation", "stories", "noise", "log", "code")


@dataclass(frozen=True)
class Quiz:
    """What is hidden (`needles`), what is asked and its true `answer`; `prefix` may begin the answer."""

    needles: list[str]
    question: str
    prefix: str
    answer: str


@dataclass(frozen=True)
class Needles:
    """Facts hidden in a text, and a question about one, about some, or about a key with several values.

    Attributes:
        forms: Weights of `FORMS`.
        haystacks: Weights of `HAYSTACKS`.
        prefixed: Share of prompts whose answer has its beginning given.
        truthful: Give the hidden values as the response, where a small target would often answer something else
            (LookaheadKV, appendix D: responses need not be the target's own).
    """

    forms: tuple[float, ...] = (0.45, 0.3, 0.12, 0.13)
    haystacks: tuple[float, ...] = (0.5, 0.2, 0.1, 0.1, 0.1)
    prefixed: float = 0.3
    truthful: bool = False

    def __post_init__(self) -> None:
        for name, weights, kinds in (("forms", self.forms, FORMS), ("haystacks", self.haystacks, HAYSTACKS)):
            if len(weights) != len(kinds) or sum(weights) <= 0:
                raise UserError(f"needles: {name} needs {len(kinds)} weights ({', '.join(kinds)}), got {list(weights)}")

    def sample(self, request: Request) -> Prompt:
        """Draw one prompt; see `Source`."""
        rng = request.rng
        form = rng.choices(FORMS, self.forms)[0]
        quiz = _quiz(form, rng)
        kind = rng.choices(HAYSTACKS, self.haystacks)[0]
        depths = [rng.random() for _ in quiz.needles]
        frame = partial(framed, quiz.question, rng.getrandbits(64))
        text = fit(partial(_fill, frame, quiz.needles, depths, kind, rng.getrandbits(64)), request)
        prefix = quiz.prefix if rng.random() < self.prefixed else ""
        response = _response(quiz, prefix) if self.truthful else None
        return replace(user_prompt(f"needles/{form}", text, answer_prefix=prefix), response=response)


def _response(quiz: Quiz, prefix: str) -> str:
    """The true answer: what follows `prefix`, or a whole sentence."""
    return f" {quiz.answer}." if prefix else f"{quiz.prefix} {quiz.answer}.".strip()


def _fill(frame: partial[str], needles: list[str], depths: list[float], kind: str, seed: int, characters: int) -> str:
    hay = haystacks.take(haystacks.hay_pieces(kind, random.Random(seed)), characters)
    return frame(haystacks.with_needles(needles, depths, hay))


def framed(question: str, seed: int, text: str) -> str:
    """The question about the text, put in one of many ways."""
    rng = random.Random(seed)
    frame = rng.choice(phrases.FRAMES)
    parts = {"intro": rng.choice(phrases.INTRODUCTIONS), "style": rng.choice(phrases.ANSWER_STYLES)}
    return frame.format(text=text, question=question, **parts).replace(" \n", "\n").strip()


def _quiz(form: str, rng: random.Random) -> Quiz:
    attribute = rng.choice(phrases.ATTRIBUTES)
    kind = rng.choice(attribute.values)
    names = {"noun": attribute.noun, "plural": attribute.plural}
    keys = distinct(rng.choice(attribute.keys), 1 if form in ("single", "multi_value") else rng.randint(2, 5), rng)
    facts = [(key, MAKERS[kind](rng)) for key in keys]
    if form == "multi_value":
        facts = [(keys[0], value) for value in distinct(kind, rng.randint(2, 4), rng)]
    needles = _stated(facts, names, rng)
    asked = {"key": keys[0], "keys": ", ".join(keys[:-1]) + " and " + keys[-1]}
    wordings = {"multi_value": phrases.MANY_VALUES, "multi_query": phrases.MANY_KEYS}.get(form, phrases.ONE_VALUE)
    question = rng.choice(wordings).format(**names, **asked)
    single = form in ("single", "multi_key")
    prefix = rng.choice(phrases.PREFIXES).format(**names, **asked) if single else ""
    answer = facts[0][1] if single else ", ".join(value for _, value in facts)
    return Quiz(needles, _capital(question), _capital(prefix), answer)


def _stated(facts: list[tuple[str, str]], names: dict[str, str], rng: random.Random) -> list[str]:
    """The facts as sentences: now all in one wording, now each in its own."""
    wordings = rng.sample(phrases.STATEMENTS, len(facts) if rng.random() < 0.5 else 1) * len(facts)
    return [
        _capital(wording.format(key=key, value=value, **names))
        for wording, (key, value) in zip(wordings, facts, strict=False)
    ]


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]
