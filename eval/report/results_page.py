"""What the pages about results have in common: head, filters, settings."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from keepsight.eval.report.facts import facts_of, headline
from keepsight.eval.report.html import flatten, render_page
from keepsight.eval.report.panels import Plot
from keepsight.eval.report.styles import styles_of
from keepsight.eval.report.tables import Table
from keepsight.eval.runs import Run, names_of


def render_results(
    template: str,
    runs: Sequence[Run],
    folder: Path,
    plots: Iterable[Plot],
    tables: Iterable[Table],
    title: str = "",
    **values: Any,
) -> str:
    """The page of a template that extends `page.html.j2`.

    Args:
        template: File name of the template.
        runs: What was measured.
        folder: Where the page goes; plots and tables that are there are linked.
        plots: What the template shows.
        tables: What the template shows.
        title: Heading, where it is not the model's.
        **values: What else the template names.
    """
    rows = [row for run in runs for row in run.rows]
    settings = [run.settings for run in runs]
    of_model, subtitle = headline(rows, settings)
    styles = styles_of(row["method"] for row in rows)
    return render_page(
        template,
        title=title or of_model,
        subtitle=f"{of_model} · {subtitle}" if title else subtitle,
        facts=facts_of(rows, settings),
        styles=styles,
        numbers={method: number for number, method in enumerate(styles)},
        choices={
            "budget": sorted({row["budget"] for row in rows if row["budget"] is not None}),
            "task": sorted({row["task"] for row in rows}),
            "length": sorted({row["length"] for row in rows}),
        },
        plots={plot.name: plot for plot in plots},
        tables={table.name: table for table in tables},
        beside=[name for name in ("plots", "tables") if (folder / name).is_dir()],
        settings={name: flatten(run.settings) for name, run in zip(names_of(runs), runs, strict=True)},
        **values,
    )
