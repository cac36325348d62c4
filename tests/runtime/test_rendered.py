"""Chats that are rendered again with each turn, with other tokens than those that were read."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from keepsight.errors import UserError
from keepsight.runtime.allocate import Adaptive
from keepsight.runtime.conversation import Conversation
from keepsight.runtime.generate import FullCache, Method, decode, generate, stop_after
from keepsight.runtime.importance import Pool
from keepsight.runtime.methods import SnapKV, StreamingLLM, Truncation
from keepsight.runtime.state import prefill
from tests.families import family_model
from tests.refused import refused
from tests.runtime.family_methods import NAMES, PROMPT, method_of
from tests.tiny import prompt_ids, tiny_model, tiny_tokenizer

GREEDY: dict[str, Any] = {"max_new_tokens": 8, "do_sample": False, "eos_token_id": None}
TURN = prompt_ids(9, seed=1)[0]
THINKING = (
    "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'].split('</think>')[-1] }}<|end|>"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|><think>{% endif %}"
)
OWN_FORM = ("kivi", "specache", "think", "specontext", "quest", "clusterkv", "shadowkv", "infllm", "exact_topk")


def edited(talk: Conversation, kept: int) -> Tensor:
    """What was said, with other tokens from the `kept`th on."""
    ids = talk.ids.clone()
    ids[:, kept:] = 3 + (ids[:, kept:] + 1) % 90
    return ids


def answer_of(model: Any, method: Method, prompt: Tensor, rest: Tensor, tokens: int = 8) -> list[int]:
    """The answer to a prompt, after which a state reads what an answer and a turn could have been."""
    state = method.resume(model, method.start(model, prompt), rest)
    reader, eviction = method.reader(model), method.periodic_eviction(model)
    return list(decode(reader, state, stop_after(tokens, None), pad_token=0, eviction=eviction).ids[0].tolist())


@pytest.mark.parametrize("name", NAMES)
def test_an_answer_of_other_tokens_is_read_in_its_place(name: str, tmp_path: Path) -> None:
    model, method = family_model("Llama 3"), method_of(name, "Llama 3", tmp_path)
    for kept in (0, 3, 7):
        talk = Conversation(model, method)
        talk.say(PROMPT, **GREEDY)
        chat = torch.cat([edited(talk, PROMPT.shape[1] + kept), TURN], dim=1)
        before = talk.ids
        if name in OWN_FORM and kept < 7:
            with pytest.raises(UserError, match=rf"^conversation: the chat differs from token {41 + kept} on [^\n]*$"):
                talk.say_rendered(chat, **GREEDY)
            assert torch.equal(talk.ids, before)
            continue
        answer = talk.say_rendered(chat, **GREEDY)
        assert torch.equal(talk.ids, torch.cat([chat, answer], dim=1))
        if name not in OWN_FORM:  # which read an answer token by token
            assert answer[0].tolist() == answer_of(model, method, PROMPT, chat[:, PROMPT.shape[1] :])


@pytest.mark.parametrize("family", ["Gemma 3 (text)", "Qwen3-Next", "Granite 4 (Mamba-2)", "DeepSeek-V3"])
def test_layers_of_every_kind_go_back(family: str) -> None:
    model, method = family_model(family), StreamingLLM(12)
    talk = Conversation(model, method)
    talk.say(PROMPT, **GREEDY)
    chat = torch.cat([edited(talk, PROMPT.shape[1] + 2), TURN], dim=1)
    found = talk.say_rendered(chat, **GREEDY)[0].tolist()
    assert found == answer_of(model, method, PROMPT, chat[:, PROMPT.shape[1] :])


def test_eviction_while_decoding_is_undone() -> None:
    model, method = tiny_model(), SnapKV(16, window=3, every=2)
    talk = Conversation(model, method)
    talk.say(PROMPT, **GREEDY)
    chat = torch.cat([edited(talk, PROMPT.shape[1] + 5), TURN], dim=1)
    found = talk.say_rendered(chat, **GREEDY)[0].tolist()
    assert found == answer_of(model, method, PROMPT, chat[:, PROMPT.shape[1] :])


@pytest.mark.parametrize("method", [FullCache(), SnapKV(400, window=4), SnapKV(1.0, window=4)])
def test_where_nothing_was_evicted_a_chat_may_differ_anywhere(method: Method) -> None:
    model = tiny_model()
    talk = Conversation(model, method)
    talk.say(PROMPT, **GREEDY)
    for kept in (30, 1, 45):
        chat = torch.cat([edited(talk, kept), TURN], dim=1)
        assert torch.equal(talk.say_rendered(chat, **GREEDY), generate(model, chat, method, **GREEDY))
    shorter = talk.ids[:, :20]
    assert torch.equal(talk.say_rendered(shorter, **GREEDY), generate(model, shorter, method, **GREEDY))


def _keys(entries: Any, head: int) -> Tensor:
    return entries.keys[0, head][entries.marks[0, head]]


@pytest.mark.parametrize("name", [name for name in NAMES if name not in OWN_FORM])
def test_the_last_tokens_before_an_eviction_are_taken_off(name: str, tmp_path: Path) -> None:
    """What each head holds of them, and nothing else; a template that ends with `<think>` needs it."""
    model, method = family_model("Llama 3"), method_of(name, "Llama 3", tmp_path)
    state = method.start(model, PROMPT)
    if state.tokens.shape[1] != PROMPT.shape[1]:
        return  # the prompt was shortened
    if state.needs.accumulated or state.needs.statistics:
        with refused("crop", "state"):
            state.without_last(5)
        return
    whole, shorter = prefill(model, PROMPT), state.without_last(5)
    assert torch.equal(shorter.tokens, PROMPT[:, :-5])
    by_layer = zip(state.entries(), shorter.entries(), whole.entries(), strict=True)
    for layer, (before, after, every) in enumerate(by_layer):
        for head in range(before.keys.shape[1]):
            kept, left = _keys(before, head), _keys(after, head)
            assert torch.equal(kept[: len(left)], left)
            if layer == 0 or name != "speckv":  # whose prefill is sparse: later layers have other keys
                differences = (kept[:, None] - every.keys[0, head, -5:]).abs().amax(dim=2)
                is_last = (differences < 1e-4).any(dim=1)
                assert is_last.tolist() == [False] * len(left) + [True] * (len(kept) - len(left))
    again = shorter.without_last(2)
    assert torch.equal(again.counts(), state.without_last(7).counts())
    assert again.cache.get_seq_length() == PROMPT.shape[1] - 7


@pytest.mark.parametrize("method", [SnapKV(16, window=4, pool=Pool(kernel=3), allocate=Adaptive()), StreamingLLM(12)])
def test_a_turn_whose_end_changes_is_cropped_and_one_that_begins_otherwise_refused(method: Any) -> None:
    model, talk = tiny_model(), Conversation(tiny_model(), method)
    talk.say(PROMPT, **GREEDY)
    chat = torch.cat([edited(talk, PROMPT.shape[1] - 3), TURN], dim=1)
    state = method.start(model, PROMPT).without_last(3)
    expected = method.resume(model, state, chat[:, PROMPT.shape[1] - 3 :])
    assert int(talk.say_rendered(chat, **GREEDY)[0, 0]) == int(expected.logits.argmax())
    before = talk.ids
    far = prompt_ids(90, seed=5)[0]
    talk.say_rendered(torch.cat([before, far], dim=1), **GREEDY)
    for kept in (before.shape[1] - 1, 2):
        with pytest.raises(UserError, match=rf"^conversation: the chat differs from token {kept} on [^\n]*$"):
            talk.say_rendered(edited(talk, kept), **GREEDY)
    with refused("ids", "conflict"):
        talk.say_rendered(edited(talk, 0), **GREEDY)
    assert talk.say(TURN, **GREEDY).shape == (1, 8)


def test_a_shortened_prompt_keeps_its_tokens() -> None:
    model, method = tiny_model(), Truncation(20)
    talk = Conversation(model, method)
    talk.say(PROMPT, **GREEDY)
    with refused("prompt", "state"):
        talk.say_rendered(edited(talk, PROMPT.shape[1] - 1), **GREEDY)
    chat = edited(talk, PROMPT.shape[1] + 2)
    assert talk.say_rendered(chat, **GREEDY)[0].tolist() == answer_of(model, method, PROMPT, chat[:, 41:])


@pytest.mark.parametrize("method", [FullCache(), SnapKV(400, window=4)])
@pytest.mark.parametrize("template", [None, THINKING], ids=["plain", "thinking"])
def test_sampled_answers_as_text_and_templates_that_drop_thoughts(method: Method, template: str | None) -> None:
    model, tokenizer = tiny_model(vocab_size=512, max_position_embeddings=1024), tiny_tokenizer()
    tokenizer.chat_template = template or tokenizer.chat_template
    talk, turns, differing = Conversation(model, method), list[dict[str, str]](), 0
    for number in range(4):
        torch.manual_seed(number)
        turns.append({"role": "user", "content": f"what is a class, {number}?"})
        chat = str(tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True))
        ids = tokenizer(chat, return_tensors="pt")["input_ids"]
        differing += not torch.equal(ids[:, : talk.ids.shape[1]], talk.ids)
        sampled: dict[str, Any] = {"max_new_tokens": 12, "do_sample": True, "tokenizer": tokenizer}
        answer = talk.say_rendered(chat, **sampled)
        torch.manual_seed(number)
        assert torch.equal(answer, generate(model, chat, method, **sampled))
        assert torch.equal(talk.ids, torch.cat([ids, answer], dim=1))
        thought = "" if template is None else "for</think>"
        text = str(tokenizer.decode(answer[0], skip_special_tokens=True))
        turns.append({"role": "assistant", "content": thought + text})
    assert differing
