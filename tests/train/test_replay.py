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

from keepsight.errors import UserError
from keepsight.files import read_bytes
from keepsight.train.dataset import Batch, SampleDataset, Use, collate
from keepsight.train.importance import ImportanceObjective
from keepsight.train.objective import ReplayedObjective
from keepsight.train.replay import ReplayBuffer, ReplaySampler, TeacherOutputs, pack, replay_order, unpack
from keepsight.train.retrieval_head import RetrievalObjective
from keepsight.train.settings import ReplaySettings, RetrievalHeadSettings
from keepsight.train.trainer import ModuleTrainer, TrainingRun
from tests.models.retrieval_heads import tiny_retrieval_head
from tests.tiny import tiny_model
from tests.train import runs
from tests.train.runs import crash, disturbed, objective, same, samples, tensors


def held_bytes(order: list[tuple[int, int]], sizes: list[int], replays: int) -> int:
    """The most bytes of readings that are held between two uses."""
    held, most = dict[int, int](), 0
    for number, turn in order:
        held[number] = sizes[number]
        if turn == replays - 1:
            del held[number]
        most = max(most, sum(held.values()))
    return most


@pytest.mark.parametrize("memory", [1, 40, 100, 10_000])
@pytest.mark.parametrize("replays", [2, 5])
def test_every_reading_is_used_so_many_times_within_memory(replays: int, memory: int) -> None:
    sizes = [random.Random(seed).randint(1, 30) for seed in range(20)]
    order = list(replay_order(sizes, replays, memory, random.Random(0)))
    assert sorted(order) == [(number, turn) for number in range(20) for turn in range(replays)]
    assert held_bytes(order, sizes, replays) <= max(memory, 0 if memory > 30 else 30)
    for number in range(20):
        assert [turn for each, turn in order if each == number] == list(range(replays))


def test_much_memory_mixes_and_little_does_not() -> None:
    one_by_one = [number for number, _ in replay_order([10] * 6, 3, 10, random.Random(0))]
    assert one_by_one == [number for number in range(6) for _ in range(3)]
    mixed = [number for number, _ in replay_order([10] * 6, 3, 60, random.Random(0))]
    assert mixed != sorted(mixed)


def sampler(processes: int = 1, **changes) -> ReplaySampler:
    lengths = [sample["length"] for sample in map(SampleDataset(samples(13)).__getitem__, range(13))]
    return ReplaySampler(lengths, 2.0, 150, runs.settings(replays=3, **changes), processes)


@pytest.mark.parametrize("grouped", [False, True])
@pytest.mark.parametrize("processes", [1, 2, 3])
def test_batches_stay_together_and_belong_to_one_process(processes: int, grouped: bool) -> None:
    chosen = sampler(processes, group_by_length=grouped)
    uses = list(chosen)
    assert len(uses) == len(chosen) == 13 // (2 * processes) * processes * 2 * 3
    owner: dict[tuple[int, ...], int] = {}
    turns = Counter[tuple[int, ...]]()
    for number in range(0, len(uses), 2):
        batch = tuple(use.place for use in uses[number : number + 2])
        assert owner.setdefault(batch, number // 2 % processes) == number // 2 % processes
        assert {(use.turn, use.last) for use in uses[number : number + 2]} == {(turns[batch], turns[batch] == 2)}
        turns[batch] += 1
    assert set(turns.values()) == {3}


def test_an_epoch_has_an_order_of_its_own() -> None:
    chosen = sampler()
    first, again = list(chosen), list(chosen)
    chosen.set_epoch(1)
    assert first == again != list(chosen)


def batch_of(places: list[int], last: bool = True) -> Batch:
    dataset = SampleDataset(samples())
    return Batch(**collate([dataset[Use(place, 0, last)] for place in places]))


@pytest.mark.parametrize("on_disk", [False, True])
def test_a_reading_is_made_once_and_dropped_after_its_last_use(on_disk: bool, tmp_path: Path) -> None:
    (tmp_path / "process-0").mkdir()
    (tmp_path / "process-0" / "7.safetensors").write_bytes(b"left by a killed run")
    buffer = ReplayBuffer(ReplaySettings(dir=str(tmp_path) if on_disk else None))
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
    if on_disk:
        assert list(tmp_path.rglob("*.safetensors")) == []


def trained(work: Path, make=objective, **changes) -> tuple[ModuleTrainer, bool]:
    replay = ReplaySettings(memory="60KB", dir=changes.pop("dir", None))
    trainer = ModuleTrainer(make(), runs.settings(replays=3, **changes), TrainingRun(work, samples(), replay=replay))
    return trainer, trainer.fit()


def test_a_run_that_was_killed_goes_on_bit_for_bit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From a checkpoint at step 6, in the middle of the uses of several readings."""
    uses, take = list[tuple[int, ...]](), ReplayBuffer.take

    def noting(self: ReplayBuffer, batch: Batch, read: Callable[[], TeacherOutputs]) -> TeacherOutputs:
        uses.extend([tuple(batch.indices)] * torch.is_grad_enabled())
        return take(self, batch, read)

    monkeypatch.setattr(ReplayBuffer, "take", noting)
    whole, _ = trained(tmp_path / "whole", steps=14)
    assert [each < 3 for each in Counter(uses[:6]).values()].count(True) >= 2
    with pytest.raises(RuntimeError, match="power failure"):
        trained(tmp_path / "cut", lambda: disturbed(9, crash), steps=14)
    resumed, finished = trained(tmp_path / "cut", steps=14)
    assert finished
    assert same(tensors(whole.objective), tensors(resumed.objective))


def test_files_hold_what_memory_would_and_are_gone_in_the_end(tmp_path: Path) -> None:
    in_memory, _ = trained(tmp_path / "memory")
    on_disk, _ = trained(tmp_path / "disk", dir=str(tmp_path / "readings"))
    assert same(tensors(in_memory.objective), tensors(on_disk.objective))
    assert list((tmp_path / "readings").rglob("*.safetensors")) == []


def test_the_target_is_read_once_a_sample_and_held_out_ones_once(tmp_path: Path) -> None:
    one, calls = objective(), list[tuple[int, ...]]()
    read = one.run_teacher

    def counted_read(batch: Batch) -> TeacherOutputs:
        calls.append(tuple(batch.indices))
        return read(batch)

    one.run_teacher = counted_read  # type: ignore[method-assign]
    trainer, _ = trained(tmp_path, lambda: one, steps=18)  # 6 batches, each used 3 times
    held_out = {tuple(batch["indices"]) for batch in trainer.held_out_batches()}
    counted = Counter(calls[1:])  # the first one tells how many bytes a reading takes
    assert set(counted.values()) == {1}
    assert len(counted.keys() - held_out) == 6


@pytest.mark.parametrize(
    ("held_out", "memory", "on_disk", "cuts"),
    [
        *((0, "60KB", False, 1), (2, "30KB", True, 1), (2, "60KB", False, 1), (12, "30KB", False, 1)),
        *((0, "90KB", False, 4), (12, "60KB", False, 4)),
    ],
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


def test_what_keeps_no_readings_says_so(tmp_path: Path) -> None:
    from keepsight.train.trainer import ModuleTrainer
    from tests.train.head_runs import head_objective, head_settings

    settings = head_settings()
    settings.train.replays = 2
    with pytest.raises(UserError, match=r"draft_head\.train\.replays=2: this training keeps no teacher outputs"):
        ModuleTrainer(head_objective(), settings.train, TrainingRun(tmp_path, samples())).fit()


def _gradients(module: torch.nn.Module) -> list[torch.Tensor]:
    return [weight.grad.clone() for weight in module.parameters() if weight.grad is not None]


def long_batch() -> Batch:
    """Prompts with far entries."""
    rows = [replace(each, prompt_ids=each.prompt_ids * 3) for each in samples(3)]
    dataset = SampleDataset(rows)
    return Batch(**collate([dataset[Use(place, 0, True)] for place in (0, 2)]))


def with_target_in(dtype: torch.dtype, one: ImportanceObjective) -> None:
    target: Any = one.lookahead.model  # transformers hides the types of `to`
    target.to(dtype)


def fresh_and_replayed(one: ReplayedObjective, batch: Batch, dtype: str) -> list[tuple[float, torch.Tensor]]:
    """Loss, and the gradients in one, of a reading as it is and of one that was packed."""
    found = []
    for buffer in (None, ReplayBuffer(ReplaySettings(dtype=dtype))):
        one.buffer = buffer
        one.zero_grad()
        loss = one.loss(batch)
        loss.backward()
        found.append((loss.item(), torch.cat([each.flatten() for each in _gradients(one)])))
    return found


@pytest.mark.parametrize("far", [0.0, 0.5])
@pytest.mark.parametrize("target", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dtype", ["int8", "bfloat16"])
def test_packing_changes_loss_and_gradients_by_next_to_nothing(dtype: str, target: torch.dtype, far: float) -> None:
    one = objective()
    with_target_in(target, one)
    one.far = far
    (exact, gradient), (packed, of_packed) = fresh_and_replayed(one, long_batch(), dtype)
    assert packed == pytest.approx(exact, rel=0.005)
    assert packed != exact or dtype == "bfloat16"
    assert torch.cosine_similarity(gradient, of_packed, dim=0) > 0.999


def lookahead_with_far() -> ReplayedObjective:
    one = objective()
    with_target_in(torch.bfloat16, one)
    one.far = 0.5
    return one


def retrieval_with_answers() -> ReplayedObjective:
    return RetrievalObjective(
        tiny_retrieval_head(), tiny_model().to(torch.bfloat16), RetrievalHeadSettings(queries=12, answers=0.5)
    )


@pytest.mark.parametrize("make", [lookahead_with_far, retrieval_with_answers])
def test_in_the_targets_dtype_replayed_loss_and_gradients_are_the_fresh_ones(
    make: Callable[[], ReplayedObjective],
) -> None:
    (exact, gradient), (packed, of_packed) = fresh_and_replayed(make(), long_batch(), "bfloat16")
    assert packed == exact
    assert torch.equal(gradient, of_packed)


def test_int8_rounds_by_half_a_step_of_each_head_and_token() -> None:
    keys, cpu = torch.randn(2, 3, 5, 8) * torch.logspace(-3, 3, 5)[:, None], torch.device("cpu")
    outputs = TeacherOutputs([{"keys": keys, "places": torch.arange(4)}], [keys[..., 0]])
    packed = pack(outputs, int8=True)
    assert packed.layers[0]["keys"][0].dtype == torch.int8
    devices: Any = TeacherOutputs([{"keys": cpu, "places": cpu}], [cpu])  # type: ignore[dict-item, list-item]
    back = unpack(packed, devices)
    assert torch.equal(back.layers[0]["places"], torch.arange(4)) and torch.equal(back.importance[0], keys[..., 0])
    step = keys.abs().amax(dim=-1, keepdim=True) / 127
    assert ((back.layers[0]["keys"] - keys).abs() <= 0.501 * step).all()
