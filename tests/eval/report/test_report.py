import csv
import re
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from keepsight.eval.report import plots, report, styles, summary
from keepsight.files import DPI

Row = dict[str, Any]


def row(method: str, budget: int | None, score: float, **changes: Any) -> Row:
    plain: Row = {
        "task": "niah_single",
        "length": 512,
        "sample": "0",
        "method": method,
        "budget": budget,
        "score": score,
        "excess_nll": 0.0 if method == "full" else 0.25,
        "agreement": 1.0 if method == "full" else 0.75,
        "kept": budget or 500,
        "kv_bytes": (budget or 500) * 1024,
        "prompt_tokens": 500,
        "answer": f"{method} says 4711",
        "references": ["4711"],
        "question": "seen",
        "recall": 1.0 if method == "full" else 0.5,
        "seconds": {"prefill": 1.0, "draft": 0.0, "observe": 0.5, "select": 0.25, "question": 0.0},
        "time_to_first_token": 1.75,
        "tokens_per_second": 20.0,
        "rows": 2,
    }
    return plain | changes


@pytest.fixture
def rows() -> list[Row]:
    """Two tasks with different numbers of samples; the full cache, two methods, two budgets."""
    made = []
    for task, samples in (("niah_single", 4), ("qa, short", 2)):
        for sample in range(samples):
            where = {"task": task, "sample": f"s{sample}"}
            made.append(row("full", None, 1.0 if task == "niah_single" else 0.5, **where))
            for budget in (64, 128):
                made.append(row("snapkv", budget, float(sample == 0), excess_nll=1.0 + sample, **where))
                made.append(row("lookaheadkv", budget, 1.0 if budget == 128 else 0.5, **where))
    return made


def panels_by_title(figure: Figure) -> dict[str, Axes]:
    return {panel.get_title(): panel for panel in figure.axes}


def line_of(panel: Axes, method: str) -> tuple[list[float], list[float]]:
    line = next(line for line in panel.get_lines() if line.get_label() == method)
    return list(np.asarray(line.get_xdata(), float)), list(np.asarray(line.get_ydata(), float))


def test_summary_csv_holds_means_in_a_fixed_order(rows: list[Row], tmp_path: Path) -> None:
    summary.write_summary(rows, tmp_path / "summary.csv")
    text = (tmp_path / "summary.csv").read_text(encoding="utf-8")
    assert text.splitlines()[0] == "task,length,method,budget,n,score,excess_nll,agreement"
    assert text.splitlines()[1] == "niah_single,512,full,,4,1.0000,0.0000,1.0000"
    assert text.splitlines()[4] == "niah_single,512,snapkv,64,4,0.2500,2.5000,0.7500"
    parsed = list(csv.DictReader(text.splitlines()))
    assert [(line["task"], line["method"], line["budget"]) for line in parsed[5:]] == [
        ("qa, short", "full", ""),
        ("qa, short", "lookaheadkv", "64"),
        ("qa, short", "lookaheadkv", "128"),
        ("qa, short", "snapkv", "64"),
        ("qa, short", "snapkv", "128"),
    ]
    summary.write_summary(rows[::-1], tmp_path / "again.csv")
    assert (tmp_path / "again.csv").read_text(encoding="utf-8") == text


def test_tiny_negative_means_are_not_written_as_minus_zero(tmp_path: Path) -> None:
    summary.write_summary([row("oracle", 64, 1.0, excess_nll=-0.00001)], tmp_path / "summary.csv")
    assert "-0.0000" not in (tmp_path / "summary.csv").read_text(encoding="utf-8")


def test_mean_over_tasks_weighs_tasks_alike(rows: list[Row]) -> None:
    mean = {(line.method, line.budget): line for line in summary.mean_over_tasks(summary.summarize(rows))}
    snapkv = mean["snapkv", 64]
    assert snapkv.score == pytest.approx((1 / 4 + 1 / 2) / 2)
    assert snapkv.excess_nll == pytest.approx((2.5 + 1.5) / 2)
    assert snapkv.n == 6
    assert snapkv.effective_n == pytest.approx(1 / (0.25 / 4 + 0.25 / 2))
    errors = np.std([1, 2, 3, 4], ddof=1) / 2, np.std([1, 2], ddof=1) / np.sqrt(2)
    assert snapkv.excess_nll_error == pytest.approx(np.hypot(*errors) / 2)


def test_mean_over_tasks_weighs_the_samples_of_a_task_alike() -> None:
    rows = [row("full", None, 1.0)] + [row("full", None, 0.0, length=1024, sample=str(i)) for i in range(3)]
    (mean,) = summary.mean_over_tasks(summary.summarize(rows))
    assert mean.score == pytest.approx(0.25)
    assert (mean.n, mean.effective_n) == (4, pytest.approx(4))


def test_table_sorts_by_score_at_equal_budget_and_shows_the_share_of_full(rows: list[Row]) -> None:
    shown = summary.summary_table(summary.summarize([line for line in rows if line["task"] == "qa, short"]))
    lines = shown.splitlines()
    assert lines[0] == "qa, short, 512 tokens"
    assert [line.replace("128", "").replace("64", "").replace("   all", "").split()[0] for line in lines[2:]] == [
        "full",
        "lookaheadkv",
        "snapkv",
        "lookaheadkv",
        "snapkv",
    ]
    assert "2.00 of full" in lines[5]
    assert "1.00 of full" in lines[6]
    both = summary.summary_table(summary.summarize(rows))
    assert [block.splitlines()[0] for block in both.split("\n\n")] == [
        "niah_single, 512 tokens",
        "qa, short, 512 tokens",
        "mean of 2 tasks, all lengths",
    ]
    assert "0.67 of full" in both.split("\n\n")[-1]  # lookaheadkv at 64: 0.5 of 0.75


def test_many_groups_leave_the_mean_alone_in_the_table() -> None:
    rows = [row("full", None, 1.0, task=f"t{number}") for number in range(summary.MAX_BLOCKS + 1)]
    assert summary.summary_table(summary.summarize(rows)).splitlines()[0] == "mean of 5 tasks, all lengths"


def test_share_of_full_is_missing_where_full_scores_nothing() -> None:
    lines = summary.summarize([row("full", None, 0.0), row("snapkv", 64, 0.5)])
    assert summary.share_of_full(lines[1], lines) is None
    assert "of full" not in summary.summary_table(lines)


def test_wilson_interval() -> None:
    assert summary.wilson_interval(1.0, 50) == pytest.approx((0.9286, 1.0), abs=1e-4)
    assert summary.wilson_interval(0.5, 10) == pytest.approx((0.2366, 0.7634), abs=1e-4)


def test_scores_figure_draws_each_method_at_its_budgets(rows: list[Row]) -> None:
    panels = panels_by_title(plots.scores_figure(summary.summarize(rows)))
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


def test_intervals_span_their_value(rows: list[Row]) -> None:
    panel = panels_by_title(plots.excess_nll_figure(summary.summarize(rows)))["niah_single, 512 tokens"]
    ends = [np.asarray(path.vertices)[:, 1] for drawn in panel.collections for path in drawn.get_paths()]
    half = 1.96 * np.std([1, 2, 3, 4], ddof=1) / 2
    assert any(np.allclose(sorted(end), [2.5 - half, 2.5 + half]) for end in ends)


def test_a_method_has_one_colour_in_every_figure(rows: list[Row]) -> None:
    lines = summary.summarize([*rows, row("mymethod", 64, 0.5)])
    figures = plots.scores_figure(lines), plots.excess_nll_figure(lines), plots.overview_figure(lines)
    for method in ("snapkv", "lookaheadkv", "mymethod"):
        drawn = [
            line.get_color()
            for figure in figures
            for panel in figure.axes
            for line in panel.get_lines()
            if line.get_label() == method
        ]
        assert len(drawn) >= 5
        assert set(drawn) == {styles.style_of(method).colour}
    assert len({style.colour for style in styles.STYLES.values()}) == len(styles.STYLES)


def test_negative_excess_nll_stays_inside_the_panel() -> None:
    lines = summary.summarize([row("full", None, 1.0), row("oracle", 64, 1.0, excess_nll=-0.3)])
    panel = plots.excess_nll_figure(lines).axes[0]
    assert panel.get_ylim()[0] < -0.3


def test_png_files_have_the_size_of_the_figure(rows: list[Row], tmp_path: Path) -> None:
    lines = summary.summarize(rows)
    plots.plot_scores(lines, tmp_path / "plots" / "scores.png")
    plots.plot_excess_nll(lines, tmp_path / "plots" / "excess_nll.png")
    width, height = plots.scores_figure(lines).get_size_inches() * DPI
    for name in ("scores.png", "excess_nll.png"):
        content = (tmp_path / "plots" / name).read_bytes()
        assert content.startswith(b"\x89PNG")
        assert struct.unpack(">II", content[16:24]) == (int(width), int(height))
    assert {path.name for path in (tmp_path / "plots").iterdir()} == {"scores.png", "excess_nll.png"}


def test_report_is_one_file_that_needs_nothing_else(rows: list[Row], tmp_path: Path) -> None:
    settings = {
        "command": "keepsight eval x",
        "versions": {"torch": "2.13"},
        "model": {"id": "tiny"},
        "lengths": [1, 2],
    }
    report.write_report(rows, tmp_path / "out", settings)
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["report.html"]
    page = (tmp_path / "out" / "report.html").read_text(encoding="utf-8")
    assert page.count("<svg") == 3
    assert not re.search(r"""(?:src|href)=["'](?!#)""", page)
    assert "<script" not in page
    for text in (
        "keepsight eval x",
        "torch 2.13",
        "model.id",
        "tiny",
        "1, 2",
        "2-4 for each task and length, 6 in all",
    ):
        assert text in page
    for name in ("niah_single, 512 tokens", "qa, short, 512 tokens", "mean of 2 tasks"):
        assert name in page
    assert "prefers-color-scheme: dark" in page


def test_report_escapes_what_the_model_wrote(rows: list[Row], tmp_path: Path) -> None:
    rows[1]["answer"] = "<script>alert(1)</script> & more"
    rows[1]["references"] = ["<b>4711</b>"]
    report.write_report(rows, tmp_path, {"note": "<i>settings</i>"})
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert "&lt;script&gt;alert(1)&lt;/script&gt; &amp; more" in page
    assert "&lt;i&gt;settings&lt;/i&gt;" in page
    assert "<script" not in page
    assert "<b>4711" not in page


def test_report_of_the_full_cache_alone(tmp_path: Path) -> None:
    report.write_report([row("full", None, 1.0)], tmp_path, {})
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert "full cache only" in page
    assert "No method that evicts was run." in page


def test_svg_takes_the_colours_of_the_page(rows: list[Row]) -> None:
    svg = plots.as_svg(plots.overview_figure(summary.summarize(rows)), salt="a")
    assert svg.startswith("<svg")
    assert "currentColor" in svg
    assert plots.TEXT not in svg
    assert styles.style_of("snapkv").colour.lower() in svg.lower()


def test_examples_are_those_that_differ_most_taking_tasks_in_turn(rows: list[Row]) -> None:
    examples = report.choose_examples(rows, count=3)
    assert [example.sample["task"] for example in examples] == ["niah_single", "qa, short", "niah_single"]
    first = examples[0]
    assert first.sample["sample"] == "s1"  # snapkv answers s0 rightly
    assert first.difference == 1.0
    assert first.full is not None and first.full["method"] == "full"
    assert [other["method"] for other in first.others] == ["lookaheadkv", "snapkv"]


def test_an_example_shows_the_budget_where_the_answers_differ_most() -> None:
    rows = [row("full", None, 1.0), row("snapkv", 64, 1.0), row("snapkv", 128, 0.25)]
    (example,) = report.choose_examples(rows)
    assert (example.budget, example.difference) == (128, 0.75)


def test_timings_are_means_with_the_full_cache_first(rows: list[Row]) -> None:
    rows[0]["seconds"] = {"prefill": 7.0, "draft": 0.0, "observe": 0.5, "select": 0.25, "question": 0.0}
    rows[1]["recall"] = None
    lines = report.timings(rows)
    assert [(line.method, line.budget) for line in lines] == [
        ("full", None),
        ("lookaheadkv", 64),
        ("snapkv", 64),
        ("lookaheadkv", 128),
        ("snapkv", 128),
    ]
    assert lines[0].seconds["prefill"] == pytest.approx(2.0)
    assert (lines[0].recall, lines[2].recall) == (1.0, 0.5)
    assert lines[1].kept == 64
    assert lines[1].kv_mib == pytest.approx(64 / 1024)
