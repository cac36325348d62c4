"""A mixture of sources: prompt i depends on the seed and on i alone, so that generation can resume anywhere."""

import difflib
import math
import random
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import MISSING, dataclass, fields
from functools import lru_cache
from typing import Any

from keepsight.data_gen.code import CodeCompletion, CodeQuestions
from keepsight.data_gen.documentation import Documentation, Passages
from keepsight.data_gen.everyday import Everyday
from keepsight.data_gen.hub_dataset import HubDataset
from keepsight.data_gen.key_values import KeyValues
from keepsight.data_gen.local_jsonl import LocalJsonl
from keepsight.data_gen.prompts import CountTokens, DoesNotFit, Prompt, Request, Source
from keepsight.data_gen.retrieval import Needles
from keepsight.data_gen.text import Continuation
from keepsight.errors import UserError

SOURCES: dict[str, type[Any]] = {
    "needles": Needles,
    "key_values": KeyValues,
    "documentation": Documentation,
    "passages": Passages,
    "everyday": Everyday,
    "code_completion": CodeCompletion,
    "code_questions": CodeQuestions,
    "continuation": Continuation,
    "local_jsonl": LocalJsonl,
    "hub_dataset": HubDataset,
}
"""The kinds an entry of a mixture may name; its further keys are the fields of the class."""

ROUND = 1000
"""Number of draws, roughly, after which the order of sources repeats."""

ENTRY_KEYS = ("kind", "weight", "min_tokens", "max_tokens")
SHORTEST = 64
"""Lower limit of `min_tokens`: below it a question alone fills the prompt."""

DRAWS = 50
"""Failed draws in a row after which a mixture is refused."""


@dataclass(frozen=True)
class Entry:
    """One source with its share of the draws and its lengths in tokens."""

    kind: str
    source: Source
    weight: float
    min_tokens: int
    max_tokens: int


@dataclass(frozen=True)
class Mixture:
    """Sources with their weights and lengths."""

    entries: tuple[Entry, ...]

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> "Mixture":
        """Build a mixture from `min_tokens`, `max_tokens` and a list `sources` of `kind`, `weight` and options.

        Raises:
            UserError: a key, a kind, an option or a value is wrong, or a file is missing.
        """
        values = dict(config)
        _check_names("mixture", "key", values, ("min_tokens", "max_tokens", "sources"))
        sources = values.get("sources")
        if not isinstance(sources, list) or not sources:
            raise UserError("mixture: sources must be a list of at least one {kind: ..., weight: ...}")
        bounds: dict[str, Any] = {key: values[key] for key in ("min_tokens", "max_tokens") if key in values}
        return cls(tuple(_entry(f"mixture.sources[{row}]", source, bounds) for row, source in enumerate(sources)))

    def prompt(self, seed: int, index: int, count_tokens: CountTokens) -> Prompt:
        """Prompt `index`, the same for the same seed, index and tokenizer.

        Args:
            seed: Random seed of the whole mixture.
            index: Position in the data set, from 0.
            count_tokens: Counts the tokens of a text; pass the same function each time, as the rows of local files are
                counted once per function.
        """
        schedule = _schedule(tuple(entry.weight for entry in self.entries), seed)
        rounds, place = divmod(index, len(schedule))
        chosen = schedule[place]
        before = rounds * schedule.count(chosen) + schedule[:place].count(chosen)
        rng = random.Random(f"keepsight:{seed}:{index}")
        return _drawn(self.entries[chosen], rng, count_tokens, seed, before)


def _drawn(entry: Entry, rng: random.Random, count_tokens: CountTokens, seed: int, number: int) -> Prompt:
    """A prompt of random length; one that does not fit is drawn again with a new length."""
    for _ in range(DRAWS):
        tokens = round(math.exp(rng.uniform(math.log(entry.min_tokens), math.log(entry.max_tokens))))
        with suppress(DoesNotFit):
            return entry.source.sample(Request(rng, tokens, entry.max_tokens, count_tokens, seed, number))
    raise UserError(f"mixture: no prompt of {entry.kind} fits {entry.max_tokens} tokens; raise max_tokens")


@lru_cache(maxsize=16)
def _schedule(weights: tuple[float, ...], seed: int) -> tuple[int, ...]:
    """The sources of one round, shuffled: each in proportion to its weight, and at least once."""
    counts = [max(1, round(weight / sum(weights) * ROUND)) for weight in weights]
    schedule = [source for source, count in enumerate(counts) for _ in range(count)]
    random.Random(f"keepsight:{seed}").shuffle(schedule)
    return tuple(schedule)


def _entry(where: str, values: Any, bounds: dict[str, Any]) -> Entry:
    if not isinstance(values, dict):
        raise UserError(f"{where}: expected {{kind: ..., weight: ...}}, got {values!r}")
    kind = str(values.get("kind"))
    _check_names(where, "kind", [kind], SOURCES)
    where = f"{where} ({kind})"
    options = {key: value for key, value in values.items() if key not in ENTRY_KEYS}
    _check_names(where, "option", options, [field.name for field in fields(SOURCES[kind])])
    weight = values.get("weight", 1.0)
    if not _is_number(weight) or not 0 < weight < math.inf:
        raise UserError(f"{where}: weight must be a number above 0, got {weight!r}")
    low, high = _lengths(where, {**bounds, **values})
    return Entry(kind, _built(where, SOURCES[kind], options), float(weight), low, high)


def _lengths(where: str, values: dict[str, Any]) -> tuple[int, int]:
    low, high = values.get("min_tokens", 200), values.get("max_tokens", 2048)
    if type(low) is not int or type(high) is not int or not SHORTEST <= low <= high:
        expected = f"whole numbers with {SHORTEST} <= min_tokens <= max_tokens"
        raise UserError(f"{where}: min_tokens and max_tokens must be {expected}, got {low!r} and {high!r}")
    return low, high


def _built(where: str, source: type[Any], options: dict[str, Any]) -> Source:
    """The source with its options; lists become tuples."""
    given = {key: tuple(value) if isinstance(value, list) else value for key, value in options.items()}
    for field in fields(source):
        if field.name not in given and field.default is MISSING:
            raise UserError(f"{where}: the option {field.name} is missing")
        expected, right = TYPES[field.type]
        if field.name in given and not right(given[field.name]):
            raise UserError(f"{where}: {field.name} must be {expected}, got {options[field.name]!r}")
    built: Source = source(**given)
    return built


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


TYPES: dict[Any, tuple[str, Callable[[Any], bool]]] = {
    bool: ("true or false", lambda value: isinstance(value, bool)),
    int: ("a whole number", lambda value: type(value) is int),
    float: ("a share between 0 and 1", lambda value: _is_number(value) and 0 <= value <= 1),
    str: ("a text", lambda value: isinstance(value, str)),
    tuple[str, ...]: ("a list of texts", lambda value: _all(value, lambda item: isinstance(item, str))),
    tuple[float, ...]: ("a list of weights", lambda value: _all(value, lambda item: _is_number(item) and item >= 0)),
}
"""What an option of each type must be, in words and as a check."""


def _all(value: Any, right: Callable[[Any], bool]) -> bool:
    return isinstance(value, tuple) and all(right(item) for item in value)


def _check_names(where: str, what: str, given: Iterable[Any], known: Iterable[str]) -> None:
    for name in given:
        if name not in (names := sorted(known)):
            close = difflib.get_close_matches(str(name), names, n=1)
            hint = f"; did you mean {close[0]}?" if close else ""
            raise UserError(f"{where}: unknown {what} {name!r}{hint} (known: {', '.join(names) or 'none'})")
