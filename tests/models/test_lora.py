"""LoRA chooses its modules by a model's structure, in every family."""

import weakref
from functools import partial
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

QUERY_AND_KEY = {"self_attn.q_proj", "self_attn.k_proj"}
ATTENTION = QUERY_AND_KEY | {"self_attn.v_proj", "self_attn.o_proj"}
INNER_LAYER = {
    "Llama 3": ATTENTION | {"mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"},
    "Llama 4 (text)": ATTENTION
    | {
        "feed_forward.shared_expert.gate_proj",
        "feed_forward.shared_expert.up_proj",
        "feed_forward.shared_expert.down_proj",
    },
    "Qwen3-MoE": ATTENTION,
    "Phi-3, Phi-4": {"self_attn.qkv_proj", "self_attn.o_proj", "mlp.gate_up_proj", "mlp.down_proj"},
    "GLM-4": ATTENTION | {"mlp.gate_up_proj", "mlp.down_proj"},
    "DeepSeek-V3": {
        "self_attn.q_a_proj",
        "self_attn.q_b_proj",
        "self_attn.kv_a_proj_with_mqa",
        "self_attn.o_proj",
        "mlp.shared_experts.gate_proj",
        "mlp.shared_experts.up_proj",
        "mlp.shared_experts.down_proj",
    },
}
LAST_LAYER = dict.fromkeys(INNER_LAYER, QUERY_AND_KEY) | {
    "Phi-3, Phi-4": {"self_attn.qkv_proj"},
    "DeepSeek-V3": {"self_attn.q_a_proj", "self_attn.q_b_proj", "self_attn.kv_a_proj_with_mqa"},
}


def modules_of_layer(names: list[str], layer: int) -> set[str]:
    """The names within a layer of its modules."""
    prefix = f"layers.{layer}."
    return {name.split(prefix)[1] for name in names if prefix in name}


@pytest.mark.parametrize("family", INNER_LAYER)
def test_targets_are_chosen_by_structure(family):
    names = list(lora_targets(family_model(family)))
    assert modules_of_layer(names, 1) == INNER_LAYER[family]
    assert modules_of_layer(names, 3) == LAST_LAYER[family]


def test_targets_are_chosen_by_name():
    model = family_model("Llama 3")
    all_targets = lora_targets(model)
    assert chosen_targets(model, ["all"]) == all_targets
    assert chosen_targets(model, ["none"]) == {}
    names = list(chosen_targets(model, ["up_proj", "layers.2.self_attn.k_proj", "qv"]))
    assert names == [name for name in all_targets if name in names]
    of_layer_1 = {"mlp.up_proj", "self_attn.q_proj", "self_attn.v_proj"}
    assert modules_of_layer(names, 1) == of_layer_1
    assert modules_of_layer(names, 2) == of_layer_1 | {"self_attn.k_proj"}
    names = list(chosen_targets(family_model("Phi-3, Phi-4"), ["qv"]))
    assert modules_of_layer(names, 1) == {"self_attn.qkv_proj"}
    assert modules_of_layer(names, 3) == {"self_attn.qkv_proj"}
    for targets in ([], [""], ["all", "q_proj"], ["qv", "none"]):
        with pytest.raises(UserError) as error:
            LookaheadSettings(targets=targets).check()
        assert error.value.field == "lookahead.targets"
    for unknown in ("proj", "UP_PROJ", "up_pro."):
        with refused("lookahead.targets", "unknown"):
            chosen_targets(model, ["q_proj", unknown])


@pytest.mark.parametrize("family", GRID)
def test_every_trained_parameter_gets_a_gradient(family):
    """Also of a batch whose prompts have different lengths."""
    prompt, mask = prompt_ids(30, 17)
    answer, _ = prompt_ids(5, 5, seed=1)
    objective = ImportanceObjective(random_on(fresh_model(family), LookaheadSettings(tokens=4, rank=2)))
    objective.loss(Batch(prompt, answer, mask.bool())).backward()
    gradients = {name: parameter.grad for name, parameter in objective.named_parameters() if parameter.requires_grad}
    assert len(gradients) == 1 + 2 * len(lora_targets(objective.lookahead.model))
    for name, gradient in gradients.items():
        assert gradient is not None, name
        assert gradient.any(), name


def lora_of(model: Any) -> Lora:
    lora = random_on(model).lora
    assert lora is not None
    return lora.requires_grad_(False)


@torch.no_grad()
def logits_with(model: Any, lora: Lora | FoldedLora) -> torch.Tensor:
    ids, _ = prompt_ids(12, 12)
    with lora.attached():
        return model(ids).logits


@pytest.mark.parametrize("family", GRID)
def test_the_update_is_that_of_the_trained_lora(family: str) -> None:
    model = family_model(family)
    ids, _ = prompt_ids(12, 12)
    lora = lora_of(model)
    logits_without = model(ids).logits
    logits_with_folded = logits_with(model, FoldedLora(lora, model.dtype))
    assert_close(logits_with_folded, logits_with(model, lora))
    assert not torch.allclose(logits_with_folded, logits_without, atol=1e-4)
    assert torch.equal(model(ids).logits, logits_without)


def test_modules_with_one_input_read_it_once() -> None:
    """4 inputs and 7 modules in each layer but the last, of which queries and keys alone are adapted."""
    model = tiny_model()
    ids, _ = prompt_ids(12)
    folded = FoldedLora(lora_of(model), model.dtype)
    with torch.inference_mode():
        operators = count(lambda: model(ids)).operators
        with folded.attached():
            operators_with_lora = count(lambda: model(ids)).operators
    assert operators_with_lora - operators == 2 * (4 + 7) + (1 + 2)


def test_an_input_is_let_go_once_all_its_modules_have_read_it() -> None:
    model = tiny_model()
    ids, _ = prompt_ids(12)
    inputs_of_modules: list[weakref.ref[torch.Tensor]] = []

    def note_input(_: Any, inputs: Any) -> None:
        inputs_of_modules.append(weakref.ref(inputs[0]))

    for name, module in model.named_modules():
        if name.endswith("_proj"):
            module.register_forward_pre_hook(note_input)
    with torch.no_grad(), FoldedLora(lora_of(model), model.dtype).attached():
        model(ids)
        assert len(inputs_of_modules) > 7
        assert all(reference() is None for reference in inputs_of_modules)


def test_a_second_pass_ends_once_the_last_layer_is_scored(tmp_path: Any) -> None:
    model = tiny_model()
    ids, _ = prompt_ids(60)
    method = LookaheadKV.from_pretrained(save(random_module(), tmp_path), 20)
    layers_and_tokens: list[tuple[int, int]] = []

    def note_tokens(module: Any, inputs: Any, output: Any, *, layer: int) -> None:
        layers_and_tokens.append((layer, inputs[0].shape[1]))

    for index, layer in enumerate(model.model.layers):
        layer.mlp.register_forward_hook(partial(note_tokens, layer=index))
    attention = model.config._attn_implementation
    method.compress_state(model, prefill(model, ids, needs=method.needs()))
    assert layers_and_tokens == [(0, 60), (1, 60), (2, 60), (0, 5), (1, 5)]
    layers_and_tokens.clear()
    method.start(model, ids)
    assert layers_and_tokens == [(0, 65), (1, 65), (2, 65)]
    assert model.config._attn_implementation == attention
