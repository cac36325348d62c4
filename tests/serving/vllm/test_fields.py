"""Every field of vLLM's protocol has its row in docs/serving.md."""

import importlib

from tests.serving.test_page import CHAT, PAGE, PLAIN


def test_fields_of_the_protocol_have_rows() -> None:
    chats = importlib.import_module("vllm.entrypoints.openai.chat_completion.protocol")
    completions = importlib.import_module("vllm.entrypoints.openai.completion.protocol")
    fields = {(CHAT, name) for name in chats.ChatCompletionRequest.model_fields}
    fields |= {(PLAIN, name) for name in completions.CompletionRequest.model_fields}
    assert not fields - PAGE.keys()
