"""Pages about one prompt: which of its tokens each layer's heads kept, and the answers side by side."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import chain, takewhile, zip_longest
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from keepsight.eval.kept_tokens import KeptOfSample, count_key, encode_counts, path_of
from keepsight.eval.report.figures import in_order, label_of, styles_of
from keepsight.eval.report.html import flatten, headline, render_page
from keepsight.eval.results import FULL, Key, Row, Run, key_of
from keepsight.files import read_json, write_text

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


@dataclass(frozen=True)
class KeptCounts:
    """What one method kept.

    Attributes:
        name: As the page shows it.
        colour: `#rrggbb`.
        counts: How many heads kept each token, as `encode_counts` gives it.
    """

    name: str
    colour: str
    counts: str


def write_inspect_page(
    path: Path,
    tokens: list[str],
    kept: dict[str, NDArray[np.bool_]],
    title: str,
    settings: dict[str, Any],
    answers: Mapping[str, str] | None = None,
) -> None:
    """Write one HTML file that shades every token of a prompt by how many heads kept it.

    Args:
        path: The file to write.
        tokens: Text of each prompt token, N of them; empty for a token that is only a part of a character, whose text
            stands with the last of its tokens.
        kept: For each method a bool array [layers, kv_heads, N]; the first two methods are shown at the start, the
            others can be chosen.
        title: Heading of the page.
        settings: What was run; shown below the page.
        answers: For each method, and for the full cache first, what it answered.

    Raises:
        ValueError: `kept` is empty, or its arrays do not all have the shape [layers, kv_heads, N].
    """
    shape = _shape(kept, len(tokens))
    styles = styles_of([*kept, FULL])
    rows = [{"method": method, "answer": answer} for method, answer in (answers or {}).items()]
    page = render_kept_page(
        title=title,
        subtitle="",
        tokens=tokens,
        shape=shape,
        kept=[KeptCounts(name, styles[name].colour, encode_counts(array)) for name, array in kept.items()],
        facts={},
        answers=[(each.row["method"], styles[each.row["method"]].colour, each) for each in answers_of(rows)],
        back="",
        settings=settings,
    )
    write_text(path, page)


def render_kept_page(
    *,
    title: str,
    subtitle: str,
    tokens: Sequence[str],
    shape: tuple[int, int],
    kept: Sequence[KeptCounts],
    facts: Mapping[str, str],
    answers: Sequence[tuple[str, str, Answer]],
    back: str,
    settings: Mapping[str, Any],
) -> str:
    """The page as text.

    Args:
        title: Heading.
        subtitle: The line below it; empty for none.
        tokens: As for `write_inspect_page`.
        shape: Number of layers and of KV heads.
        kept: What each method kept.
        facts: About the prompt, by name.
        answers: Name, colour and answer of each method.
        back: A page to go back to; empty for none.
        settings: What was run.
    """
    layers, heads = shape
    data = {"layers": layers, "heads": heads, "tokens": tokens, "methods": [asdict(each) for each in kept]}
    return render_page(
        "inspect.html.j2",
        title=title,
        subtitle=subtitle,
        data=data,
        facts=facts,
        answers=answers,
        back=back,
        settings=flatten(settings),
    )


def _shape(kept: dict[str, NDArray[np.bool_]], length: int) -> tuple[int, int]:
    """Layers and KV heads, the same for every method."""
    if not kept:
        raise ValueError("kept: at least one method is needed")
    layers, heads = next(iter(kept.values())).shape[:2]
    for name, array in kept.items():
        if array.shape != (layers, heads, length):
            raise ValueError(f"kept[{name!r}]: shape {array.shape}, expected {(layers, heads, length)}")
    if heads > np.iinfo(np.uint8).max:
        raise ValueError(f"kept: {heads} KV heads, at most 255 can be shown")
    return layers, heads


def write_sample_pages(runs: Sequence[Run], folder: Path) -> dict[Key, str]:
    """Write the pages of all samples whose kept tokens were stored.

    Returns:
        For `task, length, sample` of each, the page relative to the folder that holds `folder`.
    """
    pages = {}
    for key, group in _by_sample(runs).items():
        rows = [row for _, row in group]
        found = {path: None for run, row in group if (path := path_of(run.folder, row)).is_file()}
        kept = [read_json(path, KeptOfSample) for path in found]
        counts = {name: each for content in kept for name, each in content.counts.items()}
        if not any(count_key(row) in counts for row in rows):
            continue
        settings = {id(run): run.settings for run, _ in group}
        text = _page(rows, kept[0], counts, [*settings.values()])
        name = f"{next(iter(found)).stem}.html"
        write_text(folder / name, text)
        pages[key] = f"{folder.name}/{name}"
    return pages


def _by_sample(runs: Sequence[Run]) -> dict[Key, list[tuple[Run, Row]]]:
    samples: dict[Key, list[tuple[Run, Row]]] = defaultdict(list)
    for run in runs:
        for row in run.rows:
            if row.get("sample_digest"):
                samples[key_of(row)].append((run, row))
    return samples


def _page(rows: list[Row], kept: KeptOfSample, counts: dict[str, str], settings: list[Row]) -> str:
    order = {method: place for place, method in enumerate(in_order(row["method"] for row in rows))}
    rows = sorted(rows, key=lambda row: (row["budget"] or 0, order[row["method"]]))
    styles, sample = styles_of(order), rows[0]
    shown = [
        KeptCounts(_label(row), styles[row["method"]].colour, counts[count_key(row)])
        for row in rows
        if row["method"] != FULL and count_key(row) in counts
    ]
    model, subtitle = headline(rows, settings)
    return render_kept_page(
        title=place_of(sample),
        subtitle=f"{model} · {subtitle}",
        tokens=kept.tokens,
        shape=(kept.layers, kept.heads),
        kept=shown,
        facts={
            "sample": str(sample["sample"]),
            "prompt": f"{len(kept.tokens)} tokens",
            "question": str(sample.get("asks") or ""),
            "expected": " | ".join(sample["references"]),
        },
        answers=[(_label(each.row), styles[each.row["method"]].colour, each) for each in answers_of(rows)],
        back="../report.html",
        settings={},
    )


def _label(row: Row) -> str:
    name = label_of(row["method"])
    return name if row["budget"] is None else f"{name}, budget {row['budget']}"
