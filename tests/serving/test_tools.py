"""Tool calls: tools go to the template, and calls in answers are given back as such, streamed and whole."""

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from keepsight.models.targets import Target
from keepsight.serving.tools import response_template_of
from tests.serving.loopback import assert_field_refused, events_of, serving
from tests.tiny import tiny_model, tiny_tokenizer
from tests.tokenizers import TOOL_TEMPLATE, scripted

CHAT = "/v1/chat/completions"
TURNS = [{"role": "user", "content": "Is it warm in Ulm?"}]
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather of a city.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}
TEMPLATE = "{% if tools %}<|system|>{{ tools | tojson }}<|end|>{% endif %}" + TOOL_TEMPLATE


def response_template(open_call: str, close_call: str) -> dict[str, Any]:
    """As transformers has it for Qwen, with other marks of a call."""
    return {
        "defaults": {"role": "assistant"},
        "start_anchor": "<|assistant|>",
        "fields": {
            "reasoning_content": {"open": "<think>", "close": "</think>", "content": "text"},
            "tool_calls": {
                "open_pattern": rf"\s*{open_call}",
                "close": close_call,
                "repeats": True,
                "content": "json",
                "transform": {"type": "function", "function": "{content}"},
            },
            "content": {"close_pattern": r"\s*<\|end\|>", "content": "text"},
        },
    }


def call(city: str, open_call: str = "<tool_call>", close_call: str = "</tool_call>") -> str:
    return f'{open_call}{{"name": "weather", "arguments": {{"city": "{city}"}}}}{close_call}'


@contextmanager
def speaking(text: str, template: str = TEMPLATE, response: dict[str, Any] | None = None) -> Iterator[str]:
    """A server whose model answers a text."""
    tokenizer: Any = tiny_tokenizer()
    tokenizer.chat_template = template
    tokenizer.response_template = response
    model = tiny_model(vocab_size=len(tokenizer), max_position_embeddings=4096, pad_token_id=0)
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    with serving(Target(model, tokenizer, "tiny", "1")) as (url, _):
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        scripted(model).say([*ids, tokenizer.eos_token_id])
        yield url


RESPONSE = response_template("<tool_call>", "</tool_call>")


def post(url: str, **fields: Any) -> httpx.Response:
    """The reply to a chat with a tool."""
    body = {"model": "tiny", "messages": TURNS, "tools": [WEATHER], "max_tokens": 200}
    return httpx.post(url + CHAT, json=body | fields, timeout=60)


def answer(url: str, stream: bool, **fields: Any) -> tuple[dict[str, Any], str]:
    """The assistant's message and the finish reason, streamed or not; ids of calls are left out."""
    reply = post(url, stream=stream, **fields).raise_for_status()
    if stream:
        message, reason = joined(events_of(reply.text))
    else:
        (choice,) = reply.json()["choices"]
        message = choice["message"]
        reason = choice["finish_reason"]
    ids = [tool_call.pop("id") for tool_call in message.get("tool_calls") or []]
    assert len({*ids}) == len(ids)
    assert all(call_id.startswith("call_") for call_id in ids)
    return message, reason


def joined(events: list[str]) -> tuple[dict[str, Any], str]:
    """The message and the finish reason of a stream."""
    message: dict[str, Any] = {"role": "assistant", "content": "", "tool_calls": []}
    choices = [json.loads(event)["choices"][0] for event in events[:-1]]
    for choice in choices:
        delta = choice["delta"]
        message["content"] += delta.get("content") or ""
        if "reasoning_content" in delta:
            message["reasoning_content"] = message.get("reasoning_content", "") + delta["reasoning_content"]
        for tool_call in delta.get("tool_calls", []):
            assert tool_call.pop("index") == len(message["tool_calls"])
            message["tool_calls"].append(tool_call)
    return message, choices[-1]["finish_reason"]


SPECIAL = ("<|system|>", "<|user|>")  # special tokens, which are no part of other answers' text
MARKS = [("<tool_call>", "</tool_call>"), SPECIAL]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("marks", MARKS, ids=["text", "special tokens"])
def test_calls_are_parted_from_the_text(marks, stream):
    open_call, close_call = marks
    response = response_template(re.escape(open_call), close_call)
    text = f"Let me look.\n{call('Ulm', *marks)}\n{call('Köln', *marks)}"
    with speaking(text, response=response) as url:
        message, reason = answer(url, stream)
    assert reason == "tool_calls"
    assert message["content"] == "Let me look."
    functions = [tool_call["function"] for tool_call in message["tool_calls"]]
    assert [function["name"] for function in functions] == ["weather", "weather"]
    assert [json.loads(function["arguments"]) for function in functions] == [{"city": "Ulm"}, {"city": "Köln"}]


@pytest.mark.parametrize("stream", [False, True])
def test_one_call_alone_and_no_text(stream):
    with speaking(call("Ulm") + call("Köln"), response=RESPONSE) as url:
        message, reason = answer(url, stream, parallel_tool_calls=False)
    assert reason == "tool_calls"
    assert not message["content"]
    assert len(message["tool_calls"]) == 1


@pytest.mark.parametrize("stream", [False, True])
def test_reasoning_is_parted_from_the_text(stream):
    with speaking("<think>So.</think>It is warm.", response=RESPONSE) as url:
        message, reason = answer(url, stream)
    assert message["reasoning_content"] == "So."
    assert message["content"] == "It is warm."
    assert reason == "stop"
    assert not message.get("tool_calls")


@pytest.mark.parametrize("stream", [False, True])
def test_a_call_that_cannot_be_read_is_text(stream):
    with speaking('Oh. <tool_call>{"name": </tool_call>', response=RESPONSE) as url:
        message, reason = answer(url, stream)
    assert message["content"].startswith("Oh.")
    assert '{"name": ' in message["content"]
    assert reason == "stop"


def test_tools_go_to_the_template_unless_none_may_be_called():
    def prompt_tokens(tools: list[dict[str, Any]] | None) -> int:
        tokenizer: Any = tiny_tokenizer()
        options = {"chat_template": TEMPLATE, "tools": tools, "add_generation_prompt": True}
        return len(tokenizer.apply_chat_template(TURNS, **options)["input_ids"])

    with speaking(call("Ulm"), response=RESPONSE) as url:
        with_tools = post(url).raise_for_status().json()
        without_tools = post(url, tool_choice="none").raise_for_status().json()
    assert with_tools["usage"]["prompt_tokens"] == prompt_tokens([WEATHER])
    assert without_tools["usage"]["prompt_tokens"] == prompt_tokens(None)
    assert "tool_calls" not in without_tools["choices"][0]["message"]


def test_transformers_knows_how_some_families_write_calls():
    """It is asked by a name that is not documented."""
    for family, is_known in (("qwen2", True), ("qwen3", True), ("gemma4", True), ("llama", False)):
        model = SimpleNamespace(config=SimpleNamespace(model_type=family))
        template = response_template_of(tiny_tokenizer(), model)
        assert (template is not None) == is_known
        if template is not None:
            assert "tool_calls" in template["fields"]


@pytest.mark.parametrize(
    ("fields", "template", "readable", "param"),
    [
        ({"tool_choice": "required"}, TEMPLATE, True, "tool_choice"),
        ({"tool_choice": {"type": "function"}}, TEMPLATE, True, "tool_choice"),
        ({}, TOOL_TEMPLATE, True, "tools"),
        ({}, TEMPLATE, False, "tools"),
        ({"tools": [{"type": "function"}]}, TEMPLATE, True, "tools.0.function"),
    ],
)
def test_tools_that_cannot_be_honoured_are_refused(fields, template, readable, param):
    with speaking("Hi", template, RESPONSE if readable else None) as url:
        assert_field_refused(post(url, **fields), param)
