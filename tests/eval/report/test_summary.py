"""`summary.csv`, means over tasks, and the terminal's table."""

import numpy as np
import pytest

from keepsight.eval.report import summary
from keepsight.eval.report.tables import overall_table, task_table
from keepsight.eval.results import Row
from tests.eval.report.results import row


def test_summary_csv_holds_means_in_a_fixed_order(rows: list[Row]) -> None:
    found = summary.summary_rows(summary.summarize(rows))
    assert summary.summary_rows(summary.summarize(rows[::-1])) == found
    first, fourth = (list(map(str, found[place].values())) for place in (0, 3))
    assert first[:10] == ["niah_single", "512", "full", "", "4", "1.0000", "0.0000", "1.0000", "0.5101", "1.0000"]
    assert fourth[:10] == ["niah_single", "512", "snapkv", "64", "4", "0.2500", "2.5000", "0.7500", "0.0456", "0.6994"]
    assert fourth[-8:] == ["", "", "0.5000", "0.9000", "0.3000", "2.0000", "500.0000", "0"]
    variants = [(name, size) for name in ("lookaheadkv", "snapkv") for size in (64, 128)]
    assert [(line["task"], line["method"], line["budget"]) for line in found[5:]] == [
        ("qa, short", *each) for each in [("full", ""), *variants]
    ]
    (tiny,) = summary.summary_rows(summary.summarize([row("oracle", 64, 1.0, excess_nll=-0.00001)]))
    assert tiny["excess_nll"] == "0.0000"


def test_mean_over_tasks_weighs_tasks_alike(rows: list[Row]) -> None:
    mean = {(line.method, line.budget): line for line in summary.mean_over_tasks(summary.summarize(rows))}
    snapkv = mean["snapkv", 64]
    assert snapkv.score == pytest.approx((1 / 4 + 1 / 2) / 2)
    assert snapkv.excess_nll == pytest.approx((2.5 + 1.5) / 2)
    assert snapkv.n == 6
    assert snapkv.estimates["score"].n == pytest.approx(1 / (0.25 / 4 + 0.25 / 2))
    errors = np.std([1, 2, 3, 4]) / 2, np.std([1, 2]) / np.sqrt(2)  # of means of samples drawn with replacement
    assert np.std(snapkv.estimates["excess_nll"].draws) == pytest.approx(np.hypot(*errors) / 2, rel=0.05)


def test_table_sorts_by_score_at_equal_budget_and_shows_the_share_of_full(rows: list[Row]) -> None:
    shown = summary.summary_table(summary.summarize([line for line in rows if line["task"] == "qa, short"]))
    lines = shown.splitlines()
    assert lines[0] == "qa, short, 512 tokens (prompts: 500 on average)"
    assert [line.replace("128", "").replace("64", "").replace("   all", "").split()[0] for line in lines[2:7]] == [
        "full",
        "lookaheadkv",
        "snapkv",
        "lookaheadkv",
        "snapkv",
    ]
    assert "2.00 of full" in lines[5]
    assert "1.00 of full" in lines[6]
    both = summary.summary_table(summary.summarize(rows))
    assert [block.splitlines()[0].partition(" (")[0] for block in both.split("\n\n")] == [
        "niah_single, 512 tokens",
        "qa, short, 512 tokens",
        "mean of 2 tasks, all lengths",
        "Intervals of fewer than 10 samples are too narrow.",
    ]
    assert "0.67 of full" in both.split("\n\n")[-2]  # lookaheadkv at 64: 0.5 of 0.75


def test_share_of_full_is_missing_where_full_scores_nothing() -> None:
    lines = summary.summarize([row("full", None, 0.0), row("snapkv", 64, 0.5)])
    assert summary.share_of_full(lines[1], lines) is None
    assert "of full" not in summary.summary_table(lines)


def test_what_was_not_measured_is_left_out(rows: list[Row]) -> None:
    rows[1]["recall"] = None
    lines = summary.mean_over_tasks(summary.summarize(rows))
    assert [(line.method, line.means["recall"]) for line in lines[:3]] == [
        ("full", 1.0),
        ("lookaheadkv", 0.5),
        ("snapkv", 0.5),
    ]
    assert lines[0].means["tau"] is None
    assert lines[0].means["same_tokens"] == 5  # all of the answer


def test_samples_in_which_nothing_was_evicted_are_named() -> None:
    rows = [row("full", None, 1.0, sample=str(at)) for at in range(12)]
    rows += [row("snapkv", 512, 1.0, sample=str(at), kept=500 if at < 5 else 400) for at in range(12)]
    told = "Nothing was evicted in some samples: snapkv 512 (5 of 12)."
    assert summary.summary_table(summary.summarize(rows)).endswith(f"\n\n{told}")
    lines = summary.summarize(rows)
    for table in (overall_table(lines), task_table(lines)):
        assert table.caption.endswith(told)
        assert [cells["not_evicted"] for cells in table.rows] == [0, 5]
        assert [cells["prompt_tokens"] for cells in table.rows] == [500, 500], "not the 512 that were asked for"
    rows[-1]["kept"] = 600  # more than there was: with what was generated
    assert "(6 of 12)" in summary.summary_table(summary.summarize(rows))


def test_samples_that_a_variant_lacks_are_counted() -> None:
    """As where it was left out; a mean over other samples compares with nothing."""
    rows = [row("full", None, 1.0, sample=str(at)) for at in range(12)]
    rows += [row(name, 64, 1.0, sample=str(at)) for name, n in (("snapkv", 12), ("laq", 10)) for at in range(n)]
    shown = summary.summary_table(summary.summarize(rows))
    assert shown.endswith("\n\nSome samples were not measured: laq 64 (10 of 12).")


def test_names_cannot_steer_the_terminal() -> None:
    steering = "a\x1b[2J\nb\x9b\u202e"
    lines = summary.summarize([row("full", None, 1.0, task=steering), row(steering, 64, 0.5, task=steering)])
    for text in (summary.summary_table(lines), overall_table(lines).markdown()):
        assert all(each.isprintable() or each == "\n" for each in text) and r"a\x1b[2J\nb" in text
