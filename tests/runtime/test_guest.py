"""A guest in the model: whatever keepsight does with a model, the model is afterwards as it was."""

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
    """What ends a use of keepsight in the middle."""


def owned(family: str) -> Any:
    """A model with two adapters of its owner, of which the second is active."""
    model = fresh_model(family)
    for name in ("first", "second"):
        config = LoraConfig(r=2, target_modules=r".*\.(q_proj|qkv_proj|q_b_proj|o_proj)", init_lora_weights=False)
        inject_adapter_in_model(config, model, name)
    for layer in model.modules():
        if isinstance(layer, LoraLayer):
            layer.set_adapter(["second"])
    return model


@contextmanager
def failing(model: Any, at: int) -> Iterator[None]:
    """Within the block, a model fails in the n-th pass: in its second layer, which passes of observers reach, too."""
    passes = iter(range(1, 1000))

    def fail(*_: object) -> None:
        if next(passes) == at:
            raise PowerFailureError

    hook = decoder_of(model).layers[1].register_forward_hook(fail)
    try:
        yield
    finally:
        hook.remove()


def seen_of(model: Any) -> dict[str, Any]:
    """What its owner sees of a model, its outputs included."""
    with torch.no_grad():
        logits = model(PROMPT, use_cache=False).logits
    return {
        "logits": logits,
        "attention": [config._attn_implementation for config in _configs(model.config)],
        "adapters": [each.active_adapters for each in model.modules() if isinstance(each, LoraLayer)],
        "off": [each.disable_adapters for each in model.modules() if isinstance(each, LoraLayer)],
        "generation": model.generation_config.to_dict(),
        "names": list(model.state_dict()),
        "weights": torch.cat([each.double().flatten() for each in model.state_dict().values()]),
        "trained": [name for name, value in model.named_parameters() if value.requires_grad],
        "modes": [module.training for module in model.modules()],
        "hooks": [len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules()],
    }


def _configs(config: Any) -> list[Any]:
    return [config, *(getattr(config, name) for name in config.sub_configs)]


def assert_same(model: Any, expected: dict[str, Any]) -> None:
    for what, value in seen_of(model).items():
        same = torch.equal(value, expected[what]) if isinstance(value, Tensor) else value == expected[what]
        assert same, what


@cache
def owned_twice(family: str) -> tuple[Any, dict[str, Any]]:
    """A model to use, and what its owner sees of a copy that keepsight never sees."""
    return owned(family), seen_of(owned(family))


def assert_left_as_found(
    model: Any, expected: dict[str, Any], method: Any, inputs: dict[str, Any], refused: bool = False
) -> None:
    """Use a method on a model that fails in its first pass, in its second, and not at all."""
    ends = UserError if refused else PowerFailureError
    for at in (1, 2, 1000):
        with nullcontext() if at == 1000 and not refused else pytest.raises(ends), failing(model, at):
            generate(model, method=method, max_new_tokens=2, eos_token_id=None, **inputs)
        assert_same(model, expected)


@pytest.mark.parametrize(("family", "name"), grid())
def test_a_model_is_afterwards_as_it_was(family, name, tmp_path_factory):
    (model, expected), method = owned_twice(family), method_of(name, family, tmp_path_factory.getbasetemp())
    assert_left_as_found(model, expected, method, {"input_ids": PROMPT}, (family, name) in REFUSED)


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
    assert_left_as_found(*owned_twice(family), method_of(name, family, tmp_path), {"input_ids": PROMPT})


@pytest.mark.parametrize(("family", "name"), grid(families=WITH_IMAGE))
def test_a_model_that_reads_an_image_is_afterwards_as_it_was(family, name, tmp_path_factory):
    (model, expected), method = owned_twice(family), method_of(name, family, tmp_path_factory.getbasetemp())
    assert_left_as_found(model, expected, method, prompt(family), not reads_images(family, name))


@pytest.mark.parametrize("place", [0, 1], ids=["llmlingua2", "sentence_similarity"])
def test_a_model_that_reads_a_shortened_text_is_afterwards_as_it_was(place):
    method = text_methods(budget=60, window=12)[place]
    assert_left_as_found(wide_model(), seen_of(wide_model()), method, {"input_ids": text_ids(PROSE)[None]})


@pytest.mark.parametrize("name", ["speckv", "specpc", "speckvpc"])
@pytest.mark.parametrize("at", [1, 2, 1000])
def test_a_draft_model_is_afterwards_as_it_was(name, at, tmp_path):
    assert isinstance(DRAFT.draft, LoadedDraft)
    model = DRAFT.draft.of(tiny_model())
    with suppress(PowerFailureError), failing(model, at):
        generate(family_model("Qwen3"), PROMPT, method_of(name, "Qwen3", tmp_path), max_new_tokens=2)
    assert_same(model, seen_of(tiny_model()))


@pytest.mark.parametrize("family", ["Qwen3", "DeepSeek-V3", "Granite 4 (Mamba-2)"])
def test_a_used_model_is_saved_and_reloaded_exactly(family, tmp_path):
    used = family_model(family)
    generate(used, PROMPT, method_of("lookaheadkv", family, tmp_path), max_new_tokens=2)
    used.save_pretrained(tmp_path)
    again, report = type(used).from_pretrained(tmp_path, output_loading_info=True)
    assert not report["missing_keys"] and not report["unexpected_keys"]
    own, reloaded = used.state_dict(), again.state_dict()
    assert list(reloaded) == list(own) and all(torch.equal(reloaded[name], own[name]) for name in own)
    with torch.no_grad():  # weights that begin elsewhere in memory can be added up in another order
        assert_close(again(PROMPT).logits, used(PROMPT).logits)


@pytest.mark.parametrize("family", ["Gemma 2", "GPT-OSS"])
def test_the_loaded_attention_gets_every_argument(family):
    """An implementation that keepsight has never heard of is delegated to, with all that it would get without us."""
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
    plain = calls.copy()
    calls.clear()
    assert_close(prefill(model, PROMPT).logits, expected)
    assert len(calls) == len(plain) == 4
    for ours, its in zip(calls, plain, strict=True):
        assert ours.keys() == its.keys()
        for name in ("scaling", "sliding_window", "softcap", "dropout"):
            assert ours.get(name) == its.get(name)
        assert (ours.get("s_aux") is None) == (its.get("s_aux") is None)
    assert model.config._attn_implementation == "test_unknown"
