"""The HTML report of an evaluation run: one file that needs nothing beside it."""

import statistics
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain, zip_longest
from pathlib import Path
from typing import Any

from markupsafe import Markup

from keepsight.eval.report.html import flatten, render_page
from keepsight.eval.report.plots import as_svg, excess_nll_figure, overview_figure, scores_figure
from keepsight.eval.report.styles import label_of, style_of
from keepsight.eval.report.summary import SummaryRow, by_task_and_length, mean_over_tasks, share_of_full, summarize
from keepsight.eval.results import FULL
from keepsight.files import write_text

EXAMPLES = 10

Row = dict[str, Any]


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


@dataclass(frozen=True)
class Timing:
    """Means of one method and budget over all samples.

    Attributes:
        method: Name of the method.
        budget: KV entries per layer and KV head; None where all are kept.
        seconds: Seconds of each phase before the first token.
        time_to_first_token: Sum of these seconds.
        tokens_per_second: Decoding speed of the whole batch; None where nothing was left to decode.
        rows: Number of answers in that batch.
        recall: Share of the entries that the answer attends to most which were kept; None where it has no meaning.
        kept: KV entries kept per layer and KV head.
        kv_mib: Size of keys and values in MiB.
    """

    method: str
    budget: int | None
    seconds: dict[str, float]
    time_to_first_token: float
    tokens_per_second: float | None
    rows: float
    recall: float | None
    kept: float
    kv_mib: float


def write_report(rows: Sequence[Row], folder: Path, settings: dict[str, Any]) -> None:
    """Write `report.html` into `folder`.

    Args:
        rows: Rows of `results.jsonl`; at least one.
        folder: Where the report goes; made where it is missing.
        settings: What was run, nested as it likes; all of it is shown. `command` (str) and `versions` (a dict of
            texts) are also shown at the head, and `title` (str) replaces the page's title.
    """
    summary = summarize(rows)
    text = render_page(
        "report.html.j2",
        title=settings.get("title", "KV-cache eviction: evaluation"),
        facts=_facts(rows),
        command=settings.get("command"),
        versions=settings.get("versions", {}),
        mean=mean_over_tasks(summary),
        groups=by_task_and_length(summary),
        share_of_full=share_of_full,
        style_of=style_of,
        label_of=label_of,
        figures=_figures(summary),
        timings=timings(rows),
        examples=choose_examples(rows),
        settings=flatten(settings),
    )
    write_text(folder / "report.html", text)


def choose_examples(rows: Sequence[Row], count: int = EXAMPLES) -> list[Example]:
    """The samples whose scores differ most from the full cache's, taking the tasks and lengths in turn."""
    samples: dict[tuple[str, int, str], list[Row]] = defaultdict(list)
    for row in rows:
        samples[row["task"], row["length"], row["sample"]].append(row)
    places: dict[tuple[str, int], list[Example]] = defaultdict(list)
    for (task, length, _), group in samples.items():
        places[task, length] += _example(group)
    for examples in places.values():
        examples.sort(key=lambda example: (-example.difference, example.sample["sample"]))
    turns = chain.from_iterable(zip_longest(*(places[place] for place in sorted(places))))
    return [example for example in turns if example is not None][:count]


def timings(rows: Sequence[Row]) -> list[Timing]:
    """Mean seconds, kept entries and cache size for each method and budget, the full cache first."""
    variants: dict[tuple[int, str], list[Row]] = defaultdict(list)
    for row in rows:
        variants[row["budget"] or 0, row["method"]].append(row)
    return [_timing(variants[key]) for key in sorted(variants)]


def _facts(rows: Sequence[Row]) -> dict[str, str]:
    """What was run, read from the rows themselves."""
    samples = Counter((row["task"], row["length"]) for row in {_sample_key(row): row for row in rows}.values())
    counts = sorted(set(samples.values()))
    budgets = sorted({row["budget"] for row in rows if row["budget"] is not None})
    methods = dict.fromkeys(row["method"] for row in rows)
    return {
        "tasks": ", ".join(sorted({row["task"] for row in rows})),
        "lengths": ", ".join(str(length) for length in sorted({row["length"] for row in rows})) + " tokens",
        "methods": ", ".join(methods),
        "budgets": ", ".join(map(str, budgets)) + " KV entries per layer and KV head" if budgets else "full cache only",
        "samples": "-".join(str(count) for count in dict.fromkeys((counts[0], counts[-1])))
        + f" for each task and length, {sum(samples.values())} in all",
        "question while compressing": ", ".join(sorted({str(row["question"]) for row in rows})),
    }


def _sample_key(row: Row) -> tuple[str, int, str]:
    return row["task"], row["length"], row["sample"]


def _figures(summary: Sequence[SummaryRow]) -> dict[str, Markup]:
    figures = {
        "overview": overview_figure(summary),
        "scores": scores_figure(summary),
        "excess_nll": excess_nll_figure(summary),
    }
    return {name: Markup(as_svg(figure, salt=name)) for name, figure in figures.items()}


def _example(group: list[Row]) -> list[Example]:
    full = next((row for row in group if row["method"] == FULL), None)
    budgets = sorted({row["budget"] for row in group if row["budget"] is not None})
    at_budget = [_at_budget(full, [row for row in group if row["budget"] == budget]) for budget in budgets]
    return [max(at_budget, key=lambda example: example.difference)] if at_budget else []


def _at_budget(full: Row | None, rows: list[Row]) -> Example:
    others = tuple(sorted(rows, key=lambda row: (-row["score"], row["excess_nll"], row["method"])))
    best = full["score"] if full else others[0]["score"]
    return Example(full, others, others[0]["budget"], max(abs(best - row["score"]) for row in others))


def _timing(rows: list[Row]) -> Timing:
    def mean(key: str) -> float:
        return statistics.fmean(row[key] for row in rows)

    speeds = [row["tokens_per_second"] for row in rows if row["tokens_per_second"] is not None]
    recalls = [row["recall"] for row in rows if row["recall"] is not None]
    return Timing(
        method=rows[0]["method"],
        budget=rows[0]["budget"],
        seconds={phase: statistics.fmean(row["seconds"][phase] for row in rows) for phase in rows[0]["seconds"]},
        time_to_first_token=mean("time_to_first_token"),
        tokens_per_second=statistics.fmean(speeds) if speeds else None,
        rows=mean("rows"),
        recall=statistics.fmean(recalls) if recalls else None,
        kept=mean("kept"),
        kv_mib=mean("kv_bytes") / 2**20,
    )
