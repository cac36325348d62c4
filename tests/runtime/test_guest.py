"""A guest in the model: whatever keepsight does with a model, the model is afterwards as it was."""

import itertools
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from functools import cache
from typing import Any

import pytest
import torch
from peft import LoraConfig, inject_adapter_in_model
from peft.tuners.lora import LoraLayer
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import eager_mask

from keepsight.errors import UserError
from keepsight.models.decoder import decoder_of
from keepsight.models.draft_sources import LoadedDraft
from keepsight.runtime.generate import generate
from keepsight.runtime.state import prefill
from tests.close import assert_close
from tests.families import family_model, fresh_model
from tests.runtime.family_methods import DRAFT, PROMPT, REFUSED, WITH_IMAGE, grid, method_of, reads_images
from tests.runtime.prompt_compression.prompts import PROSE, text_ids, text_methods, wide_model
from tests.runtime.test_images import prompt
from tests.tiny import tiny_model


class PowerFailureError(Exception):
    """Ends a use of keepsight in the middle."""


def adapted_model(family: str) -> Any:
    """A model with two adapters of its owner, of which the second is active."""
    model = fresh_model(family)
    config = LoraConfig(r=2, target_modules=r".*\.(q_proj|qkv_proj|q_b_proj|o_proj)", init_lora_weights=False)
    for name in ("first", "second"):
        inject_adapter_in_model(config, model, name)
    for layer in model.modules():
        if isinstance(layer, LoraLayer):
            layer.set_adapter(["second"])
    return model


@contextmanager
def failing(model: Any, failing_pass: int) -> Iterator[None]:
    """Within the block, a model fails in the n-th pass: in its second layer, which passes of observers reach, too."""
    passes = itertools.count(1)

    def fail(*_: object) -> None:
        if next(passes) == failing_pass:
            raise PowerFailureError

    hook = decoder_of(model).layers[1].register_forward_hook(fail)
    try:
        yield
    finally:
        hook.remove()


def snapshot(model: Any) -> dict[str, Any]:
    """All that its owner can observe of a model, its outputs included."""
    with torch.no_grad():
        logits = model(PROMPT, use_cache=False).logits
    config = model.config
    configs = [config, *(getattr(config, name) for name in config.sub_configs)]
    modules = list(model.modules())
    lora_layers = [module for module in modules if isinstance(module, LoraLayer)]
    weights = model.state_dict()
    return {
        "logits": logits,
        "attention": [config._attn_implementation for config in configs],
        "adapters": [layer.active_adapters for layer in lora_layers],
        "off": [layer.disable_adapters for layer in lora_layers],
        "generation": model.generation_config.to_dict(),
        "names": list(weights),
        "weights": torch.cat([weight.double().flatten() for weight in weights.values()]),
        "trained": [name for name, weight in model.named_parameters() if weight.requires_grad],
        "modes": [module.training for module in modules],
        "hooks": [len(module._forward_hooks) + len(module._forward_pre_hooks) for module in modules],
    }


def assert_unchanged(model: Any, expected: dict[str, Any]) -> None:
    for property_name, value in snapshot(model).items():
        if isinstance(value, Tensor):
            assert torch.equal(value, expected[property_name]), property_name
        else:
            assert value == expected[property_name], property_name


@cache
def model_and_snapshot(family: str) -> tuple[Any, dict[str, Any]]:
    """A model to use, and the snapshot of a copy that keepsight never touches."""
    return adapted_model(family), snapshot(adapted_model(family))


NEVER = 1000  # more passes than any method takes


def assert_left_as_found(
    model: Any, expected: dict[str, Any], method: Any, inputs: dict[str, Any], refused: bool = False
) -> None:
    """Use a method on a model that fails in its first pass, in its second, and not at all."""
    error = UserError if refused else PowerFailureError
    for failing_pass in (1, 2, NEVER):
        succeeds = failing_pass == NEVER and not refused
        with nullcontext() if succeeds else pytest.raises(error), failing(model, failing_pass):
            generate(model, method=method, max_new_tokens=2, eos_token_id=None, **inputs)
        assert_unchanged(model, expected)


@pytest.mark.parametrize(("family", "name"), grid())
def test_a_model_is_afterwards_as_it_was(family, name, tmp_path_factory):
    model, expected = model_and_snapshot(family)
    method = method_of(name, family, tmp_path_factory.getbasetemp())
    refused = (family, name) in REFUSED
    assert_left_as_found(model, expected, method, {"input_ids": PROMPT}, refused)


@pytest.mark.parametrize(
    ("family", "name"),
    [
        ("Falcon-H1", "lookaheadkv"),
        ("Gemma 4 E2B, E4B", "snapkv"),
        ("Gemma 4 E2B, E4B", "dapq"),
        ("Inkling 2", "lookaheadkv"),
    ],
)
def test_a_model_with_further_kinds_of_layers_is_afterwards_as_it_was(family, name, tmp_path):
    model, expected = model_and_snapshot(family)
    method = method_of(name, family, tmp_path)
    assert_left_as_found(model, expected, method, {"input_ids": PROMPT})


@pytest.mark.parametrize(("family", "name"), grid(families=WITH_IMAGE))
def test_a_model_that_reads_an_image_is_afterwards_as_it_was(family, name, tmp_path_factory):
    model, expected = model_and_snapshot(family)
    method = method_of(name, family, tmp_path_factory.getbasetemp())
    refused = not reads_images(family, name)
    assert_left_as_found(model, expected, method, prompt(family), refused)


@pytest.mark.parametrize("index", [0, 1], ids=["llmlingua2", "sentence_similarity"])
def test_a_model_that_reads_a_shortened_text_is_afterwards_as_it_was(index):
    method = text_methods(budget=60, window=12)[index]
    expected = snapshot(wide_model())
    assert_left_as_found(wide_model(), expected, method, {"input_ids": text_ids(PROSE)[None]})


@pytest.mark.parametrize("name", ["speckv", "specpc", "speckvpc"])
@pytest.mark.parametrize("failing_pass", [1, 2, NEVER])
def test_a_draft_model_is_afterwards_as_it_was(name, failing_pass, tmp_path):
    assert isinstance(DRAFT.draft, LoadedDraft)
    draft_model = DRAFT.draft.of(tiny_model())
    method = method_of(name, "Qwen3", tmp_path)
    with suppress(PowerFailureError), failing(draft_model, failing_pass):
        generate(family_model("Qwen3"), PROMPT, method, max_new_tokens=2)
    assert_unchanged(draft_model, snapshot(tiny_model()))


@pytest.mark.parametrize("family", ["Qwen3", "DeepSeek-V3", "Granite 4 (Mamba-2)"])
def test_a_used_model_is_saved_and_reloaded_exactly(family, tmp_path):
    model = family_model(family)
    generate(model, PROMPT, method_of("lookaheadkv", family, tmp_path), max_new_tokens=2)
    model.save_pretrained(tmp_path)
    reloaded, report = type(model).from_pretrained(tmp_path, output_loading_info=True)
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    reloaded_weights = reloaded.state_dict()
    weights = model.state_dict()
    assert list(reloaded_weights) == list(weights)
    for name, weight in weights.items():
        assert torch.equal(reloaded_weights[name], weight)
    with torch.no_grad():  # weights that begin elsewhere in memory can be added up in another order
        assert_close(reloaded(PROMPT).logits, model(PROMPT).logits)


@pytest.mark.parametrize("family", ["Gemma 2", "GPT-OSS"])
def test_the_loaded_attention_gets_every_argument(family):
    """An attention function that keepsight does not know is called with the arguments that the model passes it."""
    calls: list[dict[str, Any]] = []

    def attend(module: Any, *args: Any, **options: Any) -> Any:
        assert module.config._attn_implementation == "test_unknown"  # as hub kernels and flash attention look it up
        calls.append(options)
        return sys.modules[type(module).__module__].eager_attention_forward(module, *args, **options)

    AttentionInterface.register("test_unknown", attend)
    AttentionMaskInterface.register("test_unknown", eager_mask)
    model = fresh_model(family)
    model.set_attn_implementation("test_unknown")
    with torch.no_grad():
        expected = model(PROMPT).logits[:, -1]
    plain_calls = calls.copy()
    calls.clear()
    assert_close(prefill(model, PROMPT).logits, expected)
    assert len(calls) == len(plain_calls) == 4
    for options, plain_options in zip(calls, plain_calls, strict=True):
        assert options.keys() == plain_options.keys()
        for name in ("scaling", "sliding_window", "softcap", "dropout"):
            assert options.get(name) == plain_options.get(name)
        has_sinks = options.get("s_aux") is not None
        assert has_sinks == (plain_options.get("s_aux") is not None)
    assert model.config._attn_implementation == "test_unknown"
