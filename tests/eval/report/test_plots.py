"""The plots of an evaluation."""

from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from keepsight.eval.record import ResultRow
from keepsight.eval.report import figures as drawing
from keepsight.eval.report import plots, summary
from keepsight.eval.report.plots import depth_plot
from tests.eval.report.results import row


def panels_by_title(figure: Figure) -> dict[str, Axes]:
    return {panel.get_title(): panel for panel in figure.axes}


def line_of(panel: Axes, method: str) -> Line2D:
    (line,) = (line for line in panel.get_lines() if line.get_label() == method)
    return line


def points_of(panel: Axes, method: str) -> tuple[list[float], list[float]]:
    """The x and y values of a method's line."""
    line = line_of(panel, method)
    return list(np.asarray(line.get_xdata(), float)), list(np.asarray(line.get_ydata(), float))


def test_scores_figure_draws_each_method_at_its_budgets(rows: list[ResultRow]) -> None:
    panels = panels_by_title(plots.scores_plot(summary.summarize(rows)).figure())
    assert list(panels) == ["niah_single, 512 tokens", "qa, short, 512 tokens"]
    panel = panels["niah_single, 512 tokens"]
    budgets, snapkv_scores = points_of(panel, "snapkv")
    assert budgets == pytest.approx([64, 128], rel=0.1)
    assert snapkv_scores == [0.25, 0.25]
    _, lookaheadkv_scores = points_of(panel, "lookaheadkv")
    assert lookaheadkv_scores == [0.5, 1.0]
    assert panel.get_xscale() == "log"
    full = line_of(panel, "full")
    assert np.array_equal(full.get_ydata(), [1.0, 1.0])
    assert full.get_linestyle() == "--"


def test_shares_of_the_prompt_stand_beside_numbers_of_entries() -> None:
    """Half of 500 tokens lies between 64 and 300 entries."""
    mixed = [row("snapkv", 64, 0.1), row("snapkv", 0.5, 0.5), row("snapkv", 300, 0.9)]
    (panel,) = plots.scores_plot(summary.summarize(mixed)).figure().axes
    assert panel.get_xlabel() == "KV budget (entries per layer and head)"
    budgets, scores = points_of(panel, "snapkv")
    assert budgets == pytest.approx([64, 250, 300], rel=0.1)
    assert scores == [0.1, 0.5, 0.9]
    (panel,) = plots.scores_plot(summary.summarize([row("snapkv", 0.1, 1.0)])).figure().axes
    assert panel.get_xlabel() == "KV budget (share of the prompt)"
    budgets, _ = points_of(panel, "snapkv")
    assert budgets == pytest.approx([0.1], rel=0.1)


def test_a_method_has_one_colour_in_every_figure(rows: list[ResultRow]) -> None:
    table = summary.summarize([*rows, row("mymethod", 64, 0.5)])
    panels: list[Axes] = []
    for plot in (plots.scores_plot(table), plots.excess_nll_plot(table), plots.overview_plot(table)):
        panels += plot.figure().axes
    colours: dict[str, list[Any]] = defaultdict(list)
    for panel in panels:
        for line in panel.get_lines():
            colours[str(line.get_label())].append(line.get_color())
    styles = drawing.styles_of(table["method"])
    for method in ("snapkv", "lookaheadkv", "mymethod"):
        assert len(colours[method]) >= 5
        assert set(colours[method]) == {styles[method].colour}
    assert len({style.colour for style in drawing.STYLES.values()}) == len(drawing.STYLES)


def test_depth_by_length_has_a_panel_for_each_method_and_budget(rows: list[ResultRow]) -> None:
    longer = [replace(row, length=1024, score=0.25) for row in rows if row.method == "snapkv"]
    of_two_lengths = [*rows, *longer]
    assert depth_plot(of_two_lengths) is None, "a cell needs three samples"
    copies: list[ResultRow] = []
    for copy in range(3):
        copies += [replace(row, sample=f"{row.sample}{copy}") for row in of_two_lengths]
    plot = depth_plot(copies)
    assert plot is not None
    assert [panel.title for panel in plot.panels] == [
        "full",
        "lookaheadkv, budget 64",
        "lookaheadkv, budget 128",
        "snapkv, budget 64",
        "snapkv, budget 128",
    ]
    panel = panels_by_title(plot.figure())["snapkv, budget 64"]
    (mesh,) = panel.collections
    assert np.asarray(mesh.get_array()).tolist() == [[1, 0.25], [0, 0.25], [0, 0.25], [0, 0.25]]
    assert depth_plot([replace(row, depth=None) for row in rows]) is None


def test_any_character_may_stand_in_a_title_and_a_label(tmp_path: Path) -> None:
    method = "costs $x^$"
    title = "my $\\frac task$, 1"
    plot = drawing.Plot("odd", [drawing.Panel(title, drawing.look)], {method: drawing.Style("#000000", "o")})
    plot.save(tmp_path)
    drawn = (tmp_path / "odd.svg").read_text("utf-8")
    assert title in drawn
    assert method in drawn


def test_scores_against_the_values_of_an_option() -> None:
    """Two methods with an option in two values or more, at two budgets; a single value makes no line."""
    rows = [row("full", None, 1.0), row("snapkv window=8", 64, 0.5)]
    for value, score in ((2, 0.2), (8, 0.4), (32, 0.8)):
        for budget in (64, 128):
            rows.append(row(f"speckv lookahead={value}", budget, score + budget / 1000))
    plot = plots.options_plot(summary.summarize(rows))
    assert plot is not None
    assert len(plot.panels) == 2
    panels = panels_by_title(plot.figure())
    values, scores = points_of(panels["score by lookahead"], "speckv, budget 64")
    assert values == [2, 8, 32]
    assert scores == pytest.approx([0.264, 0.464, 0.864])
    assert set(plot.styles) == {"full", "speckv, budget 64", "speckv, budget 128"}
    assert plots.options_plot(summary.summarize(rows[:3])) is None
