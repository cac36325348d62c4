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
    collated,
    disturbed,
    objective,
    same,
    samples,
    settings,
    sized,
    spoil,
    tensors,
    train,
)
from tests.train.runs import measured as fidelity_of


@pytest.mark.parametrize(("rank", "tensors"), [(2, 1 + 2 * (7 + 7 + 2)), (0, 1)], ids=["LookaheadKV", "Judge Q"])
def test_it_learns_a_few_samples_and_moves_every_trainable_tensor_and_no_other(rank, tensors, tmp_path):
    few, learning = samples(6), objective("qwen3", replace(SHAPE, rank=rank))
    before = {name: value.detach().clone() for name, value in learning.named_parameters()}
    batch = hold_out(few, 2)[0]
    start = fidelity_of(learning, [collated(batch)], budget=6)
    trainer, _ = train(learning, settings(steps=40, batch_size=4, measure_every=40, save_every=40), tmp_path, few)
    end = fidelity_of(learning, [collated(batch)], budget=6)
    assert sum(end.kl) < 0.75 * sum(start.kl)
    assert sum(end.recall) > sum(start.recall)
    logged = [row["loss"] for row in trainer.state.log_history if "loss" in row]
    assert len(logged) == 4
    assert logged[-1] < 0.9 * logged[0]
    for name, value in learning.named_parameters():
        assert torch.equal(value, before[name]) != value.requires_grad, name
    assert sum(value.requires_grad for value in learning.parameters()) == tensors


@pytest.mark.parametrize(("at", "checkpoint"), [(2, None), (5, "checkpoint-3")])
def test_a_loss_that_is_no_number_is_refused(at, checkpoint, tmp_path):
    with pytest.raises(UserError) as caught:
        train(disturbed(at, spoil), settings(), tmp_path, samples())
    message = str(caught.value)
    assert "\n" not in message
    assert f"the loss is nan at step {at} on samples [" in message
    named = json.loads(message.partition("on samples ")[2].partition(";")[0])
    assert len(named) == 2
    assert set(named) <= {sample.index for sample in samples()}
    assert (str(tmp_path / checkpoint) if checkpoint else "there is no checkpoint yet") in message


def test_held_out_samples_are_long_ones_spread_over_the_data_and_never_trained_on():
    trained, measured = ([row.index for row in each.samples] for each in hold_out(samples(14), 4))
    assert measured == [0, 12, 21, 33] and sorted(trained + measured) == [3 * number for number in range(14)]
    middle = median(len(row.prompt_ids) for row in samples(14))
    assert all(len(row.prompt_ids) > middle for row in hold_out(samples(14), 4)[1].samples)
    with refused("train.held_out", "range"):
        hold_out(samples(14), 14)


def test_held_out_samples_are_of_all_kinds():
    """In proportion to their samples; of a kind without long prompts, its longest."""
    lengths = [(10 + number, 4) for number in range(40)]
    kinds = ["short"] * 8 + ["common", "rare", "common", "common"] * 8
    rows = [replace(row, source=kind) for row, kind in zip(sized(*lengths), kinds, strict=True)]
    measured = hold_out(rows, 10)[1].samples
    assert Counter(row.source for row in measured) == {"common": 6, "short": 2, "rare": 2}
    assert [row.index for row in measured if row.source == "short"] == [6, 7]
    assert all(row.index >= 20 for row in measured if row.source != "short")
    few = hold_out(rows, 2)[1].samples
    assert len(few) == 2 and {row.source for row in few} == {"common", "short"}


@pytest.mark.parametrize("rate", [1e30, 1e38])
def test_weights_that_explode_are_named_and_never_saved(rate, tmp_path, monkeypatch):
    """Measured and saved after every step: neither must trip over, or keep, weights that are no numbers.

    Such a learning rate is out of its range; smaller ones do the same to larger models.
    """
    monkeypatch.setattr(TrainSettings, "check", lambda *_: None)
    often = settings(measure_every=1, save_every=1, learning_rate=rate, warmup=0.0)
    with refused("loss", "data"):
        train(objective(), often, tmp_path, samples())
    for name in checkpoints(tmp_path):
        state = load_file(tmp_path / name / "lookahead.safetensors")
        assert all(torch.isfinite(value).all() for value in state.values()), name


def first_step(work: Path, **changes) -> tuple[float, dict[str, Tensor]]:
    """Loss and gradients of one step over the same four samples."""
    model = objective()
    torch.manual_seed(5)
    with torch.no_grad():
        for name, value in model.named_parameters():
            if ".lora_B" in name:
                value.normal_(std=0.2)
    few = samples(5)
    values = settings(steps=1, held_out=1, clip=1e9, **changes)
    work.mkdir()
    trainer = ModuleTrainer(model, values, TrainingRun(work, few))
    gradients: dict[str, Tensor] = {}

    class Keep(TrainerCallback):
        def on_pre_optimizer_step(self, *_: Any, **__: Any) -> None:
            named = model.named_parameters()
            gradients.update({name: value.grad.clone() for name, value in named if value.grad is not None})

    trainer.add_callback(Keep())
    return trainer.train().training_loss, gradients


def test_accumulated_batches_equal_one_batch(tmp_path):
    """Samples of different lengths: each counts the same, whatever batch it is in."""
    loss, gradients = first_step(tmp_path / "whole", batch_size=4)
    for batch in (1, 2):
        split_loss, split_gradients = first_step(tmp_path / f"by {batch}", batch_size=batch, samples_per_step=4)
        assert split_loss == pytest.approx(loss, abs=1e-5)
        assert set(split_gradients) == set(gradients)
        for name, value in gradients.items():
            assert value.abs().max() > 1e-5, name
            assert_close(split_gradients[name], value)


def test_prompts_of_similar_length_share_a_batch(tmp_path):
    many = [TrainingSample(number, "test", [7] * (10 + number), [8, 9], "", "") for number in range(49)]
    spreads = {}
    for grouped in (True, False):
        work = tmp_path / str(grouped)
        work.mkdir()
        values = settings(batch_size=2, group_by_length=grouped, held_out=1)
        trainer = ModuleTrainer(objective(), values, TrainingRun(work, many))
        batches = [batch["indices"] for batch in trainer.get_train_dataloader()]
        dataset: Any = trainer.eval_dataset
        held_out = [sample.index for sample in dataset.samples]
        assert sorted([*itertools.chain(*batches), *held_out]) == list(range(49)) and len(held_out) == 1
        spreads[grouped] = sum(max(batch) - min(batch) for batch in batches)
    assert spreads[True] < spreads[False] / 2


def test_samples_per_step_are_accumulated_and_refused_where_they_do_not_divide():
    assert settings(batch_size=2, samples_per_step=16).accumulation(2, "train") == 4
    assert settings(batch_size=2).accumulation(2, "train") == 1
    with refused("train.samples_per_step", "range"):
        settings(batch_size=3, samples_per_step=16).accumulation(2, "train")


def test_a_process_with_several_gpus_uses_one_and_says_how_to_use_all(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(TrainingArguments, "n_gpu", property(lambda self: getattr(self, "_n_gpu", 0) or 4))
    trainer = ModuleTrainer(objective(), settings(), TrainingRun(tmp_path, samples()))
    assert trainer.args.n_gpu == 1
    assert not isinstance(trainer._wrap_model(trainer.objective), torch.nn.DataParallel)
    assert "one of 4 GPUs" in (said := capsys.readouterr().out)
    assert "accelerate launch --multi_gpu --num_processes 4" in said


def test_what_does_not_fit_the_launcher_is_refused(tmp_path, monkeypatch):
    with refused("train.tf32", "model"):
        ModuleTrainer(objective(), settings(tf32=True), TrainingRun(tmp_path, samples()))
    # Kept teacher outputs where the model is divided: one process would run it where another does not.
    with monkeypatch.context() as patch:
        patch.setattr(module, "launcher_of", lambda accelerator, objective: "fsdp2")
        with refused("replays", "conflict"):
            ModuleTrainer(objective(), settings(replays=2), TrainingRun(tmp_path, samples()))
        ModuleTrainer(objective(), settings(), TrainingRun(tmp_path, samples()))
    create = ModuleTrainer.create_accelerator_and_postprocess  # on CPUs accelerate starts no FSDP

    def launched(trainer: ModuleTrainer) -> None:
        create(trainer)
        trainer.is_fsdp_enabled = True

    with monkeypatch.context() as patch:
        patch.setattr(ModuleTrainer, "create_accelerator_and_postprocess", launched)
        with refused("model.device_map", "conflict"):
            ModuleTrainer(objective(), settings(), TrainingRun(tmp_path, samples()))
    each = objective()
    each.lookahead.model.hf_device_map = {"model.layers.0": 0, "model.layers.1": "cpu"}  # type: ignore[assignment]
    monkeypatch.setattr(TrainingArguments, "world_size", 2)
    with refused("model.device_map", "conflict"):
        ModuleTrainer(each, settings(), TrainingRun(tmp_path, samples()))


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
    worker = threading.Thread(target=lambda: results.append(train(objective(), values, tmp_path, samples())))
    worker.start()
    worker.join()
    assert len(results) == 1
    assert results[0][1]


@pytest.mark.parametrize(("text", "steps"), [("0", 0), ("0.0", 0), ("0.5", 4), ("0.99", 8), ("1", 1), ("5", 5)])
def test_warmup_is_a_number_of_steps_or_a_share_of_them(text, steps, tmp_path):
    given = parse(Train, [f"train.warmup={text}", "data=data", "out=out"]).train.warmup
    trainer = ModuleTrainer(objective(), settings(warmup=given), TrainingRun(tmp_path, samples()))
    assert trainer.args.get_warmup_steps(8) == steps


@pytest.mark.parametrize("text", ["1.0", "-1", "-0.5", "2.5", "nan", "inf", "true", "many"])
def test_other_warmups_are_refused(text):
    code: Code = "type" if text in ("true", "many") else "range"
    with refused("train.warmup", code):
        parse(Train, [f"train.warmup={text}", "data=data", "out=out"])


LONG = [replace(each, prompt_ids=each.prompt_ids * 2) for each in samples()]
"""With far entries."""


def learning(model: Any, checkpoints: bool = False, cuts: int = 1) -> ImportanceObjective:
    torch.manual_seed(0)
    return ImportanceObjective(Lookahead(model, SHAPE), far=0.3, checkpoints=checkpoints, cuts=cuts)


def logged(trainer: ModuleTrainer) -> list[dict[str, Any]]:
    clocks = ("train_runtime", "train_samples_per_second", "train_steps_per_second")
    return [{key: row[key] for key in row if key not in clocks} for row in trainer.trained().log]


@pytest.mark.parametrize(
    ("changes", "checkpoints"),
    [({"replays": 2}, False), ({"cuts": 3}, True)],
)
def test_losses_measurements_and_weights(tmp_path: Path, changes: dict[str, Any], checkpoints: bool) -> None:
    cuts = settings(**changes).cuts
    whole = learning(tiny_model(), checkpoints, cuts)
    expected, _ = train(whole, settings(**changes), tmp_path / "whole", LONG)
    with several_devices():
        halves = learning(in_halves(tiny_model()), checkpoints, cuts)
        trained, finished = train(halves, settings(**changes), tmp_path / "halves", LONG)
        assert finished
        assert {each.device for each in halves.parameters() if each.requires_grad} == {FIRST, SECOND}
    assert logged(trained) == logged(expected)
    assert same(tensors(halves), tensors(whole))
