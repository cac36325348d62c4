"""Teacher outputs that are kept: their order, their memory, what packing costs, and that resuming changes nothing."""

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from keepsight.files import read_bytes
from keepsight.train.dataset import Batch, SampleDataset, Use, collate
from keepsight.train.importance import ImportanceObjective
from keepsight.train.objective import ReplayedObjective
from keepsight.train.replay import ReplayBuffer, ReplaySampler, TeacherOutputs, replay_order
from keepsight.train.retrieval_head import RetrievalObjective
from keepsight.train.settings import ReplaySettings, RetrievalHeadSettings
from keepsight.train.trainer import ModuleTrainer, TrainingRun
from tests.models.retrieval_heads import tiny_retrieval_head
from tests.refused import refused
from tests.tiny import tiny_model
from tests.train import runs
from tests.train.head_runs import head_objective, head_settings
from tests.train.runs import objective, same, samples, tensors


@pytest.mark.parametrize(("memory", "replays"), [(1, 2), (100, 5), (10_000, 2)])
def test_all_outputs_are_used_so_many_times_within_memory(replays: int, memory: int) -> None:
    sizes = [random.Random(seed).randint(1, 30) for seed in range(20)]
    order = list(replay_order(sizes, replays, memory, random.Random(0)))
    assert sorted(order) == [(number, turn) for number in range(20) for turn in range(replays)]
    held = dict[int, int]()
    for number, turn in order:
        held[number] = sizes[number]
        if turn == replays - 1:
            del held[number]
        assert sum(held.values()) <= max(memory, 30)
    for number in range(20):
        assert [turn for each, turn in order if each == number] == list(range(replays))


def sampler(processes: int = 1, **changes) -> ReplaySampler:
    return ReplaySampler(SampleDataset(samples(13)).lengths(), 2.0, 150, runs.settings(replays=3, **changes), processes)


@pytest.mark.parametrize(("processes", "grouped"), [(1, False), (2, True), (3, False)])
def test_batches_stay_together_and_belong_to_one_process(processes: int, grouped: bool) -> None:
    chosen = sampler(processes, group_by_length=grouped)
    uses = list(chosen)
    assert len(uses) == len(chosen) == 13 // (2 * processes) * processes * 2 * 3
    owner: dict[tuple[int, ...], int] = {}
    turns = Counter[tuple[int, ...]]()
    for number in range(0, len(uses), 2):
        batch = tuple(use.sample_index for use in uses[number : number + 2])
        assert owner.setdefault(batch, number // 2 % processes) == number // 2 % processes
        assert {(use.turn, use.last) for use in uses[number : number + 2]} == {(turns[batch], turns[batch] == 2)}
        turns[batch] += 1
    assert set(turns.values()) == {3}


def test_processes_read_samples_of_similar_lengths_in_the_same_steps() -> None:
    lengths = random.Random(0).choices(range(100, 5000), k=400)
    settings = runs.settings(replays=3, batch_size=1, group_by_length=True)
    uses, ratios = list(ReplaySampler(lengths, 2.0, 10**6, settings, processes=2)), list[float]()
    for one, other in zip(uses[::2], uses[1::2], strict=True):
        assert (one.turn, one.last) == (other.turn, other.last)
        ratios.append(lengths[one.sample_index] / lengths[other.sample_index])
    assert sum(0.8 < ratio < 1.25 for ratio in ratios) > 0.95 * len(ratios)


def batch_of(places: list[int], last: bool = True) -> Batch:
    dataset = SampleDataset(samples())
    return Batch(**collate([dataset[Use(place, 0, last)] for place in places]))


def test_outputs_are_computed_once_and_dropped_after_their_last_use(tmp_path: Path) -> None:
    """What a killed run has left goes first."""
    own = tmp_path / "process-0"
    own.mkdir()
    for name in ("7.safetensors", ".lock", ".keepsight-replay"):
        (own / name).write_bytes(b"left by a killed run")
    buffer = ReplayBuffer(ReplaySettings(dir=str(tmp_path))).__enter__()
    calls = []

    def read() -> TeacherOutputs:
        calls.append(1)
        return TeacherOutputs([{"keys": torch.arange(8.0).view(1, 1, 2, 4)}])

    first = buffer.take(batch_of([0], last=False), read)
    assert len(list(tmp_path.rglob("*.safetensors"))) == 1
    second = buffer.take(batch_of([0]), read)
    assert torch.equal(first.layers[0]["keys"], second.layers[0]["keys"])
    assert len(calls) == 1
    buffer.take(batch_of([0]), read)
    assert len(calls) == 2
    assert not list(own.glob("*.safetensors"))
    buffer.__exit__()
    assert not own.exists()


def trained(work: Path, make=objective, **changes) -> tuple[ModuleTrainer, bool]:
    replay = ReplaySettings(memory="60KB", dir=changes.pop("dir", None))
    trainer = ModuleTrainer(make(), runs.settings(replays=3, **changes), TrainingRun(work, samples(), replay=replay))
    return trainer, trainer.fit()


def test_files_hold_what_memory_would_and_are_gone_in_the_end(tmp_path: Path) -> None:
    in_memory, _ = trained(tmp_path / "memory")
    on_disk, _ = trained(tmp_path / "disk", dir=str(tmp_path / "readings"))
    assert same(tensors(in_memory.objective), tensors(on_disk.objective))
    assert not [*(tmp_path / "readings").iterdir()]


def test_the_target_is_read_once_a_sample_and_held_out_ones_once(tmp_path: Path) -> None:
    one, calls = objective(), list[tuple[int, ...]]()
    read = one.run_teacher

    def counted_read(batch: Batch) -> TeacherOutputs:
        calls.append(tuple(batch.indices))
        return read(batch)

    one.run_teacher = counted_read  # type: ignore[method-assign]
    trainer, _ = trained(tmp_path, lambda: one, steps=18)  # 6 batches, each used 3 times
    held_out = {tuple(batch["indices"]) for batch in trainer.held_out_batches()}
    counted = Counter(calls[1:])  # the first one tells how many bytes teacher outputs take
    assert set(counted.values()) == {1}
    assert len(counted.keys() - held_out) == 6


@pytest.mark.parametrize(
    ("held_out", "memory", "on_disk", "cuts"),
    [(2, "30KB", True, 1), (12, "30KB", False, 1), (0, "90KB", False, 4), (12, "60KB", False, 4)],
)
def test_a_training_holds_no_more_than_its_memory(
    held_out: int, memory: str, on_disk: bool, cuts: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bytes that are really held after each use, those of held-out samples included."""
    held, take = list[int](), ReplayBuffer.take

    def noting(self: ReplayBuffer, batch: Batch, read: Callable[[], TeacherOutputs]) -> TeacherOutputs:
        taken = take(self, batch, read)
        kept = [[*load_file(each).values()] if isinstance(each, Path) else each for each, _ in self._kept.values()]
        held.append(sum(tensor.nbytes for each in kept for tensor in each))
        return taken

    monkeypatch.setattr(ReplayBuffer, "take", noting)
    replay = ReplaySettings(memory, str(tmp_path / "readings") if on_disk else None)
    settings = runs.settings(replays=4, steps=24, held_out=held_out, cuts=cuts)
    each = ImportanceObjective(objective().lookahead, cuts=cuts)
    ModuleTrainer(each, settings, TrainingRun(tmp_path / "work", samples(40), replay=replay)).fit()
    assert 0.6 * read_bytes(memory) < max(held) <= read_bytes(memory)


def long_batch() -> Batch:
    """Prompts with far entries."""
    rows = [replace(each, prompt_ids=each.prompt_ids * 3) for each in samples(3)]
    dataset = SampleDataset(rows)
    return Batch(**collate([dataset[Use(place, 0, True)] for place in (0, 2)]))


def fresh_and_replayed(one: ReplayedObjective, batch: Batch, dtype: str) -> list[tuple[float, torch.Tensor]]:
    """Loss, and the gradients in one, of teacher outputs as they are and packed."""
    found = []
    for buffer in (None, ReplayBuffer(ReplaySettings(dtype=dtype))):
        one.buffer = buffer
        one.zero_grad()
        loss = one.loss(batch)
        loss.backward()
        learned = [each.grad for each in one.parameters() if each.grad is not None]
        found.append((loss.item(), torch.cat([each.flatten() for each in learned])))
    return found


def lookahead(dtype: torch.dtype) -> ReplayedObjective:
    one = objective()
    target: Any = one.lookahead.model  # transformers hides the types of `to`
    target.to(dtype)
    one.far = 0.5
    return one


def retrieval(dtype: torch.dtype) -> ReplayedObjective:
    settings = RetrievalHeadSettings(queries=12, answers=0.5)
    return RetrievalObjective(tiny_retrieval_head(), tiny_model().to(dtype), settings)


@pytest.mark.parametrize("make", [lookahead, retrieval])
@pytest.mark.parametrize(
    ("dtype", "target"), [("int8", torch.float32), ("bfloat16", torch.float32), ("bfloat16", torch.bfloat16)]
)
def test_packing_changes_loss_and_gradients_by_next_to_nothing(
    make: Callable[[torch.dtype], ReplayedObjective], dtype: str, target: torch.dtype
) -> None:
    """By nothing at all in the base model's dtype."""
    (exact, gradient), (packed, of_packed) = fresh_and_replayed(make(target), long_batch(), dtype)
    assert packed == pytest.approx(exact, rel=0.005)
    assert torch.cosine_similarity(gradient, of_packed, dim=0) > (0.999 if make is lookahead else 0.995)
    if target == torch.bfloat16:
        assert packed == exact and torch.equal(gradient, of_packed)


def test_a_folder_of_others_is_refused_and_stays(tmp_path: Path) -> None:
    theirs = tmp_path / "process-0" / "7.safetensors"
    theirs.parent.mkdir()
    theirs.write_bytes(b"a model")
    with refused("replay.dir", "conflict"):
        trained(tmp_path / "work", dir=str(tmp_path))
    assert theirs.read_bytes() == b"a model"
    assert [path.name for path in theirs.parent.iterdir()] == ["7.safetensors"]


def test_a_folder_that_another_training_uses_is_refused(tmp_path: Path) -> None:
    settings = ReplaySettings(dir=str(tmp_path))
    with ReplayBuffer(settings) as first, refused("out", "conflict"):
        first.take(batch_of([0], last=False), lambda: TeacherOutputs([{"keys": torch.ones(1, 1, 2, 4)}]))
        assert [path.name for path in tmp_path.rglob("*.safetensors")] == ["1.safetensors"]
        ReplayBuffer(settings).__enter__()
    assert not [*tmp_path.iterdir()]


def test_a_training_without_teacher_outputs_keeps_none(tmp_path: Path) -> None:
    settings = head_settings(replays=2)
    with refused("replays", "conflict"):
        ModuleTrainer(head_objective(), settings.train, TrainingRun(tmp_path, samples())).fit()
