r"""An ASGI middleware of vLLM's server: any OpenAI client names a prefix in its message, or in its prompt's tokens.

    KEEPSIGHT_ROOT=prefixes KEEPSIGHT_MODEL=MODEL python -m vllm.entrypoints.openai.api_server --model MODEL ... \
        --middleware keepsight.serving.vllm.middleware.Prefixes

A chat message, of the user or the system, that begins with `[[keepsight:ID]]` stands for the document; the text after
it, also in further text parts, is read after the prefix. Elsewhere such words are text. A request may name the prefix
beside its messages, too: in the header `Keepsight-Prefix`, or as {"keepsight": {"prefix": ID}}. Then the document
stands before the first message of the user, and all messages are text. In completions, `prompt` is a text that begins
so, or token ids that begin with the placeholders. A request that cannot be answered rightly is refused with HTTP 4xx
and one line. Endpoints that `keepsight.serving.vllm.access` does not list are closed: they would read placeholders
unchecked. With an API key, every endpoint but `/health` needs it.

Where `KEEPSIGHT_WORKER` names the socket of a `Worker`, prompts of `KEEPSIGHT_LEAST` tokens or more that name no prefix
are sent there, and answered from the entries that it keeps; `keepsight serve vllm=true` starts both. By
{"keepsight": {"budget": B, "adapter": NAME}} a request chooses how many, and by which adapter.

Where the engine evicts (`keepsight.serving.vllm.record`) and has a folder for plain requests, it reads such
prompts itself: a first request makes the prefix, and the client's own is answered from it.

With `kv_transfer_params` {"keepsight_evict": true}, or a budget, the last message is the document of a prefix that the
engine is to make and the client to name: it is read without the chat template's text after it. The reply's
`kv_transfer_params` hold the id; its text is one meaningless token.
"""

import asyncio
import json
import logging
import math
import os
import sys
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Any, TypeAlias

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse
from transformers import AutoTokenizer
from typing_extensions import override

from keepsight.errors import UserError, one_line
from keepsight.files import read_bytes
from keepsight.models.chat import template_roles
from keepsight.models.identity import Identity
from keepsight.models.targets import fingerprints
from keepsight.serving.choices import BUDGET, Choice, Choices
from keepsight.serving.guard import Guard
from keepsight.serving.inside import PlainEviction, plain_eviction
from keepsight.serving.prefix import (
    CONTEXT_EXCEEDED,
    EVICT,
    MARK,
    PLAIN_NAME,
    PREFIX_HEADER,
    PREFIX_ROLES,
    TEXT_BEFORE,
    Header,
    PrefixStore,
    alphabet_of,
    digest_in,
    letters_of_id,
    placeholders,
    require_spellable,
    split_at_mark,
    split_named,
)
from keepsight.serving.requests import KeepsightFields, keepsight_fields
from keepsight.serving.vllm.access import (
    ADAPTERS,
    CHAT,
    COMPLETIONS,
    GRACE,
    MAX_BUDGET,
    PATHS,
    has_key,
    hosts_of,
    is_listed,
    is_preflight,
    is_stopping,
    names_in,
    needs_key,
    origins_of,
    path_of,
)
from keepsight.serving.vllm.engine_reader import EngineReader
from keepsight.serving.vllm.reader import Complete, Reader, Refused, WorkerReader

Message: TypeAlias = MutableMapping[str, Any]
Receive: TypeAlias = Callable[[], Awaitable[Message]]
Send: TypeAlias = Callable[[Message], Awaitable[None]]

logger = logging.getLogger("vllm.keepsight")

TEXT_PARTS = ("text", "input_text", "output_text")
BYPASS = ("echo", "prompt_logprobs", "truncate_prompt_tokens")
"""Options that read or cut the prompt's own tokens, which placeholders are not."""
TEMPLATE = ("chat_template", "documents", "reasoning_effort")
"""Options by which vLLM renders messages otherwise than the model's own template does."""
PREFIX = "keepsight.prefix"
"""The field of a request that names a prefix beside its prompt."""
SHUTTING_DOWN = "keepsight: the server is shutting down"
_TOKENIZED = (
    "model",
    "messages",
    "tools",
    "chat_template",
    "add_special_tokens",
    "add_generation_prompt",
    "continue_final_message",
)
"""Fields of a chat that vLLM's `/tokenize` reads too."""
_LOOK = 0.5
"""Seconds between two looks whether the server must stop."""
_LOOK_CLIENT = 0.05
"""Seconds between two looks whether anybody waits for a prompt that the engine reads."""
_PATIENCE = 10.0
"""Seconds after which a stream is opened whose prompt is still being read: before, errors have their own status."""
_PING = 15.0
"""Seconds after which it gets another empty line, since proxies close silent connections after 60."""
MAX_BYTES = int(os.environ.get("KEEPSIGHT_MAX_BYTES") or 2**26)


@dataclass(frozen=True)
class Served:
    """What vLLM's server was started with, as far as requests depend on it; None where that is not known.

    Attributes:
        page: Entries of a page that the engine reads where heads keep different numbers; 0 where it reads none.
        shape: Layers, KV heads and head dimension of the model.
        loras: Names of models that are LoRAs.
        template: The operator's own chat template.
        eviction: How the engine evicts from plain requests; None where it does not.
    """

    page: int | None = None
    shape: tuple[int, int, int] | None = None
    loras: frozenset[str] = frozenset()
    template: str | None = None
    eviction: PlainEviction | None = None

    def is_lora(self, model: Any) -> bool:
        """Whether a request's `model` is a LoRA."""
        return isinstance(model, str) and model in self.loras


def served_by(scope: Message) -> Served:
    """What the server of a request was started with."""
    state: Any = getattr(scope.get("app"), "state", None)
    config: Any = getattr(state, "vllm_config", None)
    models: Any = getattr(state, "openai_serving_models", None)
    loras = frozenset(getattr(models, "lora_requests", {}))
    template = getattr(getattr(state, "args", None), "chat_template", None)
    if config is None:
        return Served(loras=loras, template=template)
    page = 0
    if os.environ.get("KEEPSIGHT_RAGGED") in ("1", "triton"):
        page = config.cache_config.block_size
    model = config.model_config
    shape = (model.hf_text_config.num_hidden_layers, model.get_total_num_kv_heads(), model.get_head_size())
    return Served(page, shape, loras, template, plain_eviction(config))


class Rewriter:
    """Replaces prefixes that requests name by their placeholders.

    Args:
        root: Folder of the prefixes.
        model: Folder or Hub id of the model, for its tokenizer and chat template.
        weights: Fingerprints of the model's weights, one of which a prefix must have; empty where none are known.
        tokenizer: Folder or Hub id of another tokenizer, such as with another chat template.
    """

    def __init__(
        self, root: str, model: str, weights: frozenset[str] = frozenset(), tokenizer: str | None = None
    ) -> None:
        self.store = PrefixStore(root)
        self.tokenizer = AutoTokenizer.from_pretrained(tokenizer or model)
        self.alphabet = alphabet_of(self.tokenizer)
        self.weights = weights
        self.context = _number("KEEPSIGHT_CONTEXT")
        self.longest_token = max(map(len, self.tokenizer.get_vocab()))

    def require_fitting(self, characters: int) -> None:
        """Refuse a text of so many characters that no prompt holds them, before it is tokenized."""
        if characters > self.context * self.longest_token:
            raise Refused(
                400,
                f"This model's maximum context length is {self.context} tokens. However, your prompt has {characters} "
                "characters, more than so many tokens hold. Please shorten it.",
                CONTEXT_EXCEEDED,
                "prompt",
            )

    def rewritten(self, path: str, request: Any, served: Served = Served(), prefix: str | None = None) -> Any:
        """The request that vLLM receives: unchanged if it names no prefix, or spells it in placeholders.

        `prefix` is the id of one that the request names beside its prompt.

        Raises:
            UserError: the request is refused; the client gets the message.
        """
        if not isinstance(request, dict):
            return request
        if not isinstance(request.get("kv_transfer_params"), dict | None):
            raise UserError("keepsight: kv_transfer_params must be an object", field="kv_transfer_params", code="type")
        if PLAIN_NAME in (request.get("kv_transfer_params") or {}):
            raise UserError(
                f"keepsight: {PLAIN_NAME} is for the server itself; leave it out",
                field="kv_transfer_params",
                code="conflict",
            )
        try:
            if path == CHAT:
                return self._chat(request, served, prefix)
            return self._completion(request, served, prefix)
        except (AttributeError, KeyError, TypeError, ValueError, RecursionError) as error:
            if isinstance(error, UserError):
                raise
            raise UserError(
                f"keepsight: the request cannot be read: {one_line(error)}", field="", code="type"
            ) from None

    def _chat(self, request: dict[str, Any], served: Served, prefix: str | None) -> dict[str, Any]:
        messages: Any = request.get("messages")
        if isinstance(messages, list):
            self._check_roles(messages, request, served)
        if _wants_eviction(request):
            _require_no_prefix(prefix)
            return self._document(request, messages)

        params = request.get("kv_transfer_params") or {}
        named = _named_by(messages, prefix)
        if named is None:
            self._prompt(params.get("prompt_token_ids"), request, served, None)
            return request
        if not all(map(_is_text, messages)):
            raise UserError(
                "keepsight: a request with a prefix reads text alone; leave out images and other parts",
                field="messages",
                code="conflict",
            )

        naming_turn, digest, question = named
        turns = [_as_text(message) for message in messages]
        later_texts = [turn["content"] for turn in turns[naming_turn + 1 :]]
        if not any(text and text.strip() for text in (question, *later_texts)):
            raise UserError(
                "keepsight: no question follows the prefix; add it to the message", field="messages", code="missing"
            )

        header = self._header(digest, request, served)
        turns[naming_turn]["content"] = MARK + question
        before, after = self._rendered(turns, request)
        if before != header.before:
            raise UserError(
                f"keepsight: prefix {digest} was made after other text ({header.before[-80:]!r}); send the system "
                "message and template arguments that it was made with",
                field="prefix",
                code="conflict",
            )
        ids = placeholders(digest, header.entries, self.alphabet) + self._tokens(after)
        return request | {"kv_transfer_params": params | {"prompt_token_ids": ids}}

    def _check_roles(self, messages: list[Any], request: Mapping[str, Any], served: Served) -> None:
        """Refuse roles that the chat template is not made for."""
        template = request.get("chat_template") or served.template or self.tokenizer.chat_template
        if not isinstance(template, str) or not template:
            return  # vLLM says that there is none, or takes one of several
        roles = template_roles(template)
        for message in messages:
            role = message.get("role") if isinstance(message, dict) else None
            if isinstance(role, str) and role not in roles:
                raise UserError(
                    f"keepsight: the chat template has no role {role[:64]!r}; use one of system, user and assistant",
                    field="messages",
                    code="unknown",
                )

    def _document(self, request: dict[str, Any], messages: Any) -> dict[str, Any]:
        """The request that reads its last message as a document, as `keepsight prefix` does."""
        text = ""
        if isinstance(messages, list) and messages and _is_text(messages[-1]):
            text = _text_of(messages[-1])
        if not text.strip() or split_named(text) is not None:
            raise UserError(
                f"keepsight: {EVICT} needs the document as the text of the last message", field="messages", code="type"
            )

        marked_turn = {**messages[-1], "content": f"{MARK}?"}
        before, _ = self._rendered([*messages[:-1], marked_turn], request)
        params = request["kv_transfer_params"] | {TEXT_BEFORE: before, "prompt_token_ids": self._tokens(before + text)}
        changed = request | {"kv_transfer_params": params}
        length_names = {"max_tokens", "max_completion_tokens"} & request.keys()
        for name in length_names or {"max_tokens"}:
            changed[name] = 1
        return changed

    def _rendered(self, turns: list[dict[str, Any]], request: Mapping[str, Any]) -> tuple[str, str]:
        """The chat template's text before and after the document."""
        for name in TEMPLATE:
            if request.get(name) is not None:
                raise UserError(
                    f"keepsight: {name} changes the chat template; give chat_template_kwargs instead",
                    field=name,
                    code="conflict",
                )

        continues = bool(request.get("continue_final_message"))
        options = dict(request.get("chat_template_kwargs") or {})
        if request.get("tools"):
            options["tools"] = request["tools"]
        options["tokenize"] = False
        options["continue_final_message"] = continues
        options["add_generation_prompt"] = bool(request.get("add_generation_prompt", not continues))
        try:
            text = str(self.tokenizer.apply_chat_template(turns, **options))
        except Exception as error:  # a template computes with what the messages hold
            raise UserError(
                f"keepsight: the chat template refuses the messages: {one_line(error)}", field="messages", code="data"
            ) from None
        before_and_after = split_at_mark(text)
        if before_and_after is None:
            raise UserError(
                "keepsight: the chat template does not render the message that names the prefix once",
                field="model",
                code="model",
            )
        return before_and_after

    def _completion(self, request: dict[str, Any], served: Served, prefix: str | None) -> dict[str, Any]:
        prompt = request.get("prompt")
        wants_eviction = _wants_eviction(request)  # refuses what cannot be answered
        if wants_eviction:
            _require_no_prefix(prefix)
        if not isinstance(prompt, list) or not prompt or not isinstance(prompt[0], str | list):
            rewritten = self._prompt(prompt, request, served, prefix)
            return request if rewritten is prompt else request | {"prompt": rewritten}

        if wants_eviction and len(prompt) > 1:
            raise UserError(f"keepsight: {EVICT} makes one prefix; give one prompt", field="prompt", code="range")
        prompts = [self._prompt(text_or_ids, request, served, prefix) for text_or_ids in prompt]
        if all(after is before for after, before in zip(prompts, prompt, strict=True)):
            return request
        return request | {"prompt": prompts}

    def _prompt(self, prompt: Any, request: Mapping[str, Any], served: Served, prefix: str | None) -> Any:
        """The prompt that vLLM receives, a text or token ids; the same object if it is unchanged."""
        if isinstance(prompt, str):
            named = split_named(prompt) if prefix is None else (prefix, prompt)
            if named is None:
                return prompt
            digest, question = named
            if not question.strip():
                raise UserError(
                    "keepsight: no question follows the prefix; add it to the prompt", field="prompt", code="missing"
                )
            header = self._header(digest, request, served)
            return placeholders(digest, header.entries, self.alphabet) + self._tokens(question)
        if not isinstance(prompt, list):
            return prompt
        if prefix is not None:
            self.require_spelled_first(prompt)
            prompt = placeholders(prefix, self._header(prefix, request, served).entries, self.alphabet) + prompt

        entries = 0
        spelled = digest_in(prompt, self.alphabet)
        if spelled is not None:
            entries = self._header(spelled, request, served).entries
            if prompt[:entries] != placeholders(spelled, entries, self.alphabet):
                raise UserError(
                    f"keepsight: prefix {spelled} has {entries} placeholders; give all of them",
                    field="prompt",
                    code="data",
                )
            if len(prompt) == entries:
                raise UserError(
                    "keepsight: the prompt has no token of its own after the prefix; add the question",
                    field="prompt",
                    code="missing",
                )
        self.require_spelled_first(prompt[entries:])
        return prompt

    def require_spelled_first(self, ids: list[Any]) -> None:
        """Refuse tokens that spell a prefix where none is read: after others, such as the start token."""
        letters = letters_of_id(len(self.alphabet))
        alphabet = {*self.alphabet}
        run = 0  # number of letters up to this token, without another token between
        for token in ids:
            if isinstance(token, int) and token in alphabet:
                run += 1
            else:
                run = 0
            if run == letters:
                raise UserError(
                    "keepsight: placeholders of a prefix stand after other tokens; they must be the first",
                    field="prompt",
                    code="data",
                )

    def _header(self, digest: str, request: Mapping[str, Any], served: Served) -> Header:
        require_no_bypass(request)
        header = self.store.header(digest)
        if self.weights and header.identity.model not in self.weights:
            present = Identity(model=min(self.weights))
            subject = f"keepsight: prefix {digest} was made by {header.model!r}"
            header.identity.require(present, subject, "make it with this one")
        if served.shape is not None and header.shape != served.shape:
            raise UserError(
                f"keepsight: prefix {digest} is of another model, whose layers, KV heads and head size are "
                f"{header.shape} in place of {served.shape}; make it with this one",
                field="prefix",
                code="model",
            )
        if header.page and served.page is not None and header.page != served.page:
            needed = f"with page={served.page} or without page=" if served.page else "without page="
            raise UserError(
                f"keepsight: prefix {digest} has pages of {header.page} entries; make it {needed}",
                field="prefix",
                code="conflict",
            )
        if served.is_lora(request.get("model")):
            raise UserError(
                "keepsight: a prefix was made without the LoRA of this model; ask the base model",
                field="model",
                code="conflict",
            )
        return header

    def _tokens(self, text: str) -> list[int]:
        self.require_fitting(len(text))
        ids = list(self.tokenizer(text, add_special_tokens=False)["input_ids"])
        if not ids:
            raise UserError(
                "keepsight: the prompt has no token of its own after the prefix; add the question",
                field="prompt",
                code="missing",
            )
        return ids


def _wants_eviction(request: Mapping[str, Any]) -> bool:
    """Whether a request asks the engine to evict from its prompt.

    Raises:
        UserError: it asks in a form that cannot be answered.
    """
    params = request.get("kv_transfer_params")
    wanted = params.get(EVICT) if isinstance(params, dict) else None
    if wanted is None or wanted is False:
        return False
    if type(wanted) not in (bool, int, float) or wanted <= 0:
        raise UserError(
            f"keepsight: {EVICT} is {str(wanted)[:64]!r}; give true, or a budget above 0",
            field="kv_transfer_params",
            code="type",
        )
    for name, default in {"n": 1, "best_of": 1, "stream": False}.items():
        if request.get(name) not in (None, default):
            raise UserError(
                f"keepsight: {EVICT} gives one reply, not streamed; leave {name} out", field=name, code="conflict"
            )
    return True


def bypasses(request: Mapping[str, Any]) -> list[str]:
    """The options of a request that need the prompt's own tokens."""
    # prompt_logprobs=0 asks for them too.
    return [name for name in BYPASS if request.get(name) is not None and request[name] is not False]


def require_no_bypass(request: Mapping[str, Any]) -> None:
    """Refuse options that need the prompt's own tokens."""
    names = bypasses(request)
    if names:
        raise UserError(
            f"keepsight: {names[0]} needs the prompt's own tokens, which a prefix lacks; leave it out",
            field=names[0],
            code="conflict",
        )


def _named_by(messages: Any, prefix: str | None) -> tuple[int, str, str] | None:
    """The index of the message before which a prefix is read, its id, and the message's text; None for no prefix.

    `prefix` is one that the request names beside its messages.
    """
    if prefix is not None:
        if not isinstance(messages, list) or not messages:
            raise UserError("keepsight: no message follows the prefix; add one", field="messages", code="missing")
        roles = [message.get("role") if isinstance(message, dict) else None for message in messages]
        index = roles.index("user") if "user" in roles else 0
        return index, prefix, _text_of(messages[index])

    named = []
    for index, message in enumerate(messages if isinstance(messages, list) else []):
        if isinstance(message, dict) and message.get("role") in PREFIX_ROLES:
            split = split_named(_text_of(message))
            if split is not None:
                named.append((index, *split))
    if len(named) > 1:
        raise UserError(
            "keepsight: a request reads one prefix; name it in one message", field="messages", code="conflict"
        )
    return named[0] if named else None


def _require_no_prefix(prefix: str | None) -> None:
    """Refuse a prefix before a document that is to be one."""
    if prefix is not None:
        raise UserError(
            f"keepsight.prefix: {EVICT} makes a prefix; leave one of them out", field=PREFIX, code="conflict"
        )


def _fields_of(request: Any, scope: Message) -> KeepsightFields:
    """What a request asks of keepsight in its field `keepsight` and its headers.

    Raises:
        UserError: it cannot be read.
    """
    fields = keepsight_fields(request.get("keepsight") if isinstance(request, dict) else None)
    sent = Request(scope).headers.getlist(PREFIX_HEADER)
    if not sent:
        return fields
    prefixes = {*sent} if fields.prefix is None else {*sent, fields.prefix}
    if len(prefixes) > 1:
        raise UserError("keepsight.prefix: a request reads one prefix; name it once", field=PREFIX, code="conflict")
    return fields.model_copy(update={"prefix": sent[0]})


def _is_text(message: Any) -> bool:
    """Whether a chat message consists of text."""
    content = message.get("content") if isinstance(message, dict) else message
    parts = content if isinstance(content, list) else []
    return all(isinstance(part, str) or _is_text_part(part) for part in parts)


def _is_text_part(part: Any) -> bool:
    return isinstance(part, dict) and part.get("type", "text") in TEXT_PARTS and isinstance(part.get("text"), str)


def _text_of(message: Any) -> str:
    """The text of a chat message; its parts are joined as vLLM joins them."""
    content = message.get("content") if isinstance(message, dict) else None
    parts: list[Any] = content if isinstance(content, list) else [content]
    texts = []
    for part in parts:
        if _is_text_part(part):
            texts.append(part["text"])
        elif isinstance(part, str):
            texts.append(part)
    return "\n".join(texts)


def _as_text(message: Mapping[str, Any]) -> dict[str, Any]:
    """A message of text with its parts in one."""
    content = message.get("content")
    if content:
        content = _text_of(message)
    return {**message, "content": content}


def _variable(name: str, meaning: str) -> str:
    value = os.environ.get(name)
    if not value:
        raise UserError(f"{name} is not set; give {name}={meaning}", field=name, code="missing")
    return value


def _largest_budget(default: int | float | None) -> int | float | None:
    """The largest budget that requests may choose; `default` where the operator has set none."""
    variable = os.environ.get(MAX_BUDGET)
    if not variable:
        return default
    try:
        fields = keepsight_fields({"budget": json.loads(variable)})
    except ValueError:
        raise UserError(
            f"{MAX_BUDGET}={variable}: must be a number of entries, or a ratio such as 0.1",
            field=MAX_BUDGET,
            code="type",
        ) from None
    return fields.choice.budget


def _number(name: str) -> int:
    """The number in a variable; no limit where it is not set."""
    return int(os.environ.get(name) or sys.maxsize)


class Door(Guard):
    """The checks of our own server, with vLLM's key, and for the listed endpoints alone."""

    @override
    def check_key(self, request: Request) -> None:
        scope = request.scope
        if is_preflight(scope):
            return
        if needs_key(scope) and not has_key(scope):
            raise HTTPException(401, "keepsight: a key is needed; send Authorization: Bearer KEY")
        if not is_listed(scope):
            endpoint = f"{scope['method']} {path_of(scope)}"
            raise HTTPException(
                404, f"keepsight: {endpoint} does not read prefixes and is closed; use {' or '.join(PATHS)}"
            )


class Prefixes:
    """The middleware.

    By default the rewriter is of the folder `KEEPSIGHT_ROOT`, the model `KEEPSIGHT_MODEL` and the tokenizer
    `KEEPSIGHT_TOKENIZER` (the model's, if that is not set), and long prompts are read by the worker at
    `KEEPSIGHT_WORKER`, if that is set. A `UserError` if a variable is missing.
    """

    def __init__(self, app: Any, rewriter: Rewriter | None = None, reader: Reader | None = None) -> None:
        if rewriter is None:
            root = _variable("KEEPSIGHT_ROOT", "PREFIXES")
            model = _variable("KEEPSIGHT_MODEL", "MODEL")
            rewriter = Rewriter(root, model, fingerprints(model), os.environ.get("KEEPSIGHT_TOKENIZER"))
            if not rewriter.weights:
                logger.warning(
                    "keepsight: the files of %s do not tell its weights; prefixes of others are not refused", model
                )
            socket = os.environ.get("KEEPSIGHT_WORKER")
            if socket:
                least = int(_variable("KEEPSIGHT_LEAST", "TOKENS"))
                limits = (least, _number("KEEPSIGHT_CONTEXT"), _number("KEEPSIGHT_ANSWER"))
                adapters = names_in(ADAPTERS, os.environ.get(ADAPTERS) or "[]")
                reader = WorkerReader(socket, *limits, choices=Choices(_largest_budget(None), adapters))
        self.app = app
        self.rewriter = rewriter
        self.reader = reader
        self._guard: Door | None = None

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """Handle a request, as ASGI applications do."""
        if scope["type"] == "lifespan":
            await self.app(scope, receive, send)
        elif scope["type"] != "http":
            await _close(receive, send)
        else:
            if self._guard is None:  # the server's arguments are in the scope of requests
                self._guard = Door(self._handle, refuse=_refusal, hosts=hosts_of(scope), origins=origins_of(scope))
            await self._guard(scope, receive, send)

    async def _handle(self, scope: Message, receive: Receive, send: Send) -> None:
        """Handle a request that may reach the server."""
        if path_of(scope) not in PATHS or is_preflight(scope):
            await self.app(scope, receive, send)
        elif is_stopping():
            await _refuse(send, 503, SHUTTING_DOWN)
        else:
            reply = _Awaited(send)
            try:
                body = await _body_of(receive)
                if body is not None:
                    await self._answer(path_of(scope), body, scope, receive, reply)
            except Refused as error:
                await _refuse(reply.send, error.status, one_line(error, 2000), error.openai_code, error.field)
            except UserError as error:
                await _refuse(reply.send, 400, one_line(error, 2000), field=error.field)

    async def _answer(self, path: str, body: bytes, scope: Message, receive: Receive, reply: "_Awaited") -> None:
        try:
            request = json.loads(body)
        except (ValueError, RecursionError):
            request = None  # vLLM itself says what is wrong with it

        served = served_by(scope)
        fields = _fields_of(request, scope)
        choice = fields.choice
        reply.is_stream = isinstance(request, dict) and request.get("stream") is True
        plain = request
        if isinstance(request, dict) and "keepsight" in request:  # vLLM does not know it
            plain = {name: value for name, value in request.items() if name != "keepsight"}
        changed = self.rewriter.rewritten(path, plain, served, fields.prefix)
        if self.reader is None and served.eviction is not None:
            self.reader = self._engine_reader(served.eviction)
        may_be_long = self._may_read(body, plain, served, choice)
        if choice.field and isinstance(plain, dict):
            self._check_evicted_from(choice, plain, served, names_prefix=changed is not plain)
        async with AsyncExitStack() as used_prefixes:
            if changed is plain and isinstance(plain, dict) and (may_be_long or bypasses(plain)):
                ids = await _unless_gone(self._prompt_ids(path, plain, scope), receive, reply)
                if ids is None:
                    return
                if isinstance(ids, _Reply):
                    await ids.send(reply.send)
                    return
                complete = self._completing(plain, scope)
                shortened = self._shortened(path, plain, ids, choice, complete, used_prefixes)
                changed = await _unless_gone(shortened, receive, reply)
                if changed is None:
                    return
            if changed is not request:
                body = json.dumps(changed).encode()
            await self._answered(_at(scope, len(body)), _again(body, receive), reply.send)

    async def _answered(self, scope: Message, receive: Receive, send: Send) -> None:
        """Let vLLM answer; what has not ended when the server must stop ends with an error."""
        answer = _Answer(send)
        running = asyncio.ensure_future(self.app(scope, receive, answer.send))
        grace = float(os.environ.get(GRACE) or math.inf)
        try:
            while not running.done() and grace > 0:
                await asyncio.wait({running}, timeout=_LOOK)
                if is_stopping():
                    grace -= _LOOK
            if running.done():
                running.result()
        finally:
            if not running.done():
                running.cancel()
                await answer.end()

    def _may_read(self, body: bytes, request: Any, served: Served, choice: Choice) -> bool:
        """Whether a request may have a long prompt that is read first: with the base model, and a valid salt.

        The client itself names the prefix of a prompt that it wants to be evicted from. What a request chooses is
        checked however short its prompt is.
        """
        if self.reader is None or not isinstance(request, dict) or _wants_eviction(request):
            return False
        is_base = not served.is_lora(request.get("model"))
        salt = request.get("cache_salt")
        is_valid = salt is None or (isinstance(salt, str) and salt != "")
        may_be_long = choice.field != "" or len(body) >= self.reader.least  # a token takes at least one byte
        return is_base and is_valid and may_be_long

    def _check_evicted_from(
        self, choice: Choice, request: Mapping[str, Any], served: Served, *, names_prefix: bool
    ) -> None:
        """Refuse a choice for a prompt that this server does not evict from, however long it is."""
        why = ""
        if _wants_eviction(request):
            why = f"the prefix to be made has the budget in {EVICT}"
        elif names_prefix:
            why = "the prefix was evicted from when it was made"
        elif self.reader is None:
            why = "this server evicts from no plain request"
        elif served.is_lora(request.get("model")):
            why = "prompts for a LoRA are not evicted from"
        if why:
            raise UserError(f"{choice.field}: {why}; leave it out", field=choice.field, code="conflict")

    async def _prompt_ids(self, path: str, request: dict[str, Any], scope: Message) -> "list[list[int]] | _Reply":
        """Token ids of each prompt of a request, as vLLM makes them; or vLLM's reply that refuses them."""
        prompts = _chat_prompts(request) if path == CHAT else _completion_prompts(request)
        for prompt in prompts:
            if isinstance(prompt, dict):
                texts = [prompt["prompt"]] if "prompt" in prompt else map(_text_of, prompt["messages"])
                self.rewriter.require_fitting(sum(map(len, texts)))
        all_ids: list[list[int]] = []
        for prompt in prompts:
            ids = prompt
            if isinstance(prompt, dict):
                reply = await _call(self.app, "/tokenize", scope, json.dumps(prompt).encode())
                if reply.status != 200:
                    return reply
                ids = reply.json()["tokens"]
            if not isinstance(ids, list):
                ids = []  # vLLM says what is wrong with other kinds
            all_ids.append(ids)
        return all_ids

    def _engine_reader(self, eviction: PlainEviction) -> EngineReader:
        """The reader of an engine that evicts from plain requests."""
        least = eviction.shortest(letters_of_id(len(self.rewriter.alphabet)))
        return EngineReader(
            eviction.folder,
            read_bytes(os.environ.get("KEEPSIGHT_PREFIX_BYTES") or "2GiB"),
            eviction.budget,
            int(os.environ.get("KEEPSIGHT_LEAST") or least),
            min(eviction.context, _number("KEEPSIGHT_CONTEXT")),
            _number("KEEPSIGHT_ANSWER"),
            choices=Choices(_largest_budget(eviction.budget)),
        )

    def _completing(self, request: Mapping[str, Any], scope: Message) -> Complete:
        """Sends completions to the engine, for the model of a request and with its priority."""
        shared = {name: request[name] for name in ("model", "priority") if request.get(name) is not None}

        async def complete(body: dict[str, Any], must_end: Callable[[], bool]) -> tuple[int, Any]:
            reply = await _call(self.app, COMPLETIONS, scope, json.dumps(shared | body).encode(), must_end)
            return reply.status, reply.json()

        return complete

    async def _shortened(
        self,
        path: str,
        request: dict[str, Any],
        prompts: list[list[int]],
        choice: Choice,
        complete: Complete,
        used_prefixes: AsyncExitStack,
    ) -> dict[str, Any]:
        """The request with placeholders and the last token for each long prompt; prefixes are kept while it runs."""
        letters = letters_of_id(len(self.rewriter.alphabet))
        plain = []  # indices of the prompts that spell no prefix
        for index, ids in enumerate(prompts):
            if digest_in(ids, self.rewriter.alphabet) is None:
                plain.append(index)
        if len(plain) < len(prompts):
            require_no_bypass(request)  # also where they were spelled as text
            if choice.field:
                self._check_evicted_from(choice, request, Served(), names_prefix=True)
        for index in plain:
            self.rewriter.require_spelled_first(prompts[index])

        if self.reader is None:
            return request
        long = []
        for index in plain:
            self.reader.choices.check(choice, len(prompts[index]))
            self._require_spellable(choice)
            if self.reader.evicts(len(prompts[index]), choice, letters):
                long.append(index)
        if not long:
            return request
        require_no_bypass(request)

        answer_tokens = request.get("max_tokens")
        if path == CHAT and request.get("max_completion_tokens") is not None:
            answer_tokens = request["max_completion_tokens"]
        shortened = [*prompts]
        for index in long:
            ids = prompts[index]
            longest = self.reader.longest_answer(len(ids), answer_tokens)
            if path == CHAT and longest is not None:
                request = request | {"max_completion_tokens": longest}
            prefix = self.reader.prefix(ids[:-1], request.get("cache_salt") or "", choice, complete)
            digest, entries = await used_prefixes.enter_async_context(prefix)
            shortened[index] = [*placeholders(digest, entries, self.rewriter.alphabet), ids[-1]]

        if path == CHAT:
            params = request.get("kv_transfer_params") or {}
            return request | {"kv_transfer_params": params | {"prompt_token_ids": shortened[0]}}
        if len(shortened) == 1:
            return request | {"prompt": shortened[0]}
        return request | {"prompt": shortened}

    def _require_spellable(self, choice: Choice) -> None:
        """Refuse a budget of so few entries that they cannot encode an id."""
        if not isinstance(choice.budget, int):
            return  # a ratio depends on the prompt
        try:
            require_spellable(choice.budget, self.rewriter.alphabet)
        except UserError as error:
            raise UserError(f"{BUDGET}: {error}", field=BUDGET, code="range") from None


def _completion_prompts(request: Mapping[str, Any]) -> list[Any]:
    """The prompts of a completion, each as token ids or as the body of a request to vLLM's `/tokenize`."""
    prompts = request.get("prompt")
    if not isinstance(prompts, list) or not prompts or isinstance(prompts[0], int):
        prompts = [prompts]
    shared = {name: request[name] for name in ("model", "add_special_tokens") if name in request}
    bodies_or_ids = []
    for prompt in prompts:
        if isinstance(prompt, str):
            prompt = shared | {"prompt": prompt}
        bodies_or_ids.append(prompt)
    return bodies_or_ids


def _chat_prompts(request: Mapping[str, Any]) -> list[Any]:
    """The prompt of a chat as token ids or as the body of a request to vLLM's `/tokenize`, in a list.

    None in place of a prompt that has more than text, or about which vLLM should say what is wrong.
    """
    params = request.get("kv_transfer_params") or {}
    if isinstance(params.get("prompt_token_ids"), list):
        return [params["prompt_token_ids"]]

    messages = request.get("messages")
    options = request.get("chat_template_kwargs") or {}
    if not isinstance(messages, list) or not all(map(_is_text, messages)) or not isinstance(options, dict):
        return [None]

    body: dict[str, Any] = {}
    for name in _TOKENIZED:
        if name in request:
            body[name] = request[name]
    arguments = {}
    for name in ("documents", "reasoning_effort"):
        if request.get(name) is not None:
            arguments[name] = request[name]
    if "reasoning_effort" in arguments:
        arguments["enable_thinking"] = arguments["reasoning_effort"] != "none"  # as vLLM does
    body["chat_template_kwargs"] = arguments | options
    return [body]


class _Answer:
    """Passes on the messages of an answer, and ends it with an error where it has not ended."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self._started = False
        self._streamed = False
        self._ended = False

    async def send(self, message: Message) -> None:
        if self._ended:
            return  # what is left of a cancelled answer
        if message["type"] == "http.response.start":
            self._started = True
            self._streamed = any(value.startswith(b"text/event-stream") for _, value in message.get("headers", ()))
        self._ended = message["type"] == "http.response.body" and not message.get("more_body", False)
        await self._send(message)

    async def end(self) -> None:
        """End with an error: of the stream that has begun, or in place of an answer."""
        if self._ended:
            return
        self._ended = True
        if not self._started:
            await _refuse(self._send, 503, SHUTTING_DOWN)
        elif self._streamed:
            error = {"message": SHUTTING_DOWN, "type": "server_error", "param": None, "code": 503}
            await self._send(_last_events(json.dumps({"error": error})))


class _Awaited:
    """A reply, whose stream is opened while its prompt is still read, lest a proxy takes it for dead.

    From then on an error is an event.

    Attributes:
        is_stream: Whether the answer is streamed.
    """

    def __init__(self, send: Send) -> None:
        self._send = send
        self.is_stream = False
        self._is_open = False
        self._status = 200
        self._error = b""

    async def ping(self) -> None:
        """Send an empty line, which is no event, on a stream."""
        if not self.is_stream:
            return
        if not self._is_open:
            self._is_open = True
            headers = [(b"content-type", b"text/event-stream; charset=utf-8")]
            await self._send({"type": "http.response.start", "status": 200, "headers": headers})
        await self._send({"type": "http.response.body", "body": b"\n", "more_body": True})

    async def send(self, message: Message) -> None:
        """Pass on a message of the reply."""
        if not self._is_open:
            await self._send(message)
        elif message["type"] == "http.response.start":
            self._status = message["status"]
        elif self._status == 200:
            await self._send(message)
        else:
            self._error += message.get("body", b"")
            if not message.get("more_body", False):
                await self._send(_last_events(json.dumps(json.loads(self._error))))


def _last_events(error: str) -> Message:
    """The message that ends a stream with an error, in JSON."""
    events = f"data: {error}\n\ndata: [DONE]\n\n"
    return {"type": "http.response.body", "body": events.encode(), "more_body": False}


class _Reply:
    """Collects the messages that an application sends."""

    def __init__(self) -> None:
        self.messages: list[Message] = []

    async def take(self, message: Message) -> None:
        self.messages.append(message)

    async def send(self, send: Send) -> None:
        for message in self.messages:
            await send(message)

    @property
    def status(self) -> int:
        starts = (message for message in self.messages if message["type"] == "http.response.start")
        return int(next(starts)["status"])

    def json(self) -> Any:
        body = b""
        for message in self.messages:
            if message["type"] == "http.response.body":
                body += message.get("body", b"")
        return json.loads(body)


async def _call(app: Any, path: str, scope: Message, body: bytes, must_end: Callable[[], bool] | None = None) -> _Reply:
    """The reply of another endpoint to a body, which believes that its client leaves once `must_end` is true."""
    reply = _Reply()
    path = scope.get("root_path", "") + path
    receive = None if must_end is None else _until(must_end)
    # The client's name of its request would be that of two.
    headers = [pair for pair in scope["headers"] if pair[0] != b"x-request-id"]
    inner = {**_at({**scope, "headers": headers}, len(body)), "path": path, "raw_path": path.encode()}
    await app(inner, _again(body, receive), reply.take)
    return reply


def _until(must_end: Callable[[], bool]) -> Receive:
    """An ASGI channel whose only message is the client's leave."""

    async def channel() -> Message:
        while not must_end():
            await asyncio.sleep(_LOOK_CLIENT)
        return {"type": "http.disconnect"}

    return channel


async def _unless_gone(work: Awaitable[Any], receive: Receive, reply: _Awaited) -> Any:
    """The result; None, and the work is cancelled, once the client has left. Meanwhile the reply's stream is kept."""
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(receive())
    patience = _PATIENCE
    try:
        while not (task.done() or gone.done()):
            done, _ = await asyncio.wait({task, gone}, timeout=patience, return_when=asyncio.FIRST_COMPLETED)
            if not done:
                await reply.ping()
                patience = _PING
        return task.result() if task.done() else None
    finally:
        task.cancel()
        gone.cancel()


async def _body_of(receive: Receive) -> bytes | None:
    """The body; None where the client has left.

    Raises:
        Refused: it is too large.
    """
    body = bytearray()
    more = True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            return None
        body += message.get("body", b"")
        more = message.get("more_body", False)
        if len(body) > MAX_BYTES:
            raise Refused(413, f"keepsight: the request is larger than {MAX_BYTES} bytes")
    return bytes(body)


def _at(scope: Message, length: int) -> Message:
    headers = [pair for pair in scope["headers"] if pair[0] != b"content-length"]
    return {**scope, "headers": [*headers, (b"content-length", str(length).encode())]}


def _again(body: bytes, receive: Receive | None = None) -> Receive:
    """An ASGI channel that gives a body first, and then further messages, such as the client's disconnect."""
    waiting: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def channel() -> Message:
        if waiting:
            return waiting.pop()
        if receive is not None:
            return await receive()
        return await asyncio.Event().wait()  # type: ignore[return-value]

    return channel


async def _refusal(request: Request, error: HTTPException) -> JSONResponse:
    """The reply to a request that may not reach the server."""
    return _error(error.status_code, error.detail)


async def _refuse(send: Send, status: int, message: str, code: str | None = None, field: str = "") -> None:
    reply = _error(status, message, code, field)
    await send({"type": "http.response.start", "status": status, "headers": reply.raw_headers})
    await send({"type": "http.response.body", "body": reply.body})


def _error(status: int, message: str, code: str | None = None, field: str = "") -> JSONResponse:
    """An error in OpenAI's format, whose `param` is the field that it is about."""
    kind = "server_error"
    if status == 401:
        kind = "authentication_error"
    elif status < 500:
        kind = "invalid_request_error"
    headers = {}
    if status == 401:
        headers["www-authenticate"] = "Bearer"
    if status in (429, 503):
        headers["retry-after"] = "1"
    error = {"message": message, "type": kind, "param": field or None, "code": code or status}
    return JSONResponse({"error": error}, status, headers)


async def _close(receive: Receive, send: Send) -> None:
    """Refuse a WebSocket: none reads prefixes."""
    await receive()
    await send({"type": "websocket.close", "code": 1008, "reason": "keepsight: WebSockets are closed"})
