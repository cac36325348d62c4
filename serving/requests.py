"""Requests of the OpenAI server: what of their fields can be honoured, and chat messages as templates take them."""

import json
import re
from collections import Counter
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    FiniteFloat,
    PositiveInt,
    ValidationError,
)

from keepsight.errors import UserError
from keepsight.models.chat import chat_text


def _not_supported(advice: str) -> AfterValidator:
    """A type's check that a value is empty."""

    def check(value: Any) -> Any:
        if value:
            raise ValueError(f"is not supported; {advice}")
        return value

    return AfterValidator(check)


def _one_prompt(prompt: Any) -> str | list[int]:
    """A prompt, alone or in a list."""
    if isinstance(prompt, list) and prompt and isinstance(prompt[0], str | list):
        if len(prompt) != 1:
            raise ValueError(f"holds {len(prompt)} prompts; this server answers one prompt per request")
        prompt = prompt[0]
    if isinstance(prompt, list) and all(type(token) is int for token in prompt):
        return prompt
    if not isinstance(prompt, str):
        raise ValueError("must be a text or token ids, alone or in a list")
    return prompt


def _text_alone(response_format: dict[str, Any]) -> dict[str, Any]:
    kind = response_format.get("type")
    if kind != "text" or len(response_format) > 1:
        raise ValueError(f"of type {kind!r} is not supported; answers are plain text, leave response_format out")
    return response_format


_Text = Annotated[str, Field(min_length=1, max_length=256)]
_Ids = list[Annotated[int, Field(ge=0)]]


class StreamOptions(BaseModel):
    """`stream_options` of a request."""

    model_config = ConfigDict(extra="forbid")
    include_usage: bool = False


class CommonFields(BaseModel):
    """Fields of both endpoints; fields such as `n` allow only the value that this server supports."""

    model_config = ConfigDict(extra="forbid", strict=True)
    model: str
    max_tokens: PositiveInt | None = None
    temperature: Annotated[FiniteFloat, Field(ge=0, le=2)] | None = None
    top_p: Annotated[FiniteFloat, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=0)] | None = None
    repetition_penalty: Annotated[FiniteFloat, Field(ge=0.1, le=10)] | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    stop: _Text | Annotated[list[_Text], Field(max_length=16)] | None = None
    stop_token_ids: Annotated[_Ids, Field(max_length=16)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: Literal[1] | None = None
    presence_penalty: Annotated[FiniteFloat, Field(ge=0, le=0)] | None = None
    frequency_penalty: Annotated[FiniteFloat, Field(ge=0, le=0)] | None = None
    logit_bias: Annotated[dict[str, float], _not_supported("leave it out")] | None = None
    user: str | None = None
    metadata: dict[str, Any] | None = None

    def options(self, answer_tokens: int, model_top_k: int | None) -> dict[str, Any]:
        """Options of `model.generate`; unset fields are as in the model's generation configuration."""
        options: dict[str, Any] = {"max_new_tokens": answer_tokens}
        if self.temperature is not None:
            options["do_sample"] = self.temperature > 0
        if self.temperature:
            options["temperature"] = max(self.temperature, 0.01)
            options["top_k"] = model_top_k or 0
        for name in ("top_p", "top_k", "repetition_penalty"):
            value = getattr(self, name)
            if value is not None:
                options[name] = value
        return options

    @property
    def stops(self) -> list[str]:
        """The texts before which the answer ends."""
        if isinstance(self.stop, str):
            return [self.stop]
        return self.stop or []


class CompletionRequest(CommonFields):
    """A request of `/v1/completions`."""

    prompt: Annotated[str | list[int], BeforeValidator(_one_prompt)]
    echo: Literal[False] | None = None
    logprobs: None = None
    best_of: Literal[1] | None = None
    suffix: None = None


class TextPart(BaseModel):
    """A text part of a message."""

    type: Literal["text"]
    text: str


class Function(BaseModel):
    """The function that a tool call names, with its arguments as JSON text or, as some clients send them, a value."""

    model_config = ConfigDict(extra="allow")
    name: Annotated[str, Field(min_length=1)]
    arguments: str | dict[str, Any] = ""


class ToolCall(BaseModel):
    """A call in an assistant's message; other fields go to the chat template as they are."""

    model_config = ConfigDict(extra="allow")
    function: Function

    def rendered(self, name: str) -> dict[str, Any]:
        """The call as chat templates take it, with the function's name and its arguments as a value.

        Raises:
            UserError: the arguments are no JSON object.
        """
        arguments: Any = self.function.arguments
        if isinstance(arguments, str):
            try:
                arguments = json.loads(arguments or "{}")
            except (ValueError, RecursionError):
                arguments = None
        if not isinstance(arguments, dict):
            raise UserError(f"messages: the arguments of the tool call {self.function.name!r} must be a JSON object")
        rendered = self.model_dump()
        rendered["function"] |= {"name": name, "arguments": arguments}
        return rendered


class Message(BaseModel):
    """A message of a chat; other fields, such as `name` and `tool_call_id`, go to the chat template as they are."""

    model_config = ConfigDict(extra="allow")
    role: str
    content: str | list[TextPart] | None = None
    tool_calls: list[ToolCall] | None = None
    function_call: Annotated[Any, _not_supported("send it as tool_calls")] = None

    @property
    def text(self) -> str:
        """The text of its parts."""
        if isinstance(self.content, list):
            return "".join(part.text for part in self.content)
        return self.content or ""

    def turn(self, mark: str | None = None) -> dict[str, Any]:
        """The message as chat templates take it; with a `mark` in place of its calls' names, or of its text."""
        turn: dict[str, Any] = self.model_dump(exclude={"content", "tool_calls", "function_call"})
        turn["content"] = self.text
        if self.role not in _PLAIN_ROLES and mark is not None and self.text.strip():
            turn["content"] = mark
        if self.tool_calls:
            turn["tool_calls"] = [call.rendered(mark or call.function.name) for call in self.tool_calls]
        return turn


_PLAIN_ROLES = ("system", "user", "assistant")
"""Roles that every chat template renders or refuses."""


class ChatRequest(CommonFields):
    """A request of `/v1/chat/completions`."""

    messages: Annotated[list[Message], Field(min_length=1)]
    max_completion_tokens: PositiveInt | None = None
    logprobs: Literal[False] | None = None
    top_logprobs: Literal[0] | None = None
    tools: Annotated[list[Any], _not_supported("this server makes no tool calls, leave it out")] | None = None
    tool_choice: Literal["none", "auto"] | None = None
    parallel_tool_calls: bool | None = None
    response_format: Annotated[dict[str, Any], AfterValidator(_text_alone)] | None = None


def prompt_of(messages: Sequence[Message], tokenizer: Any) -> str:
    """The messages as the chat template writes them, with all of their tool calls.

    Raises:
        UserError: the template refuses the messages, or would leave out a tool call or a message of a role that it does
            not know, such as `tool`; a message without tool calls has no content.
    """
    for index, message in enumerate(messages):
        if message.content is None and not message.tool_calls:
            raise UserError(f"messages.{index}.content: must be a text, as the message has no tool_calls")
    _require_rendered(tokenizer, messages)
    return chat_text(tokenizer, [message.turn() for message in messages])


def _require_rendered(tokenizer: Any, messages: Sequence[Message]) -> None:
    """Refuse a message that the template leaves out: a mark in place of its calls' names, or its text, is missing.

    One rendering has the marks of all messages, of which a request may have thousands.
    """
    expected_marks = []
    marked_turns = []
    for index, message in enumerate(messages):
        has_unusual_text = message.role not in _PLAIN_ROLES and bool(message.text.strip())
        expected_marks.append(len(message.tool_calls or ()) + has_unusual_text)
        marked_turns.append(message.turn(f"keepsight_mark_{index}_"))
    if not any(expected_marks):
        return

    rendered_marks = Counter(re.findall(r"keepsight_mark_(\d+)_", chat_text(tokenizer, marked_turns)))
    for index, message in enumerate(messages):
        if rendered_marks[str(index)] < expected_marks[index]:
            lost = "tool_calls" if message.tool_calls else f"role {message.role!r}"
            raise UserError(
                f"messages.{index}: {lost} would be lost, as the chat template of {tokenizer.name_or_path!r} does "
                "not render it; leave it out, or write it as text"
            )


def first_fault(error: ValidationError) -> str:
    """One line: which field is wrong, and why; of the fault that lies deepest."""
    faults = error.errors(include_url=False, include_context=False)
    deepest = max(faults, key=lambda fault: len(fault["loc"]))
    field = ".".join(map(str, deepest["loc"])) or "the body"
    reason = deepest["msg"].removeprefix("Value error, ")
    if deepest["type"] in ("missing", "json_invalid", "value_error"):
        return f"{field}: {reason}"
    return f"{field}: {reason}, got {deepest.get('input')!r:.80}"
