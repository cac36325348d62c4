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
from tests.serving.loopback import serving
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


def asked(**fields: Any) -> dict[str, Any]:
    return {"model": "tiny", "messages": TURNS, "tools": [WEATHER], "max_tokens": 200, **fields}


def answer(url: str, stream: bool, **fields: Any) -> tuple[dict[str, Any], str]:
    """The assistant's message and the finish reason, streamed or whole; ids of calls are left out."""
    reply = httpx.post(url + CHAT, json=asked(stream=stream, **fields), timeout=60).raise_for_status()
    if not stream:
        (choice,) = reply.json()["choices"]
        message = choice["message"]
        reason = choice["finish_reason"]
    else:
        lines = [line.removeprefix("data: ") for line in reply.text.splitlines() if line.startswith("data: ")]
        choices = [json.loads(line)["choices"][0] for line in lines[:-1]]
        message = {"role": "assistant", "content": "", "tool_calls": []}
        for choice in choices:
            delta = choice["delta"]
            message["content"] += delta.get("content") or ""
            if "reasoning_content" in delta:
                message["reasoning_content"] = message.get("reasoning_content", "") + delta["reasoning_content"]
            for one_call in delta.get("tool_calls", []):
                assert one_call.pop("index") == len(message["tool_calls"])
                message["tool_calls"].append(one_call)
        reason = choices[-1]["finish_reason"]
    ids = [one_call.pop("id") for one_call in message.get("tool_calls") or []]
    assert len({*ids}) == len(ids) and all(id.startswith("call_") for id in ids)
    return message, reason


SPECIAL = ("<|system|>", "<|user|>")  # special tokens, which are no part of other answers' text
MARKS = [("<tool_call>", "</tool_call>"), SPECIAL]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("marks", MARKS, ids=["text", "special tokens"])
def test_calls_are_parted_from_the_text(marks, stream):
    response = response_template(re.escape(marks[0]), marks[1])
    text = f"Let me look.\n{call('Ulm', *marks)}\n{call('Köln', *marks)}"
    with speaking(text, response=response) as url:
        message, reason = answer(url, stream)
        assert reason == "tool_calls" and message["content"] == "Let me look."
        calls = [one_call["function"] for one_call in message["tool_calls"]]
        assert [one_call["name"] for one_call in calls] == ["weather", "weather"]
        assert [json.loads(one_call["arguments"]) for one_call in calls] == [{"city": "Ulm"}, {"city": "Köln"}]


@pytest.mark.parametrize("stream", [False, True])
def test_one_call_alone_and_no_text(stream):
    with speaking(call("Ulm") + call("Köln"), response=response_template("<tool_call>", "</tool_call>")) as url:
        message, reason = answer(url, stream, parallel_tool_calls=False)
        assert reason == "tool_calls" and not message["content"] and len(message["tool_calls"]) == 1


@pytest.mark.parametrize("stream", [False, True])
def test_reasoning_is_parted_from_the_text(stream):
    response = response_template("<tool_call>", "</tool_call>")
    with speaking("<think>So.</think>It is warm.", response=response) as url:
        message, reason = answer(url, stream)
        assert (message["reasoning_content"], message["content"], reason) == ("So.", "It is warm.", "stop")
        assert not message.get("tool_calls")


@pytest.mark.parametrize("stream", [False, True])
def test_a_call_that_cannot_be_read_is_text(stream):
    response = response_template("<tool_call>", "</tool_call>")
    with speaking('Oh. <tool_call>{"name": </tool_call>', response=response) as url:
        message, reason = answer(url, stream)
        assert message["content"].startswith("Oh.") and '{"name": ' in message["content"] and reason == "stop"


def test_tools_go_to_the_template_unless_none_may_be_called():
    with speaking(call("Ulm"), response=response_template("<tool_call>", "</tool_call>")) as url:
        usage = httpx.post(url + CHAT, json=asked()).raise_for_status().json()["usage"]
        without = httpx.post(url + CHAT, json=asked(tool_choice="none")).raise_for_status().json()
        tokenizer: Any = tiny_tokenizer()
        for tools, prompt_tokens in (([WEATHER], usage["prompt_tokens"]), (None, without["usage"]["prompt_tokens"])):
            rendered = tokenizer.apply_chat_template(
                TURNS, chat_template=TEMPLATE, tools=tools, add_generation_prompt=True
            )
            assert len(rendered["input_ids"]) == prompt_tokens
        assert "tool_calls" not in without["choices"][0]["message"]


def test_transformers_knows_how_some_families_write_calls():
    """It is asked by a name that is not documented."""
    for family, is_known in (("qwen2", True), ("qwen3", True), ("gemma4", True), ("llama", False)):
        model = SimpleNamespace(config=SimpleNamespace(model_type=family))
        template = response_template_of(tiny_tokenizer(), model)
        assert (template is not None) == is_known
        assert template is None or "tool_calls" in template["fields"]


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
    response = response_template("<tool_call>", "</tool_call>") if readable else None
    with speaking("Hi", template, response) as url:
        reply = httpx.post(url + CHAT, json=asked(**fields))
        assert reply.status_code == 400 and reply.json()["error"]["param"] == param
