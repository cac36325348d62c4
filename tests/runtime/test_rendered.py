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
"""A template that drops the thoughts of earlier answers."""
OTHER_ENTRIES = ("kivi", "specache", "think", "specontext", "quest", "clusterkv", "shadowkv", "infllm", "exact_topk")
"""Methods that hold entries in a form of their own: answers cannot be taken off."""


def edited(conversation: Conversation, unchanged: int) -> Tensor:
    """What was said, with other tokens after the first `unchanged`."""
    ids = conversation.ids.clone()
    ids[:, unchanged:] = 3 + (ids[:, unchanged:] + 1) % 90
    return ids


def answer_of(model: Any, method: Method, prompt: Tensor, continuation: Tensor, tokens: int = 8) -> list[int]:
    """The answer to a prompt, after which a state reads what an answer and a turn could have been."""
    state = method.resume(model, method.start(model, prompt), continuation)
    reader = method.reader(model)
    eviction = method.periodic_eviction(model)
    decoded = decode(reader, state, stop_after(tokens, None), pad_token=0, eviction=eviction)
    return list(decoded.ids[0].tolist())


def refused_from(token: int) -> Any:
    """The block ends in an error of one line that says from which token on a chat differs."""
    return pytest.raises(UserError, match=rf"^conversation: the chat differs from token {token} on [^\n]*$")


@pytest.mark.parametrize("name", NAMES)
def test_an_answer_of_other_tokens_is_read_in_its_place(name: str, tmp_path: Path) -> None:
    model = family_model("Llama 3")
    method = method_of(name, "Llama 3", tmp_path)
    for unchanged in (0, 3, 7):
        conversation = Conversation(model, method)
        conversation.say(PROMPT, **GREEDY)
        chat = torch.cat([edited(conversation, PROMPT.shape[1] + unchanged), TURN], dim=1)
        before = conversation.ids
        if name in OTHER_ENTRIES and unchanged < 7:
            with refused_from(41 + unchanged):
                conversation.say_rendered(chat, **GREEDY)
            assert torch.equal(conversation.ids, before)
            continue
        answer = conversation.say_rendered(chat, **GREEDY)
        assert torch.equal(conversation.ids, torch.cat([chat, answer], dim=1))
        if name not in OTHER_ENTRIES:  # which read an answer token by token
            assert answer[0].tolist() == answer_of(model, method, PROMPT, chat[:, PROMPT.shape[1] :])


@pytest.mark.parametrize("family", ["Gemma 3 (text)", "Qwen3-Next", "Granite 4 (Mamba-2)", "DeepSeek-V3"])
def test_layers_of_every_kind_go_back(family: str) -> None:
    model = family_model(family)
    method = StreamingLLM(12)
    conversation = Conversation(model, method)
    conversation.say(PROMPT, **GREEDY)
    chat = torch.cat([edited(conversation, PROMPT.shape[1] + 2), TURN], dim=1)
    answer = conversation.say_rendered(chat, **GREEDY)
    assert answer[0].tolist() == answer_of(model, method, PROMPT, chat[:, PROMPT.shape[1] :])


def test_eviction_while_decoding_is_undone() -> None:
    model = tiny_model()
    method = SnapKV(16, window=3, every=2)
    conversation = Conversation(model, method)
    conversation.say(PROMPT, **GREEDY)
    chat = torch.cat([edited(conversation, PROMPT.shape[1] + 5), TURN], dim=1)
    answer = conversation.say_rendered(chat, **GREEDY)
    assert answer[0].tolist() == answer_of(model, method, PROMPT, chat[:, PROMPT.shape[1] :])


@pytest.mark.parametrize("method", [FullCache(), SnapKV(400, window=4), SnapKV(1.0, window=4)])
def test_where_nothing_was_evicted_a_chat_may_differ_anywhere(method: Method) -> None:
    model = tiny_model()
    conversation = Conversation(model, method)
    conversation.say(PROMPT, **GREEDY)
    for unchanged in (30, 1, 45):
        chat = torch.cat([edited(conversation, unchanged), TURN], dim=1)
        answer = conversation.say_rendered(chat, **GREEDY)
        assert torch.equal(answer, generate(model, chat, method, **GREEDY))
    shorter = conversation.ids[:, :20]
    answer = conversation.say_rendered(shorter, **GREEDY)
    assert torch.equal(answer, generate(model, shorter, method, **GREEDY))


def keys_of(entries: Any, head: int) -> Tensor:
    """The real keys of a KV head."""
    return entries.keys[0, head][entries.marks[0, head]]


@pytest.mark.parametrize("name", [name for name in NAMES if name not in OTHER_ENTRIES])
def test_the_last_tokens_before_an_eviction_are_taken_off(name: str, tmp_path: Path) -> None:
    """What each head holds of them, and nothing else; a template that ends with `<think>` needs it."""
    model = family_model("Llama 3")
    method = method_of(name, "Llama 3", tmp_path)
    state = method.start(model, PROMPT)
    if state.tokens.shape[1] != PROMPT.shape[1]:
        return  # the prompt was shortened
    if state.needs.accumulated or state.needs.statistics:
        with refused("crop", "state"):
            state.without_last(5)
        return
    full_cache = prefill(model, PROMPT)
    shorter = state.without_last(5)
    assert torch.equal(shorter.tokens, PROMPT[:, :-5])
    by_layer = zip(state.entries(), shorter.entries(), full_cache.entries(), strict=True)
    for layer, (before, after, full) in enumerate(by_layer):
        for head in range(before.keys.shape[1]):
            keys_before = keys_of(before, head)
            keys_after = keys_of(after, head)
            assert torch.equal(keys_before[: len(keys_after)], keys_after)
            if layer == 0 or name != "speckv":  # whose prefill is sparse: later layers have other keys
                differences = (keys_before[:, None] - full.keys[0, head, -5:]).abs().amax(dim=2)
                is_last = (differences < 1e-4).any(dim=1)
                taken_off = len(keys_before) - len(keys_after)
                assert is_last.tolist() == [False] * len(keys_after) + [True] * taken_off

    shorter_again = shorter.without_last(2)
    assert torch.equal(shorter_again.counts(), state.without_last(7).counts())
    assert shorter_again.cache.get_seq_length() == PROMPT.shape[1] - 7


@pytest.mark.parametrize("method", [SnapKV(16, window=4, pool=Pool(kernel=3), allocate=Adaptive()), StreamingLLM(12)])
def test_a_turn_whose_end_changes_is_cropped_and_one_that_begins_otherwise_refused(method: Any) -> None:
    model = tiny_model()
    conversation = Conversation(tiny_model(), method)
    conversation.say(PROMPT, **GREEDY)
    chat = torch.cat([edited(conversation, PROMPT.shape[1] - 3), TURN], dim=1)
    state = method.start(model, PROMPT).without_last(3)
    expected = method.resume(model, state, chat[:, PROMPT.shape[1] - 3 :])
    answer = conversation.say_rendered(chat, **GREEDY)
    assert int(answer[0, 0]) == int(expected.logits.argmax())

    before = conversation.ids
    long_turn = prompt_ids(90, seed=5)[0]
    conversation.say_rendered(torch.cat([before, long_turn], dim=1), **GREEDY)
    for unchanged in (before.shape[1] - 1, 2):
        with refused_from(unchanged):
            conversation.say_rendered(edited(conversation, unchanged), **GREEDY)
    with refused("ids", "conflict"):
        conversation.say_rendered(edited(conversation, 0), **GREEDY)
    assert conversation.say(TURN, **GREEDY).shape == (1, 8)


def test_a_shortened_prompt_keeps_its_tokens() -> None:
    model = tiny_model()
    method = Truncation(20)
    conversation = Conversation(model, method)
    conversation.say(PROMPT, **GREEDY)
    with refused("prompt", "state"):
        conversation.say_rendered(edited(conversation, PROMPT.shape[1] - 1), **GREEDY)
    chat = edited(conversation, PROMPT.shape[1] + 2)
    answer = conversation.say_rendered(chat, **GREEDY)
    assert answer[0].tolist() == answer_of(model, method, PROMPT, chat[:, 41:])


@pytest.mark.parametrize("method", [FullCache(), SnapKV(400, window=4)])
@pytest.mark.parametrize("template", [None, THINKING], ids=["plain", "thinking"])
def test_sampled_answers_as_text_and_templates_that_drop_thoughts(method: Method, template: str | None) -> None:
    model = tiny_model(vocab_size=512, max_position_embeddings=1024)
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = template or tokenizer.chat_template
    thought = "" if template is None else "for</think>"
    sampled: dict[str, Any] = {"max_new_tokens": 12, "do_sample": True, "tokenizer": tokenizer}
    conversation = Conversation(model, method)
    turns: list[dict[str, str]] = []
    differing = 0
    for turn in range(4):
        turns.append({"role": "user", "content": f"what is a class, {turn}?"})
        chat = str(tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True))
        ids = tokenizer(chat, return_tensors="pt")["input_ids"]
        differing += not torch.equal(ids[:, : conversation.ids.shape[1]], conversation.ids)
        torch.manual_seed(turn)
        answer = conversation.say_rendered(chat, **sampled)
        torch.manual_seed(turn)
        assert torch.equal(answer, generate(model, chat, method, **sampled))
        assert torch.equal(conversation.ids, torch.cat([ids, answer], dim=1))
        text = str(tokenizer.decode(answer[0], skip_special_tokens=True))
        turns.append({"role": "assistant", "content": thought + text})
    assert differing
