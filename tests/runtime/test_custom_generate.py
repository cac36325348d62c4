"""What `model.generate(custom_generate=...)` honours, and what it refuses instead of ignoring it."""

from typing import Any

import pytest
import torch
from transformers.cache_utils import DynamicCache

from keepsight import Conversation, generate, load_state, save_state
from keepsight.runtime.drafting.speculative import Speculative
from keepsight.runtime.generate import FullCache
from keepsight.runtime.importance import Pool
from keepsight.runtime.methods import Kivi, SnapKV, StreamingLLM, Truncation
from tests.close import assert_close
from tests.refused import refused
from tests.tiny import prompt_ids, tiny_model

SMALL = SnapKV(12, window=4, pool=Pool(kernel=3))
GREEDY: dict[str, Any] = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": None}
DICT: dict[str, Any] = GREEDY | {"return_dict_in_generate": True}
METHODS: list[Any] = [FullCache(), SMALL, StreamingLLM(12), Kivi(residual=8, group=8), Truncation(20)]


@pytest.mark.parametrize("method", METHODS, ids=lambda method: type(method).__name__)
def test_a_dict_holds_what_is_returned_without_one(method):
    model, ids = tiny_model(), prompt_ids(30)[0]
    plain = model.generate(ids, custom_generate=method, **GREEDY)
    output = model.generate(ids, custom_generate=method, **DICT)
    assert torch.equal(output.sequences, plain)
    assert output.scores is None and output.logits is None
    assert torch.equal(generate(model, ids, method, **GREEDY), plain[:, 30:])
    assert torch.equal(generate(model, ids, method, **DICT).sequences, plain)


def test_scores_and_logits_are_those_of_transformers():
    model = tiny_model()
    ids, mask = prompt_ids(30, 11)
    options = DICT | {"output_scores": True, "output_logits": True, "repetition_penalty": 1.5}
    expected = model.generate(ids, attention_mask=mask, **options)
    found = model.generate(ids, attention_mask=mask, custom_generate=FullCache(), **options)
    assert torch.equal(found.sequences, expected.sequences)
    for name in ("scores", "logits"):
        assert len(found[name]) == 6
        for pair in zip(found[name], expected[name], strict=True):
            assert_close(*pair)
    assert not torch.equal(found.scores[0], found.logits[0])


@pytest.mark.parametrize("method", METHODS, ids=lambda method: type(method).__name__)
def test_past_key_values_go_on_as_a_conversation_does(method):
    model, turns = tiny_model(), [prompt_ids(30)[0], prompt_ids(7, seed=1)[0], prompt_ids(5, seed=2)[0]]
    conversation, said = Conversation(model, method), turns[0][:, :0]
    past: dict[str, Any] = {}
    for turn in turns:
        ids, before = torch.cat([said, turn], dim=1), past
        output = model.generate(ids, custom_generate=method, **DICT, **past)
        said, past = output.sequences, {"past_key_values": output.past_key_values}
        assert torch.equal(output.sequences[:, ids.shape[1] :], conversation.say(turn, **GREEDY))
    again = model.generate(ids, custom_generate=method, **DICT, **before)
    assert torch.equal(again.sequences, output.sequences)


def test_each_prompt_is_answered_as_often_as_asked():
    model = tiny_model()
    ids, mask = prompt_ids(30, 11)
    options = {"max_new_tokens": 8, "do_sample": True, "temperature": 3.0, "eos_token_id": None}
    torch.manual_seed(0)
    found = model.generate(ids, attention_mask=mask, custom_generate=FullCache(), num_return_sequences=3, **options)
    torch.manual_seed(0)
    assert torch.equal(found, model.generate(ids, attention_mask=mask, num_return_sequences=3, **options))
    assert len(found) == 6 and len(found.unique(dim=0)) == 6


def _right_padded():
    ids, mask = prompt_ids(30, 11)
    return {"input_ids": ids.flip(1), "attention_mask": mask.flip(1)}


def _filled():
    model, cache = tiny_model(), DynamicCache()
    model(prompt_ids(8)[0], past_key_values=cache)
    return cache


REFUSED: dict[str, Any] = {
    "num_beams": (lambda: {"num_beams": 3}, "num_beams", "conflict"),
    "prompt lookup": (lambda: {"prompt_lookup_num_tokens": 3}, "num_beams", "conflict"),
    "inputs_embeds": (lambda: {"input_ids": None, "inputs_embeds": torch.rand(1, 9, 32)}, "inputs_embeds", "conflict"),
    "right padding": (_right_padded, "attention_mask", "data"),
    "a hole": (lambda: {"attention_mask": (torch.arange(30) != 4).long()[None]}, "attention_mask", "data"),
    "positions": (lambda: {"position_ids": torch.arange(30)[None] + 5}, "position_ids", "data"),
    "attentions": (
        lambda: {"return_dict_in_generate": True, "output_attentions": True},
        "output_attentions",
        "conflict",
    ),
    "another cache": (lambda: {"cache_implementation": "static"}, "cache_implementation", "conflict"),
    "a short mask": (lambda: {"attention_mask": torch.ones(1, 29).long()}, "position_ids", "data"),
    "a filled cache": (lambda: {"past_key_values": _filled()}, "past_key_values", "state"),
}


@pytest.mark.parametrize("given", REFUSED)
def test_what_cannot_be_honoured_is_refused_in_one_line(given):
    options, field, code = REFUSED[given]
    model = tiny_model()
    model.set_attn_implementation("eager")
    with refused(field, code):
        model.generate(**{"input_ids": prompt_ids(30)[0]} | GREEDY | options(), custom_generate=SMALL)


def test_positions_of_padding_are_anything():
    """transformers' own idiom has 1 there."""
    model, (ids, mask) = tiny_model(), prompt_ids(30, 11)
    positions = mask.cumsum(dim=1) - 1
    expected = model.generate(ids, attention_mask=mask, custom_generate=SMALL, **GREEDY)
    for padding in (0, 1, 7):
        given = {"attention_mask": mask, "position_ids": positions.masked_fill(mask == 0, padding)}
        assert torch.equal(model.generate(ids, custom_generate=SMALL, **given, **GREEDY), expected)
        assert torch.equal(generate(model, ids, SMALL, **given, **GREEDY), expected[:, 30:])
        with refused("position_ids", "data"):
            model.generate(ids, custom_generate=SMALL, **given | {"position_ids": positions + 1}, **GREEDY)


def test_a_cache_that_the_models_own_configuration_names_is_no_wish():
    """As in those of Gemma 2 and 3 on the Hub."""
    model, ids = tiny_model(), prompt_ids(30)[0]
    expected = model.generate(ids, custom_generate=SMALL, **GREEDY)
    model.generation_config.cache_implementation = "static"
    assert torch.equal(model.generate(ids, custom_generate=SMALL, **GREEDY), expected)


def test_a_past_that_does_not_fit_is_refused():
    model, ids = tiny_model(), prompt_ids(30)[0]
    output = model.generate(ids, custom_generate=SMALL, **DICT)
    past = {"past_key_values": output.past_key_values}
    longer = torch.cat([output.sequences, prompt_ids(4)[0]], dim=1)
    with refused("input_ids", "conflict"):
        model.generate(longer[:, 1:], custom_generate=SMALL, **GREEDY, **past)

    with refused("past_key_values", "conflict"):
        Conversation(model, SMALL).say(longer, **GREEDY, **past)
    with refused("input_ids", "range"):
        model.generate(longer.repeat(2, 1), custom_generate=SMALL, **GREEDY, **past)
    with refused("past_key_values", "conflict"):
        model.generate(longer, custom_generate=Speculative(None, SMALL), **GREEDY, **past)  # type: ignore[arg-type]
    packed = model.generate(ids, custom_generate=Kivi(residual=8, group=8), **DICT)
    longer = torch.cat([packed.sequences, prompt_ids(4)[0]], dim=1)
    with refused("past_key_values", "state"):
        model.generate(longer, custom_generate=SMALL, past_key_values=packed.past_key_values, **GREEDY)


def test_another_method_may_go_on_from_entries_that_join():
    model, ids = tiny_model(), prompt_ids(30)[0]
    output = model.generate(ids, custom_generate=SMALL, **DICT)
    longer = torch.cat([output.sequences, prompt_ids(4)[0]], dim=1)
    found = model.generate(longer, custom_generate=FullCache(), past_key_values=output.past_key_values, **DICT)
    assert found.past_key_values.state.length == 12 + 5 + 1 + 4 + 5


def test_a_loaded_state_is_asked_again_by_generate(tmp_path):
    model, ids = tiny_model(), prompt_ids(30)[0]
    state = SMALL.start(model, ids)
    saved = load_state(save_state(state, tmp_path, model=model, question="multi"), model)
    for seed in (1, 2, 1):
        question = prompt_ids(6, seed=seed)[0]
        expected = Conversation(model, FullCache(), state).say(question, **GREEDY)
        assert torch.equal(generate(model, question, saved, **GREEDY), expected)
        output = model.generate(question, custom_generate=saved, **DICT)
        assert torch.equal(output.sequences, torch.cat([question, expected], dim=1))
    longer = torch.cat([output.sequences, ids], dim=1)
    further = generate(model, longer, saved, past_key_values=output.past_key_values, **GREEDY)
    talk = Conversation(model, FullCache(), state)
    talk.say(question, **GREEDY)
    assert torch.equal(further, talk.say(ids, **GREEDY))
    with refused("question", "conflict"):
        generate(model, question.repeat(2, 1), saved, **GREEDY)


def test_what_is_no_method_is_refused():
    """transformers ignores a `custom_generate` that it cannot call: the ids alone would be answered."""
    model, ids = tiny_model(), prompt_ids(30)[0]
    wrong: Any
    for wrong in (DynamicCache(), SnapKV, "snapkv", [], 0):
        with refused("method", "type"):
            generate(model, ids, wrong, **GREEDY)
