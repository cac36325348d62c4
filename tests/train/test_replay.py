"""Teacher outputs that are kept: their order, their memory, what packing costs, and that resuming changes nothing."""

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

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
from tests.train.runs import module_tensors, new_objective, same, samples


@pytest.mark.parametrize(("memory", "replays"), [(1, 2), (100, 5), (10_000, 2)])
def test_all_outputs_are_used_so_many_times_within_memory(replays: int, memory: int) -> None:
    sizes = [random.Random(seed).randint(1, 30) for seed in range(20)]
    order = list(replay_order(sizes, replays, memory, random.Random(0)))
    assert sorted(order) == [(output, turn) for output in range(20) for turn in range(replays)]
    stored = dict[int, int]()
    for output, turn in order:
        stored[output] = sizes[output]
        if turn == replays - 1:
            del stored[output]
        assert sum(stored.values()) <= max(memory, 30)
    for output in range(20):
        turns = [turn for other, turn in order if other == output]
        assert turns == list(range(replays))


def sampler(processes: int = 1, **changes) -> ReplaySampler:
    lengths = SampleDataset(samples(13)).lengths()
    return ReplaySampler(lengths, 2.0, 150, runs.settings(replays=3, **changes), processes)


@pytest.mark.parametrize(("processes", "grouped"), [(1, False), (2, True), (3, False)])
def test_batches_stay_together_and_belong_to_one_process(processes: int, grouped: bool) -> None:
    replay_sampler = sampler(processes, group_by_length=grouped)
    uses = list(replay_sampler)
    batches_of_a_process = 13 // (2 * processes)
    assert len(uses) == len(replay_sampler) == batches_of_a_process * processes * 2 * 3
    process_of_batch: dict[tuple[int, ...], int] = {}
    turns = Counter[tuple[int, ...]]()
    for position in range(0, len(uses), 2):
        batch_uses = uses[position : position + 2]
        batch = tuple(use.sample_index for use in batch_uses)
        process = position // 2 % processes
        assert process_of_batch.setdefault(batch, process) == process
        assert {(use.turn, use.last) for use in batch_uses} == {(turns[batch], turns[batch] == 2)}
        turns[batch] += 1
    assert set(turns.values()) == {3}


def test_processes_read_samples_of_similar_lengths_in_the_same_steps() -> None:
    lengths = random.Random(0).choices(range(100, 5000), k=400)
    settings = runs.settings(replays=3, batch_size=1, group_by_length=True)
    uses = list(ReplaySampler(lengths, 2.0, 10**6, settings, processes=2))
    ratios = []
    for first, second in zip(uses[::2], uses[1::2], strict=True):
        assert (first.turn, first.last) == (second.turn, second.last)
        ratios.append(lengths[first.sample_index] / lengths[second.sample_index])
    assert sum(0.8 < ratio < 1.25 for ratio in ratios) > 0.95 * len(ratios)


def batch_of(positions: list[int], last: bool = True) -> Batch:
    dataset = SampleDataset(samples())
    return Batch(**collate([dataset[Use(position, 0, last)] for position in positions]))


def test_outputs_are_computed_once_and_dropped_after_their_last_use(tmp_path: Path) -> None:
    """What a killed run has left goes first."""
    folder = tmp_path / "process-0"
    folder.mkdir()
    for name in ("7.safetensors", ".lock", ".keepsight-replay"):
        (folder / name).write_bytes(b"left by a killed run")
    buffer = ReplayBuffer(ReplaySettings(dir=str(tmp_path))).__enter__()
    run_teacher = Mock(return_value=TeacherOutputs([{"keys": torch.arange(8.0).view(1, 1, 2, 4)}]))
    fresh = buffer.take(batch_of([0], last=False), run_teacher)
    assert len(list(tmp_path.rglob("*.safetensors"))) == 1
    replayed = buffer.take(batch_of([0]), run_teacher)
    assert torch.equal(fresh.layers[0]["keys"], replayed.layers[0]["keys"])
    assert run_teacher.call_count == 1
    buffer.take(batch_of([0]), run_teacher)
    assert run_teacher.call_count == 2
    assert not list(folder.glob("*.safetensors"))
    buffer.__exit__()
    assert not folder.exists()


def train_with_replays(
    work: Path, objective: ReplayedObjective | None = None, folder: Path | None = None, **changes
) -> ModuleTrainer:
    """A training that uses each teacher output three times; in files if a folder is given."""
    replay = ReplaySettings(memory="60KB", dir=str(folder) if folder else None)
    run = TrainingRun(work, samples(), replay=replay)
    trainer = ModuleTrainer(objective or new_objective(), runs.settings(replays=3, **changes), run)
    trainer.fit()
    return trainer


def test_files_hold_what_memory_would_and_are_gone_in_the_end(tmp_path: Path) -> None:
    readings = tmp_path / "readings"
    in_memory = train_with_replays(tmp_path / "memory")
    on_disk = train_with_replays(tmp_path / "disk", folder=readings)
    assert same(module_tensors(in_memory.objective), module_tensors(on_disk.objective))
    assert list(readings.iterdir()) == []


def test_the_target_is_read_once_a_sample_and_held_out_ones_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    objective = new_objective()
    run_teacher = objective.run_teacher
    indices_of_passes: list[tuple[int, ...]] = []

    def recorded(batch: Batch) -> TeacherOutputs:
        indices_of_passes.append(tuple(batch.indices))
        return run_teacher(batch)

    monkeypatch.setattr(objective, "run_teacher", recorded)
    trainer = train_with_replays(tmp_path, objective, steps=18)  # 6 batches, each used 3 times
    held_out = {tuple(batch["indices"]) for batch in trainer.held_out_batches()}
    passes = Counter(indices_of_passes[1:])  # the first one tells how many bytes teacher outputs take
    assert set(passes.values()) == {1}
    assert len(passes.keys() - held_out) == 6


def stored_bytes(outputs: Any) -> int:
    """Bytes of teacher outputs that a buffer keeps, as tensors or in a file."""
    tensors = load_file(outputs).values() if isinstance(outputs, Path) else outputs
    return sum(tensor.nbytes for tensor in tensors)


@pytest.mark.parametrize(
    ("held_out", "memory", "on_disk", "cuts"),
    [(2, "30KB", True, 1), (12, "30KB", False, 1), (0, "90KB", False, 4), (12, "60KB", False, 4)],
)
def test_a_training_holds_no_more_than_its_memory(
    held_out: int, memory: str, on_disk: bool, cuts: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bytes that are really held after each use, those of held-out samples included."""
    bytes_after_uses: list[int] = []
    take = ReplayBuffer.take

    def measured_take(self: ReplayBuffer, batch: Batch, read: Callable[[], TeacherOutputs]) -> TeacherOutputs:
        outputs = take(self, batch, read)
        bytes_after_uses.append(sum(stored_bytes(stored) for stored, _ in self._kept.values()))
        return outputs

    monkeypatch.setattr(ReplayBuffer, "take", measured_take)
    replay = ReplaySettings(memory, str(tmp_path / "readings") if on_disk else None)
    settings = runs.settings(replays=4, steps=24, held_out=held_out, cuts=cuts)
    objective = ImportanceObjective(new_objective().lookahead, cuts=cuts)
    ModuleTrainer(objective, settings, TrainingRun(tmp_path / "work", samples(40), replay=replay)).fit()
    assert 0.6 * read_bytes(memory) < max(bytes_after_uses) <= read_bytes(memory)


def long_batch() -> Batch:
    """Prompts with far entries."""
    dataset = SampleDataset([replace(sample, prompt_ids=sample.prompt_ids * 3) for sample in samples(3)])
    return Batch(**collate([dataset[Use(position, 0, True)] for position in (0, 2)]))


def loss_and_gradient(
    objective: ReplayedObjective, batch: Batch, buffer: ReplayBuffer | None
) -> tuple[float, torch.Tensor]:
    """The loss, and all gradients in one vector; of teacher outputs as the buffer packs them, if there is one."""
    objective.buffer = buffer
    objective.zero_grad()
    loss = objective.loss(batch)
    loss.backward()
    gradients = [weight.grad.flatten() for weight in objective.parameters() if weight.grad is not None]
    return loss.item(), torch.cat(gradients)


def lookahead_objective(dtype: torch.dtype) -> ReplayedObjective:
    objective = new_objective()
    target: Any = objective.lookahead.model  # transformers hides the types of `to`
    target.to(dtype)
    objective.far = 0.5
    return objective


def retrieval_objective(dtype: torch.dtype) -> ReplayedObjective:
    settings = RetrievalHeadSettings(queries=12, answers=0.5)
    return RetrievalObjective(tiny_retrieval_head(), tiny_model().to(dtype), settings)


@pytest.mark.parametrize(("make", "least_similarity"), [(lookahead_objective, 0.999), (retrieval_objective, 0.995)])
@pytest.mark.parametrize(
    ("dtype", "target"), [("int8", torch.float32), ("bfloat16", torch.float32), ("bfloat16", torch.bfloat16)]
)
def test_packing_changes_loss_and_gradients_by_next_to_nothing(
    make: Callable[[torch.dtype], ReplayedObjective], least_similarity: float, dtype: str, target: torch.dtype
) -> None:
    """By nothing at all in the base model's dtype."""
    objective = make(target)
    loss, gradient = loss_and_gradient(objective, long_batch(), buffer=None)
    buffer = ReplayBuffer(ReplaySettings(dtype=dtype))
    packed_loss, packed_gradient = loss_and_gradient(objective, long_batch(), buffer)
    assert packed_loss == pytest.approx(loss, rel=0.005)
    assert torch.cosine_similarity(gradient, packed_gradient, dim=0) > least_similarity
    if target == torch.bfloat16:
        assert packed_loss == loss
        assert torch.equal(gradient, packed_gradient)


def test_a_folder_of_others_is_refused_and_stays(tmp_path: Path) -> None:
    other_file = tmp_path / "process-0" / "7.safetensors"
    other_file.parent.mkdir()
    other_file.write_bytes(b"a model")
    with refused("replay.dir", "conflict"):
        train_with_replays(tmp_path / "work", folder=tmp_path)
    assert other_file.read_bytes() == b"a model"
    assert [path.name for path in other_file.parent.iterdir()] == ["7.safetensors"]


def test_a_folder_that_another_training_uses_is_refused(tmp_path: Path) -> None:
    settings = ReplaySettings(dir=str(tmp_path))
    outputs = TeacherOutputs([{"keys": torch.ones(1, 1, 2, 4)}])
    with ReplayBuffer(settings) as buffer, refused("out", "conflict"):
        buffer.take(batch_of([0], last=False), lambda: outputs)
        assert [path.name for path in tmp_path.rglob("*.safetensors")] == ["1.safetensors"]
        ReplayBuffer(settings).__enter__()
    assert list(tmp_path.iterdir()) == []


def test_a_training_without_teacher_outputs_keeps_none(tmp_path: Path) -> None:
    settings = head_settings(replays=2)
    with refused("replays", "conflict"):
        ModuleTrainer(head_objective(), settings.train, TrainingRun(tmp_path, samples())).fit()
