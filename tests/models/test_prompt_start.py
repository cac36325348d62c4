"""Texts that begin with the special tokens that their tokenizer adds: none is added twice, wherever they are read."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tokenizers.processors import TemplateProcessing

from keepsight import Conversation, SnapKV, generate, load_state, save_state
from keepsight.commands.inspect import _ids
from keepsight.data_gen.generate import render_prompt
from keepsight.data_gen.prompts import Prompt
from keepsight.eval.harness import HarnessModel
from keepsight.eval.tasks.samples import Sample, render, render_apart
from keepsight.models.chat import encode, start_tokens
from tests.refused import refused
from tests.tiny import tiny_model, tiny_tokenizer

GREEDY: dict[str, Any] = {"max_new_tokens": 4, "do_sample": False, "eos_token_id": None}
TEMPLATE = "{{ bos_token }}" + str(tiny_tokenizer().chat_template)


def tokenizer_adding(*start: str) -> Any:
    """A tokenizer that adds special tokens before a text, and whose chat template writes BOS."""
    tokenizer: Any = tiny_tokenizer()
    special_tokens = [(token, int(tokenizer.convert_tokens_to_ids(token))) for token in start]
    single = " ".join([*start, "$A"])
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single=single, special_tokens=special_tokens)
    tokenizer.chat_template = TEMPLATE
    return tokenizer


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return tokenizer_adding("<|start|>")


@pytest.fixture(scope="module")
def rendered(tokenizer: Any) -> str:
    turns = [{"role": "user", "content": "for example, what does the class statement do?"}]
    return str(tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True))


@pytest.mark.parametrize("start", [(), ("<|start|>",), ("<|start|>", "<|system|>")])
def test_a_prompt_begins_once(start: tuple[str, ...]) -> None:
    tokenizer = tokenizer_adding(*start)
    start_ids = tokenizer.convert_tokens_to_ids(list(start))
    assert start_tokens(tokenizer) == start_ids
    text_ids = tokenizer("a class", add_special_tokens=False)["input_ids"]
    expected = [*start_ids, *text_ids]
    for text in ("a class", "".join(start) + "a class"):
        assert encode(tokenizer, [text, "a class"], special=True) == [expected, expected]


def test_generate_reads_a_rendered_chat_as_the_template_does(tokenizer: Any, rendered: str) -> None:
    model = tiny_model(vocab_size=512)
    ids = tokenizer(rendered, add_special_tokens=False, return_tensors="pt")["input_ids"]
    assert ids[0, :2].tolist() == [1, 4]
    prompt_tokens = ids.shape[1]
    options: dict[str, Any] = {"tokenizer": tokenizer, "return_dict_in_generate": True, **GREEDY}
    sequences = generate(model, rendered, **options).sequences
    assert torch.equal(sequences[:, :prompt_tokens], ids)

    plain_ids = tokenizer("a class")["input_ids"]
    of_chat, of_plain = generate(model, [rendered, "a class"], **options).sequences
    (answer_to_chat,) = generate(model, ids, **GREEDY)
    assert torch.equal(of_chat[prompt_tokens:], answer_to_chat)
    (answer_to_plain,) = generate(model, torch.tensor([plain_ids]), **GREEDY)
    assert of_plain[prompt_tokens - len(plain_ids) : prompt_tokens].tolist() == plain_ids
    assert torch.equal(of_plain[prompt_tokens:], answer_to_plain)


def test_texts_of_several_lengths_need_no_padding_token(tokenizer: Any) -> None:
    model = tiny_model(vocab_size=512)
    texts = ["a class", "a class with an if statement"]
    expected = generate(model, texts, tokenizer=tokenizer, **GREEDY)
    without_padding_token = tokenizer_adding("<|start|>")
    without_padding_token.pad_token = None
    assert torch.equal(generate(model, texts, tokenizer=without_padding_token, **GREEDY), expected)


def test_a_conversation_begins_once_and_a_turn_does_not_begin(tokenizer: Any, rendered: str, tmp_path: Path) -> None:
    model = tiny_model(vocab_size=512)
    method = SnapKV(16, window=4)
    conversation = Conversation(model, method)
    conversation.say(rendered, tokenizer=tokenizer, **GREEDY)
    assert conversation.ids[0, :2].tolist() == [1, 4]
    ids_before = conversation.ids
    state = method.start(model, conversation.ids)
    loaded = load_state(save_state(state, tmp_path, model=model), model)
    with refused("input_ids", "conflict"):
        conversation.say(rendered, tokenizer=tokenizer, **GREEDY)
    with refused("input_ids", "conflict"):
        generate(model, rendered, loaded, tokenizer=tokenizer, **GREEDY)
    assert torch.equal(conversation.ids, ids_before)


def test_training_prompts_tasks_and_the_harness(tokenizer: Any, rendered: str) -> None:
    expected = tokenizer(rendered, add_special_tokens=False)["input_ids"]
    prompt = Prompt("rows", ({"role": "user", "content": rendered},), template=False)
    assert render_prompt(0, prompt, tokenizer).ids == expected
    question = "do?<|end|><|assistant|>"
    sample = Sample("0", "task", 512, rendered, ("a",), "f1", 4, question=question, chat=False)
    assert render(sample, tokenizer).prompt_ids.tolist() == expected
    apart = render_apart(render(sample, tokenizer), tokenizer)
    assert apart.prompt_ids[:2].tolist() == [1, 4]
    assert apart.question_ids[-2:].tolist() == [2, 5]
    harness = SimpleNamespace(tokenizer=tokenizer)
    for add_special_tokens in (None, True, False):
        assert HarnessModel.tok_encode(harness, rendered, add_special_tokens) == expected  # type: ignore[arg-type]
    target: Any = SimpleNamespace(tokenizer=tokenizer, model=tiny_model(vocab_size=512))
    assert _ids(rendered, False, target) == expected
