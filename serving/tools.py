"""Tool calls and reasoning in answers, read by transformers' response parser while the answer grows.

What marks them depends on the model: the tokenizer's `response_template` says so or, for the families that
`transformers serve` knows, a template of transformers (5.18 to 5.24 have them).
"""

import json
import logging
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from transformers.utils.chat_parsing import ResponseParser

from keepsight.errors import one_line

logger = logging.getLogger(__name__)

_REASONING = ("reasoning_content", "reasoning", "thinking")
"""Names of the field with the reasoning; templates on the Hub differ."""


@dataclass(frozen=True)
class ToolCall:
    """A call of a tool, with its arguments as JSON text."""

    id: str
    name: str
    arguments: str


@dataclass
class Parts:
    """What a piece of an answer adds to its content, its reasoning and its calls."""

    content: str = ""
    reasoning: str = ""
    calls: list[ToolCall] = field(default_factory=list)


def response_template_of(tokenizer: Any, model: Any) -> dict[str, Any] | None:
    """How answers of a model are written; None where transformers does not know."""
    try:
        from transformers.cli.serving.utils import get_response_template
    except ImportError:  # another version of transformers, or one without its extra for serving
        return getattr(tokenizer, "response_template", None)
    template: dict[str, Any] | None = get_response_template(tokenizer, model)
    return template


class AnswerParser:
    """Parts an answer to a request with tools.

    Args:
        template: That of `response_template_of`.
        prompt: Text of the prompt, which may begin the answer, such as with its reasoning.
        tools: The tools, as the chat template takes them; their schemas say what types arguments have.
        most_calls: Number of calls to keep; None for all.
    """

    def __init__(
        self, template: dict[str, Any], prompt: str, tools: Sequence[dict[str, Any]], most_calls: int | None = None
    ) -> None:
        self._parser: ResponseParser | None = ResponseParser(template, prefix=prompt, tools=[*tools])
        self._remaining_calls = most_calls
        self._unread = ""  # text of a call that has not ended

    def feed(self, text: str, *, is_last: bool = False) -> Parts:
        """The parts that a further piece of the answer adds; `text` has special tokens in it.

        A call that cannot be read is content, and so is everything after it.
        """
        if self._parser is None:
            return Parts(content=text)
        parts = Parts()
        try:
            for event in self._parser.feed(text):
                self._add(event, parts)
            if is_last:
                _, events = self._parser.finalize()
                for event in events:
                    self._add(event, parts)
        except Exception as error:  # templates, which come with models, raise anything
            logger.warning("a tool call cannot be read, and is given as text: %s", one_line(error, 200))
            parts.content += self._unread
            self._parser = None
        return parts

    def _add(self, event: dict[str, Any], parts: Parts) -> None:
        name = event["field"]
        if event["type"] == "region_close":
            if name == "tool_calls":
                self._add_call(event["value"], parts)
            self._unread = ""
        elif event["type"] == "region_chunk":
            if event["dirty"]:
                self._unread += event["text"]
            elif name == "content":
                parts.content += event["text"]
            elif name in _REASONING:
                parts.reasoning += event["text"]

    def _add_call(self, value: Any, parts: Parts) -> None:
        if self._remaining_calls == 0:
            return
        function = value["function"]
        arguments = function["arguments"]
        if not isinstance(arguments, str):
            arguments = json.dumps(arguments, ensure_ascii=False)
        parts.calls.append(ToolCall(f"call_{uuid.uuid4().hex[:24]}", str(function["name"]), arguments))
        if self._remaining_calls is not None:
            self._remaining_calls -= 1
