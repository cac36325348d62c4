"""What `keepsight fit` says of its stages, and which module it uses, by the measurements of its trainings."""

from pathlib import Path
from typing import Any

import pytest

from keepsight.commands.config import Fit
from keepsight.commands.fit import _completed, _stage_to_use, _verdicts
from keepsight.commands.parse import parse
from keepsight.commands.verdicts import verdict_of
from keepsight.files import write_lines


def write_measurements(out: Path, stage: str, changes: list[float], **columns: Any) -> None:
    """Those before and after a stage that changed the excess NLL of its samples by so much."""
    samples = [*range(len(changes))]
    before = [0.1 * (sample % 5) for sample in samples]
    after = [loss + change for loss, change in zip(before, changes, strict=True)]
    shared = {"held_out": "sha256:1", "eval_samples": samples, **columns}
    rows = [
        {"step": 0, "eval_by_sample": before, **shared},
        {"step": 9, "eval_by_sample": after, **shared},
    ]
    (out / stage / "training").mkdir(parents=True, exist_ok=True)
    write_lines(out / stage / "training" / "fidelity.jsonl", rows)


WORSE = [0.1 + 0.01 * (sample % 7) for sample in range(32)]
BETTER = [-change for change in WORSE]
LEVEL = [change * (-1) ** sample for sample, change in enumerate(WORSE)]


@pytest.mark.parametrize(
    ("changes", "conclusion", "stage_to_use"),
    [
        (WORSE, "it made the module worse, so that of importance is used", "importance"),
        (BETTER, "it made the module better", "eviction"),
        (LEVEL, "the interval covers zero", "eviction"),
        (WORSE[:6], "too few samples to tell", "eviction"),
    ],
)
def test_a_stage_that_made_the_module_worse_is_not_used(
    tmp_path: Path, changes: list[float], conclusion: str, stage_to_use: str
) -> None:
    write_measurements(tmp_path, "eviction", changes)
    (verdict,) = _verdicts(tmp_path, "eviction")
    mean = sum(changes) / len(changes)
    assert verdict.difference.value == pytest.approx(mean)
    sentence = verdict.sentence()
    assert conclusion in sentence
    assert f"{mean:+.3f} nats" in sentence
    assert f"{len(changes)} held-out samples" in sentence
    assert _stage_to_use(tmp_path, "eviction") == stage_to_use


def test_a_later_stage_goes_on_from_the_better_module(tmp_path: Path) -> None:
    write_measurements(tmp_path, "eviction", WORSE)
    write_measurements(tmp_path, "fresh_eviction", WORSE)
    assert [verdict.before for verdict in _verdicts(tmp_path, "fresh_eviction")] == ["importance", "importance"]
    assert _stage_to_use(tmp_path, "fresh_eviction") == "importance"
    write_measurements(tmp_path, "eviction", BETTER)
    assert _stage_to_use(tmp_path, "fresh_eviction") == "eviction"
    write_measurements(tmp_path, "fresh_eviction", BETTER)
    assert _stage_to_use(tmp_path, "fresh_eviction") == "fresh_eviction"
    assert _verdicts(tmp_path, "importance") == []
    assert _verdicts(tmp_path, "head") == []


def test_a_sample_with_its_question_unseen_counts_with_the_one_that_has_it(tmp_path: Path) -> None:
    """Its index is the complement of that one's, and the difference of the two is their mean."""
    unseen = {"eval_unseen_samples": [~0, ~1], "eval_unseen_by_sample": [0.5, 0.5]}
    write_measurements(tmp_path, "eviction", [0.2] * 12, **unseen)
    verdict = verdict_of(tmp_path, "eviction", "importance")
    assert verdict is not None
    assert verdict.difference.n == 12
    assert verdict.difference.value == pytest.approx((10 * 0.2 + 2 * 0.1) / 12)


def test_measurements_of_earlier_versions_say_nothing(tmp_path: Path) -> None:
    (tmp_path / "eviction" / "training").mkdir(parents=True)
    rows = [{"step": step, "held_out": "sha256:1", "eval_excess_nll_at_64": 0.5} for step in (0, 9)]
    write_lines(tmp_path / "eviction" / "training" / "fidelity.jsonl", rows)
    assert _verdicts(tmp_path, "eviction") == []
    assert _stage_to_use(tmp_path, "eviction") == "eviction"


@pytest.mark.parametrize(
    ("keys", "of_training", "of_finetuning"),
    [
        (["limit=200"], 32, 32),
        (["limit=48"], 16, 16),
        (["limit=80"], 20, 20),
        (["limit=200", "train.held_out=8"], 8, 32),
    ],
)
def test_as_many_samples_are_held_out_as_can_decide(keys: list[str], of_training: int, of_finetuning: int) -> None:
    config = _completed(parse(Fit, ["model.id=tiny", "out=a", *keys]))
    assert config.train.held_out == of_training
    assert config.finetune.train.held_out == of_finetuning
