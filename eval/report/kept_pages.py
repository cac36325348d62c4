"""Pages about one prompt: which of its tokens each layer's heads kept, and the answers side by side."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import chain, takewhile, zip_longest
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from keepsight.eval.kept_tokens import KeptOfSample, count_key, encode_counts, path_of
from keepsight.eval.report.figures import label_of, styles_of
from keepsight.eval.report.html import headline, render_page
from keepsight.eval.results import FULL, Key, Row, Run, flatten, key_of
from keepsight.files import read_json, write_text

EXAMPLES = 10


class Answer(NamedTuple):
    """A row's answer: the beginning that it shares with the full cache's, the rest, and whether it ends early."""

    row: Row
    same: str
    own: str
    early: bool


class Example(NamedTuple):
    """A sample at the budget where scores differ most from the full cache's, by `difference` (0 to 1).

    The answers are the full cache's, if it was run, then the others', the best score first; `sample` is one's row.
    """

    sample: Row
    answers: list[Answer]
    budget: int
    difference: float


def answers_of(rows: Sequence[Row]) -> list[Answer]:
    """Answers with what they have in common with the full cache's, which is `rows[0]` where it was run."""
    whole = rows[0]["answer"] if rows and rows[0]["method"] == FULL else ""
    pairs = [zip(whole, row["answer"], strict=False) for row in rows]
    ends = [sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], each)) for each in pairs]
    found = [(row, row["answer"][:end], row["answer"][end:]) for row, end in zip(rows, ends, strict=True)]
    return [Answer(*each, early=not each[2] and len(each[1]) < len(whole)) for each in found]


def place_of(row: Row) -> str:
    """A sample's label: `niah_single, 512 tokens, needle at 40 % depth`."""
    depth = row.get("depth")
    needle = "" if depth is None else f", needle at {100 * depth:.0f} % depth"
    return f"{row['task']}, {row['length']} tokens{needle}"


def choose_examples(rows: Sequence[Row], count: int = EXAMPLES) -> list[Example]:
    """The samples whose scores differ most from the full cache's, taking the tasks and lengths in turn."""
    samples: dict[Key, list[Row]] = defaultdict(list)
    for row in rows:
        samples[key_of(row)].append(row)
    places: dict[tuple[str, int], list[Example]] = defaultdict(list)
    for (task, length, _), group in samples.items():
        full = next((row for row in group if row["method"] == FULL), None)
        budgets = sorted({row["budget"] for row in group if row["budget"] is not None})
        at_budget = [_example(full, [row for row in group if row["budget"] == budget]) for budget in budgets]
        places[task, length] += sorted(at_budget, key=lambda example: -example.difference)[:1]
    for examples in places.values():
        examples.sort(key=lambda example: (-example.difference, example.sample["sample"]))
    turns = chain.from_iterable(zip_longest(*(places[place] for place in sorted(places))))
    return [example for example in turns if example is not None][:count]


def _example(full: Row | None, rows: list[Row]) -> Example:
    rows.sort(key=lambda row: (-row["score"], row["excess_nll"], row["method"]))
    best = (full or rows[0])["score"]
    answers = answers_of([full, *rows] if full else rows)
    return Example(rows[0], answers, rows[0]["budget"], max(abs(best - row["score"]) for row in rows))


def write_inspect_page(
    path: Path,
    tokens: list[str],
    kept: dict[str, NDArray[np.bool_]],
    title: str,
    settings: dict[str, Any],
    answers: Mapping[str, str] | None = None,
) -> None:
    """Write the page of `keepsight inspect`, which shades every token of a prompt by how many heads kept it.

    Args:
        path: The file to write.
        tokens: Text of each prompt token, N of them; empty for a token that is only a part of a character, whose text
            stands with the last of its tokens.
        kept: For each method, at least one, a bool array [layers, kv_heads, N] with at most 255 heads.
        title: Heading of the page.
        settings: Settings of the command, shown below the page.
        answers: The answer of each method, the full cache's first.
    """
    layers, heads = next(iter(kept.values())).shape[:2]
    colours = {name: style.colour for name, style in styles_of([*kept, FULL]).items()}
    rows = [{"method": method, "answer": answer} for method, answer in (answers or {}).items()]
    methods = [(name, colours[name], encode_counts(array)) for name, array in kept.items()]
    found = [(each.row["method"], colours[each.row["method"]], each) for each in answers_of(rows)]
    content = KeptOfSample(tokens, layers, heads, {})
    write_text(path, _render(content, methods, found, title=title, settings=flatten(settings)))


def write_sample_pages(runs: Sequence[Run], folder: Path) -> dict[Key, str]:
    """Write a page for each sample whose kept tokens were stored.

    Returns:
        For `task, length, sample` of each, the page relative to the folder that holds `folder`.
    """
    samples: dict[Key, list[tuple[Run, Row]]] = defaultdict(list)
    for run in runs:
        for row in run.rows:
            if row.get("sample_digest"):
                samples[key_of(row)].append((run, row))
    pages = {}
    for key, group in samples.items():
        found = {path: None for run, row in group if (path := path_of(run.folder, row)).is_file()}
        kept = [read_json(path, KeptOfSample) for path in found]
        counts = {name: each for content in kept for name, each in content.counts.items()}
        if not any(count_key(row) in counts for _, row in group):
            continue
        settings = {id(run): run.settings for run, _ in group}
        name = f"{next(iter(found)).stem}.html"
        write_text(folder / name, _sample_page([row for _, row in group], kept[0], counts, [*settings.values()]))
        pages[key] = f"{folder.name}/{name}"
    return pages


def _sample_page(rows: list[Row], kept: KeptOfSample, counts: dict[str, str], settings: list[Row]) -> str:
    rows = sorted(rows, key=lambda row: (row["budget"] or 0, row["method"]))
    styles, sample = styles_of(row["method"] for row in rows), rows[0]
    colours = {name: style.colour for name, style in styles.items()}
    model, subtitle = headline(rows, settings)
    methods = [
        (_label(row), colours[row["method"]], counts[count_key(row)])
        for row in rows
        if row["method"] != FULL and count_key(row) in counts
    ]
    facts = {
        "sample": str(sample["sample"]),
        "prompt": f"{len(kept.tokens)} tokens",
        "question": str(sample.get("asks") or ""),
        "expected": " | ".join(sample["references"]),
    }
    answers = [(_label(each.row), colours[each.row["method"]], each) for each in answers_of(rows)]
    head = {"title": place_of(sample), "subtitle": f"{model} · {subtitle}"}
    return _render(kept, methods, answers, facts=facts, back="../report.html", **head)


def _label(row: Row) -> str:
    name = label_of(row["method"])
    return name if row["budget"] is None else f"{name}, budget {row['budget']}"


def _render(
    kept: KeptOfSample,
    methods: Sequence[tuple[str, str, str]],
    answers: Sequence[tuple[str, str, Answer]],
    **shown: Any,
) -> str:
    """The page of a prompt; of methods the name, colour and counts, of answers the name, colour and answer."""
    named = [dict(zip(("name", "colour", "counts"), each, strict=True)) for each in methods]
    data = {"layers": kept.layers, "heads": kept.heads, "tokens": kept.tokens, "methods": named}
    values = {"subtitle": "", "facts": {}, "back": "", "settings": {}} | shown
    return render_page("inspect.html.j2", data=data, answers=answers, **values)
