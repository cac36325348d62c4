"""Targets that bitsandbytes quantises while they are loaded, on the CPU: memory, training, what artifacts record."""

from pathlib import Path
from typing import Any

import pytest
import torch

from keepsight import LookaheadKV
from keepsight.commands import train
from keepsight.commands.config_shared import ModelConfig
from keepsight.commands.from_recipe import training_target
from keepsight.models import targets
from keepsight.models.lookahead import LookaheadAdapter
from keepsight.models.targets import Target, load_target
from keepsight.runtime.generate import generate
from tests.refused import refused
from tests.tiny import prompt_ids, save_tiny_target
from tests.train.runs import SHAPE, settings, write_data


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_target(tmp_path_factory.mktemp("target"), hidden_size=64, intermediate_size=128, head_dim=16)


def linear_bytes(target: Target) -> int:
    """The weights of the linear modules in the layers."""
    linears = [module for module in target.model.model.layers.modules() if hasattr(module, "in_features")]
    return sum(module.weight.nbytes for module in linears)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("quantize", "share_of_bytes", "version", "tolerance"),
    [("nf4", 1 / 8, "4bit", 0.8), ("int8", 1 / 4, "8bit", 0.3)],
)
def test_a_module_is_trained_on_a_quantised_target(
    folder: Path, tmp_path: Path, quantize: str, share_of_bytes: float, version: str, tolerance: float
) -> None:
    pytest.importorskip("bitsandbytes")
    exact = load_target(str(folder), dtype="float32", device="cpu")
    model = ModelConfig(id=str(folder), dtype="float32", device="cpu", quantize=quantize)
    config = train.Config(
        model=model, data=str(tmp_path / "data"), out=str(tmp_path / "out"), train=settings(steps=3), lookahead=SHAPE
    )
    target = training_target(config)
    assert linear_bytes(target) == share_of_bytes * linear_bytes(exact)
    assert target.version == f"{exact.version} quantised by bitsandbytes {version}"
    prompt, _ = prompt_ids(40)
    with torch.no_grad():
        exact_logits = exact.model(prompt).logits
        logits = target.model(prompt).logits
    difference = (exact_logits - logits).norm() / exact_logits.norm()
    assert 0 < difference < tolerance  # unrelated logits: 1.4

    write_data(tmp_path / "data", target)
    train.run(config)
    assert LookaheadAdapter.load(tmp_path / "out").provenance.identity.model == target.version
    method = LookaheadKV.from_pretrained(str(tmp_path / "out"), budget=60)
    answer = generate(target.model, prompt, method, max_new_tokens=5)
    quantised: Any = target.model
    sequence = quantised.generate(prompt, max_new_tokens=5, do_sample=False)
    assert answer.tolist() == sequence[:, 40:].tolist()


@torch.no_grad()
def test_all_devices_of_a_machine_with_one(folder: Path) -> None:
    on_cpu = load_target(str(folder), dtype="float32", device="cpu")
    on_all_devices = load_target(str(folder), dtype="float32", device="cpu", device_map="auto")
    prompt, _ = prompt_ids(20)
    expected = on_cpu.model(prompt).logits
    logits = on_all_devices.model(prompt.to(on_all_devices.model.device)).logits
    assert torch.allclose(logits.cpu(), expected, atol=1e-4)


def test_a_target_is_divided_over_the_gpus_that_its_process_may_use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(targets, "get_max_memory", lambda: {0: 5, 1: 6, "cpu": 7})
    placement = targets.placement(None, "auto", ["cuda:1"], torch.float32)
    assert placement == {"device_map": "auto", "max_memory": {1: 6, "cpu": 7}}
    placement = targets.placement(None, "auto", ["cuda:0", "cuda:1"], torch.float32)
    assert placement == {"device_map": "auto", "max_memory": {0: 5, 1: 6, "cpu": 7}}


def test_what_cannot_be_done_is_said_in_one_line(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with refused("model.quantize", "unknown"):
        load_target(str(folder), quantize="int3")
    with refused("model.device_map", "unknown"):
        load_target(str(folder), device_map="both")
    monkeypatch.setattr(targets, "find_spec", lambda _: None)
    with refused("model.quantize", "missing"):
        load_target(str(folder), quantize="nf4")
