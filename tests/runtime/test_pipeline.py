"""One compressed context, several questions."""

from typing import Any

import pytest
import torch

from keepsight import Conversation, Kivi, SnapKV, generate, pipeline
from keepsight.runtime.generate import FullCache
from keepsight.runtime.pipeline import Pipeline
from tests.refused import refused
from tests.tiny import tiny_model, tiny_tokenizer

CONTEXT = "The harbour was calm. The code of the blue door is 48213. Nobody came by in the morning. " * 2
QUESTIONS = ["What is the code?", "Who came by?"]


@pytest.fixture(scope="module")
def pipe() -> Pipeline:
    tokenizer = tiny_tokenizer()
    return pipeline(tiny_model(vocab_size=len(tokenizer)), tokenizer)


def test_the_full_cache_answers_as_generate_does(pipe: Pipeline) -> None:
    answers = pipe(CONTEXT, QUESTIONS, max_new_tokens=6)
    for question, answer in zip(QUESTIONS, answers, strict=True):
        context_ids, question_ids = pipe._ids(CONTEXT, question, "")
        prompt = torch.cat([context_ids, question_ids], dim=1)
        ids = generate(pipe.model, prompt, max_new_tokens=6)
        assert answer == pipe.tokenizer.decode(ids[0], skip_special_tokens=True)


def test_each_question_is_answered_from_the_same_context(pipe: Pipeline) -> None:
    method = SnapKV(budget=24, window=8)
    answers = pipe(CONTEXT, QUESTIONS, method, max_new_tokens=6)
    assert answers == [pipe(CONTEXT, question, method, max_new_tokens=6) for question in QUESTIONS]


def test_nothing_is_evicted_for_a_question(pipe: Pipeline, monkeypatch: pytest.MonkeyPatch) -> None:
    method = SnapKV(budget=24, window=8)
    lengths: list[int] = []
    compress_state = SnapKV.compress_state

    def record_and_compress(self: SnapKV, model: Any, state: Any) -> Any:
        lengths.append(state.tokens.shape[1])
        return compress_state(self, model, state)

    monkeypatch.setattr(SnapKV, "compress_state", record_and_compress)
    pipe(CONTEXT, QUESTIONS, method, max_new_tokens=3)
    context_ids, _ = pipe._ids(CONTEXT, QUESTIONS[0], "")
    assert set(lengths) <= {context_ids.shape[1]}


def test_options_reach_generate(pipe: Pipeline) -> None:
    torch.manual_seed(0)
    sampled = pipe(CONTEXT, QUESTIONS[0], max_new_tokens=6, do_sample=True)
    torch.manual_seed(0)
    assert pipe(CONTEXT, QUESTIONS[0], max_new_tokens=6, do_sample=True) == sampled
    with refused("num_beams", "conflict"):
        pipe(CONTEXT, QUESTIONS[0], num_beams=2)


@pytest.mark.parametrize(
    ("context", "questions"),
    [("", QUESTIONS), (CONTEXT, ["Who?", " "]), (CONTEXT, "")],
)
def test_empty_texts_are_refused(pipe: Pipeline, context: str, questions: Any) -> None:
    with refused("question", "range"):
        pipe(context, questions, FullCache())


def test_no_questions_have_no_answers(pipe: Pipeline) -> None:
    assert pipe(CONTEXT, []) == []


def test_a_loaded_model_needs_its_tokenizer() -> None:
    with refused("tokenizer", "missing"):
        pipeline(tiny_model())


def test_a_state_and_what_compress_returns_answer_questions(pipe: Pipeline) -> None:
    method = SnapKV(budget=24, window=8)
    expected = pipe(CONTEXT, QUESTIONS, method, max_new_tokens=6)
    context_ids, _ = pipe._ids(CONTEXT, QUESTIONS[0], "")
    state = method.start(pipe.model, context_ids)
    past = method.compress(pipe.model, input_ids=context_ids)
    for source in (state, past):
        answers = []
        for question in QUESTIONS:
            _, question_ids = pipe._ids(CONTEXT, question, "")
            ids = generate(pipe.model, question_ids, source, max_new_tokens=6)
            answers.append(pipe.tokenizer.decode(ids[0], skip_special_tokens=True))
        assert answers == expected


def test_states_that_need_their_method_are_refused(pipe: Pipeline) -> None:
    context_ids, question_ids = pipe._ids(CONTEXT, QUESTIONS[0], "")
    packed = Kivi(bits=2, group=8).start(pipe.model, context_ids)
    with refused("past_key_values", "state"):
        generate(pipe.model, question_ids, packed)

    conversation = Conversation(pipe.model, SnapKV(budget=24, window=8))
    output: Any = conversation.say(context_ids, max_new_tokens=2, return_dict_in_generate=True)
    with refused("past_key_values", "state"):
        generate(pipe.model, question_ids, output.past_key_values)
