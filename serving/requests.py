"""Requests of the OpenAI server: what of their fields can be honoured, and chat messages as templates take them.

Fields are those of OpenAI's protocol and of vLLM's server. Each is supported (a field of a class here), or is refused
by name unless it has its default (`NOT_SUPPORTED`), or changes no answer and is ignored (`IGNORED`). Unknown fields are
ignored, and named in the log.
"""

import inspect
import json
import re
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    FiniteFloat,
    NonNegativeInt,
    PositiveInt,
    ValidationError,
    model_validator,
)
from transformers import LogitsProcessor, MinNewTokensLengthLogitsProcessor, PreTrainedTokenizerBase
from typing_extensions import override

from keepsight.errors import UserError, code_of
from keepsight.models.chat import chat_text
from keepsight.serving.choices import Choice
from keepsight.serving.prefix import PREFIX_ROLES
from keepsight.serving.sampling import AnswerPenalties

MOST_LOGPROBS = 20
"""Largest number of most likely tokens that a request may ask for, as in OpenAI's protocol."""
_TEXT_PARTS = ("text", "input_text", "output_text")
_NOT_OF_TEMPLATES = frozenset(inspect.signature(PreTrainedTokenizerBase.apply_chat_template).parameters)
"""Arguments of `apply_chat_template` itself."""


def _not_supported(advice: str) -> AfterValidator:
    """A type's check that a value is empty."""

    def check(value: Any) -> Any:
        if value:
            raise ValueError(f"is not supported; {advice}")
        return value

    return AfterValidator(check)


def _prompts(prompt: Any) -> list[str | list[int]]:
    """The prompts of a completion: texts or token ids, alone or in a list."""
    prompts = [prompt]
    if isinstance(prompt, list) and prompt and isinstance(prompt[0], str | list):
        prompts = prompt
    for text_or_ids in prompts:
        is_ids = isinstance(text_or_ids, list) and all(type(token) is int for token in text_or_ids)
        if not is_ids and not isinstance(text_or_ids, str):
            raise ValueError("must be a text or token ids, or a list of these")
    return prompts


def _biases(logit_bias: dict[str, float]) -> dict[str, float]:
    for token, bias in logit_bias.items():
        if not token.isdecimal():
            raise ValueError(f"names {token[:64]!r}, which is no token id")
        if not -100 <= bias <= 100:
            raise ValueError(f"is {bias} for token {token}; it must be from -100 to 100")
    return logit_bias


IGNORED = frozenset(
    {
        "metadata",
        "mm_payload",
        "parallel_tool_calls",
        "prediction",
        "priority",
        "prompt_cache_key",
        "prompt_cache_options",
        "prompt_cache_retention",
        "request_id",
        "return_mm_kwargs",
        "return_token_offsets",
        "routed_experts_prompt_start",
        "safety_identifier",
        "service_tier",
        "session_id",
        "spaces_between_special_tokens",
        "store",
        "stream_interval",
        "truncation_side",
        "user",
    }
)
"""Fields that change no answer of this server."""

_TEXT_ALONE = "this server answers with text alone; leave it out"
_NO_PROMPT_TOKENS = "an evicted cache does not have the prompt's own tokens; leave it out"
_OF_VLLM = "it is for vLLM's server; leave it out"
_NO_CONSTRAINTS = "this server does not constrain answers so; leave it out"
NOT_SUPPORTED = {
    "audio": _TEXT_ALONE,
    "modalities": _TEXT_ALONE,
    "tools": "completions have none; ask the chat endpoint",
    "tool_choice": "completions have no tools; ask the chat endpoint",
    "functions": "give tools",
    "function_call": "give tools and tool_choice",
    "web_search_options": "this server searches nothing; leave it out",
    "moderation": "this server moderates nothing; leave it out",
    "verbosity": "models of this server have no such setting; leave it out",
    "echo": "an evicted cache does not have the prompt's own tokens; leave it out (lm-eval: use keepsight-lm-eval)",
    "prompt_logprobs": _NO_PROMPT_TOKENS,
    "suffix": "this server completes prompts at their end alone; leave it out",
    "best_of": "this server returns all of the n answers; leave it out",
    "use_beam_search": "answers are sampled or greedy; leave it out",
    "length_penalty": "it is for beam search, which is not supported; leave it out",
    "truncate_prompt_tokens": "prompts are read whole; shorten it",
    "allowed_token_ids": _NO_CONSTRAINTS,
    "bad_words": "give logit_bias for single tokens",
    "structured_outputs": _NO_CONSTRAINTS,
    "guided_json": _NO_CONSTRAINTS,
    "guided_regex": _NO_CONSTRAINTS,
    "guided_choice": _NO_CONSTRAINTS,
    "guided_grammar": _NO_CONSTRAINTS,
    "logits_processors": _NO_CONSTRAINTS,
    "repetition_detection": "give presence_penalty, frequency_penalty or repetition_penalty",
    "watermarking": "answers of this server have no watermark; leave it out",
    "thinking_token_budget": "give reasoning_effort, or chat_template_kwargs of the model's template",
    "include_reasoning": "the answer has all that the model writes; leave it out",
    "add_special_tokens": "the chat template writes them; leave it out",
    "chat_template": "the server's own is used; give chat_template_kwargs",
    "documents": "write them into a message",
    "mm_processor_kwargs": _TEXT_ALONE,
    "media_io_kwargs": _TEXT_ALONE,
    "prompt_embeds": "prompts are texts or token ids",
    "kv_transfer_params": _OF_VLLM,
    "ec_transfer_params": _OF_VLLM,
    "vllm_xargs": _OF_VLLM,
    "include_stop_str_in_output": "answers end before a stop; leave it out",
    "skip_special_tokens": "special tokens are no part of an answer; leave it out",
    "return_tokens_as_token_ids": "tokens have their texts; leave it out",
    "return_token_ids": "answers are text; ask /tokenize",
    "return_prompt_text": "ask /tokenize with return_token_strs",
    "logprob_token_ids": "give logprobs, and top_logprobs in chats",
}
"""Fields that would change the answer: what to do in place of each. They are refused unless they have a default."""

_DEFAULTS: dict[str, tuple[Any, ...]] = {
    "modalities": (["text"],),
    "tool_choice": ("none", "auto"),
    "function_call": ("none", "auto"),
    "verbosity": ("medium",),
    "best_of": (1,),
    "length_penalty": (1,),
}
"""Defaults of fields beside those that say nothing: null, false, and empty texts, lists and objects."""
_TRUE_BY_DEFAULT = ("include_reasoning", "skip_special_tokens")
"""Fields of which false is no default."""


def unknown_fields(fields: Mapping[str, Any] | None) -> list[str]:
    """The names of fields that this server does not know, among a request's further ones.

    Raises:
        UserError: a field would change the answer and is not supported.
    """
    unknown = []
    for name, value in (fields or {}).items():
        if name in _TRUE_BY_DEFAULT:
            is_default = value is None or value is True
        else:
            says_nothing = value is None or value is False or value in ("", [], {})
            is_default = says_nothing or value in _DEFAULTS.get(name, ())
        if name in NOT_SUPPORTED and not is_default:
            raise UserError(f"{name}: is not supported; {NOT_SUPPORTED[name]}", field=name, code="conflict")
        if name not in NOT_SUPPORTED and name not in IGNORED:
            unknown.append(name)
    return unknown


_Text = Annotated[str, Field(min_length=1, max_length=256)]
_Ids = list[Annotated[int, Field(ge=0)]]


class StreamOptions(BaseModel):
    """`stream_options` of a request."""

    include_usage: bool | None = None


class JsonSchema(BaseModel):
    """`json_schema` of a `response_format`; its name and description are for the client."""

    definition: Annotated[dict[str, Any], Field(alias="schema")]


class ResponseFormat(BaseModel):
    """`response_format` of a request."""

    type: str
    json_schema: JsonSchema | None = None

    @model_validator(mode="after")
    def _require_known(self) -> "ResponseFormat":
        if self.type not in ("text", "json_object", "json_schema"):
            raise ValueError(f"of type {self.type[:64]!r} is not supported; take text, json_object or json_schema")
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise ValueError("must have json_schema for the type json_schema, and for no other")
        return self

    @property
    def schema_of_answer(self) -> dict[str, Any] | None:
        """The JSON schema of the answer; None for any text."""
        if self.type == "text":
            return None
        return {"type": "object"} if self.json_schema is None else self.json_schema.definition


class KeepsightFields(BaseModel):
    """The field `keepsight`, with options of our servers: `extra_body={"keepsight": {"budget": 128}}` in clients.

    Attributes:
        budget: Number of entries that each KV head keeps of the prompt, or a ratio of the prompt.
        adapter: Name of one of the server's adapters.
        prefix: Id of a prefix that the prompt follows, in vLLM's server.
    """

    model_config = ConfigDict(extra="allow", strict=True)
    budget: PositiveInt | Annotated[FiniteFloat, Field(gt=0, le=1)] | None = None
    adapter: Annotated[str, Field(min_length=1)] | None = None
    prefix: str | None = None

    @model_validator(mode="after")
    def _require_known(self) -> "KeepsightFields":
        for name, value in (self.model_extra or {}).items():
            if value is not None:
                raise ValueError(f"has no field {name[:64]!r}; it has budget, adapter and prefix")
        return self

    @property
    def choice(self) -> Choice:
        """The adapter and the budget."""
        return Choice(self.adapter, self.budget)


class CommonFields(BaseModel, ABC):
    """Fields of both endpoints; further ones are kept for `unknown_fields`."""

    model_config = ConfigDict(extra="allow", strict=True)
    model: str
    max_tokens: PositiveInt | None = None
    max_completion_tokens: PositiveInt | None = None
    min_tokens: NonNegativeInt | None = None
    ignore_eos: bool | None = None
    n: PositiveInt | None = None
    temperature: Annotated[FiniteFloat, Field(ge=0, le=2)] | None = None
    top_p: Annotated[FiniteFloat, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1)] | None = None
    min_p: Annotated[FiniteFloat, Field(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[FiniteFloat, Field(ge=0.1, le=10)] | None = None
    presence_penalty: Annotated[FiniteFloat, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[FiniteFloat, Field(ge=-2, le=2)] | None = None
    logit_bias: Annotated[dict[str, float], Field(max_length=1024), AfterValidator(_biases)] | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    stop: _Text | Annotated[list[_Text], Field(max_length=16)] | None = None
    stop_token_ids: Annotated[_Ids, Field(max_length=16)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    response_format: ResponseFormat | None = None
    cache_salt: Annotated[str, Field(min_length=1, max_length=1024)] | None = None
    keepsight: KeepsightFields | None = None

    def options(self, answer_tokens: int, model_top_k: int | None) -> dict[str, Any]:
        """Options of `model.generate`; unset fields are as in the model's generation configuration."""
        options: dict[str, Any] = {"max_new_tokens": answer_tokens}
        if self.temperature is not None:
            options["do_sample"] = self.temperature > 0
        if self.temperature:
            options["temperature"] = max(self.temperature, 0.01)
            options["top_k"] = model_top_k or 0
        for name in ("top_p", "repetition_penalty"):
            value = getattr(self, name)
            if value is not None:
                options[name] = value
        if self.top_k is not None:
            options["top_k"] = max(self.top_k, 0)  # -1 and 0 stand for all tokens
        if self.min_p:
            options["min_p"] = self.min_p
        if self.min_tokens:
            options["min_new_tokens"] = self.min_tokens
        if self.logit_bias:
            options["sequence_bias"] = [[[int(token)], float(bias)] for token, bias in self.logit_bias.items()]
        return options

    def processors(self, prompt_tokens: int, device: str) -> list[LogitsProcessor]:
        """Logits processors that no option of `model.generate` makes, for a prompt of so many tokens."""
        processors: list[LogitsProcessor] = []
        if self.presence_penalty or self.frequency_penalty:
            penalties = AnswerPenalties(prompt_tokens, self.presence_penalty or 0.0, self.frequency_penalty or 0.0)
            processors.append(penalties)
        if self.min_tokens and self.stop_token_ids:
            processors.append(
                MinNewTokensLengthLogitsProcessor(prompt_tokens, self.min_tokens, self.stop_token_ids, device)
            )
        return processors

    @property
    def stops(self) -> list[str]:
        """The texts before which the answer ends."""
        if isinstance(self.stop, str):
            return [self.stop]
        return self.stop or []

    @property
    def schema_of_answer(self) -> dict[str, Any] | None:
        """The JSON schema that the answer follows; None for any text."""
        return None if self.response_format is None else self.response_format.schema_of_answer

    @property
    @abstractmethod
    def wanted_logprobs(self) -> int | None:
        """Number of most likely tokens to return with each token's log-probability; None where none are wanted."""


class CompletionRequest(CommonFields):
    """A request of `/v1/completions`."""

    prompt: Annotated[list[str | list[int]], BeforeValidator(_prompts)]
    logprobs: Annotated[int, Field(ge=0, le=MOST_LOGPROBS)] | Literal[False] | None = None
    add_special_tokens: bool | None = None

    @property
    @override
    def wanted_logprobs(self) -> int | None:
        return None if self.logprobs is False else self.logprobs


class TextPart(BaseModel):
    """A text part of a message."""

    type: str = "text"
    text: str | None = None

    @model_validator(mode="after")
    def _require_text(self) -> "TextPart":
        if self.type not in _TEXT_PARTS:
            raise ValueError(f"is of type {self.type[:64]!r}, which is not supported; this server reads text alone")
        if self.text is None:
            raise ValueError("has no text")
        return self


class Function(BaseModel):
    """The function that a tool call names, with its arguments as JSON text or, as some clients send them, a value."""

    model_config = ConfigDict(extra="allow")
    name: Annotated[str, Field(min_length=1)]
    arguments: str | dict[str, Any] = ""


class ToolFunction(BaseModel):
    """A function that an answer may call; `parameters` is its JSON schema."""

    model_config = ConfigDict(extra="allow")
    name: Annotated[str, Field(min_length=1)]
    description: str | None = None
    parameters: dict[str, Any] | None = None


class Tool(BaseModel):
    """A tool of a chat; other fields go to the chat template as they are."""

    model_config = ConfigDict(extra="allow")
    type: Literal["function"] = "function"
    function: ToolFunction


def _tool_choice(tool_choice: Any) -> Any:
    if tool_choice not in (None, "none", "auto"):
        shown = tool_choice if isinstance(tool_choice, str) else "a certain tool"
        raise ValueError(f"of {shown[:64]!r} is not supported; take auto or none")
    return tool_choice


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
            raise UserError(
                f"messages: the arguments of the tool call {self.function.name!r} must be a JSON object",
                field="messages",
                code="type",
            )
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
    def may_name_prefix(self) -> bool:
        """Whether its first words may name a prefix: those of tools and answers are text."""
        return self.role in PREFIX_ROLES

    @property
    def text(self) -> str:
        """The text of its parts."""
        if isinstance(self.content, list):
            return "".join(part.text or "" for part in self.content)
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


class TemplateFields(BaseModel):
    """Fields about how the chat template writes messages."""

    reasoning_effort: Annotated[str, Field(max_length=64)] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None

    def template_arguments(self) -> dict[str, Any]:
        """Arguments of the chat template, and of `apply_chat_template`.

        Raises:
            UserError: they contradict one another, or are none of the template's.
        """
        arguments: dict[str, Any] = {}
        if self.reasoning_effort is not None:
            arguments["reasoning_effort"] = self.reasoning_effort
            arguments["enable_thinking"] = self.reasoning_effort != "none"  # as vLLM does
        for name, value in (self.chat_template_kwargs or {}).items():
            if name in _NOT_OF_TEMPLATES:
                raise UserError(
                    f"chat_template_kwargs.{name}: is not an argument of chat templates; leave it out",
                    field=f"chat_template_kwargs.{name}",
                    code="unknown",
                )
            arguments[name] = value
        if self.continue_final_message and self.add_generation_prompt:
            raise UserError(
                "continue_final_message: leave add_generation_prompt out, which begins another message",
                field="continue_final_message",
                code="conflict",
            )
        if self.continue_final_message:
            arguments["continue_final_message"] = True
            arguments["add_generation_prompt"] = False
        elif self.add_generation_prompt is not None:
            arguments["add_generation_prompt"] = self.add_generation_prompt
        return arguments


class ChatRequest(CommonFields, TemplateFields):
    """A request of `/v1/chat/completions`."""

    messages: Annotated[list[Message], Field(min_length=1)]
    tools: list[Tool] | None = None
    tool_choice: Annotated[Any, AfterValidator(_tool_choice)] = None
    parallel_tool_calls: bool | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MOST_LOGPROBS)] | None = None

    @property
    @override
    def wanted_logprobs(self) -> int | None:
        if self.top_logprobs and not self.logprobs:
            raise UserError("top_logprobs: needs logprobs to be true", field="top_logprobs", code="conflict")
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def offered_tools(self) -> list[dict[str, Any]]:
        """The tools that the answer may call, as chat templates take them."""
        if self.tool_choice == "none":
            return []
        return [tool.model_dump(exclude_unset=True) for tool in self.tools or []]

    @override
    def template_arguments(self) -> dict[str, Any]:
        arguments = super().template_arguments()
        tools = self.offered_tools
        if tools:
            arguments["tools"] = tools
        return arguments


class TokenizeRequest(TemplateFields):
    """A request of `/tokenize`, as vLLM's server takes it: of a text, or of a chat."""

    model_config = ConfigDict(strict=True)
    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[Message], Field(min_length=1)] | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None

    @model_validator(mode="after")
    def _require_text(self) -> "TokenizeRequest":
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("must have either prompt or messages")
        return self


class DetokenizeRequest(BaseModel):
    """A request of `/detokenize`."""

    model_config = ConfigDict(strict=True)
    model: str | None = None
    tokens: _Ids


class _OfKeepsight(BaseModel):
    """A request of vLLM's server, as far as it is for keepsight."""

    keepsight: KeepsightFields | None = None


def keepsight_fields(value: Any) -> KeepsightFields:
    """The field `keepsight` of a request of vLLM's server; a `UserError` as from our own server."""
    try:
        return _OfKeepsight.model_validate({"keepsight": value}).keepsight or KeepsightFields()
    except ValidationError as error:
        raise first_fault(error) from None


def prompt_of(messages: Sequence[Message], tokenizer: Any, arguments: Mapping[str, Any] | None = None) -> str:
    """The messages as the chat template writes them, with all of their tool calls.

    `arguments` are those of `ChatRequest.template_arguments`.

    Raises:
        UserError: the template refuses the messages, or would leave out a tool call or a message of a role that it does
            not know, such as `tool`, or the tools; a message without tool calls has no content.
    """
    for index, message in enumerate(messages):
        if message.content is None and not message.tool_calls:
            raise UserError(
                f"messages.{index}.content: must be a text, as the message has no tool_calls",
                field=f"messages.{index}.content",
                code="type",
            )
    _require_rendered(tokenizer, messages)
    turns = [message.turn() for message in messages]
    arguments = dict(arguments or {})
    text = chat_text(tokenizer, turns, **arguments)
    if arguments.pop("tools", None) and chat_text(tokenizer, turns, **arguments) == text:
        raise UserError(
            f"tools: would be lost, as the chat template of {tokenizer.name_or_path!r} does not render them; leave "
            "them out",
            field="tools",
            code="model",
        )
    return text


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
                "not render it; leave it out, or write it as text",
                field=f"messages.{index}",
                code="model",
            )


_TYPES = {"bool", "bytes", "dict", "float", "int", "list", "str"}


def first_fault(error: ValidationError) -> UserError:
    """Which field of a request is wrong, and why; of the fault that lies deepest."""
    faults = error.errors(include_url=False, include_context=False)
    deepest = max(faults, key=lambda fault: len(fault["loc"]))
    field = ".".join(str(part) for part in deepest["loc"] if not _is_type(part))
    reason = deepest["msg"].removeprefix("Value error, ")
    message = f"{field or 'the body'}: {reason}"
    if deepest["type"] not in ("missing", "json_invalid", "value_error"):
        message += f", got {deepest.get('input')!r:.80}"
    return UserError(message, field=field, code=code_of(error))


def _is_type(part: str | int) -> bool:
    """Whether a part of pydantic's path is no field of the request, but which of a union's types was tried."""
    return isinstance(part, str) and (re.search(r"[^\w]", part) is not None or part in _TYPES)
