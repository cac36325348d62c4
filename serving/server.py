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
from collections.abc import AsyncIterator, Callable, Sequence
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
_TOKENIZING = 2
"""Texts that are tokenized at a time: as many long ones, and as many short ones."""


class Streamed(Job):
    """A request whose text, of the `answer`, goes to the event loop piece by piece. Text that may begin a stop waits.

    Attributes: `pieces`, the queue of texts to send, with None at the end.
    """

    def __init__(self, ids: torch.Tensor, answer: AnswerText, seed: int | None, **options: Any) -> None:
        super().__init__(ids, seed=seed, **options)
        self.pieces: asyncio.Queue[str | None] = asyncio.Queue()
        self._answer, self._loop, self._sent = answer, asyncio.get_running_loop(), 0

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

    async def __aiter__(self) -> AsyncIterator[str]:
        while (piece := await self.pieces.get()) is not None:
            yield piece


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
        self.engine, self.target, self.name, self.key = engine, target, name, key
        self.answer_tokens, self.max_bytes, self.started = answer_tokens, max_bytes, int(time.time())
        self.read_timeout, self.hosts, self.origins = read_timeout, hosts, origins
        self.open_paths = (*PROBES, "/metrics") if open_metrics else PROBES
        self.refused = dict[int, int]()
        self.registry = registry_of(engine, self.refused)
        self.decoder = copy.deepcopy(target.tokenizer)  # the engine's thread decodes while others encode
        self.most_characters = engine.max_prompt_tokens * max(map(len, target.tokenizer.get_vocab()))
        self.preparing = 0
        self._short, self._long = CapacityLimiter(_TOKENIZING), CapacityLimiter(_TOKENIZING)

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
        self._require_own(name)
        return JSONResponse(self._description())

    def _description(self) -> dict[str, Any]:
        model = {"id": self.name, "object": "model", "created": self.started, "owned_by": "keepsight"}
        return model | {"max_model_len": self.engine.context}

    def _require_own(self, name: str) -> None:
        if name != self.name:
            raise HTTPException(404, f"the model {name[:200]!r} does not exist; this server has {self.name!r}")

    async def chat(self, request: Request) -> Response:
        """`/v1/chat/completions`."""
        asked = await self._read(request, ChatRequest)
        messages, tokenizer = asked.messages, self.target.tokenizer
        if len(messages) > self.engine.max_prompt_tokens:
            raise TooLong(self.engine.too_long(f"there are {len(messages)} messages"))
        characters = sum(len(message.text) for message in messages)
        ids = await self._encoded(lambda: prompt_of(messages, tokenizer), characters, special=False)
        return await self._answer(request, asked, ids, asked.max_completion_tokens or asked.max_tokens, chat=True)

    async def complete(self, request: Request) -> Response:
        """`/v1/completions`."""
        asked = await self._read(request, CompletionRequest)
        prompt: Any = asked.prompt
        if isinstance(prompt, str):
            text = prompt
            prompt = await self._encoded(lambda: text, len(text), special=True)
        elif len(prompt) > self.engine.max_prompt_tokens:
            raise TooLong(self.engine.too_long(f"the prompt has {len(prompt)} tokens"))
        elif wrong := [token for token in prompt if not 0 <= token < self.target.vocabulary]:
            raise UserError(f"prompt: {wrong[0]} is not a token id; the vocabulary has {self.target.vocabulary}")
        return await self._answer(
            request, asked, prompt, asked.max_tokens or min(COMPLETION_TOKENS, self.answer_tokens), chat=False
        )

    async def _encoded(self, text_of: Callable[[], str], characters: int, special: bool) -> list[int]:
        """The tokens of a text with at least so many characters; both are made in a thread.

        Raises:
            TooLong: more characters than the tokens of the longest prompt have.
            Busy, Closed: the engine would not take the request.
        """

        def ids() -> list[int]:
            text = text_of()
            self._check_characters(len(text))
            return encode(self.target.tokenizer, [text], special=special)[0]

        self._check_characters(characters)
        self.engine.require_room(self.preparing)
        self.preparing += 1
        try:
            return await run_sync(ids, limiter=self._long if characters > _LONG_TEXT else self._short)
        finally:
            self.preparing -= 1

    def _check_characters(self, characters: int) -> None:
        if characters > self.most_characters:
            found = f"the prompt has {characters} characters, more than so many tokens hold"
            raise TooLong(self.engine.too_long(found))

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
        self._require_own(asked.model)
        return asked

    async def _answer(
        self, request: Request, asked: CommonFields, ids: list[int], most: int | None, chat: bool
    ) -> Response:
        if most is not None and most > self.answer_tokens:
            raise UserError(
                f"max_tokens is {most}; this server answers with at most {self.answer_tokens}, which its option "
                "max_new_tokens= raises"
            )
        room = self.engine.context - len(ids)
        own: Any = self.target.model.generation_config
        options = asked.options(most or max(min(self.answer_tokens, room), 1), own.top_k)
        answer = AnswerText(self.decoder, asked.stops, asked.stop_token_ids or [])
        job = Streamed(torch.tensor(ids, dtype=torch.long), answer, asked.seed, **options)
        self.engine.submit(job)
        reply = Reply(self.name, job, chat)
        if asked.stream:
            return Stream(job, self._events(request, reply, asked.stream_options))
        await self._unless_gone(request, _all(job), job)
        self._require_sound(job)
        return JSONResponse(reply.whole())

    async def _unless_gone(self, request: Request, result: Any, job: Job) -> Any:
        """The result; once the client has left, the request is cancelled instead."""
        waiting, gone = asyncio.ensure_future(result), asyncio.ensure_future(_left(request))
        try:
            await asyncio.wait({waiting, gone}, return_when=asyncio.FIRST_COMPLETED)
            if not waiting.done():
                raise HTTPException(499, "the client has left")
            return waiting.result()
        except BaseException:
            job.cancel()
            raise
        finally:
            waiting.cancel()
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
                yield _event({**reply.chunk(""), "choices": [], "usage": reply.usage()})
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
        headers = {"retry-after": "1"} if status in (429, 503) else {}
        headers |= {"www-authenticate": "Bearer"} if status == 401 else {}
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
            asked = printable(f"{request.method} {request.scope['path'][:200]}")
            logger.error("%s: %d, %s", asked, status, _cause_of(error))
        kind = STATUS.get(status, "invalid_request_error" if status < 500 else "server_error")
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
        self.job, self.chat = job, chat
        kind = "chat.completion" if chat else "text_completion"
        self.head = {"id": f"{'chatcmpl' if chat else 'cmpl'}-{uuid.uuid4().hex}", "object": kind}
        self.head |= {"created": int(time.time()), "model": model}  # type: ignore[dict-item]

    def usage(self) -> dict[str, Any]:
        """Tokens of prompt and answer, and the entries that a KV head keeps of the prompt."""
        prompt, answer = len(self.job.ids), len(self.job.tokens)
        details = {"cached_tokens": 0, "kept_entries": round(self.job.kept)}
        counts = {"prompt_tokens": prompt, "completion_tokens": answer, "total_tokens": prompt + answer}
        return counts | {"prompt_tokens_details": details}

    def whole(self) -> dict[str, Any]:
        """The body of an answer that is not streamed."""
        message = {"message": {"role": "assistant", "content": self.job.text}} if self.chat else {"text": self.job.text}
        choice = {"index": 0, **message, "logprobs": None, "finish_reason": self.job.reason}
        return {**self.head, "choices": [choice], "usage": self.usage()}

    def chunk(self, text: str, reason: str | None = None, first: bool = False) -> dict[str, Any]:
        """A chunk of a stream."""
        delta = ({"role": "assistant"} if first else {}) | ({"content": text} if text or first else {})
        choice = {"index": 0, **({"delta": delta} if self.chat else {"text": text})}
        kind = {"object": "chat.completion.chunk"} if self.chat else {}
        return {**self.head, **kind, "choices": [{**choice, "logprobs": None, "finish_reason": reason}]}


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


async def _all(job: Streamed) -> None:
    async for _ in job:
        pass


async def _left(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
