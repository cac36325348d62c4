"""Small trainings, and what can happen to them."""

import itertools
import json
import os
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from keepsight.data_gen.store import DataSettings, ShardWriter, TrainingSample
from keepsight.models.lookahead import Lookahead
from keepsight.models.lookahead_settings import LookaheadSettings
from keepsight.models.targets import Target
from keepsight.train.dataset import SampleDataset, collate
from keepsight.train.fidelity import Fidelity
from keepsight.train.importance import ImportanceObjective
from keepsight.train.replay import TeacherOutputs
from keepsight.train.settings import LookaheadTrainSettings, TrainSettings
from keepsight.train.trainer import ModuleTrainer, ObjectiveT, TrainingRun
from tests.families import FAMILIES
from tests.tiny import tiny_model

SHAPE = LookaheadSettings(tokens=4, rank=2, alpha=8)
VARIED = ("DeepSeek-V3", "Gemma 2", "Gemma 3 (text)", "GPT-OSS", "Llama 4 (text)", "Phi-3, Phi-4", "Qwen3-Next")
"""What families differ in: latents, soft caps, windows, sinks, experts, chunks, joint projections, recurrent states."""
GRID = [each if each in VARIED else pytest.param(each, marks=pytest.mark.slow) for each in sorted(FAMILIES)]
GRID.remove(next(each for each in GRID if "window" in str(each)))
LENGTHS = [(24, 6), (17, 3), (31, 8), (12, 5), (28, 2), (20, 7), (15, 4)]


def settings(**changes) -> LookaheadTrainSettings:
    """12 samples, 6 steps an epoch, 8 steps in all."""
    values: dict[str, Any] = {
        "steps": 8,
        "batch_size": 2,
        "held_out": 2,
        "measure_every": 4,
        "save_every": 3,
        "report_to": [],
    }
    return LookaheadTrainSettings(**values | {"learning_rate": 1e-2, "budget": 6} | changes)


def samples(count: int = 14) -> list[TrainingSample]:
    """Random prompts and answers of different lengths; their indices have gaps, as after a filter."""
    generator = torch.Generator().manual_seed(3)

    def ids(length: int) -> list[int]:
        return torch.randint(6, 128, (length,), generator=generator).tolist()

    lengths = [LENGTHS[number % len(LENGTHS)] for number in range(count)]
    return [TrainingSample(3 * number, "test", ids(n), ids(t), "", "") for number, (n, t) in enumerate(lengths)]


def sized(*lengths: tuple[int, int]) -> list[TrainingSample]:
    """Random samples of (prompt, answer) tokens."""
    generator = torch.Generator().manual_seed(3)

    def ids(count: int) -> list[int]:
        return torch.randint(3, 128, (count,), generator=generator).tolist()

    return [TrainingSample(place, "test", ids(n), ids(t), "", "") for place, (n, t) in enumerate(lengths)]


def batch_of(rows: list[TrainingSample]) -> dict[str, Any]:
    """The samples as the fields of one batch, without their numbers."""
    return collated(SampleDataset(rows)) | {"indices": ()}


def numbered(rows: list[TrainingSample]) -> list[TrainingSample]:
    """The samples with indices without gaps, as a data folder has them."""
    return [replace(row, index=number) for number, row in enumerate(rows)]


def write_data(folder: Path, target: Target, count: int = 14) -> None:
    """A finished data folder of samples that the base model is said to have answered."""
    mixture = {"sources": [{"kind": "hub_dataset", "id": "ada/books", "license": "odc-by", "text": "text"}]}
    made = DataSettings(target.name, target.identity, mixture, 0, count, 5, 8)
    writer, every = ShardWriter(folder, made), numbered(samples(count))
    for shard in writer.settings.shards():
        writer.append(shard, [every[index] for index in shard])
        writer.finish(shard)
    writer.complete()


def objective(family: str = "llama", shape: LookaheadSettings = SHAPE) -> ImportanceObjective:
    model = tiny_model(family)
    torch.manual_seed(0)
    return ImportanceObjective(Lookahead(model, shape))


def train(
    objective: ImportanceObjective, settings: TrainSettings, work: Path, samples: list[TrainingSample]
) -> tuple[ModuleTrainer, bool]:
    """The trainer, and whether the training ran to its end."""
    trainer = ModuleTrainer(objective, settings, TrainingRun(work, samples))
    return trainer, trainer.fit()


def at_batch(objective: ObjectiveT, number: int, action: Callable[[ObjectiveT], object]) -> ObjectiveT:
    """The objective, to which something happens at its n-th training batch."""
    calls = itertools.count(1)

    def happen(*_: object) -> None:
        if next(calls) == number:
            action(objective)

    objective.register_forward_pre_hook(happen)
    return objective


def disturbed(number: int, action: Callable[[ImportanceObjective], object], **options: Any) -> ImportanceObjective:
    return at_batch(objective(**options), number, action)


def crash(_: object) -> None:
    raise RuntimeError("power failure")


def press_ctrl_c(_: object) -> None:
    os.kill(os.getpid(), signal.SIGINT)


def press_ctrl_c_twice(_: object) -> None:
    press_ctrl_c(_)
    press_ctrl_c(_)


def spoil(each: ImportanceObjective) -> None:
    with torch.no_grad():
        each.lookahead.tokens.fill_(torch.nan)


def collated(dataset: SampleDataset) -> dict:
    return collate([dataset[place] for place in range(len(dataset))])


def tensors(each: ImportanceObjective) -> dict[str, Tensor]:
    return each.lookahead.lora_state() | {"tokens": each.lookahead.tokens.detach().clone()}


def same(first: dict[str, Tensor], second: dict[str, Tensor]) -> bool:
    return set(first) == set(second) and all(torch.equal(first[name], second[name]) for name in first)


def measured(objective: ImportanceObjective, batches: list[dict[str, Any]], budget: int) -> Fidelity:
    """The fidelity by layer that the objective measures."""
    found = objective.measure(batches, budget)
    return Fidelity(*(found[f"eval_{name}_by_layer"] for name in ("kl", "recall", "tau")))


def tensors_of(outputs: TeacherOutputs) -> list[Tensor]:
    return tree_leaves(vars(outputs))


def checkpoints(work: Path) -> list[str]:
    return sorted(path.name for path in work.glob("checkpoint-*"))


def rows(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]
