"""Several cuts of one reading against as many samples, each with a reading of its own."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from keepsight.data_gen.store import TrainingSample
from keepsight.errors import UserError
from keepsight.models.lookahead_settings import LookaheadSettings
from keepsight.runtime import observe
from keepsight.train.ablation import SideBySide
from keepsight.train.dataset import Batch, SampleDataset, collate
from keepsight.train.importance import Cuts, ImportanceObjective, spread
from keepsight.train.replay import ReplayBuffer
from keepsight.train.settings import ReplaySettings
from keepsight.train.trainer import ModuleTrainer, TrainingRun
from tests.close import assert_close
from tests.families import FAMILIES, fresh_model
from tests.models.modules import random_on
from tests.train.runs import Disturbed, crash, same, samples, settings, side_by_side, tensors
from tests.train.runs import measured as fidelity_of
from tests.train.runs import objective as new_objective

SHAPE = LookaheadSettings(tokens=5, rank=2, alpha=8)
FORGETFUL = [
    "Gemma 2",
    "Gemma 3 (multimodal class, text)",
    "Gemma 3 (text)",
    "GPT-OSS",
    "Granite 4 (Mamba-2)",
    "Llama 4 (text)",
    "Qwen3-Next",
]
"""Some of their layers have a window or a recurrent state."""
LENGTHS = {"one": [(50, 9)], "padded": [(50, 3), (44, 14), (61, 8)], "short": [(50, 2)]}
LEARNED = tuple[Tensor, dict[str, Tensor]]


def objective(family: str = "Llama 3", cuts: int = 1, **options: Any) -> ImportanceObjective:
    lookahead = random_on(fresh_model(family), options.pop("shape", SHAPE))
    return ImportanceObjective(lookahead, far=0.4, cuts=cuts, **options)


def rows_of(lengths: list[tuple[int, int]]) -> list[TrainingSample]:
    generator = torch.Generator().manual_seed(3)

    def ids(count: int) -> list[int]:
        return torch.randint(3, 128, (count,), generator=generator).tolist()

    return [TrainingSample(place, "test", ids(n), ids(t), "", "") for place, (n, t) in enumerate(lengths)]


def batch_of(rows: list[TrainingSample], **changes: Any) -> Batch:
    return replace(Batch(**collate([SampleDataset(rows)[place] for place in range(len(rows))])), **changes)


def divided(row: TrainingSample, cuts: int) -> list[TrainingSample]:
    """The samples that a sample is at each of its cuts."""
    return [
        replace(row, prompt_ids=row.prompt_ids + row.answer_ids[:cut], answer_ids=row.answer_ids[cut:])
        for cut in spread(len(row.answer_ids), cuts)
    ]


def learned(each: ImportanceObjective | SideBySide, batch: Batch) -> LEARNED:
    each.zero_grad()
    loss = each.loss(batch)
    loss.backward()
    return loss.detach(), {name: value.grad for name, value in each.named_parameters() if value.grad is not None}


def mean(found: list[LEARNED]) -> LEARNED:
    losses, gradients = zip(*found, strict=True)
    means = {name: torch.stack([each[name] for each in gradients]).mean(dim=0) for name in gradients[0]}
    return torch.stack(losses).mean(), means


def apart(each: ImportanceObjective, rows: list[TrainingSample], cuts: int) -> LEARNED:
    """What is learned of the samples at their cuts, each read alone."""
    return mean([mean([learned(each, batch_of([part])) for part in divided(row, cuts)]) for row in rows])


@pytest.mark.parametrize(
    ("length", "cuts", "expected"),
    [(12, 1, [0]), (12, 4, [0, 3, 6, 9]), (10, 4, [0, 2, 5, 7]), (4, 4, [0, 1, 2, 3]), (2, 4, [0, 1]), (1, 3, [0])],
)
def test_cuts_are_spread_over_the_answer(length: int, cuts: int, expected: list[int]) -> None:
    assert spread(length, cuts) == expected


@pytest.mark.parametrize(
    ("family", "lengths", "checkpoints"),
    [
        *((each, "padded", False) for each in sorted({*FAMILIES} - {*FORGETFUL, "Mistral with a window"})),
        *(("Llama 3", each, checkpoints) for each in LENGTHS for checkpoints in (False, True)),
    ],
)
def test_cuts_equal_separate_samples(
    family: str, lengths: str, checkpoints: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = rows_of(LENGTHS[lengths])
    expected, slow = apart(objective(family), rows, 4)
    monkeypatch.setattr(observe, "RECOMPUTED", 1 if checkpoints else 2**40)
    loss, found = learned(objective(family, 4, checkpoints=checkpoints), batch_of(rows))
    assert abs(expected - learned(objective(family), batch_of(rows))[0]) > 1e-3
    assert_close(loss, expected)
    assert len(found) > 1
    assert_close(found, slow)


@pytest.mark.parametrize("tokens", [3, 140])
def test_also_for_any_number_of_soft_tokens(tokens: int) -> None:
    rows, shape = rows_of(LENGTHS["padded"]), replace(SHAPE, tokens=tokens)
    expected = apart(objective(shape=shape), rows, 3)
    found = learned(objective(cuts=3, shape=shape), batch_of(rows))
    assert_close(found[0], expected[0])
    assert_close(found[1], expected[1])


def test_without_gradients_the_loss_is_the_same() -> None:
    each, batch = objective(cuts=3), batch_of(rows_of(LENGTHS["padded"]))
    loss, _ = learned(each, batch)
    with torch.no_grad():
        assert_close(each.loss(batch), loss)


@pytest.mark.parametrize(("dtype", "off"), [("int8", 0.01), ("bfloat16", 0.005)])
@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
def test_cuts_of_a_kept_reading(lengths: list[tuple[int, int]], dtype: str, off: float) -> None:
    """All uses learn the same, as near to a fresh reading as rounded entries allow."""
    each, rows = objective(cuts=4), rows_of(lengths)
    expected, slow = apart(objective(), rows, 4)
    each.buffer, reads = ReplayBuffer(ReplaySettings(dtype=dtype)), list[Batch]()
    read: Callable[[Batch], Any] = each.run_teacher
    each.run_teacher = lambda batch: reads.append(batch) or read(batch)  # type: ignore[method-assign, func-returns-value]
    uses = [learned(each, batch_of(rows, turn=turn, last=turn == 2)) for turn in range(3)]
    assert len(reads) == 1
    assert all(torch.equal(loss, uses[0][0]) and same(found, uses[0][1]) for loss, found in uses)
    loss, found = uses[0]
    assert abs(loss / expected - 1) < off
    for name, gradient in slow.items():
        assert torch.cosine_similarity(found[name].flatten(), gradient.flatten(), dim=0) > 0.995, name


@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
def test_a_replayed_bfloat16_reading_is_the_fresh_one(lengths: list[tuple[int, int]]) -> None:
    batch = batch_of(rows_of(lengths))
    module = random_on(fresh_model("Llama 3").bfloat16(), SHAPE)
    fresh = learned(ImportanceObjective(module, 0.4, cuts=3), batch)
    replayed = ImportanceObjective(module, 0.4, cuts=3)
    replayed.buffer = ReplayBuffer(ReplaySettings(dtype="bfloat16"))
    again = learned(replayed, batch)
    assert torch.equal(again[0], fresh[0])
    assert same(again[1], fresh[1])


def test_the_loss_is_float32_under_autocast() -> None:
    """Products in bfloat16 would round it."""
    each, batch = objective(cuts=4), batch_of(rows_of(LENGTHS["padded"]))
    exact, _ = learned(each, batch)
    with torch.autocast("cpu", torch.bfloat16):
        loss = each.loss(batch)
    assert loss.dtype == torch.float32
    assert 0 < abs(loss - exact) < 0.02 * exact


def test_modules_side_by_side_learn_what_they_would_alone() -> None:
    model, batch = fresh_model("Llama 3"), batch_of(rows_of(LENGTHS["padded"]))
    cells = [ImportanceObjective(random_on(model, SHAPE, seed), 0.4, cuts=3) for seed in (7, 8)]
    alone = [learned(cell, batch) for cell in cells]
    loss, together = learned(side_by_side(cells), batch)
    assert_close(loss, alone[0][0] + alone[1][0])
    for place, (_, expected) in enumerate(alone):
        end = {
            name: next(each for full, each in together.items() if full.endswith(f"{place}.{name}")) for name in expected
        }
        assert_close(end, expected)


def test_what_is_measured_is_the_prompt_itself() -> None:
    rows = rows_of(LENGTHS["padded"])
    batch = collate([SampleDataset(rows)[place] for place in range(3)])
    measured = [fidelity_of(objective(cuts=cuts), [batch], budget=6) for cuts in (1, 4)]
    assert measured[0] == measured[1]


def test_a_kept_reading_holds_no_more_than_its_samples_tokens() -> None:
    """By which the memory bound of kept readings is reckoned: not the longest prompt beside the longest answer."""
    batch = batch_of(rows_of([(60, 4), (20, 40)]))
    assert Cuts.of(batch, 4).length == max(60 + 3, 20 + 30)
    each = objective(cuts=4)
    assert each.run_teacher(batch).layers[0]["keys"].shape[2] == each.kept_tokens(batch) / 2 == 63


@pytest.mark.parametrize("family", FORGETFUL)
def test_layers_that_forget_are_refused(family: str) -> None:
    with pytest.raises(UserError, match=r"^train\.cuts=2: \w+ has layers of \w+, which forget .*; use train\.cuts=1$"):
        objective(family, 2)
    objective(family, 1)


@pytest.mark.parametrize("cuts", [0, -1, 65])
def test_wrong_values_are_refused(cuts: int) -> None:
    with pytest.raises(UserError, match=rf"^train\.cuts={cuts} must be (greater|less) than or equal to (1|64)$"):
        settings(cuts=cuts).check("train")


def trained(work: Path, at: int = 0, replays: int = 3) -> ModuleTrainer:
    learning = new_objective()
    each = Disturbed(at, crash, learning.lookahead, 0.5, False, 3)
    run = TrainingRun(work, samples(), replay=ReplaySettings(memory="90KB"))
    trainer = ModuleTrainer(each, settings(replays=replays, steps=14, cuts=3), run)
    trainer.fit()
    return trainer


@pytest.mark.parametrize("replays", [1, 3])
def test_a_run_that_was_killed_goes_on_bit_for_bit(replays: int, tmp_path: Path) -> None:
    """From a checkpoint at step 6, in the middle of the uses of several readings."""
    whole = trained(tmp_path / "whole", replays=replays)
    with pytest.raises(RuntimeError, match="power failure"):
        trained(tmp_path / "cut", at=9, replays=replays)
    resumed = trained(tmp_path / "cut", replays=replays)
    assert same(tensors(whole.objective), tensors(resumed.objective))
    assert not same(tensors(whole.objective), tensors(new_objective()))


def test_a_training_is_not_resumed_with_other_cuts(tmp_path: Path) -> None:
    trained(tmp_path)
    with pytest.raises(UserError, match=r"train\.cuts=3, now it is 1"):
        ModuleTrainer(
            new_objective(),
            settings(replays=3, steps=14),
            TrainingRun(tmp_path, samples(), replay=ReplaySettings("90KB")),
        ).fit()
