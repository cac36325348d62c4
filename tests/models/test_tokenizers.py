"""Tokenizers of any class: chats that a class renders itself have the ids of its own rendering, or are refused."""

from typing import Any

import pytest

from keepsight.commands.inspect import _ids
from keepsight.data_gen.generate import render_prompt
from keepsight.data_gen.prompts import Prompt
from keepsight.eval.tasks.samples import Sample, render
from keepsight.models.chat import chat_text, encode, load_tokenizer, set_chat_template
from keepsight.models.targets import Target
from tests.refused import refused
from tests.tiny import tiny_model
from tests.tokenizers import OwnChats, tokenizers_of_all_kinds

TURNS = [{"role": "user", "content": "Two  words\nand \u00e9."}]


@pytest.mark.parametrize("kind", tokenizers_of_all_kinds())
def test_every_command_reads_a_chat_as_the_tokenizer_renders_it(kind: str) -> None:
    tokenizer = tokenizers_of_all_kinds()[kind]
    expected = tokenizer.apply_chat_template(TURNS, tokenize=True, add_generation_prompt=True)["input_ids"]
    text = TURNS[0]["content"]
    assert encode(tokenizer, [chat_text(tokenizer, TURNS)], special=False) == [expected]
    prompt = Prompt("a", tuple(TURNS))
    assert render_prompt(0, prompt, tokenizer).ids == expected
    sample = Sample("0", "a", 0, text, (), "exact", 1)
    assert render(sample, tokenizer).prompt_ids.tolist() == expected
    target = Target(tiny_model(vocab_size=len(tokenizer)), tokenizer, "tiny", "1")
    assert [*_ids(text, True, target)] == expected


def test_a_class_that_renders_chats_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer: Any = OwnChats()
    monkeypatch.setattr("transformers.AutoTokenizer.from_pretrained", lambda *_, **__: tokenizer)
    assert load_tokenizer("a") is tokenizer
    with refused("model.chat_template", "model"):
        set_chat_template(tokenizer, "any.jinja")
    tokenizer.is_readable = False
    with refused("tokenizer", "model"):
        load_tokenizer("a")
