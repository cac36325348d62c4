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
from tests.train.runs import SHAPE, rows, settings, write_data

needs_deepspeed = pytest.mark.skipif(find_spec("deepspeed") is None, reason="needs the extra `deepspeed`")
TRAINING: dict[str, Any] = {
    **{"steps": 5, "batch_size": 1, "clip": 0.5, "group_by_length": False, "replays": 1},
    **{"measure_every": 1, "save_every": 1},  # which logs the loss of every step
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
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A base model, data that it answered, and adapters trained by one process, `one` and, at several cuts, `cuts`."""
    folder = tmp_path_factory.mktemp("place")
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


def arguments(place: Path, out: Path, **more: Any) -> list[str]:
    made = settings(**TRAINING)
    names = (*TRAINING, "held_out", "measure_every", "save_every", "learning_rate", "budget", "report_to")
    given = {f"train.{name}": getattr(made, name) for name in names}
    given |= {f"lookahead.{name}": getattr(SHAPE, name) for name in ("tokens", "rank", "alpha", "pooling", "kernel")}
    given |= {
        "model.id": place / "target",
        "model.device": "cpu",
        "model.dtype": "float32",
        "data": place / "data",
        "out": out,
        **more,
    }
    return [f"{name}={value}" for name, value in given.items()]


def losses(adapter: Path) -> dict[int, float]:
    """The loss of each step of a training."""
    state = json.loads((adapter / "training/checkpoint-5/trainer_state.json").read_text())
    return {row["step"]: row["loss"] for row in state["log_history"] if "loss" in row}


def held_out_losses(adapter: Path) -> dict[int, float]:
    """The KL divergence on held-out samples before each step and after the last."""
    return {row["step"]: row["eval_kl"] for row in rows(adapter / "training/fidelity.jsonl")}


@pytest.mark.parametrize(("config", "more"), LAUNCHED.values(), ids=LAUNCHED)
def test_two_processes_stop_together_go_on_and_train_what_one_trains(
    config: str | None, more: list[str], place: Path, tmp_path: Path
):
    given = [*arguments(place, tmp_path / "two"), *more]
    stopped = launch(tmp_path, str(ROOT / "tests/train/stopped_training.py"), *given, config=config)
    assert stopped.stderr.count("interrupted at step 3") == 2, stopped.stderr[-4000:]
    assert (tmp_path / "two/training/checkpoint-3/trainer_state.json").exists()
    sizes = {name: value.numel() for name, value in load_file(place / "target/model.safetensors").items()}
    whole, layers = sum(sizes.values()), sum(size for name, size in sizes.items() if ".layers." in name)
    read, held = ([int(n) for n in re.findall(rf"weights {what}: (\d+)", stopped.stdout)] for what in ("read", "held"))
    if FSDP2[0] in more:
        assert sorted(read) == [0, whole], "the first process alone reads the files"
        assert held == [whole - layers // 2] * 2
    else:
        assert held == [0 if config == "zero3" else whole] * 2

    result = launch(tmp_path, str(ROOT / "train_lookahead.py"), *given, config=config)
    assert result.returncode == 0, result.stderr[-4000:]
    assert "resuming from" in result.stdout
    assert "tokens a second" in result.stderr
    training = tmp_path / "two/training"
    assert json.loads((training / "settings.json").read_text())["settings"]["launch.processes"] == 2
    alone = place / ("cuts" if more == CUTS else "one")
    one, two = (LookaheadAdapter.load(folder) for folder in (alone, tmp_path / "two"))
    assert two.provenance.training["samples a step"] == one.provenance.training["samples a step"] == 2
    assert config is not None or torch.equal(two.tokens, one.tokens), "bit for bit without DeepSpeed"
    assert_close(two.tokens, one.tokens)
    for name, value in one.lora.items():
        assert config is not None or torch.equal(two.lora[name], value), name
        assert_close(two.lora[name], value)
    for curve in (losses, held_out_losses):
        assert [*curve(alone)] == [*curve(tmp_path / "two")] and len(curve(alone)) >= 5
        assert curve(tmp_path / "two") == pytest.approx(curve(alone), abs=2e-4)  # the Trainer rounds to 1e-4
    plan_upload(tmp_path / "two", "user/name")
    configs = [json.loads((folder / "adapter_config.json").read_text()) for folder in (place / "one", tmp_path / "two")]
    assert configs[1] == configs[0]

    target = sum(path.stat().st_size for path in (place / "target").glob("*.safetensors"))
    states = [*training.glob("checkpoint-5/**/*_states.pt")]
    assert bool(states) == (config in ("zero2", "zero3"))
    for path in states:
        assert path.stat().st_size < target / 2, f"{path} holds the frozen target"


@pytest.mark.slow
@pytest.mark.parametrize(("config", "more"), [(None, FSDP2), LAUNCHED["zero3"]], ids=["fsdp2", "zero3"])
def test_a_weight_that_is_not_finite_ends_all_processes(
    config: str | None, more: list[str], place: Path, tmp_path: Path
):
    shutil.copytree(place / "target", tmp_path / "target")
    write_data(tmp_path / "data", load_target(str(tmp_path / "target"), device="cpu"))
    with_nan(tmp_path / "target")
    given = [*arguments(tmp_path, tmp_path / "two"), *more]
    result = launch(tmp_path, str(ROOT / "train_lookahead.py"), *given, config=config)
    assert result.returncode != 0
    assert "weight 'model.norm.weight' is not finite; copy or download it again" in result.stderr


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["llama", "gemma3"])
def test_a_sharded_target_answers_as_a_whole_one(kind: str, tmp_path: Path):
    save_tiny_target(tmp_path / "target", tie_word_embeddings=True)
    if kind == "gemma3":  # which has buffers that no file holds
        config = AutoConfig.from_pretrained(tmp_path / "target").to_dict()
        shape = {name: config[name] for name in ("vocab_size", "hidden_size", "num_hidden_layers", "head_dim")}
        torch.manual_seed(0)
        Gemma3ForCausalLM(Gemma3TextConfig(**shape, intermediate_size=64, sliding_window=8)).save_pretrained(
            tmp_path / "target"
        )
    result = launch(tmp_path, str(ROOT / "tests/train/sharded_target.py"), str(tmp_path / "target"))
    assert result.returncode == 0, result.stderr[-4000:]
    assert result.stdout.count("tied True, equal True") == 2, result.stdout


@pytest.mark.slow
@pytest.mark.parametrize("more", [[], ["model.device_map=fsdp2"]], ids=["ddp", "fsdp2"])
def test_two_processes_ablate_what_one_trains(more: list[str], place: Path, tmp_path: Path):
    given = [*arguments(place, tmp_path / "two"), *more, "lookahead.tokens=[4,6]"]
    result = launch(tmp_path, "-m", "keepsight", "train", *(each for each in given if each != "lookahead.tokens=4"))
    assert result.returncode == 0, result.stderr[-4000:]
    one, cell = (LookaheadAdapter.load(folder) for folder in (place / "one", tmp_path / "two/cells/tokens4"))
    assert json.loads((tmp_path / "two/training/settings.json").read_text())["settings"]["launch.processes"] == 2
    assert_close(cell.tokens, one.tokens)
    for name, value in one.lora.items():
        assert_close(cell.lora[name], value)


@pytest.mark.slow
def test_two_processes_keep_teacher_outputs_of_their_own(place: Path, tmp_path: Path):
    given = arguments(place, tmp_path / "two", **{"train.replays": 3, "train.held_out": 3, "replay.dir": "readings"})
    result = launch(tmp_path, str(ROOT / "train_lookahead.py"), *given)
    assert result.returncode == 0, result.stderr[-4000:]
    assert LookaheadAdapter.load(tmp_path / "two").provenance.training["steps on each teacher output"] == 3
    measured = rows(tmp_path / "two/training/fidelity.jsonl")
    assert measured[-1]["step"] == 5
    assert measured[-1]["eval_kl"] < measured[0]["eval_kl"]
    assert not [path for path in (tmp_path / "readings").rglob("*") if path.is_file()]


@needs_deepspeed
@pytest.mark.slow
def test_with_deepspeed_in_bfloat16_the_adapter_stays_float32(place: Path, tmp_path: Path):
    given = arguments(place, tmp_path / "two", **{"train.precision": "bf16", "model.dtype": "bfloat16"})
    result = launch(tmp_path, str(ROOT / "train_lookahead.py"), *given, config="zero3")
    assert result.returncode == 0, result.stderr[-4000:]
    for path in (
        tmp_path / "two/adapter_model.safetensors",
        tmp_path / "two/training/checkpoint-5/lookahead.safetensors",
    ):
        for name, value in load_file(path).items():
            assert value.dtype == torch.float32, name
            assert not torch.equal(value, value.bfloat16().float()), name


def finetuning(place: Path) -> list[str]:
    """The command's arguments but `out`."""
    tuned = {"adapter": place / "one", "selection": "shared", "finetune.budgets": "[16]", "finetune.train.steps": 4}
    tuned |= {f"finetune.train.{name}": TRAINING[name] for name in ("clip", "group_by_length", "replays")}
    tuned |= {"finetune.train.samples_per_step": 2, "finetune.train.held_out": 2, "finetune.train.report_to": "[]"}
    given = [each for each in arguments(place, place) if not each.startswith(("train.", "lookahead.", "out="))]
    given += [f"{name}={value}" for name, value in tuned.items()]
    return ["finetune", *given]


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
    config: str | None, more: list[str], trained: list[str], place: Path, tmp_path: Path
):
    """Also where one of them has nothing to learn from: some prompts are within every budget."""
    given = [*finetuning(place), *trained]
    assert main([*given, f"out={tmp_path / 'one'}"]) == 0
    result = launch(tmp_path, "-m", "keepsight", *given, *more, f"out={tmp_path / 'two'}", config=config)
    assert result.returncode == 0, result.stderr[-4000:]
    before, one, two = (LookaheadAdapter.load(each) for each in (place / "one", tmp_path / "one", tmp_path / "two"))
    assert torch.equal(one.tokens, before.tokens) == bool(trained)
    assert torch.tensor(one.head_weights).std() > 1e-3
    assert_close(two.tokens, one.tokens)
    assert_close(torch.tensor(two.head_weights), torch.tensor(one.head_weights))
    for name, value in one.lora.items():
        assert_close(two.lora[name], value)
