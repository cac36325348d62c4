"""Prompts with images, against the model's own eager attention over the whole sequence, at positions of its own."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from keepsight.errors import UserError
from keepsight.runtime.conversation import Conversation
from keepsight.runtime.generate import generate
from keepsight.runtime.images import Images
from keepsight.runtime.method import FullCache
from keepsight.runtime.methods import SnapKV, StreamingLLM, make_method
from keepsight.runtime.methods.quest import Quest
from keepsight.runtime.prefill import prefill, read
from tests.close import assert_close
from tests.families import family_model
from tests.runtime.family_methods import BUDGET, DRAFT, method_of
from tests.runtime.scoring import observed_by_query_head
from tests.runtime.slow_families import hiding, slow_pass

QWEN, GEMMA = "Qwen2.5-VL (text)", "Gemma 3 (multimodal class, text)"
IMAGE, START, END = 120, 122, 123
LENGTH = 41
METHODS = ["snapkv", "lookaheadkv", "dapq", "adakv", "laq", "oracle", "streamingllm", "tova", "key_norm"]
both = pytest.mark.parametrize("family", [QWEN, GEMMA])


def images_of(family: str, ids: Tensor) -> dict[str, Tensor]:
    """Random pixels for the image tokens of one prompt [1, N]."""
    kinds, generator = (ids == IMAGE).long(), torch.Generator().manual_seed(1)
    if family == GEMMA:
        return {"pixel_values": torch.randn(1, 3, 16, 16, generator=generator), "token_type_ids": kinds}
    return {
        "pixel_values": torch.randn(32, 3 * 2 * 4 * 4, generator=generator),  # 8 x 4 patches, four a token
        "image_grid_thw": torch.tensor([[1, 8, 4]]),
        "mm_token_type_ids": kinds,
    }


def prompt(family: str, length: int = LENGTH, seed: int = 0) -> dict[str, Any]:
    ids = torch.randint(3, 119, (1, length), generator=torch.Generator().manual_seed(seed))
    place = 5 + seed
    tokens = 8 if family == QWEN else 4
    ids[:, place : place + tokens] = IMAGE
    ids[:, place - 1], ids[:, place + tokens] = START, END
    return {"input_ids": ids, **images_of(family, ids)}


def longer(inputs: dict[str, Any], answer: Tensor) -> dict[str, Any]:
    """The prompt with an answer after it."""
    kinds = {name: functional.pad(value, (0, answer.shape[1])) for name, value in inputs.items() if "type_ids" in name}
    return inputs | kinds | {"input_ids": torch.cat([inputs["input_ids"], answer], dim=1)}


ANSWER = torch.randint(3, 119, (1, 4), generator=torch.Generator().manual_seed(9))


@both
def test_the_prompt_is_read_at_the_models_own_positions(family: str) -> None:
    model, inputs = family_model(family), prompt(family)
    state = prefill(model, inputs["input_ids"], images=Images.among(inputs))
    _, expected = slow_pass(model, **longer(inputs, ANSWER))
    assert_close(state.logits, expected[:, LENGTH - 1])
    # Eight tokens of an image of 4 x 2 take four positions.
    assert state.next_position.tolist() == [LENGTH - 4 if family == QWEN else LENGTH]
    _, logits = read(model, state, ANSWER)
    assert_close(logits, expected[:, LENGTH:])
    blind = prefill(model, inputs["input_ids"])
    assert (blind.logits - state.logits).abs().max() > 0.1, "the pixels matter"


@both
@pytest.mark.parametrize("name", METHODS)
def test_answers_see_what_was_kept(family: str, name: str, tmp_path: Path) -> None:
    model, inputs = family_model(family), prompt(family)
    method = method_of(name, family, tmp_path)
    whole = prefill(model, inputs["input_ids"], needs=method.needs(), images=Images.among(inputs))
    shared = method.compress_shared(model, whole, lambda observer, reduction: observer(model, whole, reduction))
    state, kept = shared
    assert sum(int(each.sum()) for each in kept) == BUDGET * sum(each.shape[1] for each in kept)
    _, expected = slow_pass(model, hiding(kept), **longer(inputs, ANSWER))
    for place in range(ANSWER.shape[1]):
        state, logits = read(model, state, ANSWER[:, place : place + 1])
        assert_close(logits[:, 0], expected[:, LENGTH + place])


@both
def test_the_window_scores_by_the_models_own_attention(family: str) -> None:
    model, inputs = family_model(family), prompt(family)
    method = SnapKV(BUDGET, window=8)
    state = prefill(model, inputs["input_ids"], needs=method.needs(), images=Images.among(inputs))
    weights, _ = slow_pass(model, **inputs)
    for score, each in zip(observed_by_query_head(model, method, state), weights, strict=True):
        assert_close(score[0], each[0, :, LENGTH - 8 :, :LENGTH].mean(dim=1))


@both
def test_generate_takes_what_the_processor_makes(family: str) -> None:
    model, inputs = family_model(family), prompt(family)
    plain = model.generate(**inputs, max_new_tokens=6, do_sample=False)
    for method in (FullCache(), SnapKV(LENGTH, window=8)):
        assert torch.equal(model.generate(**inputs, custom_generate=method, max_new_tokens=6, do_sample=False), plain)
    text = {"input_ids": inputs["input_ids"].masked_fill(inputs["input_ids"] >= IMAGE, 7)}
    spoken = model.generate(**text, max_new_tokens=6, do_sample=False)
    assert torch.equal(model.generate(**text, custom_generate=FullCache(), max_new_tokens=6, do_sample=False), spoken)
    evicted = generate(model, method=SnapKV(BUDGET, window=8), max_new_tokens=6, **inputs)
    method = SnapKV(BUDGET, window=8)
    whole = prefill(model, inputs["input_ids"], needs=method.needs(), images=Images.among(inputs))
    state = method.compress(model, whole)
    for token in evicted[0].tolist():
        assert int(state.logits.argmax()) == token
        state, _ = read(model, state, torch.tensor([[token]]))


def test_a_padded_batch_answers_as_its_rows_do_alone() -> None:
    model, rows = family_model(QWEN), [prompt(QWEN), prompt(QWEN, length=33, seed=2)]
    padding = {"input_ids": 2, "mm_token_type_ids": 0}
    batch = {
        name: torch.cat([functional.pad(row[name], (LENGTH - row[name].shape[1], 0), value=fill) for row in rows])
        for name, fill in padding.items()
    } | {name: torch.cat([row[name] for row in rows]) for name in ("pixel_values", "image_grid_thw")}
    mask = torch.arange(LENGTH) >= torch.tensor([[0], [LENGTH - 33]])
    method = SnapKV(BUDGET, window=8)
    together = generate(model, method=method, attention_mask=mask.long(), max_new_tokens=6, **batch)
    alone = [generate(model, method=method, max_new_tokens=6, **row) for row in rows]
    assert torch.equal(together, torch.cat(alone))


def test_a_further_turn_goes_on_at_the_images_positions() -> None:
    model, inputs = family_model(QWEN), prompt(QWEN)
    options: dict[str, Any] = {"max_new_tokens": 4, "do_sample": False, "return_dict_in_generate": True}
    first = model.generate(**inputs, custom_generate=FullCache(), **options)
    turn = torch.cat([first.sequences, ANSWER], dim=1)
    second = model.generate(
        turn, past_key_values=first.past_key_values, custom_generate=FullCache(), **options
    ).sequences
    whole = longer(inputs, turn[:, LENGTH:])
    assert torch.equal(second, model.generate(**whole, max_new_tokens=4, do_sample=False))


def test_tokens_of_an_image_do_not_observe_where_they_see_one_another() -> None:
    model, inputs = family_model(GEMMA), prompt(GEMMA)
    for method in (SnapKV(40, window=36), make_method("h2o", BUDGET, window=4)):
        with pytest.raises(UserError, match="cannot observe the prompt; take a shorter window, or a method that"):
            generate(model, method=method, max_new_tokens=2, **inputs)


def test_what_cannot_read_images_says_so() -> None:
    model, inputs = family_model(QWEN), prompt(QWEN)
    for method in (
        Quest(LENGTH),
        Conversation(model, SnapKV(BUDGET, window=8)),
        make_method("speckv", BUDGET, DRAFT, window=8),
    ):
        with pytest.raises(UserError, match=f"{type(method).__name__} reads no images"):
            generate(model, method=method, max_new_tokens=2, **inputs)
    with pytest.raises(UserError, match="read in one pass; leave out prefill_chunk_size"):
        generate(model, method=StreamingLLM(BUDGET), max_new_tokens=2, prefill_chunk_size=8, **inputs)
    without = {name: value for name, value in inputs.items() if name != "mm_token_type_ids"}
    with pytest.raises(UserError, match="mm_token_type_ids, which say where images are, are missing"):
        prefill(model, inputs["input_ids"], images=Images.among(without))
