"""Real clients offer a tool, and read the calls of an answer, streamed or not."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from keepsight.models.targets import Target
from tests.clients.served import PROMPTS, Served, outcomes_of
from tests.serving.loopback import serving
from tests.serving.test_tools import TEMPLATE, WEATHER, call, response_template
from tests.tiny import tiny_model, tiny_tokenizer
from tests.tokenizers import scripted

pytestmark = pytest.mark.clients
ANSWERS = 8
"""How often the model says the same."""


def calls_for(*cities: str) -> list[dict[str, Any]]:
    return [{"name": "weather", "arguments": {"city": city}} for city in cities]


@pytest.fixture
def calling() -> Iterator[str]:
    """A server whose model calls the tool for two cities, in each answer again."""
    tokenizer: Any = tiny_tokenizer()
    tokenizer.chat_template = TEMPLATE
    tokenizer.response_template = response_template("<tool_call>", "</tool_call>")
    model = tiny_model(vocab_size=len(tokenizer), max_position_embeddings=4096, pad_token_id=0)
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    text = f"Let me look.\n{call('Ulm')}\n{call('Köln')}"
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    with serving(Target(model, tokenizer, "tiny", "1")) as (url, _):
        scripted(model).say([*ids, tokenizer.eos_token_id] * ANSWERS)
        yield url


@pytest.mark.parametrize("client", ["openai", "litellm", "langchain-openai", "llm"])
def test_clients_read_calls(client: str, calling: str, tmp_path: Path) -> None:
    cases = {"prompt": "Is it warm?", "tool": WEATHER, "extra": {}}
    calls = outcomes_of("call.py", client, calling, str(tmp_path), cases=cases, folder=tmp_path)
    assert calls == calls_for("Ulm", "Köln", "Ulm", "Köln")


@pytest.mark.parametrize("prompt", ["Is it warm?", f"{PROMPTS[8]}Is it warm?"], ids=["short", "evicted from"])
@pytest.mark.parametrize("client", ["openai", "litellm", "langchain-openai"])
def test_clients_read_calls_beside_vllm(client: str, prompt: str, beside_vllm: Served, tmp_path: Path) -> None:
    """By vLLM's parser, of answers that are made to be two calls: the tiny model calls nothing by itself."""
    two_calls = re.escape(call("Ulm") + call("Bonn")).replace("\\ ", " ")
    cases = {"prompt": prompt, "tool": WEATHER, "extra": {"structured_outputs": {"regex": two_calls}}}
    calls = outcomes_of("call.py", client, beside_vllm.url, str(tmp_path), cases=cases, folder=tmp_path)
    assert calls == calls_for("Ulm", "Bonn", "Ulm", "Bonn")
