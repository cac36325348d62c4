"""Prompts with images, against the model's own eager attention over the whole sequence, at the model's positions."""

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from keepsight.runtime import importance
from keepsight.runtime.conversation import Conversation
from keepsight.runtime.evict import Evict
from keepsight.runtime.generate import FullCache, generate
from keepsight.runtime.images import Images
from keepsight.runtime.methods import H2O, METHODS, SnapKV, StreamingLLM
from keepsight.runtime.saved import load_state, save_state
from keepsight.runtime.state import State, prefill, read
from tests.close import assert_close
from tests.families import family_model, fresh_model
from tests.models.modules import random_on
from tests.refused import refused
from tests.runtime.family_methods import BUDGET, LENGTH, NAMES, WITH_IMAGE, grid, method_of
from tests.runtime.scoring import observed_by_query_head
from tests.runtime.slow_families import hiding, slow_pass, soft_token_attention

QWEN, GEMMA = WITH_IMAGE
IMAGE = 120
START = 122
END = 123
EVICTING = [name for name in NAMES if issubclass(METHODS[name], Evict) and METHODS[name].reads_images]
both_families = pytest.mark.parametrize("family", WITH_IMAGE)


def images_of(family: str, ids: Tensor) -> dict[str, Tensor]:
    """Random pixels for the image tokens of one prompt [1, N]."""
    token_types = (ids == IMAGE).long()
    generator = torch.Generator().manual_seed(1)
    if family == GEMMA:
        pixels = torch.randn(1, 3, 16, 16, generator=generator)
        return {"pixel_values": pixels, "token_type_ids": token_types}
    patches = torch.randn(32, 3 * 2 * 4 * 4, generator=generator)  # 8 x 4 patches, four a token
    return {
        "pixel_values": patches,
        "image_grid_thw": torch.tensor([[1, 8, 4]]),
        "mm_token_type_ids": token_types,
    }


def prompt(family: str, length: int = LENGTH, seed: int = 0) -> dict[str, Any]:
    """A prompt of random text with one image near its start."""
    ids = torch.randint(3, 119, (1, length), generator=torch.Generator().manual_seed(seed))
    first = 5 + seed
    end = first + (8 if family == QWEN else 4)
    ids[:, first:end] = IMAGE
    ids[:, first - 1] = START
    ids[:, end] = END
    return {"input_ids": ids, **images_of(family, ids)}


def longer(inputs: dict[str, Any], answer: Tensor) -> dict[str, Any]:
    """The prompt with an answer after it."""
    extended = inputs | {"input_ids": torch.cat([inputs["input_ids"], answer], dim=1)}
    for name, tensor in inputs.items():
        if "type_ids" in name:
            extended[name] = functional.pad(tensor, (0, answer.shape[1]))
    return extended


def read_prompt(model: Any, inputs: dict[str, Any], method: Evict) -> State:
    """The prompt read with its image, nothing evicted, with what the method needs recorded."""
    return prefill(model, inputs["input_ids"], needs=method.needs(), images=Images.among(inputs))


ANSWER = torch.randint(3, 119, (1, 4), generator=torch.Generator().manual_seed(9))


@both_families
def test_the_prompt_is_read_at_the_models_own_positions(family: str) -> None:
    model = family_model(family)
    inputs = prompt(family)
    state = prefill(model, inputs["input_ids"], images=Images.among(inputs))
    _, expected = slow_pass(model, **longer(inputs, ANSWER))
    assert_close(state.logits, expected[:, LENGTH - 1])
    # Eight tokens of an image of 4 x 2 take four positions.
    next_position = LENGTH - 4 if family == QWEN else LENGTH
    assert (state.lengths + state.rope_offset).tolist() == [next_position]
    _, logits = read(model, state, ANSWER)
    assert_close(logits, expected[:, LENGTH:])
    blind = prefill(model, inputs["input_ids"])
    assert (blind.logits - state.logits).abs().max() > 0.1, "the pixels matter"


@pytest.mark.parametrize(("family", "name"), grid(EVICTING, WITH_IMAGE))
def test_answers_see_what_was_kept(family: str, name: str, tmp_path: Path) -> None:
    model = family_model(family)
    inputs = prompt(family)
    method = method_of(name, family, tmp_path)
    full_state = read_prompt(model, inputs, method)
    kept = method.select(full_state, method.importance(model, full_state))
    state = method.compress_state(model, full_state)
    kept_count = sum(int(layer.sum()) for layer in kept)
    kv_heads = sum(layer.shape[1] for layer in kept)
    assert kept_count == BUDGET * kv_heads
    _, expected = slow_pass(model, hiding(kept), **longer(inputs, ANSWER))
    for index in range(ANSWER.shape[1]):
        state, logits = read(model, state, ANSWER[:, index : index + 1])
        assert_close(logits[:, 0], expected[:, LENGTH + index])


@cache
def eager_model(family: str) -> Any:
    model = fresh_model(family)
    model.set_attn_implementation("eager")
    return model


def assert_observed(model: Any, method: Evict, state: State, expected: list[Tensor]) -> None:
    scores = observed_by_query_head(model, method, state)
    for layer_scores, layer_expected in zip(scores, expected, strict=True):
        assert_close(layer_scores[0], layer_expected)


@both_families
@pytest.mark.parametrize(
    ("load_model", "window"),
    [(family_model, 8), (eager_model, 34), (family_model, 34), (family_model, 36)],
    ids=["behind the image", "from within the image, eager", "from within the image", "with the image"],
)
def test_the_window_scores_by_the_models_own_attention(family: str, load_model: Any, window: int) -> None:
    model = load_model(family)
    inputs = prompt(family)
    method = SnapKV(LENGTH - 1, window=window)
    state = read_prompt(model, inputs, method)
    weights, _ = slow_pass(model, **inputs)
    expected = [layer_weights[0, :, -window:].mean(dim=1) for layer_weights in weights]
    assert_observed(model, method, state, expected)


@both_families
def test_the_attention_received_is_the_models_own(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importance, "ROWS_AT_ONCE", 8)  # the image is in two blocks
    model = family_model(family)
    inputs = prompt(family)
    method = H2O(BUDGET, window=4)
    state = read_prompt(model, inputs, method)
    weights, _ = slow_pass(model, **inputs)
    expected = [layer_weights[0].sum(dim=1) for layer_weights in weights]
    assert_observed(model, method, state, expected)


def test_soft_tokens_score_by_the_models_own_attention(tmp_path: Path) -> None:
    model = family_model(GEMMA)
    inputs = prompt(GEMMA)
    method = method_of("lookaheadkv", GEMMA, tmp_path)
    lookahead = random_on(model)
    state = read_prompt(model, inputs, method)
    with torch.no_grad():
        embedded = model(**inputs, output_hidden_states=True).hidden_states[0]
    token_types = functional.pad(inputs["token_type_ids"], (0, len(lookahead.tokens)))
    expected = soft_token_attention(lookahead, embedded, method.reduce.queries, token_type_ids=token_types)
    assert_observed(model, method, state, expected)


def test_an_image_read_earlier_observes_as_it_did(tmp_path: Path) -> None:
    model = family_model(GEMMA)
    inputs = prompt(GEMMA)
    window = LENGTH - 1
    method = SnapKV(LENGTH + 3, window=window)
    state = read_prompt(model, inputs, method)
    state = load_state(save_state(state, tmp_path, model=model), model).state
    for token in ANSWER.split(1, dim=1):
        state, _ = read(model, state, token)
    weights, _ = slow_pass(model, **longer(inputs, ANSWER))
    expected = [layer_weights[0, :, -window:].mean(dim=1) for layer_weights in weights]
    assert_observed(model, method, state, expected)


@both_families
def test_generate_takes_what_the_processor_makes(family: str) -> None:
    model = family_model(family)
    inputs = prompt(family)
    greedy: dict[str, Any] = {"max_new_tokens": 6, "do_sample": False}
    expected = model.generate(**inputs, **greedy)
    for method in (FullCache(), SnapKV(LENGTH, window=8)):
        assert torch.equal(model.generate(**inputs, custom_generate=method, **greedy), expected)
    text = {"input_ids": inputs["input_ids"].masked_fill(inputs["input_ids"] >= IMAGE, 7)}
    expected = model.generate(**text, **greedy)
    assert torch.equal(model.generate(**text, custom_generate=FullCache(), **greedy), expected)
    method = SnapKV(BUDGET, window=8)
    answer = generate(model, method=method, max_new_tokens=6, **inputs)
    state = method.compress_state(model, read_prompt(model, inputs, method))
    for token in answer[0].tolist():
        assert int(state.logits.argmax()) == token
        state, _ = read(model, state, torch.tensor([[token]]))


@both_families
def test_a_padded_batch_answers_as_its_rows_do_alone(family: str) -> None:
    model = family_model(family)
    rows = [prompt(family), prompt(family, length=33, seed=2)]
    token_types = "mm_token_type_ids" if family == QWEN else "token_type_ids"
    fills = {"input_ids": 2, token_types: 0}
    batch = {}
    for name in rows[0]:
        tensors = [row[name] for row in rows]
        if name in fills:
            tensors = [functional.pad(tensor, (LENGTH - tensor.shape[1], 0), value=fills[name]) for tensor in tensors]
        batch[name] = torch.cat(tensors)
    mask = torch.arange(LENGTH) >= torch.tensor([[0], [LENGTH - 33]])
    for method in (SnapKV(BUDGET, window=8), SnapKV(30, window=25), H2O(BUDGET, window=4)):
        together = generate(model, method=method, attention_mask=mask.long(), max_new_tokens=6, **batch)
        alone = [generate(model, method=method, max_new_tokens=6, **row) for row in rows]
        assert torch.equal(together, torch.cat(alone))


def test_a_further_turn_goes_on_at_the_images_positions() -> None:
    model = family_model(QWEN)
    inputs = prompt(QWEN)
    greedy: dict[str, Any] = {"max_new_tokens": 4, "do_sample": False}
    options = greedy | {"return_dict_in_generate": True, "custom_generate": FullCache()}
    first = model.generate(**inputs, **options)
    history = torch.cat([first.sequences, ANSWER], dim=1)
    second = model.generate(history, past_key_values=first.past_key_values, **options)
    expected = model.generate(**longer(inputs, history[:, LENGTH:]), **greedy)
    assert torch.equal(second.sequences, expected)


TEXT_ONLY = [name for name in NAMES if not METHODS[name].reads_images]


@pytest.mark.parametrize(("family", "name"), grid(TEXT_ONLY, WITH_IMAGE))
def test_a_method_that_reads_no_images_says_so(family: str, name: str, tmp_path: Path) -> None:
    model = family_model(family)
    inputs = prompt(family)
    method = method_of(name, family, tmp_path)
    with refused("pixel_values", "model"):
        generate(model, method=method, max_new_tokens=2, **inputs)


def test_what_cannot_be_read_with_images_says_so() -> None:
    model = family_model(QWEN)
    inputs = prompt(QWEN)
    conversation = Conversation(model, SnapKV(BUDGET, window=8))
    with refused("pixel_values", "model"):
        generate(model, method=conversation, max_new_tokens=2, **inputs)
    with refused("prefill_chunk_size", "conflict"):
        generate(model, method=StreamingLLM(BUDGET), max_new_tokens=2, prefill_chunk_size=8, **inputs)
    without = {name: value for name, value in inputs.items() if name != "mm_token_type_ids"}
    with refused("mm_token_type_ids", "missing"):
        prefill(model, inputs["input_ids"], images=Images.among(without))
