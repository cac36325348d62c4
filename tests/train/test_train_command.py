"""`keepsight train` on a tiny model that was saved to a folder."""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from keepsight.commands import train as command
from keepsight.commands.config_shared import ModelConfig
from keepsight.commands.from_recipe import training_target
from keepsight.models.lookahead import ADAPTER, TOKENS, LookaheadAdapter
from keepsight.models.targets import load_target
from keepsight.train.importance import ImportanceObjective
from tests.refused import refused
from tests.train.runs import SHAPE, at_batch, press_ctrl_c, rows, same, settings


def config(workspace: Path, out: Path, **changes) -> command.Config:
    values: dict[str, Any] = {
        "data": str(workspace / "data"),
        "out": str(out),
        "train": settings(steps=10),
        "lookahead": SHAPE,
    } | changes
    return command.Config(model=ModelConfig(id=str(workspace / "target"), device="cpu", dtype="float32"), **values)


@pytest.fixture(scope="module")
def adapter(workspace: Path) -> Path:
    """The adapter that the command trains."""
    command.run(config(workspace, workspace / "adapter", title="A tiny adapter", data_notes="From nowhere."))
    return workspace / "adapter"


def test_quantised_weights_are_not_divided(workspace, tmp_path, monkeypatch):
    monkeypatch.setattr(command, "is_deepspeed_zero3_enabled", lambda: True)
    values = config(workspace, tmp_path / "adapter")
    quantised = replace(values, model=replace(values.model, quantize="nf4"))
    with refused("model.quantize", "conflict"):
        command.run(quantised)
    assert not (tmp_path / "adapter").exists()


def test_one_process_has_nothing_to_divide_the_target_over(workspace, tmp_path):
    values = config(workspace, tmp_path / "adapter")
    with refused("model.device_map", "conflict"):
        command.run(replace(values, model=replace(values.model, device_map="fsdp2")))


def test_the_command_leaves_an_adapter_that_loads(workspace, adapter):
    assert {path.name for path in adapter.iterdir()} == {
        *LookaheadAdapter.files,
        "README.md",
        "config.yaml",
        "training.png",
        "training",
    }
    artifact = LookaheadAdapter.load(adapter)
    target = load_target(str(workspace / "target"), device="cpu")
    with artifact.attached(target.model) as tokens:
        assert tokens.shape == (4, 32)
    provenance = artifact.provenance
    manifest = json.loads((workspace / "data" / "manifest.json").read_text())
    assert provenance.base_model == "target"
    assert provenance.identity == replace(target.identity, data=manifest["digest"])
    assert provenance.training["steps"] == 10
    assert provenance.training["samples"] == 14
    assert provenance.training["prompt tokens (shortest, median, longest)"] == [12, 20, 31]
    assert same(artifact.lora | {"tokens": artifact.tokens}, _checkpoint(adapter, 10))

    card = (adapter / "README.md").read_text()
    last_measurement = rows(adapter / "training" / "fidelity.jsonl")[-1]
    assert "# A tiny adapter" in card
    assert "From nowhere." in card
    assert "- [ada/books](https://huggingface.co/datasets/ada/books) (odc-by)" in card
    assert "Samples by source: test (14)." in card
    assert f"| recall | {last_measurement['eval_recall']:.4f} |" in card
    assert re.search(
        r"^- modules with a LoRA: self_attn.q_proj (\d), self_attn.k_proj \1, self_attn.v_proj \d, ", card, re.MULTILINE
    )
    for name in ("README.md", "adapter_config.json", "lookahead_config.json"):
        assert str(workspace) not in (adapter / name).read_text(), f"{name}: a private path would be published"
    assert (adapter / "training.png").read_bytes().startswith(b"\x89PNG")


def _checkpoint(adapter: Path, step: int) -> dict[str, Tensor]:
    return load_file(adapter / "training" / f"checkpoint-{step}" / "lookahead.safetensors")


def test_an_interrupted_command_leaves_an_adapter_and_goes_on(workspace, adapter, tmp_path, monkeypatch):
    def interrupted_objective(*args) -> ImportanceObjective:
        return at_batch(ImportanceObjective(*args), 4, press_ctrl_c)

    out = tmp_path / "adapter"
    with monkeypatch.context() as patch, refused("step", "conflict") as caught:
        patch.setattr(command, "ImportanceObjective", interrupted_objective)
        command.run(config(workspace, out))
    assert str(out) in str(caught.value)
    assert LookaheadAdapter.load(out).provenance.training["steps"] == 4
    torch.manual_seed(99)
    command.run(config(workspace, out))
    for name in (ADAPTER, TOKENS):
        assert (out / name).read_bytes() == (adapter / name).read_bytes()


def test_another_seed_trains_another_adapter(workspace, adapter, tmp_path):
    command.run(config(workspace, tmp_path / "other", train=settings(steps=10, seed=1)))
    assert (tmp_path / "other" / TOKENS).read_bytes() != (adapter / TOKENS).read_bytes()


def test_longer_prompts_are_left_out(workspace, tmp_path):
    without_measurements = settings(steps=1, held_out=0, cuts=3)
    command.run(config(workspace, tmp_path / "adapter", max_prompt_tokens=20, train=without_measurements))
    training = LookaheadAdapter.load(tmp_path / "adapter").provenance.training
    assert training["cuts of each answer"] == 3
    assert training["samples"] == 8
    assert training["prompt tokens (shortest, median, longest)"] == [12, 17, 20]


def test_an_adapter_to_start_from_must_have_been_trained_as_this_one_is(workspace, adapter, tmp_path):
    other_shape = replace(SHAPE, alpha=32.0, tokens=5)
    with refused("tokens", "conflict"):
        command.run(config(workspace, tmp_path / "more", init=str(adapter), lookahead=other_shape))
    assert not (tmp_path / "more").exists()


@pytest.mark.parametrize(
    ("capabilities", "dtype", "expected"),
    [
        ({"amx_bf16": True}, "auto", torch.bfloat16),
        ({"avx512_bf16": True, "amx_bf16": False}, "auto", torch.float32),  # half the speed of float32 there
        ({"avx2": True}, "auto", torch.float32),
        ({"amx_bf16": True}, "float32", torch.float32),
    ],
)
def test_a_cpu_that_computes_in_bfloat16_reads_the_target_in_it(workspace, monkeypatch, capabilities, dtype, expected):
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: capabilities, raising=False)
    model = ModelConfig(id=str(workspace / "target"), device="cpu", dtype=dtype)
    assert training_target(command.Config(model=model)).model.dtype == expected
