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
    model = tiny_model()
    ids, _ = prompt_ids(30)
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
    output = model.generate(ids, attention_mask=mask, custom_generate=FullCache(), **options)
    assert torch.equal(output.sequences, expected.sequences)
    for name in ("scores", "logits"):
        assert len(output[name]) == 6
        for step, expected_step in zip(output[name], expected[name], strict=True):
            assert_close(step, expected_step)
    assert not torch.equal(output.scores[0], output.logits[0])


@pytest.mark.parametrize("method", METHODS, ids=lambda method: type(method).__name__)
def test_past_key_values_go_on_as_a_conversation_does(method):
    model = tiny_model()
    turns = [prompt_ids(30)[0], prompt_ids(7, seed=1)[0], prompt_ids(5, seed=2)[0]]
    conversation = Conversation(model, method)
    history = turns[0][:, :0]
    next_past: dict[str, Any] = {}
    for turn in turns:
        past = next_past
        ids = torch.cat([history, turn], dim=1)
        output = model.generate(ids, custom_generate=method, **DICT, **past)
        history = output.sequences
        next_past = {"past_key_values": output.past_key_values}
        answer = output.sequences[:, ids.shape[1] :]
        assert torch.equal(answer, conversation.say(turn, **GREEDY))
    repeated = model.generate(ids, custom_generate=method, **DICT, **past)
    assert torch.equal(repeated.sequences, output.sequences)


def test_each_prompt_is_answered_as_often_as_asked():
    model = tiny_model()
    ids, mask = prompt_ids(30, 11)
    options = {"max_new_tokens": 8, "do_sample": True, "temperature": 3.0, "eos_token_id": None}
    torch.manual_seed(0)
    answers = model.generate(ids, attention_mask=mask, custom_generate=FullCache(), num_return_sequences=3, **options)
    torch.manual_seed(0)
    expected = model.generate(ids, attention_mask=mask, num_return_sequences=3, **options)
    assert torch.equal(answers, expected)
    assert len(answers) == 6
    assert len(answers.unique(dim=0)) == 6


def _right_padded():
    ids, mask = prompt_ids(30, 11)
    return {"input_ids": ids.flip(1), "attention_mask": mask.flip(1)}


def _filled_cache():
    cache = DynamicCache()
    tiny_model()(prompt_ids(8)[0], past_key_values=cache)
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
    "a filled cache": (lambda: {"past_key_values": _filled_cache()}, "past_key_values", "state"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_honoured_is_refused_in_one_line(case):
    make_options, field, code = REFUSED[case]
    model = tiny_model()
    model.set_attn_implementation("eager")
    options = {"input_ids": prompt_ids(30)[0]} | GREEDY | make_options()
    with refused(field, code):
        model.generate(**options, custom_generate=SMALL)


def test_positions_of_padding_may_be_anything():
    """transformers' own code fills in 1."""
    model = tiny_model()
    ids, mask = prompt_ids(30, 11)
    positions = mask.cumsum(dim=1) - 1
    expected = model.generate(ids, attention_mask=mask, custom_generate=SMALL, **GREEDY)
    for padding in (0, 1, 7):
        inputs = {"attention_mask": mask, "position_ids": positions.masked_fill(mask == 0, padding)}
        assert torch.equal(model.generate(ids, custom_generate=SMALL, **inputs, **GREEDY), expected)
        assert torch.equal(generate(model, ids, SMALL, **inputs, **GREEDY), expected[:, 30:])
        shifted = inputs | {"position_ids": positions + 1}
        with refused("position_ids", "data"):
            model.generate(ids, custom_generate=SMALL, **shifted, **GREEDY)


def test_a_cache_that_the_models_own_configuration_names_is_ignored():
    """The configurations of Gemma 2 and 3 on the Hub name one."""
    model = tiny_model()
    ids, _ = prompt_ids(30)
    expected = model.generate(ids, custom_generate=SMALL, **GREEDY)
    model.generation_config.cache_implementation = "static"
    assert torch.equal(model.generate(ids, custom_generate=SMALL, **GREEDY), expected)


def test_a_past_that_does_not_fit_is_refused():
    model = tiny_model()
    ids, _ = prompt_ids(30)
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
    model = tiny_model()
    ids, _ = prompt_ids(30)
    output = model.generate(ids, custom_generate=SMALL, **DICT)
    longer = torch.cat([output.sequences, prompt_ids(4)[0]], dim=1)
    past = output.past_key_values
    resumed = model.generate(longer, custom_generate=FullCache(), past_key_values=past, **DICT)
    turn_length = 1 + 4  # the answer's last token was not read before
    assert resumed.past_key_values.state.length == 12 + 5 + turn_length + 5


def test_generate_answers_several_questions_from_one_loaded_state(tmp_path):
    model = tiny_model()
    ids, _ = prompt_ids(30)
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
    conversation = Conversation(model, FullCache(), state)
    conversation.say(question, **GREEDY)
    assert torch.equal(further, conversation.say(ids, **GREEDY))
    with refused("question", "conflict"):
        generate(model, question.repeat(2, 1), saved, **GREEDY)


def test_a_method_of_another_type_is_refused():
    """transformers ignores a `custom_generate` that it cannot call: the ids alone would be answered."""
    model = tiny_model()
    ids, _ = prompt_ids(30)
    values: list[Any] = [DynamicCache(), SnapKV, "snapkv", [], 0]
    for value in values:
        with refused("method", "type"):
            generate(model, ids, value, **GREEDY)
