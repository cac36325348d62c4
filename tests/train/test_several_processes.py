"""Training in two processes, with DDP and with DeepSpeed: stopped, gone on with, and equal to one process's."""

import json
import re
import shutil
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, Gemma3ForCausalLM, Gemma3TextConfig

from keepsight.commands import train as command
from keepsight.commands.cli import main
from keepsight.commands.config_shared import ModelConfig
from keepsight.models.hub import plan_upload
from keepsight.models.lookahead import LookaheadAdapter
from keepsight.models.targets import load_target
from tests.close import assert_close
from tests.launch import ROOT, launch
from tests.models.test_targets import with_nan
from tests.tiny import save_tiny_target
from tests.train.runs import SHAPE, rows, same, settings, write_data

needs_deepspeed = pytest.mark.skipif(find_spec("deepspeed") is None, reason="needs the extra `deepspeed`")
TRAINING: dict[str, Any] = {
    "steps": 5,
    "batch_size": 1,
    "clip": 0.5,
    "group_by_length": False,
    "replays": 1,
    "measure_every": 1,
    "save_every": 1,  # which logs the loss of every step
}
FSDP2 = ["model.device_map=fsdp2"]
CUTS = ["train.cuts=3"]
LAUNCHED: dict[str, Any] = {
    "ddp, several cuts": (None, CUTS),
    "fsdp2, layers run twice": pytest.param(
        None, [*FSDP2, "train.gradient_checkpointing=true"], marks=pytest.mark.slow
    ),
    "zero2": pytest.param("zero2", [], marks=[pytest.mark.slow, needs_deepspeed]),
    "zero3": pytest.param("zero3", [], marks=[pytest.mark.slow, needs_deepspeed]),
}
"""A file of recipes/accelerate/ for DeepSpeed, and keys."""


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A base model, data that it answered, and adapters trained by one process, `one` and, at several cuts, `cuts`."""
    folder = tmp_path_factory.mktemp("workspace")
    save_tiny_target(folder / "target")
    write_data(folder / "data", load_target(str(folder / "target"), device="cpu"))
    for out, changes in {"one": {}, "cuts": {"cuts": 3}}.items():
        command.run(
            command.Config(
                model=ModelConfig(id=str(folder / "target"), device="cpu", dtype="float32"),
                data=str(folder / "data"),
                out=str(folder / out),
                lookahead=SHAPE,
                train=settings(**TRAINING, **changes, samples_per_step=2),
            )
        )
    return folder


def arguments(workspace: Path, out: Path, **more: Any) -> list[str]:
    """The arguments of `keepsight train`, as NAME=VALUE."""
    train_settings = settings(**TRAINING)
    values: dict[str, Any] = {}
    for name in (*TRAINING, "held_out", "learning_rate", "budget", "report_to"):
        values[f"train.{name}"] = getattr(train_settings, name)
    for name in ("tokens", "rank", "alpha", "pooling", "kernel"):
        values[f"lookahead.{name}"] = getattr(SHAPE, name)
    values |= {
        "model.id": workspace / "target",
        "model.device": "cpu",
        "model.dtype": "float32",
        "data": workspace / "data",
        "out": out,
        **more,
    }
    return [f"{name}={value}" for name, value in values.items()]


def losses(adapter: Path) -> dict[int, float]:
    """The loss of each step of a training."""
    state = json.loads((adapter / "training/checkpoint-5/trainer_state.json").read_text())
    return {row["step"]: row["loss"] for row in state["log_history"] if "loss" in row}


def held_out_losses(adapter: Path) -> dict[int, float]:
    """The KL divergence on held-out samples before each step and after the last."""
    return {row["step"]: row["eval_kl"] for row in rows(adapter / "training/fidelity.jsonl")}


def printed_counts(name: str, text: str) -> list[int]:
    """What the processes printed after `weights NAME`."""
    return [int(count) for count in re.findall(rf"weights {name}: (\d+)", text)]


def launched_processes(adapter: Path) -> int:
    """How many processes the settings of an adapter's training name."""
    settings_of_training = json.loads((adapter / "training/settings.json").read_text())
    return settings_of_training["settings"]["launch.processes"]


@pytest.mark.parametrize(("config", "more"), LAUNCHED.values(), ids=LAUNCHED)
def test_two_processes_stop_together_go_on_and_train_what_one_trains(
    config: str | None, more: list[str], workspace: Path, tmp_path: Path
):
    out = tmp_path / "two"
    training = out / "training"
    command_arguments = [*arguments(workspace, out), *more]
    stopped = launch(tmp_path, str(ROOT / "tests/train/stopped_training.py"), *command_arguments, config=config)
    assert stopped.stderr.count("interrupted at step 3") == 2, stopped.stderr[-4000:]
    assert (training / "checkpoint-3/trainer_state.json").exists()
    sizes = {name: weight.numel() for name, weight in load_file(workspace / "target/model.safetensors").items()}
    all_weights = sum(sizes.values())
    weights_of_layers = sum(size for name, size in sizes.items() if ".layers." in name)
    held = printed_counts("held", stopped.stdout)
    if FSDP2[0] in more:
        read = printed_counts("read", stopped.stdout)
        assert sorted(read) == [0, all_weights], "the first process alone reads the files"
        assert held == [all_weights - weights_of_layers // 2] * 2
    else:
        assert held == [0 if config == "zero3" else all_weights] * 2

    result = launch(tmp_path, str(ROOT / "train_lookahead.py"), *command_arguments, config=config)
    assert result.returncode == 0, result.stderr[-4000:]
    assert "resuming from" in result.stdout
    assert "tokens a second" in result.stderr
    assert launched_processes(out) == 2
    alone = workspace / ("cuts" if more == CUTS else "one")
    adapter_alone = LookaheadAdapter.load(alone)
    adapter = LookaheadAdapter.load(out)
    assert adapter_alone.provenance.training["samples a step"] == 2
    assert adapter.provenance.training["samples a step"] == 2
    assert_close(adapter.tokens, adapter_alone.tokens)
    assert_close(adapter.lora, adapter_alone.lora)
    if config is None:  # bit for bit without DeepSpeed
        assert torch.equal(adapter.tokens, adapter_alone.tokens)
        assert same(adapter.lora, adapter_alone.lora)
    for curve in (losses, held_out_losses):
        expected = curve(alone)
        assert len(expected) >= 5
        assert list(curve(out)) == list(expected)
        assert curve(out) == pytest.approx(expected, abs=2e-4)  # the Trainer rounds to 1e-4
    plan_upload(out, "user/name")
    config_alone = json.loads((workspace / "one/adapter_config.json").read_text())
    assert json.loads((out / "adapter_config.json").read_text()) == config_alone

    target_bytes = sum(path.stat().st_size for path in (workspace / "target").glob("*.safetensors"))
    states = [*training.glob("checkpoint-5/**/*_states.pt")]
    assert bool(states) == (config in ("zero2", "zero3"))
    for path in states:
        assert path.stat().st_size < target_bytes / 2, f"{path} holds the frozen target"


@pytest.mark.slow
@pytest.mark.parametrize(("config", "more"), [(None, FSDP2), LAUNCHED["zero3"]], ids=["fsdp2", "zero3"])
def test_a_weight_that_is_not_finite_ends_all_processes(
    config: str | None, more: list[str], workspace: Path, tmp_path: Path
):
    shutil.copytree(workspace / "target", tmp_path / "target")
    write_data(tmp_path / "data", load_target(str(tmp_path / "target"), device="cpu"))
    with_nan(tmp_path / "target")
    command_arguments = [*arguments(tmp_path, tmp_path / "two"), *more]
    result = launch(tmp_path, str(ROOT / "train_lookahead.py"), *command_arguments, config=config)
    assert result.returncode != 0
    assert "weight 'model.norm.weight' is not finite; copy or download it again" in result.stderr


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["llama", "gemma3"])
def test_a_sharded_target_answers_as_a_whole_one(kind: str, tmp_path: Path):
    target = tmp_path / "target"
    save_tiny_target(target, tie_word_embeddings=True)
    if kind == "gemma3":  # which has buffers that no file holds
        config = AutoConfig.from_pretrained(target).to_dict()
        shape = {name: config[name] for name in ("vocab_size", "hidden_size", "num_hidden_layers", "head_dim")}
        torch.manual_seed(0)
        model = Gemma3ForCausalLM(Gemma3TextConfig(**shape, intermediate_size=64, sliding_window=8))
        model.save_pretrained(target)
    result = launch(tmp_path, str(ROOT / "tests/train/sharded_target.py"), str(target))
    assert result.returncode == 0, result.stderr[-4000:]
    assert result.stdout.count("tied True, equal True") == 2, result.stdout


@pytest.mark.slow
@pytest.mark.parametrize("more", [[], ["model.device_map=fsdp2"]], ids=["ddp", "fsdp2"])
def test_two_processes_ablate_what_one_trains(more: list[str], workspace: Path, tmp_path: Path):
    out = tmp_path / "two"
    command_arguments = [*arguments(workspace, out), *more]
    command_arguments.remove("lookahead.tokens=4")
    command_arguments.append("lookahead.tokens=[4,6]")
    result = launch(tmp_path, "-m", "keepsight", "train", *command_arguments)
    assert result.returncode == 0, result.stderr[-4000:]
    cell_folder = out / "cells/tokens4"
    assert launched_processes(cell_folder) == 2
    adapter_alone = LookaheadAdapter.load(workspace / "one")
    cell = LookaheadAdapter.load(cell_folder)
    assert_close(cell.tokens, adapter_alone.tokens)
    for name, tensor in adapter_alone.lora.items():
        assert_close(cell.lora[name], tensor)


@pytest.mark.slow
def test_two_processes_keep_teacher_outputs_of_their_own(workspace: Path, tmp_path: Path):
    out = tmp_path / "two"
    replays = {"train.replays": 3, "train.held_out": 3, "replay.dir": "readings"}
    result = launch(tmp_path, str(ROOT / "train_lookahead.py"), *arguments(workspace, out, **replays))
    assert result.returncode == 0, result.stderr[-4000:]
    assert LookaheadAdapter.load(out).provenance.training["steps on each teacher output"] == 3
    measurements = rows(out / "training/fidelity.jsonl")
    assert measurements[-1]["step"] == 5
    assert measurements[-1]["eval_kl"] < measurements[0]["eval_kl"]
    assert not [path for path in (tmp_path / "readings").rglob("*") if path.is_file()]


@needs_deepspeed
@pytest.mark.slow
def test_with_deepspeed_in_bfloat16_the_adapter_stays_float32(workspace: Path, tmp_path: Path):
    out = tmp_path / "two"
    in_bfloat16 = {"train.precision": "bf16", "model.dtype": "bfloat16"}
    command_arguments = arguments(workspace, out, **in_bfloat16)
    result = launch(tmp_path, str(ROOT / "train_lookahead.py"), *command_arguments, config="zero3")
    assert result.returncode == 0, result.stderr[-4000:]
    for path in (out / "adapter_model.safetensors", out / "training/checkpoint-5/lookahead.safetensors"):
        for name, tensor in load_file(path).items():
            assert tensor.dtype == torch.float32, name
            assert not torch.equal(tensor, tensor.bfloat16().float()), name


def finetune_arguments(workspace: Path) -> list[str]:
    """The command and its arguments but `out`."""
    base = [
        argument
        for argument in arguments(workspace, workspace)
        if not argument.startswith(("train.", "lookahead.", "out="))
    ]
    values = {
        "adapter": workspace / "one",
        "selection": "shared",
        "finetune.budgets": "[16]",
        "finetune.train.steps": 4,
        "finetune.train.clip": TRAINING["clip"],
        "finetune.train.group_by_length": TRAINING["group_by_length"],
        "finetune.train.replays": TRAINING["replays"],
        "finetune.train.samples_per_step": 2,
        "finetune.train.held_out": 2,
        "finetune.train.report_to": "[]",
    }
    return ["finetune", *base, *(f"{name}={value}" for name, value in values.items())]


FROZEN = ["finetune.freeze_module=true"]
FINETUNED: dict[str, Any] = {
    "ddp": (None, [], []),
    "fsdp2, layers run twice": (None, [*FSDP2, "finetune.gradient_checkpointing=true"], []),
    "fsdp2, module frozen": (None, FSDP2, FROZEN),
    "zero2": pytest.param("zero2", [], [], marks=needs_deepspeed),
    "zero3": pytest.param("zero3", [], [], marks=needs_deepspeed),
    "zero3, module frozen": pytest.param("zero3", [], FROZEN, marks=needs_deepspeed),
}
"""A file of recipes/accelerate/ for DeepSpeed, keys of the two processes, and keys of the one process too."""


@pytest.mark.slow
@pytest.mark.parametrize(("config", "more", "trained"), FINETUNED.values(), ids=FINETUNED)
def test_two_processes_finetune_what_one_does(
    config: str | None, more: list[str], trained: list[str], workspace: Path, tmp_path: Path
):
    """Also where one of them has nothing to learn from: some prompts are within every budget."""
    out_alone = tmp_path / "one"
    out = tmp_path / "two"
    command = [*finetune_arguments(workspace), *trained]
    assert main([*command, f"out={out_alone}"]) == 0
    result = launch(tmp_path, "-m", "keepsight", *command, *more, f"out={out}", config=config)
    assert result.returncode == 0, result.stderr[-4000:]
    start = LookaheadAdapter.load(workspace / "one")
    adapter_alone = LookaheadAdapter.load(out_alone)
    adapter = LookaheadAdapter.load(out)
    module_is_frozen = bool(trained)
    assert torch.equal(adapter_alone.tokens, start.tokens) == module_is_frozen
    assert torch.tensor(adapter_alone.head_weights).std() > 1e-3
    assert_close(adapter.tokens, adapter_alone.tokens)
    assert_close(torch.tensor(adapter.head_weights), torch.tensor(adapter_alone.head_weights))
    for name, tensor in adapter_alone.lora.items():
        assert_close(adapter.lora[name], tensor)
