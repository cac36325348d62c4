"""LoRA chooses its modules by a model's structure, in every family."""

import weakref
from typing import Any

import pytest
import torch

from keepsight.errors import UserError
from keepsight.eval.bench.eviction import count
from keepsight.models.lookahead_settings import LookaheadSettings
from keepsight.models.lora import FoldedLora, Lora, chosen_targets, lora_targets
from keepsight.runtime.methods import LookaheadKV
from keepsight.runtime.state import prefill
from keepsight.train.dataset import Batch
from keepsight.train.importance import ImportanceObjective
from tests.close import assert_close
from tests.families import family_model, fresh_model
from tests.models.modules import random_module, random_on, save
from tests.refused import refused
from tests.tiny import prompt_ids, tiny_model
from tests.train.runs import GRID

ATTENTION, MLP = "self_attn.q_proj k_proj v_proj o_proj", "mlp.gate_proj up_proj down_proj"
EXPECTED = {
    "Llama 3": ((ATTENTION, MLP), "self_attn.q_proj k_proj"),
    "Llama 4 (text)": (
        (ATTENTION, "feed_forward.shared_expert.gate_proj up_proj down_proj"),
        "self_attn.q_proj k_proj",
    ),
    "Qwen3-MoE": ((ATTENTION,), "self_attn.q_proj k_proj"),
    "Phi-3, Phi-4": (("self_attn.qkv_proj o_proj", "mlp.gate_up_proj down_proj"), "self_attn.qkv_proj"),
    "GLM-4": ((ATTENTION, "mlp.gate_up_proj down_proj"), "self_attn.q_proj k_proj"),
    "DeepSeek-V3": (
        (
            "self_attn.q_a_proj q_b_proj kv_a_proj_with_mqa o_proj",
            "mlp.shared_experts.gate_proj up_proj down_proj",
        ),
        "self_attn.q_a_proj q_b_proj kv_a_proj_with_mqa",
    ),
}


def _of_layer(names: list[str], layer: int) -> set[str]:
    return {name.split(f"layers.{layer}.")[1] for name in names if f"layers.{layer}." in name}


def _named(*groups: str) -> set[str]:
    return {f"{group.rpartition('.')[0].split()[0]}.{name}" for group in groups for name in _last(group)}


def _last(group: str) -> list[str]:
    return group.split(".")[-1].split()


@pytest.mark.parametrize("family", EXPECTED)
def test_targets_are_chosen_by_structure(family):
    names, (inner, last) = list(lora_targets(family_model(family))), EXPECTED[family]
    assert _of_layer(names, 1) == _named(*inner)
    assert _of_layer(names, 3) == _named(last)


def test_targets_are_chosen_by_name():
    model = family_model("Llama 3")
    every = lora_targets(model)
    assert chosen_targets(model, ["all"]) == every
    assert chosen_targets(model, ["none"]) == {}
    named = list(chosen_targets(model, ["up_proj", "layers.2.self_attn.k_proj", "qv"]))
    assert named == [name for name in every if name in named]
    assert _of_layer(named, 1) == {"mlp.up_proj", "self_attn.q_proj", "self_attn.v_proj"}
    assert _of_layer(named, 2) == {*_of_layer(named, 1), "self_attn.k_proj"}
    fused = list(chosen_targets(family_model("Phi-3, Phi-4"), ["qv"]))
    assert _of_layer(fused, 1) == _of_layer(fused, 3) == {"self_attn.qkv_proj"}
    for targets in ([], [""], ["all", "q_proj"], ["qv", "none"]):
        with pytest.raises(UserError) as error:
            LookaheadSettings(targets=targets).check()
        assert error.value.field == "lookahead.targets"
    for wrong in ("proj", "UP_PROJ", "up_pro."):
        with refused("lookahead.targets", "unknown"):
            chosen_targets(model, ["q_proj", wrong])


@pytest.mark.parametrize("family", GRID)
def test_every_trained_parameter_gets_a_gradient(family):
    """Also of a batch whose prompts have different lengths."""
    ids, mask = prompt_ids(30, 17)
    objective = ImportanceObjective(random_on(fresh_model(family), LookaheadSettings(tokens=4, rank=2)))
    objective.loss(Batch(ids, prompt_ids(5, 5, seed=1)[0], mask.bool())).backward()
    trained = {name: each for name, each in objective.named_parameters() if each.requires_grad}
    assert len(trained) == 1 + 2 * len(lora_targets(objective.lookahead.model))
    assert [name for name, each in trained.items() if each.grad is None or not each.grad.any()] == []


def lora_of(model: Any) -> Lora:
    lora = random_on(model).lora
    assert lora is not None
    return lora.requires_grad_(False)


@torch.no_grad()
def outputs(model: Any, lora: Lora | FoldedLora) -> torch.Tensor:
    with lora.attached():
        return model(prompt_ids(12, 12)[0]).logits


@pytest.mark.parametrize("family", GRID)
def test_the_update_is_that_of_the_trained_lora(family: str) -> None:
    model = family_model(family)
    lora = lora_of(model)
    plain = model(prompt_ids(12, 12)[0]).logits
    folded = FoldedLora(lora, model.dtype)
    assert_close(outputs(model, folded), outputs(model, lora))
    assert not torch.allclose(outputs(model, folded), plain, atol=1e-4)
    assert torch.equal(model(prompt_ids(12, 12)[0]).logits, plain)


def test_modules_with_one_input_read_it_once() -> None:
    """4 inputs and 7 modules in each layer but the last, of which queries and keys alone are adapted."""
    model, ids = tiny_model(), prompt_ids(12)[0]
    folded = FoldedLora(lora_of(model), model.dtype)
    with torch.inference_mode():
        plain = count(lambda: model(ids)).operators
        with folded.attached():
            assert count(lambda: model(ids)).operators - plain == 2 * (4 + 7) + (1 + 2)


def test_an_input_is_let_go_once_all_its_modules_have_read_it() -> None:
    model, ids = tiny_model(), prompt_ids(12)[0]
    seen: list[weakref.ref[torch.Tensor]] = []
    for name, module in model.named_modules():
        if name.endswith("_proj"):
            module.register_forward_pre_hook(lambda _, inputs: seen.append(weakref.ref(inputs[0])))
    with torch.no_grad(), FoldedLora(lora_of(model), model.dtype).attached():
        model(ids)
        assert len(seen) > 7 and not any(each() is not None for each in seen)


def test_a_second_pass_ends_once_the_last_layer_is_scored(tmp_path: Any) -> None:
    model, ids = tiny_model(), prompt_ids(60)[0]
    method = LookaheadKV.from_pretrained(save(random_module(), tmp_path), 20)
    run: list[tuple[int, int]] = []
    for index, layer in enumerate(model.model.layers):
        layer.mlp.register_forward_hook(lambda module, inputs, output, at=index: run.append((at, inputs[0].shape[1])))
    loaded = model.config._attn_implementation
    method.compress_state(model, prefill(model, ids, needs=method.needs()))
    assert run == [(0, 60), (1, 60), (2, 60), (0, 5), (1, 5)]
    run.clear()
    method.start(model, ids)
    assert run == [(0, 65), (1, 65), (2, 65)]
    assert model.config._attn_implementation == loaded
