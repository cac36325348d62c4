"""`summary.csv`, means over tasks, tables in the terminal and in files, intervals, and what is said of all these."""

import csv
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from keepsight.eval.record import ResultRow
from keepsight.eval.report import summary
from keepsight.eval.report.intervals import Estimate, estimate, weighted, wilson_interval
from keepsight.eval.report.summary import differences, findings, mean_over_tasks, summarize
from keepsight.eval.report.tables import Column, Table, overall_table, task_table
from keepsight.eval.results import Run, labels_of
from keepsight.files import write_csv
from tests.eval.report.results import row


def several(method: str, budget: float | None, score: float, samples: int = 12, **changes: object) -> list[ResultRow]:
    """The same row for several samples."""
    return [row(method, budget, score, sample=f"{sample:02}", **changes) for sample in range(samples)]


def csv_lines(rows: list[ResultRow]) -> list[dict[str, object]]:
    return summary.csv_cells(summary.summary_rows(summarize(rows)))


def test_summary_csv_holds_means_in_a_fixed_order(rows: list[ResultRow]) -> None:
    summary_rows = summary.summary_rows(summarize(rows))
    assert summary.summary_rows(summarize(rows[::-1])) == summary_rows
    lines = csv_lines(rows)
    full = [str(cell) for cell in lines[0].values()]
    assert full[:10] == ["niah_single", "512", "full", "", "4", "1.0000", "0.0000", "1.0000", "0.5101", "1.0000"]
    snapkv = [str(cell) for cell in lines[3].values()]
    assert snapkv[:10] == ["niah_single", "512", "snapkv", "64", "4", "0.2500", "2.5000", "0.7500", "0.0456", "0.6994"]
    assert snapkv[-8:] == ["", "", "0.5000", "0.9000", "0.3000", "2.0000", "500.0000", "0"]
    assert [(line["task"], line["method"], line["budget"]) for line in lines[5:]] == [
        ("qa, short", "full", ""),
        ("qa, short", "lookaheadkv", 64),
        ("qa, short", "lookaheadkv", 128),
        ("qa, short", "snapkv", 64),
        ("qa, short", "snapkv", 128),
    ]
    (almost_zero,) = csv_lines([row("oracle", 64, 1.0, excess_nll=-0.00001)])
    assert almost_zero["excess_nll"] == "0.0000"


def test_summary_rows_are_numbers_and_a_frame(rows: list[ResultRow]) -> None:
    summary_rows = summary.summary_rows(summarize(rows))
    full = summary_rows[0]
    assert full["budget"] is None
    assert full["n"] == 4
    assert full["score"] == 1.0
    assert full["excess_nll_low"] is None
    assert full["tau"] is None
    snapkv = summary_rows[3]
    assert (snapkv["budget"], snapkv["score"], snapkv["excess_nll"]) == (64, 0.25, 2.5)
    assert snapkv["score_low"] == pytest.approx(0.0456, abs=1e-4)
    assert snapkv["excess_nll_low"] == 1.5
    for column in ("length", "budget", "n", "not_evicted"):
        assert type(snapkv[column]) is int
    frame = summary_rows.to_pandas()
    assert list(frame.columns) == list(summary.COLUMNS)
    assert len(frame) == len(summary_rows)
    assert frame.query("method == 'snapkv'")["score"].mean() == pytest.approx((0.25 + 0.25 + 0.5 + 0.5) / 4)


def test_mean_over_tasks_weighs_tasks_alike(rows: list[ResultRow]) -> None:
    mean = mean_over_tasks(summarize(rows))
    (snapkv,) = mean.query("method == 'snapkv' and budget == 64").itertuples()
    assert snapkv.score.value == pytest.approx((1 / 4 + 1 / 2) / 2)
    assert snapkv.excess_nll.value == pytest.approx((2.5 + 1.5) / 2)
    assert snapkv.n == 6
    assert snapkv.score.n == pytest.approx(1 / (0.25 / 4 + 0.25 / 2))
    # of means of samples drawn with replacement
    error_of_niah = np.std([1, 2, 3, 4]) / np.sqrt(4)
    error_of_qa = np.std([1, 2]) / np.sqrt(2)
    assert np.std(snapkv.excess_nll.draws) == pytest.approx(np.hypot(error_of_niah, error_of_qa) / 2, rel=0.05)


def test_table_sorts_by_score_at_equal_budget_and_shows_the_share_of_full(rows: list[ResultRow]) -> None:
    of_qa = summary.summary_table(summarize([row for row in rows if row.task == "qa, short"]))
    title, _, *lines = of_qa.splitlines()
    assert title == "qa, short, 512 tokens (prompts: 500 on average)"
    methods: list[str] = []
    for line in lines[:5]:
        without_budget = [word for word in line.split() if word not in ("all", "64", "128")]
        methods.append(without_budget[0])
    assert methods == ["full", "lookaheadkv", "snapkv", "lookaheadkv", "snapkv"]
    assert "2.00 of full" in lines[3]
    assert "1.00 of full" in lines[4]
    blocks = summary.summary_table(summarize(rows)).split("\n\n")
    assert [block.splitlines()[0].partition(" (")[0] for block in blocks] == [
        "niah_single, 512 tokens",
        "qa, short, 512 tokens",
        "mean of 2 tasks, all lengths",
        "Intervals of fewer than 10 samples are too narrow.",
    ]
    assert "0.67 of full" in blocks[-2]  # lookaheadkv at 64: 0.5 of 0.75


def test_share_of_full_is_missing_where_full_scores_nothing() -> None:
    frame = summarize([row("full", None, 0.0), row("snapkv", 64, 0.5)])
    assert frame["of_full"].isna().all()
    assert "of full" not in summary.summary_table(frame)


def test_what_was_not_measured_is_left_out(rows: list[ResultRow]) -> None:
    rows[1] = replace(rows[1], recall=None)
    means = mean_over_tasks(summarize(rows))
    assert means["method"].tolist()[:3] == ["full", "lookaheadkv", "snapkv"]
    assert means["recall"].tolist()[:3] == [1.0, 0.5, 0.5]
    assert math.isnan(means["tau"].iloc[0])
    assert means["same_tokens"].iloc[0] == 5  # all of the answer


def test_samples_in_which_nothing_was_evicted_are_named() -> None:
    rows = several("full", None, 1.0)
    for sample in range(12):
        rows.append(row("snapkv", 512, 1.0, sample=f"{sample:02}", kept=500 if sample < 5 else 400))
    note = "Nothing was evicted in some samples: snapkv 512 (5 of 12)."
    frame = summarize(rows)
    assert summary.summary_table(frame).endswith(f"\n\n{note}")
    for table in (overall_table(frame), task_table(frame)):
        assert table.caption.endswith(note)
        assert [cells["not_evicted"] for cells in table.rows] == [0, 5]
        assert [cells["prompt_tokens"] for cells in table.rows] == [500, 500], "not the 512 that were asked for"
    rows[-1] = replace(rows[-1], kept=600)  # more than there was: with what was generated
    assert "(6 of 12)" in summary.summary_table(summarize(rows))


def test_samples_that_a_variant_lacks_are_counted() -> None:
    """As where it was left out; a mean over other samples compares with nothing."""
    rows = [
        *several("full", None, 1.0),
        *several("snapkv", 64, 1.0),
        *several("laq", 64, 1.0, samples=10),
    ]
    table = summary.summary_table(summarize(rows))
    assert table.endswith("\n\nSome samples were not measured: laq 64 (10 of 12).")


def test_names_cannot_steer_the_terminal() -> None:
    steering = "a\x1b[2J\nb\x9b\u202e"
    frame = summarize([row("full", None, 1.0, task=steering), row(steering, 64, 0.5, task=steering)])
    for text in (summary.summary_table(frame), overall_table(frame).markdown()):
        assert text.replace("\n", "").isprintable()
        assert r"a\x1b[2J\nb" in text


def test_ours_is_compared_with_the_best_other_one_by_excess_nll() -> None:
    """By hand: 0.1 and 0.5 nats in every sample; oracle attention, which is a bound, is not the best other one."""
    rows = [
        *several("full", None, 1.0),
        *several("lookaheadkv", 64, 0.5, excess_nll=0.1),
        *several("snapkv", 64, 0.5, excess_nll=0.5),
        *several("laq", 64, 0.5, excess_nll=0.7),
        *several("oracle", 64, 0.5, excess_nll=0.0),
        *several("snapkv", 128, 1.0, excess_nll=0.25),
    ]
    at_64, at_128 = findings(summarize(rows))
    assert at_64 == (
        "At 64 entries lookaheadkv has an excess NLL of 0.100 nats per token, 0.400 less than snapkv, the best "
        "other method (95 % interval 0.400 to 0.400). Score 0.50, snapkv 0.50, full cache 1.00; 12 samples."
    )
    assert at_128 == (
        "At 128 entries snapkv has an excess NLL of 0.250 nats per token. Score 1.00, full cache 1.00; 12 samples."
    )


def test_methods_within_the_noise_are_level() -> None:
    rows = several("snapkv", 0.1, 1.0, samples=20, excess_nll=0.05)
    for sample in range(20):
        rows.append(row("lookaheadkv", 0.1, 1.0, sample=f"{sample:02}", excess_nll=(-1) ** sample))
    (sentence,) = findings(summarize(rows))
    assert sentence.startswith(
        "At 10 % of the prompt lookaheadkv has an excess NLL of 0.000 nats per token: level with "
    )
    assert "(0.050 less, 95 % interval -0." in sentence


@pytest.mark.parametrize(
    ("settings", "labels"),
    [
        ([{"adapter": "runs/a"}, {"adapter": "runs/b/"}], ["a", "b"]),
        ([{"samples": 5}, {"samples": 20}], ["samples=5", "samples=20"]),
        ([{"model": {"dtype": "float32"}}, {"model": {"dtype": "bfloat16"}}], ["float32", "bfloat16"]),
        ([{"a": 1, "command": "x"}, {"a": 1, "command": "y"}], ["first", "second"]),
        ([{"methods": ["snapkv"]}, {"methods": ["full"]}], ["first", "second"]),
    ],
)
def test_runs_are_labelled_by_what_differs(settings: list[dict[str, Any]], labels: list[str]) -> None:
    first, second = settings
    runs = [Run(Path("runs/first"), [], first), Run(Path("runs/second"), [], second)]
    assert labels_of(runs) == labels


def test_wilson_interval() -> None:
    assert wilson_interval(1.0, 50) == pytest.approx((0.9286, 1.0), abs=1e-4)
    assert wilson_interval(0.5, 10) == pytest.approx((0.2366, 0.7634), abs=1e-4)


def test_shares_have_wilsons_interval_and_others_the_bootstraps() -> None:
    share = estimate([1.0, 0.0, 1.0, 1.0], "a", can_be_share=True)
    assert share.interval == wilson_interval(0.75, 4)
    generator = np.random.default_rng(0)
    values = generator.normal(3.0, 2.0, size=400).tolist()
    interval = estimate(values, "a", can_be_share=True).interval
    assert interval is not None
    mean = np.mean(values)
    half_width = 1.96 * np.std(values) / np.sqrt(400)
    assert interval == pytest.approx((mean - half_width, mean + half_width), abs=0.03)
    assert estimate([0.5], "a").interval is None
    assert estimate([0.5], "a").ends == (0.5, 0.5)


def test_the_bootstrap_covers_the_mean_about_as_often_as_it_says() -> None:
    generator = np.random.default_rng(1)
    inside = 0
    for _ in range(200):
        low, high = estimate(generator.exponential(size=60).tolist(), "a").ends
        inside += low <= 1.0 <= high
    assert 0.87 <= inside / 200 <= 0.98


def test_questions_about_one_context_are_drawn_together() -> None:
    generator = np.random.default_rng(3)
    inside = 0
    for _ in range(200):  # four questions each, which are as hard as their context is
        means = np.repeat(generator.exponential(size=40), 4)
        contexts = [str(question // 4) for question in range(160)]
        low, high = estimate(means.tolist(), "a", contexts).ends
        inside += low <= 1.0 <= high
    assert 0.86 <= inside / 200 <= 0.98
    shares = estimate([1.0, 1.0, 0.0, 0.0], "a", ["x", "x", "y", "y"], can_be_share=True)
    assert shares.n == 2
    assert not shares.is_share


def test_differences_are_paired() -> None:
    """Two methods that differ little on samples that differ much."""
    generator = np.random.default_rng(2)
    losses = generator.random(50)
    worse = estimate((losses + 0.05).tolist(), "a")
    better = estimate(losses.tolist(), "a")
    assert (worse - better).ends == pytest.approx((0.05, 0.05), abs=1e-3)
    assert width_of(worse) > 0.1
    of_other_draws = estimate((losses + 0.05).tolist(), "b")  # as for other samples
    assert width_of(of_other_draws - better) > 0.1


def width_of(estimated: Estimate) -> float:
    low, high = estimated.ends
    return high - low


def test_a_mean_over_strata_draws_within_each() -> None:
    zeros = estimate([0.0] * 20, "a")
    twos = estimate([2.0] * 20, "b")
    mean = weighted([zeros, twos], [0.5, 0.5])
    assert mean.value == 1.0
    assert mean.ends == (1.0, 1.0)
    single = estimate([1.0], "c")
    assert not weighted([zeros, single], [0.5, 0.5]).is_drawn
    mostly_zeros = weighted([zeros, single], [0.96, 0.04])
    low, high = zeros.ends
    assert mostly_zeros.interval == pytest.approx([0.96 * low + 0.04, 0.96 * high + 0.04])


def test_methods_are_paired_at_equal_budget_and_with_the_full_cache(rows: list[ResultRow]) -> None:
    paired = differences(mean_over_tasks(summarize(rows)))
    assert [(line.method, line.budget, line.against) for line in paired.itertuples()] == [
        ("lookaheadkv", 64, "full"),
        ("snapkv", 64, "full"),
        ("lookaheadkv", 128, "full"),
        ("snapkv", 128, "full"),
        ("lookaheadkv", 64, "snapkv"),
        ("lookaheadkv", 128, "snapkv"),
    ]
    assert paired["score"].iloc[4].value == pytest.approx(0.5 - (1 / 4 + 1 / 2) / 2)


def test_different_samples_have_no_paired_difference() -> None:
    snapkv = row("snapkv", 64, 1.0, sample_digest="a")
    laq = row("laq", 64, 1.0, sample_digest="a")
    assert len(differences(summarize([snapkv, laq]))) == 1
    for laq_of_another in (row("laq", 64, 1.0, sample="1"), row("laq", 64, 1.0, sample_digest="b")):
        assert differences(summarize([snapkv, laq_of_another])).empty


def test_few_equal_samples_have_no_interval() -> None:
    assert estimate([0.25, 0.25], "a").interval is None
    assert estimate([0.25] * 10, "a").interval == (0.25, 0.25)


SHARE = estimate([1.0, 1.0, 0.0, 0.0], "a", can_be_share=True)
TABLE = Table(
    "scores",
    "Scores of 100 % & more.",
    (Column("budget", "budget"), Column("method", "method", is_text=True), Column("gain", "τ gain", 2, is_signed=True)),
    [
        {"budget": None, "method": "full", "gain": None},
        {"budget": 64, "method": "a|b_c", "gain": SHARE},
        {"budget": 0.5, "method": "{x}", "gain": -0.001},
    ],
)


def test_markdown_is_aligned_and_escaped() -> None:
    assert TABLE.markdown().splitlines() == [
        "Scores of 100 % & more.",
        "",
        "|   budget | method   |               τ gain |",
        "|---------:|:---------|---------------------:|",
        "|      all | full     |                    – |",
        r"|       64 | a\|b_c   | +0.50 [+0.15, +0.85] |",
        "|    0.500 | {x}      |                +0.00 |",
    ]


def test_latex_is_escaped() -> None:
    lines = TABLE.latex().splitlines()
    assert lines[2] == r"\caption{Scores of 100 \% \& more.}"
    assert lines[4:6] == [r"\begin{tabular}{rlr}", r"\toprule"]
    assert lines[6] == r"budget & method & $\tau$ gain \\"
    assert lines[8:11] == [
        r"all & full & -- \\",
        r"64 & a|b\_c & +0.50 {\scriptsize [+0.15, +0.85]} \\",
        r"0.500 & \{x\} & +0.00 \\",
    ]


def test_csv_has_columns_for_the_ends(tmp_path: Path) -> None:
    TABLE.save(tmp_path)
    assert (tmp_path / "scores.csv").read_text("utf-8").splitlines() == [
        "budget,method,gain,gain_low,gain_high",
        ",full,,,",
        "64,a|b_c,0.5,0.150036,0.849964",
        "0.5,{x},-0.001,,",
    ]


def test_what_separates_cells_and_lines_stays_in_its_cell(tmp_path: Path) -> None:
    table = Table("t", "c", (Column("method", "method", is_text=True),), [{"method": "a\\|b\rc"}])
    assert table.markdown().splitlines()[-1] == r"| a\\\|b\rc |"
    table.save(tmp_path)
    with (tmp_path / "t.csv").open(newline="", encoding="utf-8") as lines:
        assert list(csv.reader(lines)) == [["method"], ["a\\|b\nc"]]


@pytest.mark.parametrize("text", ["=1+1", "@x", "+1+cmd|' /C calc'!A0", "-2+3", "\n=1"])
def test_no_text_is_a_formula_of_a_spreadsheet(tmp_path: Path, text: str) -> None:
    table = Table("t", "c", (Column("method", "method", is_text=True), Column("n", "n")), [{"method": text, "n": -1.5}])
    table.save(tmp_path)
    cells_of_table = only_line(tmp_path / "t.csv")
    assert cells_of_table["method"] == f"'{text}"
    assert cells_of_table["n"] == "-1.5"
    lines = csv_lines([row(text, 64, 1.0, task=text, excess_nll=-0.5)])
    write_csv(tmp_path / "summary.csv", summary.COLUMNS, lines)
    cells_of_summary = only_line(tmp_path / "summary.csv")
    assert cells_of_summary["method"] == f"'{text}"
    assert cells_of_summary["excess_nll"] == "-0.5000"


def only_line(path: Path) -> dict[str, str]:
    """The cells of a CSV file's only line, by column."""
    with path.open(newline="", encoding="utf-8") as lines:
        (cells,) = csv.DictReader(lines)
    return cells
