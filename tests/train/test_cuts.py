"""Several cuts of the same teacher outputs against as many samples, each with its own."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from keepsight.data_gen.store import TrainingSample
from keepsight.models.lookahead_settings import LookaheadSettings
from keepsight.runtime import observe
from keepsight.train.dataset import Batch
from keepsight.train.importance import Cuts, ImportanceObjective, cut_positions
from keepsight.train.replay import ReplayBuffer
from keepsight.train.settings import ReplaySettings
from keepsight.train.trainer import ModuleTrainer, TrainingRun
from tests.close import assert_close
from tests.families import fresh_model
from tests.models.modules import random_on
from tests.refused import refused
from tests.train.runs import at_batch, batch_of, crash, same, samples, settings, sized, tensors
from tests.train.runs import measured as fidelity_of
from tests.train.runs import objective as new_objective

SHAPE = LookaheadSettings(tokens=5, rank=2, alpha=8)
LENGTHS = {"one": [(50, 9)], "padded": [(50, 3), (44, 14), (61, 8)], "short": [(50, 2)]}
LEARNED = tuple[Tensor, dict[str, Tensor]]


def objective(family: str = "Llama 3", cuts: int = 1, **options: Any) -> ImportanceObjective:
    lookahead = random_on(fresh_model(family), options.pop("shape", SHAPE))
    return ImportanceObjective(lookahead, far=0.4, cuts=cuts, **options)


def divided(row: TrainingSample, cuts: int) -> list[TrainingSample]:
    """The samples that a sample is at each of its cuts."""
    return [
        replace(row, prompt_ids=row.prompt_ids + row.answer_ids[:cut], answer_ids=row.answer_ids[cut:])
        for cut in cut_positions(len(row.answer_ids), cuts)
    ]


def learned(each: ImportanceObjective, rows: list[TrainingSample], **changes: Any) -> LEARNED:
    each.zero_grad()
    loss = each.loss(Batch(**batch_of(rows) | changes))
    loss.backward()
    return loss.detach(), {name: value.grad for name, value in each.named_parameters() if value.grad is not None}


def mean(found: list[LEARNED]) -> LEARNED:
    losses, gradients = zip(*found, strict=True)
    means = {name: torch.stack([each[name] for each in gradients]).mean(dim=0) for name in gradients[0]}
    return torch.stack(losses).mean(), means


def apart(each: ImportanceObjective, rows: list[TrainingSample], cuts: int) -> LEARNED:
    """What is learned of the samples at their cuts, each read alone."""
    return mean([mean([learned(each, [part]) for part in divided(row, cuts)]) for row in rows])


@pytest.mark.parametrize(
    ("length", "cuts", "expected"),
    [(12, 1, [0]), (12, 4, [0, 3, 6, 9]), (10, 4, [0, 2, 5, 7]), (4, 4, [0, 1, 2, 3]), (2, 4, [0, 1]), (1, 3, [0])],
)
def test_cuts_are_spread_over_the_answer(length: int, cuts: int, expected: list[int]) -> None:
    assert cut_positions(length, cuts) == expected


@pytest.mark.parametrize(
    ("family", "lengths", "checkpoints"),
    [
        *((each, "padded", False) for each in ("DeepSeek-V3", "Phi-3, Phi-4", "Qwen3-MoE")),
        *(("Llama 3", each, each != "one") for each in LENGTHS),
    ],
)
def test_cuts_equal_separate_samples(
    family: str, lengths: str, checkpoints: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = sized(*LENGTHS[lengths])
    expected, slow = apart(objective(family), rows, 4)
    monkeypatch.setattr(observe, "RECOMPUTED", 1 if checkpoints else 2**40)
    loss, found = learned(objective(family, 4, checkpoints=checkpoints), rows)
    assert abs(expected - learned(objective(family), rows)[0]) > 1e-3
    assert_close(loss, expected)
    assert len(found) > 1
    assert_close(found, slow)


@pytest.mark.parametrize(("dtype", "off"), [("int8", 0.01), ("bfloat16", 0.005)])
def test_cuts_of_kept_outputs(dtype: str, off: float) -> None:
    """All uses learn the same, as near to fresh teacher outputs as rounded entries allow."""
    each, rows = objective(cuts=4), sized(*LENGTHS["padded"])
    expected, slow = apart(objective(), rows, 4)
    each.buffer, reads = ReplayBuffer(ReplaySettings(dtype=dtype)), list[Batch]()
    read: Callable[[Batch], Any] = each.run_teacher
    each.run_teacher = lambda batch: reads.append(batch) or read(batch)  # type: ignore[method-assign, func-returns-value]
    uses = [learned(each, rows, turn=turn, last=turn == 2) for turn in range(3)]
    assert len(reads) == 1
    assert all(torch.equal(loss, uses[0][0]) and same(found, uses[0][1]) for loss, found in uses)
    loss, found = uses[0]
    assert abs(loss / expected - 1) < off
    for name, gradient in slow.items():
        assert torch.cosine_similarity(found[name].flatten(), gradient.flatten(), dim=0) > 0.995, name


def test_what_is_measured_is_the_prompt_itself() -> None:
    rows = sized(*LENGTHS["padded"])
    batch = batch_of(rows)
    measured = [fidelity_of(objective(cuts=cuts), [batch], budget=6) for cuts in (1, 4)]
    assert measured[0] == measured[1]


def test_kept_outputs_hold_no_more_than_their_samples_tokens() -> None:
    """By which their memory is bounded: not the longest prompt beside the longest answer."""
    batch = Batch(**batch_of(sized((60, 4), (20, 40))))
    assert Cuts.of_batch(batch, 4).length == max(60 + 3, 20 + 30)
    each = objective(cuts=4)
    assert each.run_teacher(batch).layers[0]["keys"].shape[2] == each.kept_tokens(batch) / 2 == 63


@pytest.mark.parametrize("family", ["Gemma 2", "Llama 4 (text)", "Qwen3-Next"])
def test_layers_that_forget_are_refused(family: str) -> None:
    with refused("train.cuts", "model"):
        objective(family, 2)
    objective(family, 1)


def trained(work: Path, at: int = 0) -> ModuleTrainer:
    each = at_batch(ImportanceObjective(new_objective().lookahead, 0.5, False, 3), at, crash)
    run = TrainingRun(work, samples(), replay=ReplaySettings(memory="90KB"))
    trainer = ModuleTrainer(each, settings(replays=3, steps=14, cuts=3), run)
    trainer.fit()
    return trainer


def test_too_few_samples_for_a_batch_that_is_used_again_are_refused(tmp_path: Path) -> None:
    run = TrainingRun(tmp_path, samples(), replay=ReplaySettings(memory="90KB"))
    with refused("train.batch_size", "range"):
        ModuleTrainer(objective(), settings(replays=3, steps=14, batch_size=32, samples_per_step=32), run)


def test_a_run_that_was_killed_goes_on_bit_for_bit(tmp_path: Path) -> None:
    """From a checkpoint at step 6, in the middle of the uses of several teacher outputs."""
    whole = trained(tmp_path / "whole")
    with pytest.raises(RuntimeError, match="power failure"):
        trained(tmp_path / "cut", at=9)
    resumed = trained(tmp_path / "cut")
    assert same(tensors(whole.objective), tensors(resumed.objective))
    assert not same(tensors(whole.objective), tensors(new_objective()))
