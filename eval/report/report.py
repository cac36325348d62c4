"""The report of an evaluation run: one HTML page that needs nothing beside it, and its plots and tables as files."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from keepsight.eval.report.costs import cost_table
from keepsight.eval.report.depth_plot import depth_plot
from keepsight.eval.report.examples import choose_examples, place_of
from keepsight.eval.report.facts import facts_of, headline
from keepsight.eval.report.html import flatten, render_page
from keepsight.eval.report.panels import Plot
from keepsight.eval.report.plots import excess_nll_plot, overview_plot, scores_plot, tradeoffs_plot
from keepsight.eval.report.result_tables import difference_table, overall_table, task_table
from keepsight.eval.report.sample_pages import write_sample_pages
from keepsight.eval.report.styles import styles_of
from keepsight.eval.report.summary import summarize, write_summary
from keepsight.eval.report.tables import Table
from keepsight.eval.results import Key, Row
from keepsight.eval.runs import Run
from keepsight.files import write_text


def write_outputs(runs: Sequence[Run], folder: Path) -> None:
    """Write `summary.csv`, the plots, the tables, a page a sample, and `report.html` that shows all of it.

    Args:
        runs: One run, or several of the same target that no sample and variant is in twice.
        folder: Where all of it goes.
    """
    rows = [row for run in runs for row in run.rows]
    write_summary(rows, folder / "summary.csv")
    for plot in plots_of(rows):
        plot.save(folder / "plots")
    for table in tables_of(rows):
        table.save(folder / "tables")
    pages = write_sample_pages(runs, folder / "samples")
    write_report(rows, folder, *(run.settings for run in runs), pages=pages)


def plots_of(rows: Sequence[Row]) -> list[Plot]:
    """The plots of a run, in the order of the page."""
    summary = summarize(rows)
    plots = [make(summary) for make in (overview_plot, tradeoffs_plot, scores_plot, excess_nll_plot)]
    deep = depth_plot(rows)
    return [*plots, deep] if deep else plots


def tables_of(rows: Sequence[Row]) -> list[Table]:
    """The tables of a run, in the order of the page."""
    summary = summarize(rows)
    return [overall_table(summary), difference_table(summary), task_table(summary), cost_table(rows)]


def write_report(
    rows: Sequence[Row], folder: Path, *settings: dict[str, Any], pages: dict[Key, str] | None = None
) -> None:
    """Write `report.html` into `folder`.

    Args:
        rows: Rows of `results.jsonl`; at least one.
        folder: Where the report goes; made where it is missing. Plots and tables that are there are linked.
        settings: What was run, of each run, nested as it likes; all of it is shown. `command` (str) and `versions` (a
            dict of texts) are also shown at the head, and `title` (str) replaces the page's title.
        pages: For `task, length, sample` of a sample, the page about it, relative to `folder`.
    """
    title, subtitle = headline(rows, settings)
    methods = styles_of(row["method"] for row in rows)
    examples = choose_examples(rows)
    text = render_page(
        "report.html.j2",
        title=title,
        subtitle=subtitle,
        facts=facts_of(rows, settings),
        commands=[each["command"] for each in settings if each.get("command")],
        styles=methods,
        plots={plot.name: plot for plot in plots_of(rows)},
        tables={table.name: table for table in tables_of(rows)},
        budgets=sorted({row["budget"] for row in rows if row["budget"] is not None}),
        tasks=sorted({row["task"] for row in rows}),
        lengths=sorted({row["length"] for row in rows}),
        examples=examples,
        place_of=place_of,
        pages=pages or {},
        beside=[name for name in ("plots", "tables") if (folder / name).is_dir()],
        settings=[flatten(each) for each in settings],
    )
    write_text(folder / "report.html", text)
