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


def config(place: Path, out: Path, **changes) -> command.Config:
    values: dict[str, Any] = {
        "data": str(place / "data"),
        "out": str(out),
        "train": settings(steps=10),
        "lookahead": SHAPE,
    } | changes
    return command.Config(model=ModelConfig(id=str(place / "target"), device="cpu", dtype="float32"), **values)


@pytest.fixture(scope="module")
def trained(place: Path) -> Path:
    command.run(config(place, place / "adapter", title="A tiny adapter", data_notes="From nowhere."))
    return place / "adapter"


def test_quantised_weights_are_not_divided(place, tmp_path, monkeypatch):
    monkeypatch.setattr(command, "is_deepspeed_zero3_enabled", lambda: True)
    given = config(place, tmp_path / "adapter")
    given = replace(given, model=replace(given.model, quantize="nf4"))
    with refused("model.quantize", "conflict"):
        command.run(given)
    assert not (tmp_path / "adapter").exists()


def test_one_process_has_nothing_to_divide_the_target_over(place, tmp_path):
    given = config(place, tmp_path / "adapter")
    with refused("model.device_map", "conflict"):
        command.run(replace(given, model=replace(given.model, device_map="fsdp2")))


def test_the_command_leaves_an_adapter_that_loads(place, trained):
    assert {path.name for path in trained.iterdir()} == {
        *LookaheadAdapter.files,
        "README.md",
        "config.yaml",
        "training.png",
        "training",
    }
    artifact = LookaheadAdapter.load(trained)
    target = load_target(str(place / "target"), device="cpu")
    with artifact.attached(target.model) as tokens:
        assert tokens.shape == (4, 32)
    provenance, manifest = artifact.provenance, json.loads((place / "data" / "manifest.json").read_text())
    assert provenance.base_model == "target"
    assert provenance.identity == replace(target.identity, data=manifest["digest"])
    assert (provenance.training["steps"], provenance.training["samples"]) == (10, 14)
    assert provenance.training["prompt tokens (shortest, median, longest)"] == [12, 20, 31]
    assert same(artifact.lora | {"tokens": artifact.tokens}, _checkpoint(trained, 10))
    card = (trained / "README.md").read_text()
    assert "# A tiny adapter" in card
    assert "From nowhere." in card
    assert "- [ada/books](https://huggingface.co/datasets/ada/books) (odc-by)" in card
    assert "Samples by source: test (14)." in card
    assert f"| recall | {rows(trained / 'training' / 'fidelity.jsonl')[-1]['eval_recall']:.4f} |" in card
    assert re.search(
        r"^- modules with a LoRA: self_attn.q_proj (\d), self_attn.k_proj \1, self_attn.v_proj \d, ", card, re.MULTILINE
    )
    published = [card, *((trained / name).read_text() for name in ("adapter_config.json", "lookahead_config.json"))]
    assert not [text for text in published if str(place) in text], "a private path would be published"
    assert (trained / "training.png").read_bytes().startswith(b"\x89PNG")


def _checkpoint(adapter: Path, step: int) -> dict[str, Tensor]:
    return load_file(adapter / "training" / f"checkpoint-{step}" / "lookahead.safetensors")


def test_an_interrupted_command_leaves_an_adapter_and_goes_on(place, trained, tmp_path, monkeypatch):
    monkeypatch.setattr(
        command, "ImportanceObjective", lambda *given: at_batch(ImportanceObjective(*given), 4, press_ctrl_c)
    )
    with refused("step", "conflict") as caught:
        command.run(config(place, tmp_path / "adapter"))
    assert str(tmp_path / "adapter") in str(caught.value)
    assert LookaheadAdapter.load(tmp_path / "adapter").provenance.training["steps"] == 4
    monkeypatch.undo()
    torch.manual_seed(99)
    command.run(config(place, tmp_path / "adapter"))
    for name in (ADAPTER, TOKENS):
        assert (tmp_path / "adapter" / name).read_bytes() == (trained / name).read_bytes()


def test_another_seed_trains_another_adapter(place, trained, tmp_path):
    command.run(config(place, tmp_path / "other", train=settings(steps=10, seed=1)))
    assert (tmp_path / "other" / TOKENS).read_bytes() != (trained / TOKENS).read_bytes()


def test_longer_prompts_are_left_out(place, tmp_path):
    few = settings(steps=1, held_out=0, cuts=3)  # nothing is measured
    command.run(config(place, tmp_path / "adapter", max_prompt_tokens=20, train=few))
    training = LookaheadAdapter.load(tmp_path / "adapter").provenance.training
    assert training["cuts of each answer"] == 3
    assert training["samples"] == 8
    assert training["prompt tokens (shortest, median, longest)"] == [12, 17, 20]


def test_an_adapter_to_start_from_must_have_been_trained_as_this_one_is(place, trained, tmp_path):
    other = config(place, tmp_path / "more", init=str(trained), lookahead=replace(SHAPE, alpha=32.0, tokens=5))
    with refused("tokens", "conflict"):
        command.run(other)
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
def test_a_cpu_that_computes_in_bfloat16_reads_the_target_in_it(place, monkeypatch, capabilities, dtype, expected):
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: capabilities, raising=False)
    model = ModelConfig(id=str(place / "target"), device="cpu", dtype=dtype)
    assert training_target(command.Config(model=model)).model.dtype == expected
