"""An OpenAI server over the engine: chat completions and completions, streamed or whole, from evicted caches.

Requests are checked before the model runs. Options that cannot be honoured are refused with HTTP 4xx and one line that
says why, in OpenAI's error format. A text that no prompt can be as long as is refused before it is tokenized, and a
request for which there is no room before that.
"""

import asyncio
import copy
import json
import logging
import time
import uuid
from collections.abc import AsyncIterator, Sequence
from typing import Any

import anyio
import torch
from anyio import CapacityLimiter
from anyio.to_thread import run_sync
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from pydantic import ValidationError
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect
from typing_extensions import override

from keepsight.errors import UserError, one_line, printable
from keepsight.models.answer_text import AnswerText
from keepsight.models.chat import encode
from keepsight.models.targets import Target
from keepsight.serving.engine import Busy, Closed, Engine, Job, TooLong
from keepsight.serving.guard import PROBES, Guard
from keepsight.serving.metrics import registry_of
from keepsight.serving.requests import (
    ChatRequest,
    CommonFields,
    CompletionRequest,
    Message,
    StreamOptions,
    first_fault,
    prompt_of,
)

logger = logging.getLogger(__name__)

STATUS = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error", 500: "server_error"}
"""Types of errors by status; all others are `invalid_request_error`."""
COMPLETION_TOKENS = 16
"""Default of `max_tokens` for completions, as in OpenAI's interface."""
_PING = 15.0
"""Seconds after which a stream without text gets a comment, since proxies close silent connections after 60."""
_COMMENT = ": keepsight\n\n"
_LONG_TEXT = 1 << 15
"""Characters from which a text is tokenized behind other long ones, in some milliseconds or more."""
_TOKENIZED_AT_A_TIME = 2
"""Texts that are tokenized at a time: as many long ones, and as many short ones."""


class Streamed(Job):
    """A request whose text, of the `answer`, goes to the event loop piece by piece. Text that may begin a stop waits.

    Attributes: `pieces`, the queue of texts to send, with None at the end.
    """

    def __init__(self, ids: torch.Tensor, answer: AnswerText, seed: int | None, **options: Any) -> None:
        super().__init__(ids, seed=seed, **options)
        self.pieces: asyncio.Queue[str | None] = asyncio.Queue()
        self._answer = answer
        self._loop = asyncio.get_running_loop()
        self._sent = 0

    @property
    def text(self) -> str:
        """The answer so far."""
        return self._answer.text

    @override
    def took(self, token: int) -> bool:
        has_stopped = self._answer.add(token)
        self._send(self._answer.settled)
        return has_stopped

    @override
    def ended(self) -> None:
        try:
            self._answer.finish()
            self._send(len(self.text))
        finally:
            self._put(None)

    def _send(self, stop: int) -> None:
        if stop > self._sent:
            self._put(self.text[self._sent : stop])
            self._sent = stop

    def _put(self, piece: str | None) -> None:
        try:
            self._loop.call_soon_threadsafe(self.pieces.put_nowait, piece)
        except RuntimeError:  # the loop is closed: the server has ended
            self.cancel()

    async def wait(self) -> None:
        """Wait until the answer has ended."""
        while await self.pieces.get() is not None:
            pass


class Service:
    """The endpoints over an engine that is running.

    Args:
        engine: Answers the requests.
        target: The model's tokenizer and vocabulary.
        name: Name of the model in requests.
        key: The key that requests must send; None where none is needed.
        answer_tokens: Longest answer in tokens.
        max_bytes: Largest body of a request in bytes.
        read_timeout: Seconds in which a body must arrive.
        hosts, origins: See `Guard`. Replies to these origins have CORS headers.
        open_metrics: Whether `/metrics` needs no key.
    """

    def __init__(
        self,
        engine: Engine,
        target: Target,
        *,
        name: str,
        key: str | None,
        answer_tokens: int,
        max_bytes: int,
        read_timeout: float = 60,
        hosts: Sequence[str] = (),
        origins: Sequence[str] = (),
        open_metrics: bool = False,
    ) -> None:
        self.engine = engine
        self.target = target
        self.name = name
        self.key = key
        self.answer_tokens = answer_tokens
        self.max_bytes = max_bytes
        self.read_timeout = read_timeout
        self.hosts = hosts
        self.origins = origins
        self.open_paths = PROBES
        if open_metrics:
            self.open_paths = (*PROBES, "/metrics")
        self.started = int(time.time())
        self.refused: dict[int, int] = {}
        self.registry = registry_of(engine, self.refused)
        self.decoder = copy.deepcopy(target.tokenizer)  # the engine's thread decodes while others encode
        self.most_characters = engine.max_prompt_tokens * max(map(len, target.tokenizer.get_vocab()))
        self.preparing = 0
        self._short_texts = CapacityLimiter(_TOKENIZED_AT_A_TIME)
        self._long_texts = CapacityLimiter(_TOKENIZED_AT_A_TIME)

    def app(self) -> FastAPI:
        """The FastAPI application."""
        app = FastAPI(title="keepsight", docs_url=None, redoc_url=None, openapi_url=None)
        app.add_api_route("/v1/chat/completions", self.chat, methods=["POST"])
        app.add_api_route("/v1/completions", self.complete, methods=["POST"])
        app.add_api_route("/v1/models", self.models)
        app.add_api_route("/v1/models/{name:path}", self.model)
        app.add_api_route("/health", self.health, methods=["GET", "HEAD"])
        app.add_api_route("/ready", self.ready, methods=["GET", "HEAD"])
        app.add_api_route("/metrics", self.metrics)
        app.add_middleware(
            Guard,
            refuse=self._refusal,
            key=self.key,
            open_paths=self.open_paths,
            hosts=self.hosts,
            origins=self.origins,
        )
        if self.origins:
            app.add_middleware(
                CORSMiddleware, allow_origins=self.origins, allow_methods=["GET", "POST"], allow_headers=["*"]
            )
        for kind in (HTTPException, UserError, Exception):
            app.add_exception_handler(kind, self._refusal)
        return app

    async def health(self) -> Response:
        """`/health`: 200 while the engine's thread runs."""
        return Response(status_code=200 if self.engine.alive else 503)

    async def ready(self) -> Response:
        """`/ready`: 200 while a request would be taken; 503 while the queue is full, and once the engine has ended."""
        try:
            self.engine.require_room(self.preparing)
        except UserError:
            return Response(status_code=503)
        return await self.health()

    async def models(self) -> JSONResponse:
        """`/v1/models`: the one model."""
        return JSONResponse({"object": "list", "data": [self._description()]})

    async def model(self, name: str) -> JSONResponse:
        """`/v1/models/NAME`: the model of that name."""
        self._require_served(name)
        return JSONResponse(self._description())

    def _description(self) -> dict[str, Any]:
        return {
            "id": self.name,
            "object": "model",
            "created": self.started,
            "owned_by": "keepsight",
            "max_model_len": self.engine.context,
        }

    def _require_served(self, name: str) -> None:
        if name != self.name:
            raise HTTPException(404, f"the model {name[:200]!r} does not exist; this server has {self.name!r}")

    async def chat(self, request: Request) -> Response:
        """`/v1/chat/completions`."""
        asked = await self._read(request, ChatRequest)
        messages = asked.messages
        if len(messages) > self.engine.max_prompt_tokens:
            raise TooLong(self.engine.too_long(f"there are {len(messages)} messages"))
        characters = sum(len(message.text) for message in messages)
        ids = await self._encoded(messages, characters)
        return await self._answer(request, asked, ids, asked.max_completion_tokens or asked.max_tokens, chat=True)

    async def complete(self, request: Request) -> Response:
        """`/v1/completions`."""
        asked = await self._read(request, CompletionRequest)
        prompt: str | list[int] = asked.prompt
        if isinstance(prompt, str):
            prompt = await self._encoded(prompt, len(prompt))
        else:
            self._check_ids(prompt)
        answer_tokens = asked.max_tokens or min(COMPLETION_TOKENS, self.answer_tokens)
        return await self._answer(request, asked, prompt, answer_tokens, chat=False)

    def _check_ids(self, ids: list[int]) -> None:
        """Refuse a prompt of ids that is too long, or holds what is no token."""
        if len(ids) > self.engine.max_prompt_tokens:
            raise TooLong(self.engine.too_long(f"the prompt has {len(ids)} tokens"))
        vocabulary = self.target.vocabulary
        for token in ids:
            if not 0 <= token < vocabulary:
                raise UserError(f"prompt: {token} is not a token id; the vocabulary has {vocabulary}")

    async def _encoded(self, prompt: str | Sequence[Message], characters: int) -> list[int]:
        """The tokens of a text, or of a chat, with at least so many characters; they are made in a thread.

        Raises:
            TooLong: more characters than the tokens of the longest prompt have.
            Busy, Closed: the engine would not take the request.
        """

        def ids() -> list[int]:
            tokenizer = self.target.tokenizer
            is_chat = not isinstance(prompt, str)
            text = prompt_of(prompt, tokenizer) if is_chat else prompt
            self._check_characters(len(text))
            return encode(tokenizer, [text], special=not is_chat)[0]

        self._check_characters(characters)
        self.engine.require_room(self.preparing)
        self.preparing += 1
        try:
            limiter = self._long_texts if characters > _LONG_TEXT else self._short_texts
            return await run_sync(ids, limiter=limiter)
        finally:
            self.preparing -= 1

    def _check_characters(self, characters: int) -> None:
        if characters > self.most_characters:
            length = f"the prompt has {characters} characters, more than so many tokens hold"
            raise TooLong(self.engine.too_long(length))

    async def _read(self, request: Request, kind: Any) -> Any:
        body = bytearray()
        try:
            with anyio.fail_after(self.read_timeout):
                async for part in request.stream():
                    body += part
                    if len(body) > self.max_bytes:
                        raise HTTPException(413, f"the request is larger than {self.max_bytes} bytes (max_bytes=)")
        except TimeoutError:
            raise HTTPException(408, f"the request took longer than {self.read_timeout} s (read_timeout=)") from None
        except ClientDisconnect:
            raise HTTPException(499, "the client has left") from None
        try:
            asked = kind.model_validate_json(bytes(body))
        except ValidationError as error:
            raise UserError(first_fault(error)) from None
        self._require_served(asked.model)
        return asked

    async def _answer(
        self, request: Request, asked: CommonFields, ids: list[int], max_tokens: int | None, chat: bool
    ) -> Response:
        if max_tokens is None:
            room = self.engine.context - len(ids)
            max_tokens = max(min(self.answer_tokens, room), 1)
        elif max_tokens > self.answer_tokens:
            raise UserError(
                f"max_tokens is {max_tokens}; this server answers with at most {self.answer_tokens}, which its option "
                "max_new_tokens= raises"
            )
        generation_config: Any = self.target.model.generation_config
        options = asked.options(max_tokens, generation_config.top_k)
        answer = AnswerText(self.decoder, asked.stops, asked.stop_token_ids or [])
        job = Streamed(torch.tensor(ids, dtype=torch.long), answer, asked.seed, **options)
        self.engine.submit(job)
        reply = Reply(self.name, job, chat)
        if asked.stream:
            return Stream(job, self._events(request, reply, asked.stream_options))
        await self._unless_gone(request, job)
        self._require_sound(job)
        return JSONResponse(reply.completion())

    async def _unless_gone(self, request: Request, job: Streamed) -> None:
        """Wait until the answer has ended; once the client has left, the request is cancelled instead."""
        answered = asyncio.ensure_future(job.wait())
        gone = asyncio.ensure_future(_disconnected(request))
        try:
            await asyncio.wait({answered, gone}, return_when=asyncio.FIRST_COMPLETED)
            if not answered.done():
                raise HTTPException(499, "the client has left")
        except BaseException:
            job.cancel()
            raise
        finally:
            answered.cancel()
            gone.cancel()

    async def _events(self, request: Request, reply: "Reply", options: StreamOptions | None) -> AsyncIterator[str]:
        """The events of a streamed answer; comments keep the connection open while there is no text."""
        job = reply.job
        yield _COMMENT
        if reply.chat:
            yield _event(reply.chunk("", first=True))
        async for piece in _with_pings(job):
            yield _COMMENT if piece is None else _event(reply.chunk(piece))
        try:
            self._require_sound(job)
        except (UserError, HTTPException) as error:
            yield _event(self._error_body(request, error))
        else:
            yield _event(reply.chunk("", job.reason))
            if options is not None and options.include_usage:
                yield _event(reply.usage_chunk())
        yield "data: [DONE]\n\n"

    def _require_sound(self, job: Job) -> None:
        if isinstance(job.error, UserError):
            raise job.error
        if job.error is not None:
            kind = type(job.error).__name__
            raise HTTPException(500, f"{kind} while the prompt was read or answered") from job.error
        if job.reason == "cancelled":
            raise HTTPException(503, "the server is shutting down")

    async def _refusal(self, request: Request, error: Any) -> JSONResponse:
        """The reply of an error."""
        status = _status_of(error)
        headers = {}
        if status == 401:
            headers["www-authenticate"] = "Bearer"
        if status in (429, 503):
            headers["retry-after"] = "1"
        return JSONResponse(self._error_body(request, error), status, headers)

    def _error_body(self, request: Request, error: Any) -> dict[str, Any]:
        """The error in OpenAI's format; it is counted, and logged with its cause if it is the server's."""
        status = _status_of(error)
        self.refused[status] = self.refused.get(status, 0) + 1
        if isinstance(error, UserError):
            message = one_line(error, 2000)
        elif isinstance(error, HTTPException):
            message = str(error.detail)
        else:
            message = f"{type(error).__name__} in the server"
        if status >= 500:
            endpoint = printable(f"{request.method} {request.scope['path'][:200]}")
            logger.error("%s: %d, %s", endpoint, status, _cause_of(error))
        kind = STATUS.get(status)
        if kind is None:
            kind = "invalid_request_error" if status < 500 else "server_error"
        code = "context_length_exceeded" if isinstance(error, TooLong) else status
        return {"error": {"message": message, "type": kind, "param": None, "code": code}}

    async def metrics(self) -> PlainTextResponse:
        """`/metrics`, in Prometheus' text format."""
        return PlainTextResponse(generate_latest(self.registry), media_type=CONTENT_TYPE_LATEST)


def _status_of(error: Any) -> int:
    if isinstance(error, HTTPException):
        return error.status_code
    if isinstance(error, Busy):
        return 429
    if isinstance(error, Closed):
        return 503
    return 400 if isinstance(error, UserError) else 500


def _cause_of(error: BaseException) -> str:
    """One line with the exception that led to an error, which clients are not told."""
    cause = error.__cause__ or error
    if isinstance(cause, HTTPException):
        return str(cause.detail)
    return f"{type(cause).__name__}: {one_line(cause, 2000)}"


class Reply:
    """The bodies of an answer, whole and in chunks."""

    def __init__(self, model: str, job: Streamed, chat: bool) -> None:
        self.model = model
        self.job = job
        self.chat = chat
        self.id = f"{'chatcmpl' if chat else 'cmpl'}-{uuid.uuid4().hex}"
        self.created = int(time.time())

    def usage(self) -> dict[str, Any]:
        """Tokens of prompt and answer, and the entries that a KV head keeps of the prompt."""
        prompt_tokens = len(self.job.ids)
        completion_tokens = len(self.job.tokens)
        return {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": completion_tokens,
            "total_tokens": prompt_tokens + completion_tokens,
            "prompt_tokens_details": {"cached_tokens": 0, "kept_entries": round(self.job.kept)},
        }

    def completion(self) -> dict[str, Any]:
        """The body of an answer that is not streamed."""
        choice: dict[str, Any] = {"index": 0}
        if self.chat:
            choice["message"] = {"role": "assistant", "content": self.job.text}
        else:
            choice["text"] = self.job.text
        choice["logprobs"] = None
        choice["finish_reason"] = self.job.reason
        body = self._body("chat.completion" if self.chat else "text_completion", [choice])
        body["usage"] = self.usage()
        return body

    def chunk(self, text: str, reason: str | None = None, first: bool = False) -> dict[str, Any]:
        """A chunk of a stream."""
        choice: dict[str, Any] = {"index": 0}
        if self.chat:
            delta = {}
            if first:
                delta["role"] = "assistant"
            if text or first:
                delta["content"] = text
            choice["delta"] = delta
        else:
            choice["text"] = text
        choice["logprobs"] = None
        choice["finish_reason"] = reason
        return self._body("chat.completion.chunk" if self.chat else "text_completion", [choice])

    def usage_chunk(self) -> dict[str, Any]:
        """The last chunk of a stream whose client wants to know its usage."""
        body = self._body("chat.completion.chunk" if self.chat else "text_completion", [])
        body["usage"] = self.usage()
        return body

    def _body(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model, "choices": choices}


class Stream(StreamingResponse):
    """Server-sent events; the request is cancelled when the client leaves, even before the first event."""

    def __init__(self, job: Job, events: AsyncIterator[str]) -> None:
        super().__init__(events, media_type="text/event-stream")
        self.job = job

    @override
    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self.job.cancel()


async def _with_pings(job: Streamed) -> AsyncIterator[str | None]:
    """The pieces of an answer, and None for every `_PING` seconds without one."""
    while True:
        try:
            with anyio.fail_after(_PING):
                piece = await job.pieces.get()
        except TimeoutError:
            yield None
            continue
        if piece is None:
            return
        yield piece


def _event(body: dict[str, Any]) -> str:
    return f"data: {json.dumps(body)}\n\n"


async def _disconnected(request: Request) -> None:
    """Wait until the client has left."""
    while (await request.receive())["type"] != "http.disconnect":
        pass
