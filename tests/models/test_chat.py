"""Prompts as text: through a chat template, through one from a file, and without any, as base models read them."""

from pathlib import Path

import pytest

from keepsight.data_gen.generate import render_prompt
from keepsight.data_gen.prompts import Prompt
from keepsight.eval.tasks.niah import make_samples
from keepsight.eval.tasks.samples import Sample, render, render_apart, render_turns
from keepsight.models.chat import chat_text, prompt_text
from keepsight.models.targets import load_target
from tests.refused import refused
from tests.tiny import base_tokenizer, save_tiny_target, tiny_tokenizer

TURNS = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Where is it?"}]
SAMPLE = Sample("0", "test", 128, "The fox sleeps.\nWhere?", ("here",), "qa_f1", 12, "It is", question="\nWhere?")


def test_without_a_template_a_prompt_is_its_plain_text() -> None:
    base = base_tokenizer()
    assert prompt_text(base, TURNS) == "Be brief.\n\nWhere is it?"
    assert prompt_text(base, TURNS[1:], "It is") == "Where is it?\nIt is"
    assert prompt_text(base, TURNS[1:], " It is") == "Where is it? It is"
    assert prompt_text(base, [{"role": "user", "content": "Answer: "}], "It") == "Answer: It"
    assert prompt_text(tiny_tokenizer(), TURNS[1:], "It is") == "<|user|>Where is it?<|end|><|assistant|>It is"


def test_a_base_models_samples_begin_with_its_first_token_once() -> None:
    base = base_tokenizer()
    rendered = render(SAMPLE, base)
    assert base.decode(rendered.prompt_ids) == "<|start|>The fox sleeps.\nWhere?\nIt is"
    apart = render_apart(rendered, base)
    assert base.decode(apart.prompt_ids) == "<|start|>The fox sleeps."
    assert base.decode(apart.question_ids) == "\nWhere?\nIt is"
    first = Sample("1", "turns", 128, "Who?", ("x",), "qa_f1", 12)
    second = Sample("2", "turns", 128, "Why?", ("x",), "qa_f1", 12, earlier=("Who?",))
    _, later = render_turns([first, second], base)
    assert base.decode(later.question_ids) == "\n\nWhy?"
    (needle,) = make_samples("single", 320, 1, 0, base)
    assert needle.prompt_ids.tolist().count(base.bos_token_id) == 1
    assert len(needle.prompt_ids) + needle.max_new_tokens <= 320


def test_a_base_models_training_prompts_begin_with_its_first_token_once() -> None:
    base = base_tokenizer()
    turns = ({"role": "user", "content": "Hello?"},)
    with_prefix = render_prompt(0, Prompt("mine", turns, answer_prefix="Well,"), base)
    assert base.decode(with_prefix.ids) == "<|start|>Hello?\nWell,"
    without_template = render_prompt(0, Prompt("mine", turns, template=False), base)
    assert base.decode(without_template.ids) == "<|start|>Hello?"


def test_a_template_from_a_file_is_part_of_the_target(tmp_path: Path) -> None:
    folder = str(save_tiny_target(tmp_path / "base", tokenizer=base_tokenizer()))
    file = tmp_path / "chat.jinja"
    file.write_text("{% for m in messages %}[{{ m['role'] }}] {{ m['content'] }}\n{% endfor %}[assistant]")
    without_template = load_target(folder, device="cpu")
    with_template = load_target(folder, device="cpu", chat_template=file)
    assert chat_text(with_template.tokenizer, TURNS[1:]) == "[user] Where is it?\n[assistant]"
    assert with_template.identity.template != without_template.identity.template
    with refused("model.chat_template", "missing"):
        chat_text(without_template.tokenizer, TURNS)


@pytest.mark.parametrize("content", ["{% for", "no message at all", "{{ raise_exception('no') }}", "\udce4", None])
def test_a_file_that_is_no_template_is_refused(tmp_path: Path, content: str | None) -> None:
    folder = str(save_tiny_target(tmp_path / "tiny"))
    file = tmp_path / "chat.jinja"
    if content is not None:
        file.write_bytes(content.encode("utf-8", "surrogateescape"))
    with refused("model.chat_template", "file"):
        load_target(folder, device="cpu", chat_template=file)
