"""The report of an evaluation and the comparison of several: one HTML page each, with plots and tables as files."""

from collections.abc import Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

from keepsight.eval.report import plots, tables
from keepsight.eval.report.figures import Plot
from keepsight.eval.report.html import render_results
from keepsight.eval.report.kept_pages import choose_examples, place_of, write_sample_pages
from keepsight.eval.report.summary import (
    COLUMNS,
    MEASURES,
    SummaryRow,
    difference,
    findings,
    mean_over_tasks,
    notes_on,
    summarize,
    summary_rows,
)
from keepsight.eval.report.tables import PLACE, VARIANT, Cells, Column, Table
from keepsight.eval.results import Key, Row, Run, flatten, labels_of, names_of
from keepsight.files import write_csv, write_text

Summaries = Sequence[Sequence[SummaryRow]]
_LABELS = {"score": "Score", "excess_nll": "Excess NLL (nats/token)", "agreement": "Top-1 agreement"}


def write_outputs(runs: Sequence[Run], folder: Path) -> list[SummaryRow]:
    """Write `summary.csv`, the plots, the tables, a page a sample, and `report.html` that shows all of it.

    Args:
        runs: One run, or several of the same base model that no sample and variant is in twice.
        folder: Where all of it goes.

    Returns:
        The rows of `summary.csv`.
    """
    rows = [row for run in runs for row in run.rows]
    write_csv(folder / "summary.csv", COLUMNS, summary_rows(summary := summarize(rows)))
    drawn, made = plots_of(rows, summary), tables_of(rows, summary)
    for plot in drawn:
        plot.save(folder / "plots")
    for table in made:
        table.save(folder / "tables")
    write_report(runs, folder, write_sample_pages(runs, folder / "samples"), drawn, made, findings(summary))
    return summary


def plots_of(rows: Sequence[Row], summary: Sequence[SummaryRow]) -> list[Plot]:
    """The plots of a run, in the order of the page."""
    makers = (plots.overview_plot, plots.tradeoffs_plot, plots.scores_plot, plots.excess_nll_plot)
    deep = plots.depth_plot(rows)
    return [*(make(summary) for make in makers), *([deep] if deep else [])]


def tables_of(rows: Sequence[Row], summary: Sequence[SummaryRow]) -> list[Table]:
    """The tables of a run, in the order of the page."""
    of_scores = [make(summary) for make in (tables.overall_table, tables.difference_table, tables.task_table)]
    return [*of_scores, tables.cost_table(rows)]


def write_report(
    runs: Sequence[Run],
    folder: Path,
    pages: Mapping[Key, str],
    drawn: Sequence[Plot],
    made: Sequence[Table],
    found: Sequence[str],
) -> None:
    """Write `report.html` with plots, tables and findings into `folder`; `pages` of samples are relative to it."""
    rows = [row for run in runs for row in run.rows]
    more: dict[str, Any] = {"examples": choose_examples(rows), "place_of": place_of, "pages": pages}
    more |= {"findings": found, "samples_a_cell": plots.SAMPLES_A_CELL}
    page = render_results("report.html.j2", runs, folder, drawn, made, **more)
    write_text(folder / "report.html", page)


def write_comparison(runs: Sequence[Run], folder: Path) -> list[Table]:
    """Write `compare.html`, its plot and its tables; returns a table for each measure, means over tasks.

    Args:
        runs: At least two, as `keepsight.eval.results.comparable` gives them.
        folder: Where all of it goes.
    """
    names = labels_of(runs)
    by_task = [summarize(run.rows) for run in runs]
    means = [mean_over_tasks(summary) for summary in by_task]
    overall = [_table(measure, means, names) for measure in MEASURES]
    detailed = [_table(measure, by_task, names, PLACE) for measure in MEASURES]
    later = list(enumerate(names))[1:]
    pairs = {
        f"{name} - {names[0]}": [difference(found[at], found[0]) for found in _matched(means)] for at, name in later
    }
    plot = plots.comparison_plot({name: [each for each in found if each] for name, found in pairs.items()})
    if plot.panels:
        plot.save(folder / "plots")
    for table in (*overall, *detailed):
        table.save(folder / "tables")
    title, more = " against ".join(names), {"labels": names, "differing": _differing(runs)}
    page = render_results("compare.html.j2", runs, folder, [plot], [*overall, *detailed], title, **more)
    write_text(folder / "compare.html", page)
    return overall


def _table(measure: str, summaries: Summaries, names: Sequence[str], places: Sequence[Column] = ()) -> Table:
    """One measure of every run, and its difference from the first run; `places` are the first columns."""
    later = list(enumerate(names))[1:]
    columns = (
        *places,
        *VARIANT,
        *(Column(f"run{at}", name) for at, name in enumerate(names)),
        *(Column(f"minus{at}", f"{name} - {names[0]}", is_signed=True) for at, name in later),
        Column("n", "n"),
    )
    rows: list[Cells] = []
    for found in _matched(summaries):
        first = next(row for row in found if row)
        cells: dict[str, Any] = {each.name: getattr(first, each.name) for each in (*places, *VARIANT)}
        cells |= {f"run{at}": row and row.estimates[measure] for at, row in enumerate(found)}
        for at, _ in later:
            pair = difference(found[at], found[0])
            cells[f"minus{at}"] = pair and pair.estimates[measure]
        counts = {row.n for row in found if row}
        rows.append(cells | {"n": counts.pop() if len(counts) == 1 else None})
    notes = " ".join(filter(None, dict.fromkeys(notes_on(summary) for summary in summaries)))
    name, title = (f"{measure}_by_task", "by task and length") if places else (measure, "mean over tasks")
    caption = f"{_LABELS[measure]}{' ' if places else ', '}{title}"
    return Table(name, f"{caption}. {notes}" if notes else caption, columns, rows)


def _matched(summaries: Summaries) -> list[list[SummaryRow | None]]:
    """The rows of one task, length, method and budget, None for a run that has none."""
    places: dict[tuple[Any, ...], list[SummaryRow | None]] = {}
    for at, summary in enumerate(summaries):
        for row in summary:
            key = (row.task if row.length else "", row.length, row.method, row.budget)  # a mean's task is a sentence
            places.setdefault(key, [None] * len(summaries))[at] = row
    return list(places.values())


def _differing(runs: Sequence[Run]) -> dict[str, list[str]]:
    """Settings that are not the same in all runs."""
    settings = [flatten(run.settings) for run in runs]
    keys = dict.fromkeys(chain.from_iterable(settings))
    values = {key: [each.get(key, "") for each in settings] for key in keys if key != "command"}
    values |= {"folder": names_of(runs)}
    return {key: each for key, each in values.items() if len(set(each)) > 1}
