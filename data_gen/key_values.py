"""Prompts over a list of keys and values, written as JSON, as lines or as a table."""

import json
import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from keepsight.data_gen.prompts import Prompt, Request, fit, user_prompt
from keepsight.data_gen.retrieval import framed
from keepsight.data_gen.words import distinct

Pairs = list[tuple[str, str]]

KEY_KINDS = ("uuid", "pair", "person", "code", "device", "project", "order")
VALUE_KINDS = ("uuid", "digits", "pair", "code", "mixed", "city", "date", "price", "person")

FORMATS: dict[str, Callable[[Pairs], str]] = {
    "json": lambda pairs: json.dumps(dict(pairs), indent=1),
    "json_line": lambda pairs: json.dumps(dict(pairs)),
    "json_rows": lambda pairs: "\n".join(json.dumps({"key": key, "value": value}) for key, value in pairs),
    "colon": lambda pairs: "\n".join(f"{key}: {value}" for key, value in pairs),
    "equals": lambda pairs: "\n".join(f'{key} = "{value}"' for key, value in pairs),
    "arrow": lambda pairs: "\n".join(f"{row}. {key} -> {value}" for row, (key, value) in enumerate(pairs, 1)),
    "csv": lambda pairs: "key,value\n" + "\n".join(f"{key},{value}" for key, value in pairs),
    "table": lambda pairs: "| key | value |\n|---|---|\n" + "\n".join(f"| {key} | {value} |" for key, value in pairs),
}

VALUE_OF = (
    'What is the value for "{key}"?',
    "Which value belongs to {key}?",
    "Look up {key} in the list.",
    "Return the value stored under {key}.",
    "{key}?",
    "In the data, what stands next to {key}?",
)
KEY_OF = (
    "Which key has the value {value}?",
    "Whose value is {value}?",
    "Under which key is {value} stored?",
)
VALUES_OF = (
    "Write down the values for {key} and {other}.",
    "Which values do {key} and {other} have?",
    "Compare the entries {key} and {other}: what are their values?",
)


@dataclass(frozen=True)
class KeyValues:
    """Key-value lists of several formats, asked by key, by value, or by two keys.

    Attributes:
        by_value: Share of questions that give the value and ask for the key.
        two_keys: Share of questions that ask for two values.
    """

    by_value: float = 0.15
    two_keys: float = 0.15

    def sample(self, request: Request) -> Prompt:
        """Draw one prompt; see `Source`."""
        rng = request.rng
        form = rng.choice(sorted(FORMATS))
        pairs = _pairs(request)
        key, other = rng.random(), rng.random()
        wordings = rng.choices((VALUE_OF, KEY_OF, VALUES_OF), self._weights())[0]
        fill = partial(_fill, pairs, FORMATS[form], rng.choice(wordings), (key, other), rng.getrandbits(64))
        return user_prompt(f"key_values/{form}", fit(fill, request))

    def _weights(self) -> tuple[float, float, float]:
        return (max(0.0, 1 - self.by_value - self.two_keys), self.by_value, self.two_keys)


def _pairs(request: Request) -> Pairs:
    """As many pairs as a prompt of the wanted length can hold at most."""
    count = max(3, request.tokens // 4)
    keys = distinct(request.rng.choice(KEY_KINDS), count, request.rng)
    kind = request.rng.choice(VALUE_KINDS)
    return list(zip(keys, (distinct(kind, 1, request.rng)[0] for _ in keys), strict=True))


def _fill(
    pairs: Pairs,
    form: Callable[[Pairs], str],
    wording: str,
    places: tuple[float, float],
    seed: int,
    characters: int,
) -> str:
    overhead = len(form(pairs[:2])) / 2
    shown = pairs[: max(3, int(characters / overhead))]
    asked, other = (shown[int(place * len(shown))] for place in places)
    question = wording.format(key=asked[0], value=asked[1], other=other[0])
    return framed(question, seed, form(random.Random(seed).sample(shown, len(shown))))
