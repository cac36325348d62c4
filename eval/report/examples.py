"""Samples whose answers show what a method loses: those that differ most from the full cache's."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain, takewhile, zip_longest

from keepsight.eval.results import FULL, Key, Row, key_of

EXAMPLES = 10


@dataclass(frozen=True)
class Answer:
    """An answer for a page.

    Attributes:
        row: Its row of `results.jsonl`.
        same: Where it begins as the full cache's answer does.
        own: The rest.
    """

    row: Row
    same: str
    own: str


@dataclass(frozen=True)
class Example:
    """One sample, with what the full cache and each method answered at the budget where they differ most.

    Attributes:
        full: The full cache's row; None where it was not run.
        others: A row for each method at `budget`, the best score first.
        budget: KV entries per layer and KV head.
        difference: Largest distance of a score from the full cache's, 0 to 1.
    """

    full: Row | None
    others: tuple[Row, ...]
    budget: int
    difference: float

    @property
    def sample(self) -> Row:
        """The row that names the task, length, sample and references."""
        return self.others[0]

    @property
    def answers(self) -> list[Answer]:
        """The full cache's, then the others'."""
        return answers_of([*([self.full] if self.full else []), *self.others])


def answers_of(rows: Sequence[Row]) -> list[Answer]:
    """Answers with what they have in common with the full cache's, which is `rows[0]` where it was run."""
    whole = rows[0]["answer"] if rows and rows[0]["method"] == FULL else ""
    ends = [_common(whole, row["answer"]) for row in rows]
    return [Answer(row, row["answer"][:end], row["answer"][end:]) for row, end in zip(rows, ends, strict=True)]


def _common(first: str, second: str) -> int:
    """Number of characters with which both texts begin."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(first, second, strict=False)))


def place_of(row: Row) -> str:
    """A sample's label: `niah_single, 512 tokens, needle at 40 % depth`."""
    depth = row.get("depth")
    return f"{row['task']}, {row['length']} tokens" + (
        "" if depth is None else f", needle at {100 * depth:.0f} % depth"
    )


def choose_examples(rows: Sequence[Row], count: int = EXAMPLES) -> list[Example]:
    """The samples whose scores differ most from the full cache's, taking the tasks and lengths in turn."""
    samples: dict[Key, list[Row]] = defaultdict(list)
    for row in rows:
        samples[key_of(row)].append(row)
    places: dict[tuple[str, int], list[Example]] = defaultdict(list)
    for (task, length, _), group in samples.items():
        places[task, length] += _example(group)
    for examples in places.values():
        examples.sort(key=lambda example: (-example.difference, example.sample["sample"]))
    turns = chain.from_iterable(zip_longest(*(places[place] for place in sorted(places))))
    return [example for example in turns if example is not None][:count]


def _example(group: list[Row]) -> list[Example]:
    full = next((row for row in group if row["method"] == FULL), None)
    budgets = sorted({row["budget"] for row in group if row["budget"] is not None})
    at_budget = [_at_budget(full, [row for row in group if row["budget"] == budget]) for budget in budgets]
    return [max(at_budget, key=lambda example: example.difference)] if at_budget else []


def _at_budget(full: Row | None, rows: list[Row]) -> Example:
    others = tuple(sorted(rows, key=lambda row: (-row["score"], row["excess_nll"], row["method"])))
    best = full["score"] if full else others[0]["score"]
    return Example(full, others, others[0]["budget"], max(abs(best - row["score"]) for row in others))
