"""The sentences at the head of a report, and the labels of runs that are compared."""

from pathlib import Path
from typing import Any

import pytest

from keepsight.eval.report.summary import findings, summarize
from keepsight.eval.results import Run, labels_of
from tests.eval.report.results import row


def test_ours_is_compared_with_the_best_other_one_by_excess_nll() -> None:
    """By hand: 0.1 and 0.5 nats in every sample; oracle attention, which is a bound, is not the best other one."""
    losses = {"lookaheadkv": 0.1, "snapkv": 0.5, "laq": 0.7, "oracle": 0.0}
    rows = [row("full", None, 1.0, sample=str(at)) for at in range(12)]
    for at in range(12):
        rows += [row(name, 64, 0.5, sample=str(at), excess_nll=loss) for name, loss in losses.items()]
        rows.append(row("snapkv", 128, 1.0, sample=str(at), excess_nll=0.25))
    first, second = findings(summarize(rows))
    assert first == (
        "At 64 entries lookaheadkv has an excess NLL of 0.100 nats per token, 0.400 less than snapkv, the best "
        "other method (95 % interval 0.400 to 0.400). Score 0.50, snapkv 0.50, full cache 1.00; 12 samples."
    )
    assert second == (
        "At 128 entries snapkv has an excess NLL of 0.250 nats per token. Score 1.00, full cache 1.00; 12 samples."
    )


def test_methods_within_the_noise_are_level() -> None:
    rows = [row("lookaheadkv", 0.1, 1.0, sample=f"{at:02}", excess_nll=(-1) ** at) for at in range(20)]
    rows += [row("snapkv", 0.1, 1.0, sample=f"{at:02}", excess_nll=0.05) for at in range(20)]
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
    runs = [Run(Path("runs") / name, [], each) for name, each in zip(("first", "second"), settings, strict=True)]
    assert labels_of(runs) == labels
