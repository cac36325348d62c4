r"""An ASGI middleware of vLLM's server: any OpenAI client names a prefix in its message, or in its prompt's tokens.

    KEEPSIGHT_ROOT=prefixes KEEPSIGHT_MODEL=MODEL python -m vllm.entrypoints.openai.api_server --model MODEL ... \
        --middleware keepsight.serving.vllm.middleware.Prefixes

A chat message that begins with `[[keepsight:ID]]` stands for the document; what follows it is read after the prefix. In
completions, `prompt` is a text that begins so, or token ids that begin with the placeholders. What cannot be answered
rightly is refused with HTTP 400 and one line.

With `kv_transfer_params` {"keepsight_evict": true}, or a budget, the last message is the document of a prefix that the
engine is to make (`keepsight.serving.vllm.record`): it is read without what the chat template puts after it, and the
reply's `kv_transfer_params` hold the id; its text is one token and means nothing.
"""

import json
import os
import re
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from typing import Any, TypeAlias

from transformers import AutoTokenizer

from keepsight.errors import UserError, one_line
from keepsight.serving.prefix import (
    BEFORE,
    EVICT,
    MARK,
    Header,
    PrefixStore,
    alphabet_of,
    around_mark,
    digest_in,
    placeholders,
)

Message: TypeAlias = MutableMapping[str, Any]
Receive: TypeAlias = Callable[[], Awaitable[Message]]
Send: TypeAlias = Callable[[Message], Awaitable[None]]

NAMED = re.compile(r"\[\[keepsight:([^\]]*)\]\]")
PATHS = ("/v1/chat/completions", "/v1/completions")
BYPASS = ("echo", "prompt_logprobs", "truncate_prompt_tokens")
"""Options that read or cut the prompt's own tokens, which placeholders are not."""
MAX_BYTES = 2**26


class Rewriter:
    """Replaces prefixes that requests name by their placeholders.

    Args:
        root: Folder of the prefixes.
        model: Folder or Hub id of the model, for its tokenizer and chat template.
    """

    def __init__(self, root: str, model: str) -> None:
        self.store, self.tokenizer = PrefixStore(root), AutoTokenizer.from_pretrained(model)
        self.alphabet = alphabet_of(self.tokenizer)

    def rewritten(self, path: str, request: Any) -> Any:
        """The request as vLLM is to see it; itself where it names no prefix.

        Raises:
            UserError: with what the client is told.
        """
        if not isinstance(request, dict):
            return request
        return self._chat(request) if path == PATHS[0] else self._completion(request)

    def _chat(self, request: dict[str, Any]) -> dict[str, Any]:
        messages: Any = request.get("messages")
        if _wants_eviction(request):
            return self._document(request, messages)
        texts = [_text_of(each) for each in messages] if isinstance(messages, list) else []
        named = [place for place, text in enumerate(texts) if text is not None and NAMED.match(text)]
        if not named:
            return request
        if len(named) > 1:
            raise UserError("keepsight: a request reads one prefix; name it in one message")
        (place,) = named
        digest, question = _split(str(texts[place]))
        header = self._header(digest, request)
        turns = [dict(each) for each in messages]
        turns[place]["content"] = MARK + question
        before, after = self._rendered(turns, request)
        if before != header.before:
            raise UserError(
                f"keepsight: prefix {digest} was made after other text ({header.before[-80:]!r}); send the system "
                "message and template arguments that it was made with"
            )
        ids = placeholders(digest, header.entries, self.alphabet) + self._tokens(after)
        params = request.get("kv_transfer_params") or {}
        return request | {"kv_transfer_params": params | {"prompt_token_ids": ids}}

    def _document(self, request: dict[str, Any], messages: Any) -> dict[str, Any]:
        """The request that reads its last message as a document, as `keepsight prefix` does."""
        text = _text_of(messages[-1]) if isinstance(messages, list) and messages else None
        if text is None or not text.strip() or NAMED.match(text):
            raise UserError(f"keepsight: {EVICT} needs the document as the text of the last message")
        before, _ = self._rendered([*messages[:-1], {**messages[-1], "content": f"{MARK}?"}], request)
        params = request["kv_transfer_params"] | {BEFORE: before, "prompt_token_ids": self._tokens(before + text)}
        lengths = dict.fromkeys({"max_tokens", "max_completion_tokens"} & request.keys() or {"max_tokens"}, 1)
        return request | lengths | {"kv_transfer_params": params}

    def _rendered(self, turns: list[dict[str, Any]], request: Mapping[str, Any]) -> tuple[str, str]:
        """What the chat template puts before and after the document."""
        options = dict(request.get("chat_template_kwargs") or {})
        options |= {"tools": request["tools"]} if request.get("tools") else {}
        goes_on = bool(request.get("continue_final_message"))
        begins = bool(request.get("add_generation_prompt", not goes_on))
        options |= {"tokenize": False, "add_generation_prompt": begins, "continue_final_message": goes_on}
        try:
            text = str(self.tokenizer.apply_chat_template(turns, **options))
        except Exception as error:  # a template computes with what the messages hold
            raise UserError(f"keepsight: the chat template refuses the messages: {one_line(error)}") from None
        if (parts := around_mark(text)) is None:
            raise UserError("keepsight: the chat template does not render the message that names the prefix once")
        return parts

    def _completion(self, request: dict[str, Any]) -> dict[str, Any]:
        prompt = request.get("prompt")
        many = isinstance(prompt, list) and bool(prompt) and isinstance(prompt[0], str | list)
        if _wants_eviction(request) and many and len(prompt or ()) > 1:
            raise UserError(f"keepsight: {EVICT} makes one prefix; give one prompt")
        prompts = prompt if many else [prompt]
        replaced = [self._prompt(each, request) for each in prompts]  # type: ignore[union-attr]
        return request | {"prompt": replaced if many else replaced[0]}

    def _prompt(self, prompt: Any, request: Mapping[str, Any]) -> Any:
        if isinstance(prompt, str) and NAMED.match(prompt):
            digest, question = _split(prompt)
            header = self._header(digest, request)
            return placeholders(digest, header.entries, self.alphabet) + self._tokens(question)
        spelled = digest_in(prompt, self.alphabet) if isinstance(prompt, list) else None
        if spelled is not None:
            header = self._header(spelled, request)
            if prompt[: header.entries] != placeholders(spelled, header.entries, self.alphabet):
                raise UserError(f"keepsight: prefix {spelled} has {header.entries} placeholders; give all of them")
            if len(prompt) == header.entries:
                raise UserError("keepsight: the prompt has no token of its own after the prefix; add the question")
        return prompt

    def _header(self, digest: str, request: Mapping[str, Any]) -> Header:
        if bypassing := [name for name in BYPASS if request.get(name) not in (None, False)]:
            raise UserError(
                f"keepsight: {bypassing[0]} needs the prompt's own tokens, which a prefix has not; leave it out"
            )
        return self.store.header(digest)

    def _tokens(self, text: str) -> list[int]:
        if not (ids := list(self.tokenizer(text, add_special_tokens=False)["input_ids"])):
            raise UserError("keepsight: the prompt has no token of its own after the prefix; add the question")
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
        raise UserError(f"keepsight: {EVICT} is {str(wanted)[:64]!r}; give true, or a budget above 0")
    single = {"n": 1, "best_of": 1, "stream": False}
    if several := [name for name, value in single.items() if request.get(name) not in (None, value)]:
        raise UserError(f"keepsight: {EVICT} has one reply, whole; leave {several[0]} out")
    return True


def _text_of(message: Any) -> str | None:
    """The text of a chat message; None where it has another form."""
    content = message.get("content") if isinstance(message, dict) else None
    if isinstance(content, list) and len(content) == 1 and isinstance(content[0], dict):
        content = content[0].get("text")
    return content if isinstance(content, str) else None


def _split(text: str) -> tuple[str, str]:
    """The prefix's id, and what follows it."""
    named = NAMED.match(text)
    assert named is not None
    return named[1], text[named.end() :]


class Prefixes:
    """The middleware.

    Args:
        app: The application behind it.
        rewriter: Rewrites requests; by default of the folder `KEEPSIGHT_ROOT` and the model `KEEPSIGHT_MODEL`.

    Raises:
        UserError: one of these variables is missing.
    """

    def __init__(self, app: Any, rewriter: Rewriter | None = None) -> None:
        if rewriter is None:
            missing = [name for name in ("KEEPSIGHT_ROOT", "KEEPSIGHT_MODEL") if not os.environ.get(name)]
            if missing:
                raise UserError(f"{missing[0]} is not set; give KEEPSIGHT_ROOT=PREFIXES and KEEPSIGHT_MODEL=MODEL")
            rewriter = Rewriter(os.environ["KEEPSIGHT_ROOT"], os.environ["KEEPSIGHT_MODEL"])
        self.app, self.rewriter = app, rewriter

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """See ASGI."""
        if scope["type"] != "http" or scope["path"] not in PATHS or scope["method"] != "POST":
            await self.app(scope, receive, send)
            return
        body, more = bytearray(), True
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                return
            body += message.get("body", b"")
            more = message.get("more_body", False)
            if len(body) > MAX_BYTES:
                await _refuse(send, 413, f"keepsight: the request is larger than {MAX_BYTES} bytes")
                return
        try:
            request = json.loads(bytes(body))
            changed = self.rewriter.rewritten(scope["path"], request)
        except UserError as error:
            await _refuse(send, 400, str(error))
            return
        except (ValueError, RecursionError):
            changed = request = None  # vLLM itself says what is wrong with it
        data = bytes(body) if changed is request else json.dumps(changed).encode()
        await self.app(_with_length(scope, len(data)), _again(data, receive), send)


def _with_length(scope: Message, length: int) -> Message:
    headers = [pair for pair in scope["headers"] if pair[0] != b"content-length"]
    return {**scope, "headers": [*headers, (b"content-length", str(length).encode())]}


def _again(body: bytes, receive: Receive) -> Receive:
    """A channel that gives a body first, and then what else arrives, such as the client's leaving."""
    waiting = [{"type": "http.request", "body": body, "more_body": False}]

    async def channel() -> Message:
        return waiting.pop() if waiting else await receive()

    return channel


async def _refuse(send: Send, status: int, message: str) -> None:
    body = json.dumps({"error": {"message": message, "type": "invalid_request_error", "code": status}}).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
