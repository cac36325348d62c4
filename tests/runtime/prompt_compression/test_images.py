"""SpecPC on prompts with images: a draft model that sees them too, and a base model that reads some of their tokens."""

from typing import Any

import torch
from torch import Tensor

from keepsight.errors import Code
from keepsight.models.draft_sources import DraftHeadSource
from keepsight.runtime.generate import generate
from keepsight.runtime.images import Images
from keepsight.runtime.prompt_compression.specpc import SpecPC, select_tokens
from tests.close import assert_close
from tests.families import family_model, fresh_model
from tests.models.retrieval_heads import LAYERS, tiny_draft_head
from tests.refused import refused
from tests.runtime.family_methods import LENGTH
from tests.runtime.prompt_compression.prompts import Fixed
from tests.runtime.slow_families import slow_pass
from tests.runtime.test_images import ANSWER, GEMMA, IMAGE, QWEN, longer, prompt
from tests.tiny import prompt_ids

DRAFT: Any = Fixed(fresh_model(QWEN, seed=7))
GREEDY: dict[str, Any] = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": None}
BUDGET = 24
WINDOW = 8


def small_specpc(budget: int = BUDGET, **options: Any) -> SpecPC:
    defaults = {"window": WINDOW, "draft": DRAFT, "kernel": 4, "first_layer": 2}
    return SpecPC(budget, **(defaults | options))


def weighted(attention: Tensor) -> Tensor:
    """What the last `w` tokens of a prompt look at, [..., w, N]: later ones count more."""
    return attention * torch.linspace(0, 1, attention.shape[-2])[:, None]


def kept_of(inputs: dict[str, Any]) -> Tensor:
    """The tokens that the draft's eager attention over the whole prompt selects."""
    layers = slow_pass(DRAFT.model, **inputs)[0][2:]
    attention = torch.stack(layers)[:, 0, :, -WINDOW:]
    scores = weighted(attention).amax(dim=(0, 1, 2))
    return select_tokens(scores, BUDGET, WINDOW, 4, 4)


def positions_of(inputs: dict[str, Any], answer: Tensor, kept: Tensor) -> Tensor:
    """[3, 1, C + T]: the model's own positions of what is kept, one by one without gaps, and those of the answer."""
    with_answer = longer(inputs, answer)
    with_answer.pop("pixel_values", None)
    full_positions, _ = family_model(QWEN).model.get_rope_index(**with_answer)
    answer_range = torch.arange(LENGTH, LENGTH + answer.shape[1])
    positions = full_positions[..., torch.cat([kept, answer_range])]
    distinct = sorted({*positions.flatten().tolist()})
    ranks = [distinct.index(position) for position in positions.flatten().tolist()]
    return torch.tensor(ranks).view(positions.shape)


def test_the_target_reads_what_a_draft_that_sees_the_images_attends_to() -> None:
    model = family_model(QWEN)
    inputs = prompt(QWEN)
    kept = kept_of(inputs)
    image_tokens = int((inputs["input_ids"][:, kept] == IMAGE).sum())
    assert 0 < image_tokens < 8, "of the image, a part is kept"

    answer = generate(model, method=small_specpc(), **inputs, **GREEDY)
    with torch.no_grad():
        prompt_embedded = model(**inputs, output_hidden_states=True).hidden_states[0][:, kept]
        embedded = torch.cat([prompt_embedded, model.get_input_embeddings()(answer)], dim=1)
    _, logits = slow_pass(model, inputs_embeds=embedded, position_ids=positions_of(inputs, answer, kept))
    assert torch.equal(logits[:, BUDGET - 1 : -1].argmax(dim=-1), answer)


def test_a_draft_whose_image_tokens_see_one_another_scores_by_its_own_attention() -> None:
    draft = family_model(GEMMA)
    inputs = prompt(GEMMA, seed=24)
    window = 14  # with the image
    method = small_specpc(draft=Fixed(draft), window=window, reduction="sum")
    scores, _ = method.draft_scores(draft, inputs["input_ids"][0], Images.among(inputs))
    attention = slow_pass(draft, **inputs)[0][1][0, :, -window:]
    assert_close(scores, weighted(attention).sum(dim=(0, 1)))


def test_a_turn_goes_on_at_the_new_positions() -> None:
    model = family_model(QWEN)
    inputs = prompt(QWEN)
    options = GREEDY | {"return_dict_in_generate": True}
    output = model.generate(**inputs, custom_generate=small_specpc(), **options)
    assert torch.equal(output.sequences[:, :LENGTH], inputs["input_ids"])

    state = output.past_key_values.state
    positions = positions_of(inputs, output.sequences[:, LENGTH:], kept_of(inputs))
    assert state.length == BUDGET + 5
    assert int((state.lengths + state.rope_offset)[0]) == int(positions.max())

    turn = torch.cat([output.sequences, ANSWER], dim=1)
    next_output = model.generate(
        turn, past_key_values=output.past_key_values, custom_generate=small_specpc(), **options
    )
    assert torch.equal(next_output.sequences[:, : turn.shape[1]], turn)


def test_a_draft_scores_in_its_layers_with_full_attention() -> None:
    """In Gemma the second and the last of four, so that the third on means the last alone."""
    ids = prompt_ids(LENGTH)[0]
    target = family_model("Qwen3")
    draft = family_model("Gemma 3 (text)")
    scores, _ = small_specpc(draft=Fixed(draft), first_layer=2).draft_scores(target, ids[0])
    attention = slow_pass(draft, input_ids=ids)[0][1][0, :, -WINDOW:]
    assert_close(scores, weighted(attention).amax(dim=(0, 1)))
    windowed = small_specpc(draft=Fixed(family_model("Mistral with a window")))
    with refused("first_layer", "model"):
        windowed.draft_scores(target, ids[0])


def test_what_cannot_be_shortened_is_refused_in_one_line() -> None:
    model = family_model(QWEN)
    inputs = prompt(QWEN)
    two_rows = {name: torch.cat([value, value]) for name, value in inputs.items()}
    padded = inputs | {"attention_mask": (torch.arange(LENGTH) > 1).long()[None]}
    draft_head = small_specpc(draft=DraftHeadSource("head", LAYERS, tiny_draft_head()), first_layer=None)
    text_draft = small_specpc(draft=Fixed(family_model("Qwen3")))
    gemma_draft = small_specpc(draft=Fixed(fresh_model(GEMMA, seed=7)))
    refusals: list[tuple[Any, Any, Any, str, Code]] = [
        (model, small_specpc(), two_rows, "pixel_values", "conflict"),
        (model, small_specpc(), padded, "pixel_values", "conflict"),
        (model, draft_head, inputs, "draft", "model"),
        (model, text_draft, inputs, "pixel_values", "model"),
        (family_model(GEMMA), gemma_draft, prompt(GEMMA), "pixel_values", "model"),
    ]
    for target, method, options, field, code in refusals:
        with refused(field, code):
            generate(target, method=method, **options, **GREEDY)
