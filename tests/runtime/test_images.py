"""Prompts with images, against the model's own eager attention over the whole sequence, at positions of its own."""

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
IMAGE, START, END = 120, 122, 123
EVICTING = [name for name in NAMES if issubclass(METHODS[name], Evict) and METHODS[name].reads_images]
both = pytest.mark.parametrize("family", WITH_IMAGE)


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
    assert (state.lengths + state.rope_offset).tolist() == [LENGTH - 4 if family == QWEN else LENGTH]
    _, logits = read(model, state, ANSWER)
    assert_close(logits, expected[:, LENGTH:])
    blind = prefill(model, inputs["input_ids"])
    assert (blind.logits - state.logits).abs().max() > 0.1, "the pixels matter"


@pytest.mark.parametrize(("family", "name"), grid(EVICTING, WITH_IMAGE))
def test_answers_see_what_was_kept(family: str, name: str, tmp_path: Path) -> None:
    model, inputs = family_model(family), prompt(family)
    method = method_of(name, family, tmp_path)
    whole = prefill(model, inputs["input_ids"], needs=method.needs(), images=Images.among(inputs))
    kept = method.select(whole, method.importance(model, whole))
    state = method.compress_state(model, whole)
    assert sum(int(each.sum()) for each in kept) == BUDGET * sum(each.shape[1] for each in kept)
    _, expected = slow_pass(model, hiding(kept), **longer(inputs, ANSWER))
    for place in range(ANSWER.shape[1]):
        state, logits = read(model, state, ANSWER[:, place : place + 1])
        assert_close(logits[:, 0], expected[:, LENGTH + place])


@cache
def eager_model(family: str) -> Any:
    model = fresh_model(family)
    model.set_attn_implementation("eager")
    return model


def assert_observed(model: Any, method: Evict, state: State, expected: list[Tensor]) -> None:
    for score, each in zip(observed_by_query_head(model, method, state), expected, strict=True):
        assert_close(score[0], each)


@both
@pytest.mark.parametrize(
    ("loaded", "window"),
    [(family_model, 8), (eager_model, 34), (family_model, 34), (family_model, 36)],
    ids=["behind the image", "from within the image, eager", "from within the image", "with the image"],
)
def test_the_window_scores_by_the_models_own_attention(family: str, loaded: Any, window: int) -> None:
    model, inputs = loaded(family), prompt(family)
    method = SnapKV(LENGTH - 1, window=window)
    state = prefill(model, inputs["input_ids"], needs=method.needs(), images=Images.among(inputs))
    assert_observed(model, method, state, [each[0, :, -window:].mean(dim=1) for each in slow_pass(model, **inputs)[0]])


@both
def test_the_attention_received_is_the_models_own(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importance, "ROWS_AT_ONCE", 8)  # the image is in two blocks
    model, inputs, method = family_model(family), prompt(family), H2O(BUDGET, window=4)
    state = prefill(model, inputs["input_ids"], needs=method.needs(), images=Images.among(inputs))
    assert_observed(model, method, state, [each[0].sum(dim=1) for each in slow_pass(model, **inputs)[0]])


def test_soft_tokens_score_by_the_models_own_attention(tmp_path: Path) -> None:
    model, inputs = family_model(GEMMA), prompt(GEMMA)
    method, lookahead = method_of("lookaheadkv", GEMMA, tmp_path), random_on(model)
    state = prefill(model, inputs["input_ids"], needs=method.needs(), images=Images.among(inputs))
    with torch.no_grad():
        embedded = model(**inputs, output_hidden_states=True).hidden_states[0]
    kinds = functional.pad(inputs["token_type_ids"], (0, len(lookahead.tokens)))
    seen = soft_token_attention(lookahead, embedded, method.reduce.queries, token_type_ids=kinds)
    assert_observed(model, method, state, seen)


def test_an_image_read_earlier_observes_as_it_did(tmp_path: Path) -> None:
    model, inputs, window = family_model(GEMMA), prompt(GEMMA), LENGTH - 1
    method = SnapKV(LENGTH + 3, window=window)
    state = prefill(model, inputs["input_ids"], needs=method.needs(), images=Images.among(inputs))
    state = load_state(save_state(state, tmp_path, model=model), model).state
    for token in ANSWER.split(1, dim=1):
        state, _ = read(model, state, token)
    weights, _ = slow_pass(model, **longer(inputs, ANSWER))
    assert_observed(model, method, state, [each[0, :, -window:].mean(dim=1) for each in weights])


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
    state = method.compress_state(model, whole)
    for token in evicted[0].tolist():
        assert int(state.logits.argmax()) == token
        state, _ = read(model, state, torch.tensor([[token]]))


@both
def test_a_padded_batch_answers_as_its_rows_do_alone(family: str) -> None:
    model, rows = family_model(family), [prompt(family), prompt(family, length=33, seed=2)]
    kinds = "mm_token_type_ids" if family == QWEN else "token_type_ids"
    padding = {"input_ids": 2, kinds: 0}
    batch = {
        name: torch.cat([functional.pad(row[name], (LENGTH - row[name].shape[1], 0), value=fill) for row in rows])
        for name, fill in padding.items()
    } | {name: torch.cat([row[name] for row in rows]) for name in rows[0].keys() - padding}
    mask = torch.arange(LENGTH) >= torch.tensor([[0], [LENGTH - 33]])
    for method in (SnapKV(BUDGET, window=8), SnapKV(30, window=25), H2O(BUDGET, window=4)):
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


@pytest.mark.parametrize(
    ("family", "name"), grid([name for name in NAMES if not METHODS[name].reads_images], WITH_IMAGE)
)
def test_a_method_that_reads_no_images_says_so(family: str, name: str, tmp_path: Path) -> None:
    model, inputs, method = family_model(family), prompt(family), method_of(name, family, tmp_path)
    with refused("pixel_values", "model"):
        generate(model, method=method, max_new_tokens=2, **inputs)


def test_what_cannot_be_read_with_images_says_so() -> None:
    model, inputs = family_model(QWEN), prompt(QWEN)
    with refused("pixel_values", "model"):
        generate(model, method=Conversation(model, SnapKV(BUDGET, window=8)), max_new_tokens=2, **inputs)
    with refused("prefill_chunk_size", "conflict"):
        generate(model, method=StreamingLLM(BUDGET), max_new_tokens=2, prefill_chunk_size=8, **inputs)
    without = {name: value for name, value in inputs.items() if name != "mm_token_type_ids"}
    with refused("mm_token_type_ids", "missing"):
        prefill(model, inputs["input_ids"], images=Images.among(without))
