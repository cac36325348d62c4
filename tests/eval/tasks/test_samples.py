"""How a prompt comes apart at its question."""

from dataclasses import replace
from typing import Any

import pytest

from keepsight.errors import UserError
from keepsight.eval.tasks.samples import RenderedSample, Sample, render, render_apart
from tests.tiny import tiny_tokenizer

CONTEXT = "Who is it? The fox said: who is it? It is the fox, said the bear."
QUESTION = "\n\nWho is it?"
SAMPLE = Sample(
    "one", "test", 64, CONTEXT + QUESTION, ("fox",), "qa_f1", 8, answer_prefix="Who is it?", question=QUESTION
)


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return tiny_tokenizer()


def apart(sample: Sample, tokenizer: Any) -> RenderedSample:
    return render_apart(render(sample, tokenizer), tokenizer)


def texts(sample: Sample, tokenizer: Any) -> tuple[str, str]:
    whole, parts = render(sample, tokenizer), apart(sample, tokenizer)
    both = [*parts.prompt_ids, *parts.question_ids]
    assert tokenizer.decode(both) == tokenizer.decode(whole.prompt_ids) and not len(whole.question_ids)
    return tokenizer.decode(parts.prompt_ids), tokenizer.decode(parts.question_ids)


def test_with_a_chat_template(tokenizer: Any) -> None:
    before, after = texts(SAMPLE, tokenizer)
    assert before == f"<|user|>{CONTEXT}"
    assert after == f"{QUESTION}<|end|><|assistant|>Who is it?"


def test_without_a_chat_template(tokenizer: Any) -> None:
    assert texts(replace(SAMPLE, chat=False), tokenizer) == (CONTEXT, f"{QUESTION}Who is it?")


def test_white_space_goes_with_the_question(tokenizer: Any) -> None:
    spaced = replace(SAMPLE, prompt=f"  {CONTEXT} \n {QUESTION}\n ", question=f"{QUESTION}\n ", answer_prefix=" It is")
    for chat in (True, False):
        before, after = texts(replace(spaced, chat=chat), tokenizer)
        assert before.endswith(f"  {CONTEXT}") and after.startswith(f" \n {QUESTION}\n ")


def test_a_template_that_strips_and_one_that_repeats_words_of_the_prompt() -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = "{{ messages[0].content | trim }}\nWho is it? Now answer:"
    before, after = texts(replace(SAMPLE, prompt=f" {CONTEXT}{QUESTION}\n", question=f"{QUESTION}\n"), tokenizer)
    assert (before, after) == (CONTEXT, f"{QUESTION}\nWho is it? Now answer:Who is it?")


@pytest.mark.parametrize(
    "sample",
    [
        replace(SAMPLE, question=""),
        replace(SAMPLE, question="\n "),
        replace(SAMPLE, prompt=QUESTION),
        replace(SAMPLE, prompt=f" {QUESTION}", chat=False),
    ],
)
def test_a_question_that_cannot_be_told_apart(sample: Sample, tokenizer: Any) -> None:
    with pytest.raises(UserError, match=r"sample test/one does not say where its question starts; .* question=seen"):
        apart(sample, tokenizer)
