"""Training on tiny random models: it learns, it counts samples alike, and it says what went wrong."""

import itertools
import json
import os
import signal
import threading
from collections import Counter
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import TrainerCallback, TrainingArguments

from keepsight.commands.config import Train
from keepsight.commands.parse import parse
from keepsight.data_gen.store import TrainingSample
from keepsight.errors import Code, UserError
from keepsight.models.lookahead import Lookahead
from keepsight.train import trainer as module
from keepsight.train.dataset import hold_out
from keepsight.train.importance import ImportanceObjective
from keepsight.train.settings import TrainSettings
from keepsight.train.trainer import ModuleTrainer, TrainingRun
from tests.close import assert_close
from tests.devices import FIRST, SECOND, in_halves, several_devices
from tests.refused import refused
from tests.tiny import tiny_model
from tests.train.runs import (
    SHAPE,
    checkpoints,
    collate_all,
    disturbed,
    measure_fidelity,
    module_tensors,
    new_objective,
    same,
    samples,
    samples_of_lengths,
    set_to_nan,
    settings,
    train,
)


@pytest.mark.parametrize(("rank", "tensors"), [(2, 1 + 2 * (7 + 7 + 2)), (0, 1)], ids=["LookaheadKV", "Judge Q"])
def test_it_learns_a_few_samples_and_moves_every_trainable_tensor_and_no_other(rank, tensors, tmp_path):
    few_samples = samples(6)
    objective = new_objective("qwen3", replace(SHAPE, rank=rank))
    before = {name: weight.detach().clone() for name, weight in objective.named_parameters()}
    trained, _ = hold_out(few_samples, 2)
    batch = collate_all(trained)
    start = measure_fidelity(objective, [batch], budget=6)
    values = settings(steps=40, batch_size=4, measure_every=40, save_every=40)
    trainer, _ = train(objective, values, tmp_path, few_samples)
    end = measure_fidelity(objective, [batch], budget=6)
    assert sum(end.kl) < 0.75 * sum(start.kl)
    assert sum(end.recall) > sum(start.recall)
    losses = [row["loss"] for row in trainer.state.log_history if "loss" in row]
    assert len(losses) == 4
    assert losses[-1] < 0.9 * losses[0]
    for name, weight in objective.named_parameters():
        moved = not torch.equal(weight, before[name])
        assert moved == weight.requires_grad, name
    assert sum(weight.requires_grad for weight in objective.parameters()) == tensors


@pytest.mark.parametrize(("at", "checkpoint"), [(2, None), (5, "checkpoint-3")])
def test_a_loss_that_is_no_number_is_refused(at, checkpoint, tmp_path):
    with pytest.raises(UserError) as caught:
        train(disturbed(at, set_to_nan), settings(), tmp_path, samples())
    message = str(caught.value)
    assert "\n" not in message
    assert f"the loss is nan at step {at} on samples [" in message
    listed = message.partition("on samples ")[2].partition(";")[0]
    indices = json.loads(listed)
    assert len(indices) == 2
    assert set(indices) <= {sample.index for sample in samples()}
    advice = str(tmp_path / checkpoint) if checkpoint else "there is no checkpoint yet"
    assert advice in message


def test_held_out_samples_are_long_ones_spread_over_the_data_and_never_trained_on():
    trained, held_out = hold_out(samples(14), 4)
    trained_indices = [sample.index for sample in trained.samples]
    held_out_indices = [sample.index for sample in held_out.samples]
    assert held_out_indices == [0, 12, 21, 33]
    assert sorted(trained_indices + held_out_indices) == [3 * position for position in range(14)]
    median_length = median(len(sample.prompt_ids) for sample in samples(14))
    assert all(len(sample.prompt_ids) > median_length for sample in held_out.samples)
    with refused("train.held_out", "range"):
        hold_out(samples(14), 14)


def test_held_out_samples_are_of_all_kinds():
    """In proportion to their samples; of a kind without long prompts, its longest."""
    kinds = ["short"] * 8 + ["common", "rare", "common", "common"] * 8
    all_samples = []
    for position, sample in enumerate(samples_of_lengths(*((10 + extra, 4) for extra in range(40)))):
        all_samples.append(replace(sample, source=kinds[position]))
    _, held_out = hold_out(all_samples, 10)
    assert Counter(sample.source for sample in held_out.samples) == {"common": 6, "short": 2, "rare": 2}
    assert [sample.index for sample in held_out.samples if sample.source == "short"] == [6, 7]
    assert all(sample.index >= 20 for sample in held_out.samples if sample.source != "short")
    _, two_held_out = hold_out(all_samples, 2)
    assert sorted(sample.source for sample in two_held_out.samples) == ["common", "short"]


@pytest.mark.parametrize("rate", [1e30, 1e38])
def test_weights_that_explode_are_named_and_never_saved(rate, tmp_path, monkeypatch):
    """Measured and saved after every step: neither must trip over, or keep, weights that are no numbers.

    Such a learning rate is out of its range; smaller ones do the same to larger models.
    """
    monkeypatch.setattr(TrainSettings, "check", lambda *_: None)
    often = settings(measure_every=1, save_every=1, learning_rate=rate, warmup=0.0)
    with refused("loss", "data"):
        train(new_objective(), often, tmp_path, samples())
    for name in checkpoints(tmp_path):
        state = load_file(tmp_path / name / "lookahead.safetensors")
        assert all(torch.isfinite(value).all() for value in state.values()), name


def first_step(work: Path, **changes) -> tuple[float, dict[str, Tensor]]:
    """Loss and gradients of one step over the same four samples."""
    objective = new_objective()
    torch.manual_seed(5)
    with torch.no_grad():
        for name, weight in objective.named_parameters():
            if ".lora_B" in name:
                weight.normal_(std=0.2)
    work.mkdir()
    values = settings(steps=1, held_out=1, clip=1e9, **changes)
    trainer = ModuleTrainer(objective, values, TrainingRun(work, samples(5)))
    gradients: dict[str, Tensor] = {}

    class RecordGradients(TrainerCallback):
        def on_pre_optimizer_step(self, *_: Any, **__: Any) -> None:
            for name, weight in objective.named_parameters():
                if weight.grad is not None:
                    gradients[name] = weight.grad.clone()

    trainer.add_callback(RecordGradients())
    return trainer.train().training_loss, gradients


def test_accumulated_batches_equal_one_batch(tmp_path):
    """Samples of different lengths: each counts the same, whatever batch it is in."""
    loss, gradients = first_step(tmp_path / "one batch", batch_size=4)
    for size in (1, 2):
        split_loss, split_gradients = first_step(tmp_path / f"by {size}", batch_size=size, samples_per_step=4)
        assert split_loss == pytest.approx(loss, abs=1e-5)
        assert set(split_gradients) == set(gradients)
        for name, gradient in gradients.items():
            assert gradient.abs().max() > 1e-5, name
            assert_close(split_gradients[name], gradient)


def test_prompts_of_similar_length_share_a_batch(tmp_path):
    """A sample's index tells its length."""
    rising_lengths = [TrainingSample(index, "test", [7] * (10 + index), [8, 9], "", "") for index in range(49)]
    spreads = {}
    for grouped in (True, False):
        work = tmp_path / str(grouped)
        work.mkdir()
        values = settings(batch_size=2, group_by_length=grouped, held_out=1)
        trainer = ModuleTrainer(new_objective(), values, TrainingRun(work, rising_lengths))
        batches = [batch["indices"] for batch in trainer.get_train_dataloader()]
        dataset: Any = trainer.eval_dataset
        held_out = [sample.index for sample in dataset.samples]
        assert len(held_out) == 1
        assert sorted([*itertools.chain(*batches), *held_out]) == list(range(49))
        spreads[grouped] = sum(max(batch) - min(batch) for batch in batches)
    assert spreads[True] < spreads[False] / 2


def test_samples_per_step_are_accumulated_and_refused_where_they_do_not_divide():
    assert settings(batch_size=2, samples_per_step=16).accumulation(2, "train") == 4
    assert settings(batch_size=2).accumulation(2, "train") == 1
    with refused("train.samples_per_step", "range"):
        settings(batch_size=3, samples_per_step=16).accumulation(2, "train")


def test_a_process_with_several_gpus_uses_one_and_says_how_to_use_all(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(TrainingArguments, "n_gpu", property(lambda self: getattr(self, "_n_gpu", 0) or 4))
    trainer = ModuleTrainer(new_objective(), settings(), TrainingRun(tmp_path, samples()))
    assert trainer.args.n_gpu == 1
    assert not isinstance(trainer._wrap_model(trainer.objective), torch.nn.DataParallel)
    printed = capsys.readouterr().out
    assert "one of 4 GPUs" in printed
    assert "accelerate launch --multi_gpu --num_processes 4" in printed


def test_what_does_not_fit_the_launcher_is_refused(tmp_path, monkeypatch):
    run = TrainingRun(tmp_path, samples())
    with refused("train.tf32", "model"):
        ModuleTrainer(new_objective(), settings(tf32=True), run)
    # Kept teacher outputs where the model is divided: one process would run it where another does not.
    with monkeypatch.context() as patch:
        patch.setattr(module, "launcher_of", lambda accelerator, objective: "fsdp2")
        with refused("replays", "conflict"):
            ModuleTrainer(new_objective(), settings(replays=2), run)
        ModuleTrainer(new_objective(), settings(), run)
    create = ModuleTrainer.create_accelerator_and_postprocess  # on CPUs accelerate starts no FSDP

    def create_with_fsdp(trainer: ModuleTrainer) -> None:
        create(trainer)
        trainer.is_fsdp_enabled = True

    with monkeypatch.context() as patch:
        patch.setattr(ModuleTrainer, "create_accelerator_and_postprocess", create_with_fsdp)
        with refused("model.device_map", "conflict"):
            ModuleTrainer(new_objective(), settings(), run)
    objective = new_objective()
    objective.lookahead.model.hf_device_map = {"model.layers.0": 0, "model.layers.1": "cpu"}  # type: ignore[assignment]
    monkeypatch.setattr(TrainingArguments, "world_size", 2)
    with refused("model.device_map", "conflict"):
        ModuleTrainer(objective, settings(), run)


def test_sigterm_saves_like_ctrl_c(tmp_path):
    before = signal.getsignal(signal.SIGTERM)

    def end_of_the_job(_: object) -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGTERM)  # a launcher's, after Slurm's

    trainer, finished = train(disturbed(5, end_of_the_job), settings(), tmp_path, samples())
    assert not finished
    assert trainer.state.global_step == 5
    assert "checkpoint-5" in checkpoints(tmp_path)
    assert signal.getsignal(signal.SIGTERM) is before


def test_training_works_outside_the_main_thread(tmp_path):
    """A notebook's or a server's worker: there signals cannot be caught."""
    results: list = []
    values = settings(steps=1, save_every=1)
    worker = threading.Thread(target=lambda: results.append(train(new_objective(), values, tmp_path, samples())))
    worker.start()
    worker.join()
    assert len(results) == 1
    assert results[0][1]


@pytest.mark.parametrize(("text", "steps"), [("0", 0), ("0.0", 0), ("0.5", 4), ("0.99", 8), ("1", 1), ("5", 5)])
def test_warmup_is_a_number_of_steps_or_a_share_of_them(text, steps, tmp_path):
    config = parse(Train, [f"train.warmup={text}", "data=data", "out=out"])
    values = settings(warmup=config.train.warmup)
    trainer = ModuleTrainer(new_objective(), values, TrainingRun(tmp_path, samples()))
    assert trainer.args.get_warmup_steps(8) == steps


@pytest.mark.parametrize("text", ["1.0", "-1", "-0.5", "2.5", "nan", "inf", "true", "many"])
def test_other_warmups_are_refused(text):
    code: Code = "type" if text in ("true", "many") else "range"
    with refused("train.warmup", code):
        parse(Train, [f"train.warmup={text}", "data=data", "out=out"])


LONG = [replace(sample, prompt_ids=sample.prompt_ids * 2) for sample in samples()]
"""With far entries."""


def objective_on(model: Any, checkpoints: bool = False, cuts: int = 1) -> ImportanceObjective:
    torch.manual_seed(0)
    return ImportanceObjective(Lookahead(model, SHAPE), far=0.3, checkpoints=checkpoints, cuts=cuts)


def log_without_times(trainer: ModuleTrainer) -> list[dict[str, Any]]:
    times = ("train_runtime", "train_samples_per_second", "train_steps_per_second")
    return [{key: value for key, value in row.items() if key not in times} for row in trainer.trained().log]


@pytest.mark.parametrize(
    ("changes", "checkpoints"),
    [({"replays": 2}, False), ({"cuts": 3}, True)],
)
def test_a_model_on_two_devices_has_the_losses_measurements_and_weights_of_one_on_one(
    tmp_path: Path, changes: dict[str, Any], checkpoints: bool
) -> None:
    values = settings(**changes)
    on_one_device = objective_on(tiny_model(), checkpoints, values.cuts)
    expected, _ = train(on_one_device, values, tmp_path / "one", LONG)
    with several_devices():
        on_two_devices = objective_on(in_halves(tiny_model()), checkpoints, values.cuts)
        trainer, finished = train(on_two_devices, values, tmp_path / "two", LONG)
        assert finished
        trained = [weight for weight in on_two_devices.parameters() if weight.requires_grad]
        assert {weight.device for weight in trained} == {FIRST, SECOND}
    assert log_without_times(trainer) == log_without_times(expected)
    assert same(module_tensors(on_two_devices), module_tensors(on_one_device))
