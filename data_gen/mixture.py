"""A mixture of sources: prompt i depends on the seed and on i alone, so that generation can resume anywhere."""

import difflib
import json
import math
import random
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, fields
from functools import lru_cache
from typing import Annotated, Any

from pydantic import Field, FiniteFloat

from keepsight.data_gen import package_text, synthetic, tables
from keepsight.data_gen.prompts import CountTokens, DoesNotFit, Prompt, Request, Source
from keepsight.data_gen.user_data import HubDataset, LocalJsonl
from keepsight.errors import UserError
from keepsight.files import from_json

SOURCES: dict[str, type[Any]] = {
    "needles": synthetic.Needles,
    "key_values": synthetic.KeyValues,
    "documentation": package_text.Documentation,
    "passages": package_text.Passages,
    "described_passages": package_text.DescribedPassages,
    "reconstruction": package_text.ReconstructionSource,
    "dialogue": package_text.Dialogue,
    "tables": tables.Tables,
    "everyday": synthetic.Everyday,
    "state_tracking": synthetic.StateTracking,
    "second_turn": synthetic.SecondTurn,
    "code_completion": package_text.CodeCompletion,
    "code_questions": package_text.CodeQuestions,
    "continuation": package_text.Continuation,
    "local_jsonl": LocalJsonl,
    "hub_dataset": HubDataset,
}
"""The kinds an entry of a mixture may name; its further keys are the fields of the class."""

_ROUND = 1000
"""Number of draws, roughly, after which the order of sources repeats."""
_DRAWS = 50
"""Failed draws in a row after which a mixture is refused."""


@dataclass(frozen=True)
class Lengths:
    """Share of the draws, and lengths in tokens. Below 64 tokens a question alone fills the prompt."""

    weight: Annotated[FiniteFloat, Field(gt=0)] = 1.0
    min_tokens: Annotated[int, Field(ge=64)] = 200
    max_tokens: Annotated[int, Field(le=10_000_000)] = 2048

    def __post_init__(self) -> None:
        if self.min_tokens > self.max_tokens:
            raise UserError(
                f"min_tokens={self.min_tokens} is more than max_tokens={self.max_tokens}",
                field="min_tokens",
                code="range",
            )


@dataclass(frozen=True)
class Entry:
    """One source with its share of the draws and its lengths in tokens."""

    kind: str
    source: Source
    lengths: Lengths

    @property
    def fills(self) -> bool:
        """Whether prompts are filled to the drawn length; rows of the user's data are used as they are."""
        if isinstance(self.source, LocalJsonl):
            return False
        if isinstance(self.source, HubDataset):
            return bool(self.source.text)
        return True


@dataclass(frozen=True)
class Mixture:
    """Sources with their weights and lengths."""

    entries: tuple[Entry, ...]

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> "Mixture":
        """A mixture from `min_tokens`, `max_tokens` and `sources` of `kind`, `weight` and options, else UserError."""
        bounds = dict(config)
        _check_names("mixture", "key", bounds, ("min_tokens", "max_tokens", "sources"))
        sources = bounds.pop("sources", None)
        if not isinstance(sources, list) or not sources:
            raise UserError(
                "mixture: sources must be a list of at least one {kind: ..., weight: ...}",
                field="sources",
                code="range",
            )

        entries = []
        for index, source in enumerate(sources):
            entries.append(_entry(f"mixture.sources[{index}]", source, bounds))
        return cls(tuple(entries))

    def check(self) -> None:
        """UserError for data sets of the Hub that cannot be read, before a model is loaded."""
        for entry in self.entries:
            if isinstance(entry.source, HubDataset):
                entry.source.check()

    def prompt(self, seed: int, index: int, count_tokens: CountTokens) -> Prompt:
        """Prompt `index`, the same for the same seed, index and tokenizer; BadRow if the user's row is unusable.

        Pass the same function `count_tokens` each time, as the rows of local files are counted once per function.
        """
        schedule = _schedule(tuple(entry.lengths.weight for entry in self.entries), seed)
        full_rounds, position = divmod(index, len(schedule))
        source = schedule[position]
        drawn_before = full_rounds * schedule.count(source) + schedule[:position].count(source)
        rng = random.Random(f"keepsight:{seed}:{index}")
        return _draw_prompt(self.entries[source], rng, count_tokens, seed, drawn_before)


def _draw_prompt(entry: Entry, rng: random.Random, count_tokens: CountTokens, seed: int, number: int) -> Prompt:
    """A prompt of random length; one that does not fit is drawn again with a new length."""
    lowest = entry.lengths.min_tokens
    highest = entry.lengths.max_tokens
    for _ in range(_DRAWS):
        tokens = round(math.exp(rng.uniform(math.log(lowest), math.log(highest))))
        with suppress(DoesNotFit):
            return entry.source.sample(Request(rng, tokens, highest, count_tokens, seed, number))
    raise UserError(
        f"mixture: no prompt of {entry.kind} fits {highest} tokens; raise max_tokens", field="max_tokens", code="range"
    )


@lru_cache(maxsize=16)
def _schedule(weights: tuple[float, ...], seed: int) -> tuple[int, ...]:
    """The sources of one round, shuffled: each in proportion to its weight, and at least once."""
    schedule: list[int] = []
    for source, weight in enumerate(weights):
        draws = max(1, round(weight / sum(weights) * _ROUND))
        schedule += [source] * draws
    random.Random(f"keepsight:{seed}").shuffle(schedule)
    return tuple(schedule)


def _entry(where: str, values: Any, bounds: dict[str, Any]) -> Entry:
    if not isinstance(values, dict):
        raise UserError(f"{where}: expected {{kind: ..., weight: ...}}, got {values!r}", field="sources", code="type")
    options = {**bounds, **values}
    kind = str(options.pop("kind", None))
    _check_names(where, "kind", [kind], SOURCES)
    source_class = SOURCES[kind]
    where = f"{where} ({kind})"

    lengths = {}
    for length_field in fields(Lengths):
        if length_field.name in options:
            lengths[length_field.name] = options.pop(length_field.name)
    _check_names(where, "option", options, [option.name for option in fields(source_class)])
    return Entry(kind, _typed(where, options, source_class), _typed(where, lengths, Lengths))


def _typed(where: str, values: dict[str, Any], kind: type[Any]) -> Any:
    """Plain values as a dataclass, without type conversion."""
    try:
        return from_json(json.dumps(values).encode(), kind)
    except UserError as error:
        raise error.reworded(f"{where}: {error}") from None
    except (ValueError, TypeError) as error:
        raise UserError(f"{where}: {error}", field="sources", code="type") from None


def _check_names(where: str, what: str, names: Iterable[Any], allowed: Iterable[str]) -> None:
    allowed_names = sorted(allowed)
    for name in names:
        if name in allowed_names:
            continue
        similar = difflib.get_close_matches(str(name), allowed_names, n=1)
        hint = f"; did you mean {similar[0]}?" if similar else ""
        raise UserError(
            f"{where}: unknown {what} {name!r}{hint} (known: {', '.join(allowed_names) or 'none'})",
            field=str(name),
            code="unknown",
        )
