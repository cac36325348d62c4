"""What `keepsight fit` says of its stages, and which module it uses, by the measurements of its trainings."""

from pathlib import Path
from typing import Any

import pytest

from keepsight.commands.config import Fit
from keepsight.commands.fit import _completed, _stage_to_use, _verdicts
from keepsight.commands.parse import parse
from keepsight.commands.verdicts import verdict_of
from keepsight.files import write_lines


def measured(out: Path, stage: str, changes: list[float], **more: Any) -> None:
    """The measurements before and after a stage that changed each sample's excess NLL by so much."""
    indices = [*range(len(changes))]
    before = [0.1 * (index % 5) for index in indices]
    after = [value + change for value, change in zip(before, changes, strict=True)]
    rows = [
        {"step": step, "held_out": "sha256:1", "eval_by_sample": values, "eval_samples": indices, **more}
        for step, values in ((0, before), (9, after))
    ]
    (out / stage / "training").mkdir(parents=True, exist_ok=True)
    write_lines(out / stage / "training" / "fidelity.jsonl", rows)


WORSE = [0.1 + 0.01 * (index % 7) for index in range(32)]
BETTER = [-change for change in WORSE]
LEVEL = [change * (-1) ** index for index, change in enumerate(WORSE)]


@pytest.mark.parametrize(
    ("changes", "said", "used"),
    [
        (WORSE, "it made the module worse, so that of importance is used", "importance"),
        (BETTER, "it made the module better", "eviction"),
        (LEVEL, "the interval covers zero", "eviction"),
        (WORSE[:6], "too few samples to tell", "eviction"),
    ],
)
def test_a_stage_that_made_the_module_worse_is_not_used(
    tmp_path: Path, changes: list[float], said: str, used: str
) -> None:
    measured(tmp_path, "eviction", changes)
    (verdict,) = _verdicts(tmp_path, "eviction")
    assert said in verdict.sentence() and f"{len(changes)} held-out samples" in verdict.sentence()
    assert _stage_to_use(tmp_path, "eviction") == used
    mean = sum(changes) / len(changes)
    assert verdict.difference.value == pytest.approx(mean) and f"{mean:+.3f} nats" in verdict.sentence()


def test_a_later_stage_goes_on_from_the_better_module(tmp_path: Path) -> None:
    measured(tmp_path, "eviction", WORSE)
    measured(tmp_path, "fresh_eviction", WORSE)
    assert [verdict.before for verdict in _verdicts(tmp_path, "fresh_eviction")] == ["importance", "importance"]
    assert _stage_to_use(tmp_path, "fresh_eviction") == "importance"
    measured(tmp_path, "eviction", BETTER)
    assert _stage_to_use(tmp_path, "fresh_eviction") == "eviction"
    measured(tmp_path, "fresh_eviction", BETTER)
    assert _stage_to_use(tmp_path, "fresh_eviction") == "fresh_eviction"
    assert _verdicts(tmp_path, "importance") == [] == _verdicts(tmp_path, "head")


def test_a_sample_with_its_question_unseen_counts_with_the_whole_one(tmp_path: Path) -> None:
    """Whose index is the complement: the difference of a sample is the mean of both."""
    unseen = {"eval_unseen_samples": [~0, ~1], "eval_unseen_by_sample": [0.5, 0.5]}
    measured(tmp_path, "eviction", [0.2] * 12, **unseen)
    verdict = verdict_of(tmp_path, "eviction", "importance")
    assert verdict is not None and verdict.difference.n == 12
    assert verdict.difference.value == pytest.approx((10 * 0.2 + 2 * 0.1) / 12)


def test_measurements_of_earlier_versions_say_nothing(tmp_path: Path) -> None:
    (tmp_path / "eviction" / "training").mkdir(parents=True)
    rows = [{"step": step, "held_out": "sha256:1", "eval_excess_nll_at_64": 0.5} for step in (0, 9)]
    write_lines(tmp_path / "eviction" / "training" / "fidelity.jsonl", rows)
    assert _verdicts(tmp_path, "eviction") == [] and _stage_to_use(tmp_path, "eviction") == "eviction"


@pytest.mark.parametrize(
    ("given", "held_out", "tuned"),
    [
        (["limit=200"], 32, 32),
        (["limit=48"], 16, 16),
        (["limit=80"], 20, 20),
        (["limit=200", "train.held_out=8"], 8, 32),
    ],
)
def test_as_many_samples_are_held_out_as_can_decide(given: list[str], held_out: int, tuned: int) -> None:
    config = _completed(parse(Fit, ["model.id=tiny", "out=a", *given]))
    assert (config.train.held_out, config.finetune.train.held_out) == (held_out, tuned)
