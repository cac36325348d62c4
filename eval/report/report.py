"""The report of an evaluation: one HTML page that needs nothing beside it, and its plots and tables as files."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from keepsight.eval.report.costs import cost_table
from keepsight.eval.report.depth_plot import depth_plot
from keepsight.eval.report.examples import choose_examples, place_of
from keepsight.eval.report.panels import Plot
from keepsight.eval.report.plots import excess_nll_plot, overview_plot, scores_plot, tradeoffs_plot
from keepsight.eval.report.result_tables import difference_table, overall_table, task_table
from keepsight.eval.report.results_page import render_results
from keepsight.eval.report.sample_pages import write_sample_pages
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
    write_report(runs, folder, write_sample_pages(runs, folder / "samples"))


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


def write_report(runs: Sequence[Run], folder: Path, pages: Mapping[Key, str]) -> None:
    """Write `report.html` into `folder`.

    Args:
        runs: As for `write_outputs`. Of their settings `command` (str), `target`, `adapter` and `versions` are also
            shown at the head.
        folder: Where the report goes; made where it is missing. Plots and tables that are there are linked.
        pages: For a sample, the page about it, relative to `folder`.
    """
    rows = [row for run in runs for row in run.rows]
    page = render_results(
        "report.html.j2",
        runs,
        folder,
        plots_of(rows),
        tables_of(rows),
        examples=choose_examples(rows),
        place_of=place_of,
        pages=pages,
    )
    write_text(folder / "report.html", page)
