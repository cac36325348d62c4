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

BUDGET, WINDOW, LOOKAHEAD = 24, 8, 5
both = pytest.mark.parametrize("family", WITH_IMAGE)


def small(family: str, **parts: Any) -> SpecKV:
    return SpecKV.with_draft(pictured_draft(family), BUDGET, LOOKAHEAD, window=WINDOW, pool=NO_POOL, **parts)


def drafted(family: str, inputs: dict[str, Any]) -> Tensor:
    """The greedy answer of the draft model itself to a prompt with images."""
    model: Any = pictured_draft(family).of(family_model(family))
    ids = model.generate(**inputs, max_new_tokens=LOOKAHEAD, do_sample=False)
    return ids[:, inputs["input_ids"].shape[1] :]


def read_with_images(family: str) -> tuple[Any, dict[str, Any], State]:
    model, inputs = family_model(family), prompt(family)
    return model, inputs, prefill(model, inputs["input_ids"], images=Images.among(inputs))


@both
def test_entries_are_scored_by_the_answer_of_a_draft_that_sees_the_images(family: str) -> None:
    model, inputs, state = read_with_images(family)
    draft = drafted(family, inputs)
    weights = slow_pass(model, **longer(inputs, draft))[0]
    found = small(family).importance(model, state)
    for each, expected in zip(found, weights, strict=True):
        rows = expected[0, :, LENGTH - WINDOW :, : LENGTH - WINDOW].amax(dim=1)
        assert_close(each[0, :, : LENGTH - WINDOW], rows.unflatten(0, (each.shape[1], -1)).amax(dim=1))
    text: Any = pictured_draft(family).of(model)
    blind = text.generate(inputs["input_ids"], max_new_tokens=LOOKAHEAD, do_sample=False)[:, LENGTH:]
    assert not torch.equal(draft, blind), "the pixels matter"


@both
def test_a_later_turn_is_drafted_with_the_images_of_the_first(family: str) -> None:
    model, inputs, state = read_with_images(family)
    state, _ = read(model, state, ANSWER)
    drafter = ModelDrafter(pictured_draft(family), LOOKAHEAD)
    assert torch.equal(drafter(model, state).ids, drafted(family, longer(inputs, ANSWER)))


@both
def test_several_answers_of_a_prompt_are_drafted_with_its_images(family: str) -> None:
    model, inputs = family_model(family), prompt(family)
    greedy: dict[str, Any] = {"method": small(family), "max_new_tokens": 4, "do_sample": True, "top_k": 1}
    once = generate(model, **greedy, **inputs)
    assert torch.equal(generate(model, num_return_sequences=2, **greedy, **inputs), once.expand(2, -1))
    twice: dict[str, Any] = {name: torch.cat([value, value]) for name, value in inputs.items()}
    assert torch.equal(generate(model, **greedy, **twice), once.expand(2, -1))
    with refused("pixel_values", "conflict"):
        generate(model, num_return_sequences=2, **greedy, **twice)


def test_where_the_draft_cannot_see_the_images_one_line_says_so(tmp_path: Path) -> None:
    model, inputs, state = read_with_images(QWEN)
    refusals = [
        (SpecKV.with_draft(Fixed(family_model("Qwen3")), BUDGET, window=WINDOW), "pixel_values"),
        (
            SpecKV(BUDGET, DraftObserver(ModelDrafter(DraftHeadSource("head", LAYERS, tiny_draft_head()))), window=8),
            "draft",
        ),
        (small(QWEN, sparse=SparsePrefill(vertical=8, band=64)), "sparse"),
    ]
    for method, field in refusals:
        long = {**prompt(QWEN, length=120)} if field == "sparse" else inputs
        with pytest.raises(UserError) as error:
            generate(model, method=method, max_new_tokens=2, **long)
        assert error.value.field == field
    saved = load_state(save_state(state, tmp_path, model=model), model).state
    for without in (saved, join([state, state]), take_rows(join([state, state]), [0])):
        with refused("pixel_values", "conflict"):
            small(QWEN).compress_state(model, without)
