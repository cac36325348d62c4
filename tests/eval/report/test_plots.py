"""The plots of an evaluation."""

import struct
from pathlib import Path

import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from keepsight.eval.report import figures as drawing
from keepsight.eval.report import plots, summary
from keepsight.eval.report.plots import depth_plot
from keepsight.eval.results import Row
from keepsight.files import DPI
from tests.eval.report.results import row


def panels_by_title(figure: Figure) -> dict[str, Axes]:
    return {panel.get_title(): panel for panel in figure.axes}


def line_of(panel: Axes, method: str) -> tuple[list[float], list[float]]:
    line = next(line for line in panel.get_lines() if line.get_label() == method)
    return list(np.asarray(line.get_xdata(), float)), list(np.asarray(line.get_ydata(), float))


def test_scores_figure_draws_each_method_at_its_budgets(rows: list[Row]) -> None:
    panels = panels_by_title(plots.scores_plot(summary.summarize(rows)).figure())
    assert list(panels) == ["niah_single, 512 tokens", "qa, short, 512 tokens"]
    panel = panels["niah_single, 512 tokens"]
    budgets, scores = line_of(panel, "snapkv")
    assert budgets == pytest.approx([64, 128], rel=0.1)
    assert scores == [0.25, 0.25]
    assert line_of(panel, "lookaheadkv")[1] == [0.5, 1.0]
    assert panel.get_xscale() == "log"
    assert [label.get_text() for label in panel.get_xticklabels()] == ["64", "128"]
    full = next(line for line in panel.get_lines() if line.get_label() == "full")
    assert np.array_equal(full.get_ydata(), [1.0, 1.0])
    assert full.get_linestyle() == "--"


def test_shares_of_the_prompt_stand_beside_numbers_of_entries() -> None:
    """Half of 500 tokens lies between 64 and 300 entries."""
    mixed = [row("snapkv", budget, score) for budget, score in {64: 0.1, 0.5: 0.5, 300: 0.9}.items()]
    (panel,) = plots.scores_plot(summary.summarize(mixed)).figure().axes
    assert panel.get_xlabel() == "KV budget (entries per layer and head)"
    assert line_of(panel, "snapkv") == (pytest.approx([64, 250, 300], rel=0.1), [0.1, 0.5, 0.9])
    assert [label.get_text() for label in panel.get_xticklabels()] == ["64", "250", "300"]
    (panel,) = plots.scores_plot(summary.summarize([row("snapkv", 0.1, 1.0)])).figure().axes
    assert panel.get_xlabel() == "KV budget (share of the prompt)"
    assert line_of(panel, "snapkv")[0] == pytest.approx([0.1], rel=0.1)


def test_intervals_span_their_value(rows: list[Row]) -> None:
    panel = panels_by_title(plots.excess_nll_plot(summary.summarize(rows)).figure())["niah_single, 512 tokens"]
    ends = [np.asarray(path.vertices)[:, 1] for drawn in panel.collections for path in drawn.get_paths()]
    half = 1.96 * np.std([1, 2, 3, 4]) / 2
    assert any(np.allclose(sorted(end), [2.5 - half, 2.5 + half], atol=0.25) for end in ends)


def test_a_method_has_one_colour_in_every_figure(rows: list[Row]) -> None:
    lines = summary.summarize([*rows, row("mymethod", 64, 0.5)])
    figures = [make(lines).figure() for make in (plots.scores_plot, plots.excess_nll_plot, plots.overview_plot)]
    for method in ("snapkv", "lookaheadkv", "mymethod"):
        drawn = [
            line.get_color()
            for figure in figures
            for panel in figure.axes
            for line in panel.get_lines()
            if line.get_label() == method
        ]
        assert len(drawn) >= 5
        assert set(drawn) == {drawing.styles_of(line.method for line in lines)[method].colour}
    assert len({style.colour for style in drawing.STYLES.values()}) == len(drawing.STYLES)


def test_plots_are_saved_as_png_svg_and_pdf(rows: list[Row], tmp_path: Path) -> None:
    lines = summary.summarize(rows)
    for plot in (plots.scores_plot(lines), plots.excess_nll_plot(lines)):
        plot.save(tmp_path / "plots")
        width, height = plot.figure().get_size_inches() * DPI
        content = (tmp_path / "plots" / f"{plot.name}.png").read_bytes()
        assert content.startswith(b"\x89PNG")
        assert struct.unpack(">II", content[16:24]) == (int(width), int(height))
        assert (tmp_path / "plots" / f"{plot.name}.pdf").read_bytes().startswith(b"%PDF")
        assert "</svg>" in (tmp_path / "plots" / f"{plot.name}.svg").read_text(encoding="utf-8")
    names = {f"{name}.{kind}" for name in ("scores", "excess_nll") for kind in drawing.FORMATS}
    assert {path.name for path in (tmp_path / "plots").iterdir()} == names


def test_many_methods_have_looks_of_their_own_and_a_legend_that_fits() -> None:
    methods = [f"snapkv pool(kernel={number}) window=32 reduce=max" for number in range(40)]
    looks = drawing.styles_of(["full", "snapkv", *methods])
    assert len({(style.colour, style.marker, style.line) for style in looks.values()}) == 42
    few = drawing.styles_of(["lookaheadkv", "snapkv", *methods[:8]])
    assert len({style.colour for style in few.values()}) == 10
    lines = summary.summarize([row(method, 64, 0.5) for method in methods[:9]])
    figure = plots.scores_plot(lines).figure()
    figure.draw_without_rendering()
    (legend,) = figure.legends
    box, whole = legend.get_window_extent(), figure.bbox
    assert box.x0 >= 0 and box.x1 <= whole.x1 and box.y1 <= whole.y1


def test_depth_by_length_has_a_panel_for_each_method_and_budget(rows: list[Row]) -> None:
    deeper = [line | {"length": 1024, "score": 0.25} for line in rows if line["method"] == "snapkv"]
    plot = depth_plot([*rows, *deeper])
    assert plot is not None
    titles = [panel.title for panel in plot.panels]
    assert titles == ["full", *(f"{name}, budget {size}" for name in ("lookaheadkv", "snapkv") for size in (64, 128))]
    panel = panels_by_title(plot.figure())["snapkv, budget 64"]
    assert [label.get_text() for label in panel.get_xticklabels()] == ["512", "1024"]
    assert [label.get_text() for label in panel.get_yticklabels()] == ["5%", "15%", "25%", "35%"]
    (mesh,) = panel.collections
    assert np.asarray(mesh.get_array()).tolist() == [[1, 0.25], [0, 0.25], [0, 0.25], [0, 0.25]]
    assert depth_plot([line | {"depth": None} for line in rows]) is None


def test_any_character_may_stand_in_a_title_and_a_label(tmp_path: Path) -> None:
    method, title = "costs $x^$", "my $\\frac task$, 1"
    plot = drawing.Plot("odd", [drawing.Panel(title, drawing.look)], {method: drawing.Style("#000000", "o")})
    plot.save(tmp_path)
    drawn = (tmp_path / "odd.svg").read_text("utf-8")
    assert title in drawn and method in drawn
