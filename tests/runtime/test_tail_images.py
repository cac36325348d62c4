"""Observers after a prompt with images: read with it where the decoder takes embeddings alone, else after it."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional
from transformers import AutoConfig, AutoModelForImageTextToText

from keepsight.models.decoder import decoder_layers
from keepsight.models.lookahead import LookaheadAdapter
from keepsight.runtime.drafting.observer import DraftObserver
from keepsight.runtime.drafting.speckv import SpecKV
from keepsight.runtime.evict import Evict
from keepsight.runtime.generate import generate
from keepsight.runtime.images import Images
from keepsight.runtime.importance import NO_POOL
from keepsight.runtime.methods.drafts import ConstantText, DapQ
from keepsight.runtime.methods.lookaheadkv import LookaheadKV, SoftTokens
from keepsight.runtime.state import prefill, read
from keepsight.runtime.tail import Tail
from tests.close import assert_close
from tests.families import SMALL, fresh_model
from tests.models.modules import SHAPE, random_on, save
from tests.runtime.family_methods import BUDGET, LENGTH, pictured_draft
from tests.runtime.test_images import GEMMA, IMAGE, QWEN, prompt
from tests.runtime.test_tail import assert_kept_alike
from tests.tiny import prompt_ids
from tests.zoo.configs import small_model

SHORT = 33
_VISION = {"hidden_size": 16, "intermediate_size": 24, "patch_size": 4}
_CLIP = {"model_type": "clip_vision_model", "num_hidden_layers": 2, "num_attention_heads": 2, "image_size": 8}
_LLAVA = {
    "text_config": SMALL | {"model_type": "llama"},
    "vision_config": _VISION | _CLIP,
    "image_token_index": IMAGE,
}
_M_ROPE = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]}
_QWEN3_VISION = {
    "depth": 2,
    "num_heads": 2,
    "out_hidden_size": 32,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "num_position_embeddings": 64,
    "deepstack_visual_indexes": [0],
}
_QWEN3_VL = {
    "text_config": SMALL | {"rope_parameters": _M_ROPE, "head_dim": 8},
    "vision_config": _VISION | _QWEN3_VISION,
    "image_token_id": IMAGE,
    "vision_start_token_id": 122,
    "vision_end_token_id": 123,
}


def from_config(kind: str, options: dict[str, Any]) -> Any:
    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, **options | {"tie_word_embeddings": False})
    return AutoModelForImageTextToText.from_config(config).eval()


def pictured(name: str) -> tuple[Any, list[dict[str, Any]]]:
    """A model, and two prompts of `LENGTH` and `SHORT` tokens with an image each."""
    family = QWEN if "Qwen" in name else GEMMA
    rows = [prompt(family), prompt(family, length=SHORT, seed=2)]
    rows[1]["pixel_values"] = rows[1]["pixel_values"] + 1
    if name == "Qwen2.5-VL":
        return fresh_model(QWEN), rows
    if name == "Qwen3-VL":
        return from_config("qwen3_vl", _QWEN3_VL), rows
    if name == "Gemma 3, full attention":
        return fresh_model(GEMMA, layer_types=["full_attention"] * 4), rows
    for row in rows:  # LLaVA: 8 x 8 pixels, four tokens
        row["pixel_values"] = row["pixel_values"][..., :8, :8]
        del row["token_type_ids"]
    return from_config("llava", _LLAVA), rows


def padded(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """A batch of prompts of `LENGTH` and `SHORT` tokens, padded on the left."""
    batch: dict[str, Any] = {}
    for name in rows[0]:
        values = [row[name] for row in rows]
        if name == "input_ids" or "type_ids" in name:
            fill = 2 if name == "input_ids" else 0
            values = [functional.pad(value, (LENGTH - value.shape[1], 0), value=fill) for value in values]
        batch[name] = torch.cat(values)
    return batch


def soft_tokens(model: Any, folder: Path) -> LookaheadKV:
    adapter = LookaheadAdapter.load(save(random_on(model), folder / "adapter"))
    return LookaheadKV(BUDGET, SoftTokens(adapter), pool=NO_POOL)


def passes_of(model: Any) -> list[int]:
    """The number of tokens of each forward pass of a model's decoder from now on."""
    counts: list[int] = []

    def count(module: Any, inputs: Any, options: dict[str, Any]) -> None:
        hidden: Tensor = inputs[0] if inputs else options["hidden_states"]
        counts.append(hidden.shape[1])

    decoder_layers(model)[0].register_forward_pre_hook(count, with_kwargs=True)
    return counts


ONE_PASS = ("Qwen2.5-VL", "LLaVA")
TWO_PASSES = ("Qwen3-VL", "Gemma 3, full attention")


@pytest.mark.parametrize("is_padded", [False, True], ids=["one prompt", "padded batch"])
@pytest.mark.parametrize("name", ONE_PASS)
def test_the_prompt_is_read_as_without_observers(name: str, is_padded: bool, tmp_path: Path) -> None:
    model, rows = pictured(name)
    method = soft_tokens(model, tmp_path)
    inputs = rows[0]
    mask = None
    if is_padded:
        inputs = padded(rows)
        mask = torch.arange(LENGTH) >= torch.tensor([[0], [LENGTH - SHORT]])
    ids: Tensor = inputs["input_ids"]
    images = Images.among(inputs)
    assert images is not None
    plain = prefill(model, ids, mask, needs=method.needs(), images=images)
    expected = method.bound_observer(model, plain, method.reduce)

    embeddings = images.embeddings_alone(model, ids, mask)
    tail = method.bound_observer.tail(model, ids, mask, method.reduce, images)
    assert tail is not None
    tail = replace(tail, prompt=embeddings)
    silent = Tail(torch.zeros_like(tail.embeddings), method.reduce, prompt=embeddings)
    passes = passes_of(model)
    state = prefill(model, ids, mask, needs=method.needs(), images=images, tail=tail)
    assert passes == [LENGTH + SHAPE.tokens]
    silent_state = prefill(model, ids, mask, needs=method.needs(), images=images, tail=silent)
    by_layer = zip(state.entries(), silent_state.entries(), plain.entries(), strict=True)
    for layer, silent_layer, plain_layer in by_layer:
        assert torch.equal(layer.keys, silent_layer.keys), "bit for bit, whatever observes"
        assert torch.equal(layer.values, silent_layer.values)
        assert_close(layer.keys, plain_layer.keys)
        assert_close(layer.values, plain_layer.values)
    assert torch.equal(state.logits, silent_state.logits)
    assert_close(state.logits, plain.logits)
    assert torch.equal(state.lengths + state.rope_offset, plain.lengths + plain.rope_offset)
    assert [layer.seen for layer in state.layers] == [LENGTH] * len(state.layers)
    real = torch.ones(ids.shape, dtype=torch.bool) if mask is None else mask
    for kept_layer, scores in zip(state.layers, expected, strict=True):
        assert kept_layer.recorded is not None
        assert kept_layer.recorded.observed is not None
        difference = (kept_layer.recorded.observed - scores).abs().amax(dim=1)
        assert difference[real].max() < 1e-5

    passes.clear()
    evicted = method.start(model, ids, mask, images=images)
    assert passes == [LENGTH + SHAPE.tokens]
    assert_kept_alike(evicted, method.compress_state(model, plain))
    assert evicted.images is images


def test_observers_follow_an_image_at_the_end_of_a_prompt_as_text_does(tmp_path: Path) -> None:
    """Its last token is not at its largest position in all dimensions of M-RoPE."""
    model, rows = pictured("Qwen2.5-VL")
    method = replace(soft_tokens(model, tmp_path), budget=8)
    end = int((rows[0]["input_ids"][0] == IMAGE).nonzero().max()) + 1
    ids: Tensor = rows[0]["input_ids"][:, :end]
    images = Images.among({**rows[0], "mm_token_type_ids": rows[0]["mm_token_type_ids"][:, :end]})
    plain = prefill(model, ids, needs=method.needs(), images=images)
    assert images is not None
    positions = images.positions_in(model, ids, None)
    assert positions is not None
    assert len(positions[:, 0, -1].unique()) > 1
    assert_kept_alike(method.start(model, ids, images=images), method.compress_state(model, plain))


@pytest.mark.parametrize("name", TWO_PASSES)
def test_a_decoder_that_reads_more_than_embeddings_reads_the_observers_later(name: str, tmp_path: Path) -> None:
    """Images in several layers (Qwen3-VL), and image tokens that see one another, masked outside the decoder."""
    model, rows = pictured(name)
    method = soft_tokens(model, tmp_path)
    ids: Tensor = rows[0]["input_ids"]
    images = Images.among(rows[0])
    plain = prefill(model, ids, needs=method.needs(), images=images)
    passes = passes_of(model)
    encoded: list[int] = []
    model.model.get_image_features = counted(model.model.get_image_features, encoded)
    state = method.start(model, ids, images=images)
    assert passes == [LENGTH, SHAPE.tokens]
    assert len(encoded) == 1
    assert_kept_alike(state, method.compress_state(model, plain))


def test_a_model_that_reads_its_prompt_in_both_directions_reads_the_observers_later() -> None:
    """PaliGemma's prompt would see them, with an image and without."""
    model = small_model("paligemma").eval()
    model.config.image_token_id = IMAGE
    method = DapQ(BUDGET, DraftObserver(ConstantText([5, 6, 7])))
    ids = prompt_ids(LENGTH)[0].clamp(max=IMAGE - 1)
    pixels = torch.randn(1, 3, 16, 16, generator=torch.Generator().manual_seed(1))
    pictured_ids = ids.clone()
    pictured_ids[:, :16] = IMAGE
    for tokens, images in ((ids, None), (pictured_ids, Images({"pixel_values": pixels}))):
        plain = prefill(model, tokens, needs=method.needs(), images=images)
        state = method.start(model, tokens, images=images)
        assert torch.equal(state.logits, plain.logits)
        assert_kept_alike(state, method.compress_state(model, plain))


def counted(function: Any, calls: list[int]) -> Any:
    def call(*args: Any, **options: Any) -> Any:
        calls.append(1)
        return function(*args, **options)

    return call


def test_a_mask_that_is_made_outside_the_decoder_is_seen_without_token_types() -> None:
    model, rows = pictured("Gemma 3, full attention")
    images = Images({"pixel_values": rows[0]["pixel_values"]})
    assert images.embeddings_alone(model, rows[0]["input_ids"], None) is None


def test_embeddings_that_the_model_would_scale_again_are_not_given_to_it() -> None:
    model, rows = pictured("LLaVA")
    images = Images.among(rows[0])
    assert images is not None

    def scale(module: Any, inputs: Any, options: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        return inputs, {**options, "inputs_embeds": options["inputs_embeds"] * 2}

    with model.model.language_model.register_forward_pre_hook(scale, with_kwargs=True):
        assert images.embeddings_alone(model, rows[0]["input_ids"], None) is None


@pytest.mark.parametrize("name", ["dapq", "speckv"])
def test_drafts_are_read_with_the_prompt_too(name: str) -> None:
    """A draft model still reads the images."""
    model, rows = pictured("Qwen2.5-VL")
    methods: dict[str, Evict] = {
        "dapq": DapQ(BUDGET, DraftObserver(ConstantText([5, 6, 7]))),
        "speckv": SpecKV.with_draft(pictured_draft(QWEN), BUDGET, 5, window=8, pool=NO_POOL),
    }
    method = methods[name]
    ids: Tensor = rows[0]["input_ids"]
    images = Images.among(rows[0], rows[0])
    plain = prefill(model, ids, needs=method.needs(), images=images)
    passes = passes_of(model)
    state = method.start(model, ids, images=images)
    assert passes == [LENGTH + method.bound_observer.positions()]
    assert_kept_alike(state, method.compress_state(model, plain))


def test_answers_follow_the_images_positions(tmp_path: Path) -> None:
    """The images are encoded once, and the answer goes on as after two passes."""
    model, rows = pictured("Qwen2.5-VL")
    method = soft_tokens(model, tmp_path)
    ids: Tensor = rows[0]["input_ids"]
    full_cache = prefill(model, ids, needs=method.needs(), images=Images.among(rows[0]))
    state = method.compress_state(model, full_cache)
    expected = []
    for _ in range(6):
        token = state.logits.argmax(dim=-1, keepdim=True)
        expected.append(token)
        state, _ = read(model, state, token)
    encoded: list[int] = []
    model.model.visual.register_forward_hook(lambda *_: encoded.append(1))
    answer = generate(model, method=method, max_new_tokens=6, **rows[0])
    assert torch.equal(answer, torch.cat(expected, dim=1))
    assert len(encoded) == 1
