"""95 % intervals: Wilson's, the bootstrap's, and those of paired differences."""

import numpy as np
import pytest

from keepsight.eval.report.intervals import estimate, weighted, wilson_interval
from keepsight.eval.report.summary import difference, differences, mean_over_tasks, summarize
from keepsight.eval.results import Row
from tests.eval.report.results import row


def test_wilson_interval() -> None:
    assert wilson_interval(1.0, 50) == pytest.approx((0.9286, 1.0), abs=1e-4)
    assert wilson_interval(0.5, 10) == pytest.approx((0.2366, 0.7634), abs=1e-4)


def test_shares_have_wilsons_interval_and_others_the_bootstraps() -> None:
    share = estimate([1.0, 0.0, 1.0, 1.0], "a", can_be_share=True)
    assert share.interval == wilson_interval(0.75, 4)
    generator = np.random.default_rng(0)
    values = generator.normal(3.0, 2.0, size=400).tolist()
    found = estimate(values, "a", can_be_share=True).interval
    assert found is not None
    half = 1.96 * np.std(values) / 20
    assert found == pytest.approx((np.mean(values) - half, np.mean(values) + half), abs=0.03)
    assert estimate([0.5], "a").interval is None
    assert estimate([0.5], "a").ends == (0.5, 0.5)


def test_the_bootstrap_covers_the_mean_about_as_often_as_it_says() -> None:
    generator = np.random.default_rng(1)
    inside = 0
    for _ in range(200):
        low, high = estimate(generator.exponential(size=60).tolist(), "a").ends
        inside += low <= 1.0 <= high
    assert 0.87 <= inside / 200 <= 0.98


def test_differences_are_paired() -> None:
    """Two methods that differ little on samples that differ much."""
    generator = np.random.default_rng(2)
    hard = generator.random(50)
    first, second = estimate((hard + 0.05).tolist(), "a"), estimate(hard.tolist(), "a")
    low, high = (first - second).ends
    assert (low, high) == pytest.approx((0.05, 0.05), abs=1e-3)
    assert first.ends[1] - first.ends[0] > 0.1
    apart = estimate((hard + 0.05).tolist(), "b") - second  # other draws, as for other samples
    assert apart.ends[1] - apart.ends[0] > 0.1


def test_a_mean_over_strata_draws_within_each() -> None:
    parts = [estimate([0.0] * 20, "a"), estimate([2.0] * 20, "b")]
    mean = weighted(parts, [0.5, 0.5])
    assert mean.value == 1.0
    assert mean.ends == (1.0, 1.0)
    lone = estimate([1.0], "c")
    assert not weighted([parts[0], lone], [0.5, 0.5]).is_drawn
    mostly = weighted([parts[0], lone], [0.96, 0.04])
    assert mostly.interval == pytest.approx([0.96 * end + 0.04 for end in parts[0].ends])


def test_methods_are_paired_at_equal_budget_and_with_the_full_cache(rows: list[Row]) -> None:
    found = differences(mean_over_tasks(summarize(rows)))
    assert [(each.method, each.budget, each.against) for each in found] == [
        ("lookaheadkv", 64, "full"),
        ("snapkv", 64, "full"),
        ("lookaheadkv", 128, "full"),
        ("snapkv", 128, "full"),
        ("lookaheadkv", 64, "snapkv"),
        ("lookaheadkv", 128, "snapkv"),
    ]
    assert found[4].estimates["score"].value == pytest.approx(0.5 - (1 / 4 + 1 / 2) / 2)


def test_different_samples_have_no_paired_difference() -> None:
    (first, second) = summarize([row("snapkv", 64, 1.0), row("laq", 64, 1.0, sample="1")])
    assert difference(first, second) is None
    (first, second) = summarize([row("snapkv", 64, 1.0, sample_digest="a"), row("laq", 64, 1.0, sample_digest="b")])
    assert difference(first, second) is None


def test_few_equal_samples_have_no_interval() -> None:
    assert estimate([0.25, 0.25], "a").interval is None
    assert estimate([0.25] * 10, "a").interval == (0.25, 0.25)
