"""LoRA chooses its modules by a model's structure, in every family."""

import pytest

from keepsight.models.lookahead import Lookahead
from keepsight.models.lookahead_files import load_lookahead
from keepsight.models.lookahead_settings import LookaheadSettings
from keepsight.models.lora import lora_targets
from keepsight.train.dataset import Batch
from keepsight.train.lookahead.objective import LookaheadObjective
from tests.families import FAMILIES, family_model, fresh_model
from tests.models.modules import random_on, save
from tests.tiny import prompt_ids

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


@pytest.mark.parametrize("family", sorted({*FAMILIES} - {"Mistral with a window"}))
def test_every_trained_parameter_gets_a_gradient(family):
    """Also of a batch whose prompts have different lengths."""
    ids, mask = prompt_ids(30, 17)
    objective = LookaheadObjective(random_on(fresh_model(family), LookaheadSettings(tokens=4, rank=2)))
    objective.loss(Batch(ids, prompt_ids(5, 5, seed=1)[0], mask.bool())).backward()
    trained = {name: each for name, each in objective.named_parameters() if each.requires_grad}
    assert len(trained) == 1 + 2 * len(lora_targets(objective.lookahead.model))
    assert [name for name, each in trained.items() if each.grad is None or not each.grad.any()] == []


@pytest.mark.parametrize("family", ["Gemma 3 (multimodal class, text)", "Phi-3, Phi-4", "DeepSeek-V3", "Qwen3-Next"])
def test_an_adapter_lists_its_modules_and_fits_the_model_it_was_saved_for(family, tmp_path):
    module = random_on(family_model(family))
    artifact = load_lookahead(save(module, tmp_path))
    assert isinstance(module, Lookahead) and module.lora is not None
    assert {name.split(".lora_")[0].removeprefix("base_model.model.") for name in artifact.lora} == set(
        module.lora.names
    )
    with artifact.attached(fresh_model(family)) as tokens:
        assert tokens.shape == module.tokens.shape
