"""A trained LoRA folded for observers: the same update, in the model's dtype, each input read once."""

import weakref
from typing import Any

import pytest
import torch

from keepsight.eval.bench.eviction import count
from keepsight.models.folded_lora import FoldedLora
from keepsight.models.lora import Lora
from keepsight.runtime.methods import LookaheadKV
from tests.close import assert_close
from tests.families import FAMILIES, family_model
from tests.models.modules import random_module, random_on, save
from tests.tiny import prompt_ids, tiny_model

WITHOUT = {"Mistral with a window"}  # no layer with full attention, and so nothing to adapt


def lora_of(model: Any) -> Lora:
    lora = random_on(model).lora
    assert lora is not None
    return lora.requires_grad_(False)


@torch.no_grad()
def outputs(model: Any, lora: Lora | FoldedLora) -> torch.Tensor:
    with lora.attached():
        return model(prompt_ids(12, 12)[0]).logits


@pytest.mark.parametrize("family", sorted({*FAMILIES} - WITHOUT))
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


def test_the_pass_ends_once_the_last_layer_is_scored(tmp_path: Any) -> None:
    model, ids = tiny_model(), prompt_ids(60)[0]
    method = LookaheadKV.from_pretrained(save(random_module(), tmp_path), 20)
    run: list[tuple[int, int]] = []
    for index, layer in enumerate(model.model.layers):
        layer.mlp.register_forward_hook(lambda module, inputs, output, at=index: run.append((at, inputs[0].shape[1])))
    loaded = model.config._attn_implementation
    method.start(model, ids)
    assert run == [(0, 60), (1, 60), (2, 60), (0, 5), (1, 5)]
    assert model.config._attn_implementation == loaded
