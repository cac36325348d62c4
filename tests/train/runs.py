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
TRAINED_FAMILIES = sorted(family for family in FAMILIES if family != "Mistral with a window")
GRID = [family if family in VARIED else pytest.param(family, marks=pytest.mark.slow) for family in TRAINED_FAMILIES]
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
        "learning_rate": 1e-2,
        "budget": 6,
    }
    return LookaheadTrainSettings(**values | changes)


def samples(count: int = 14) -> list[TrainingSample]:
    """Random prompts and answers of different lengths; their indices have gaps, as after a filter."""
    generator = torch.Generator().manual_seed(3)
    result = []
    for position in range(count):
        prompt_length, answer_length = LENGTHS[position % len(LENGTHS)]
        prompt = torch.randint(6, 128, (prompt_length,), generator=generator).tolist()
        answer = torch.randint(6, 128, (answer_length,), generator=generator).tolist()
        result.append(TrainingSample(3 * position, "test", prompt, answer, "", ""))
    return result


def samples_of_lengths(*lengths: tuple[int, int]) -> list[TrainingSample]:
    """Random samples of (prompt, answer) tokens."""
    generator = torch.Generator().manual_seed(3)
    result = []
    for index, (prompt_length, answer_length) in enumerate(lengths):
        prompt = torch.randint(3, 128, (prompt_length,), generator=generator).tolist()
        answer = torch.randint(3, 128, (answer_length,), generator=generator).tolist()
        result.append(TrainingSample(index, "test", prompt, answer, "", ""))
    return result


def batch_of(samples: list[TrainingSample]) -> dict[str, Any]:
    """The samples as the fields of one batch, without their indices."""
    return collate_all(SampleDataset(samples)) | {"indices": ()}


def reindexed(samples: list[TrainingSample]) -> list[TrainingSample]:
    """The samples with indices without gaps, as a data folder has them."""
    return [replace(sample, index=index) for index, sample in enumerate(samples)]


def write_data(folder: Path, target: Target, count: int = 14) -> None:
    """A finished data folder of samples that the base model is said to have answered."""
    mixture = {"sources": [{"kind": "hub_dataset", "id": "ada/books", "license": "odc-by", "text": "text"}]}
    data_settings = DataSettings(target.name, target.identity, mixture, 0, count, 5, 8)
    writer = ShardWriter(folder, data_settings)
    all_samples = reindexed(samples(count))
    for shard in data_settings.shards():
        writer.append(shard, [all_samples[index] for index in shard])
        writer.finish(shard)
    writer.complete()


def new_objective(family: str = "llama", shape: LookaheadSettings = SHAPE) -> ImportanceObjective:
    """A new lookahead module on a tiny model; the same one for the same arguments."""
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

    def act(*_: object) -> None:
        if next(calls) == number:
            action(objective)

    objective.register_forward_pre_hook(act)
    return objective


def disturbed(number: int, action: Callable[[ImportanceObjective], object], **options: Any) -> ImportanceObjective:
    """A new objective, to which something happens at its n-th training batch."""
    return at_batch(new_objective(**options), number, action)


def crash(_: object) -> None:
    raise RuntimeError("power failure")


def press_ctrl_c(_: object) -> None:
    os.kill(os.getpid(), signal.SIGINT)


def press_ctrl_c_twice(_: object) -> None:
    press_ctrl_c(_)
    press_ctrl_c(_)


def set_to_nan(objective: ImportanceObjective) -> None:
    with torch.no_grad():
        objective.lookahead.tokens.fill_(torch.nan)


def collate_all(dataset: SampleDataset) -> dict:
    """All samples of a data set as one batch."""
    return collate([dataset[position] for position in range(len(dataset))])


def module_tensors(objective: ImportanceObjective) -> dict[str, Tensor]:
    """The tensors that the objective's lookahead module learns."""
    return objective.lookahead.lora_state() | {"tokens": objective.lookahead.tokens.detach().clone()}


def same(first: dict[str, Tensor], second: dict[str, Tensor]) -> bool:
    return set(first) == set(second) and all(torch.equal(first[name], second[name]) for name in first)


def measure_fidelity(objective: ImportanceObjective, batches: list[dict[str, Any]], budget: int) -> Fidelity:
    """The fidelity by layer that the objective measures."""
    measurements = objective.measure(batches, budget)
    return Fidelity(
        kl=measurements["eval_kl_by_layer"],
        recall=measurements["eval_recall_by_layer"],
        tau=measurements["eval_tau_by_layer"],
    )


def tensors_of(outputs: TeacherOutputs) -> list[Tensor]:
    return tree_leaves(vars(outputs))


def checkpoints(work: Path) -> list[str]:
    return sorted(path.name for path in work.glob("checkpoint-*"))


def rows(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]
