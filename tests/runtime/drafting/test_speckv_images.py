"""SpecKV on prompts with images: the draft model reads them too."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from keepsight.errors import UserError
from keepsight.models.draft_sources import DraftHeadSource
from keepsight.runtime.drafting.observer import DraftObserver
from keepsight.runtime.drafting.speckv import ModelDrafter, SparsePrefill, SpecKV
from keepsight.runtime.generate import generate
from keepsight.runtime.images import Images
from keepsight.runtime.importance import NO_POOL
from keepsight.runtime.join import join, take_rows
from keepsight.runtime.saved import load_state, save_state
from keepsight.runtime.state import State, prefill, read
from tests.close import assert_close
from tests.families import family_model
from tests.models.retrieval_heads import LAYERS, tiny_draft_head
from tests.refused import refused
from tests.runtime.family_methods import LENGTH, WITH_IMAGE, pictured_draft
from tests.runtime.prompt_compression.prompts import Fixed
from tests.runtime.slow_families import slow_pass
from tests.runtime.test_images import ANSWER, QWEN, longer, prompt

BUDGET = 24
WINDOW = 8
LOOKAHEAD = 5
every_family = pytest.mark.parametrize("family", WITH_IMAGE)


def small_speckv(family: str, **parts: Any) -> SpecKV:
    return SpecKV.with_draft(pictured_draft(family), BUDGET, LOOKAHEAD, window=WINDOW, pool=NO_POOL, **parts)


def draft_of(family: str, inputs: dict[str, Any]) -> Tensor:
    """The greedy answer of the draft model itself to a prompt with images."""
    model: Any = pictured_draft(family).of(family_model(family))
    ids = model.generate(**inputs, max_new_tokens=LOOKAHEAD, do_sample=False)
    return ids[:, inputs["input_ids"].shape[1] :]


def read_with_images(family: str) -> tuple[Any, dict[str, Any], State]:
    model = family_model(family)
    inputs = prompt(family)
    return model, inputs, prefill(model, inputs["input_ids"], images=Images.among(inputs))


@every_family
def test_entries_are_scored_by_the_answer_of_a_draft_that_sees_the_images(family: str) -> None:
    model, inputs, state = read_with_images(family)
    draft = draft_of(family, inputs)
    attention = slow_pass(model, **longer(inputs, draft))[0]
    importance = small_speckv(family).importance(model, state)
    before_window = LENGTH - WINDOW
    for layer, weights in zip(importance, attention, strict=True):
        by_query_head = weights[0, :, before_window:, :before_window].amax(dim=1)
        by_kv_head = by_query_head.unflatten(0, (layer.shape[1], -1)).amax(dim=1)
        assert_close(layer[0, :, :before_window], by_kv_head)

    draft_model: Any = pictured_draft(family).of(model)
    without_images = draft_model.generate(inputs["input_ids"], max_new_tokens=LOOKAHEAD, do_sample=False)
    assert not torch.equal(draft, without_images[:, LENGTH:]), "the pixels matter"


@every_family
def test_a_later_turn_is_drafted_with_the_images_of_the_first(family: str) -> None:
    model, inputs, state = read_with_images(family)
    state, _ = read(model, state, ANSWER)
    drafter = ModelDrafter(pictured_draft(family), LOOKAHEAD)
    assert torch.equal(drafter(model, state).ids, draft_of(family, longer(inputs, ANSWER)))


@every_family
def test_several_answers_of_a_prompt_are_drafted_with_its_images(family: str) -> None:
    model = family_model(family)
    inputs = prompt(family)
    options: dict[str, Any] = {"method": small_speckv(family), "max_new_tokens": 4, "do_sample": True, "top_k": 1}
    one_answer = generate(model, **options, **inputs)
    two_answers = generate(model, num_return_sequences=2, **options, **inputs)
    assert torch.equal(two_answers, one_answer.expand(2, -1))

    two_rows: dict[str, Any] = {name: torch.cat([value, value]) for name, value in inputs.items()}
    assert torch.equal(generate(model, **options, **two_rows), one_answer.expand(2, -1))
    with refused("pixel_values", "conflict"):
        generate(model, num_return_sequences=2, **options, **two_rows)


def test_where_the_draft_cannot_see_the_images_one_line_says_so(tmp_path: Path) -> None:
    model, inputs, state = read_with_images(QWEN)
    text_draft = SpecKV.with_draft(Fixed(family_model("Qwen3")), BUDGET, window=WINDOW)
    head = DraftHeadSource("head", LAYERS, tiny_draft_head())
    draft_head = SpecKV(BUDGET, DraftObserver(ModelDrafter(head)), window=8)
    sparse = small_speckv(QWEN, sparse=SparsePrefill(vertical=8, band=64))
    refusals = [
        (text_draft, inputs, "pixel_values"),
        (draft_head, inputs, "draft"),
        (sparse, prompt(QWEN, length=120), "sparse"),
    ]
    for method, prompt_inputs, field in refusals:
        with pytest.raises(UserError) as error:
            generate(model, method=method, max_new_tokens=2, **prompt_inputs)
        assert error.value.field == field

    loaded = load_state(save_state(state, tmp_path, model=model), model).state
    joined = join([state, state])
    for without_images in (loaded, joined, take_rows(join([state, state]), [0])):
        with refused("pixel_values", "conflict"):
            small_speckv(QWEN).compress_state(model, without_images)
