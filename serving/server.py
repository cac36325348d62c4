"""An OpenAI server over the engine: chat completions and completions, streamed or whole, from evicted caches.

Requests are checked before the model runs. Options that cannot be honoured are refused with HTTP 4xx and one line that
says why, in OpenAI's error format.
"""

import asyncio
import copy
import hmac
import json
import time
import uuid
from collections.abc import AsyncIterator, Iterator
from typing import Any

import torch
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from pydantic import ValidationError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from typing_extensions import override

from keepsight.errors import UserError, one_line
from keepsight.models.answer_text import AnswerText
from keepsight.models.chat import encode
from keepsight.models.targets import Target
from keepsight.serving.engine import BUCKETS, Busy, Engine, Job
from keepsight.serving.requests import (
    ChatRequest,
    CommonFields,
    CompletionRequest,
    StreamOptions,
    first_fault,
    prompt_of,
)

STATUS = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error", 500: "server_error"}
"""Types of errors by status; all others are `invalid_request_error`."""
COMPLETION_TOKENS = 16
"""Default of `max_tokens` for completions, as in OpenAI's interface."""


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

    Requests call the model `name`; clients must send `key`, if there is one, as `Authorization: Bearer KEY`. An answer
    has at most `answer_tokens` tokens, the body of a request `max_bytes` bytes.
    """

    def __init__(
        self, engine: Engine, target: Target, *, name: str, key: str | None, answer_tokens: int, max_bytes: int
    ) -> None:
        self.engine, self.target, self.name, self.key = engine, target, name, key
        self.answer_tokens, self.max_bytes, self.started = answer_tokens, max_bytes, int(time.time())
        self.refused = dict[int, int]()
        self.decoder = copy.deepcopy(target.tokenizer)  # the engine's thread decodes while this one encodes
        self._encoding = asyncio.Lock()

    def app(self) -> FastAPI:
        """The FastAPI application."""
        app = FastAPI(title="keepsight", docs_url=None, redoc_url=None, openapi_url=None)
        app.add_api_route("/v1/chat/completions", self.chat, methods=["POST"])
        app.add_api_route("/v1/completions", self.complete, methods=["POST"])
        app.add_api_route("/v1/models", self.models)
        app.add_api_route("/v1/models/{name:path}", self.model)
        app.add_api_route("/health", self.health)
        app.add_api_route("/metrics", self.metrics)
        for kind in (HTTPException, UserError, Exception):
            app.add_exception_handler(kind, self._refusal)
        return app

    async def health(self) -> Response:
        """`/health`: 200 while the engine's thread runs."""
        return Response(status_code=200 if self.engine.alive else 503)

    async def models(self, request: Request) -> JSONResponse:
        """`/v1/models`: the one model."""
        self._require_key(request)
        return JSONResponse({"object": "list", "data": [self._description()]})

    async def model(self, request: Request, name: str) -> JSONResponse:
        """`/v1/models/NAME`: the model of that name."""
        self._require_key(request)
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
        ids = await self._encoded(prompt_of(asked.messages, self.target.tokenizer), special=False)
        return await self._answer(request, asked, ids, asked.max_completion_tokens or asked.max_tokens, chat=True)

    async def complete(self, request: Request) -> Response:
        """`/v1/completions`."""
        asked = await self._read(request, CompletionRequest)
        prompt: Any = asked.prompt
        if isinstance(prompt, list) and prompt and isinstance(prompt[0], str | list):
            (prompt,) = prompt
        if isinstance(prompt, str):
            prompt = await self._encoded(prompt, special=True)
        elif wrong := [token for token in prompt if not 0 <= token < self.target.vocabulary]:
            raise UserError(f"prompt: {wrong[0]} is not a token id; the vocabulary has {self.target.vocabulary}")
        return await self._answer(
            request, asked, prompt, asked.max_tokens or min(COMPLETION_TOKENS, self.answer_tokens), chat=False
        )

    async def _encoded(self, text: str, special: bool) -> list[int]:
        async with self._encoding:
            (ids,) = await asyncio.to_thread(encode, self.target.tokenizer, [text], special=special)
        return ids

    async def _read(self, request: Request, kind: Any) -> Any:
        self._require_key(request)
        body = bytearray()
        try:
            async for part in request.stream():
                body += part
                if len(body) > self.max_bytes:
                    raise HTTPException(413, f"the request is larger than {self.max_bytes} bytes")
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
            raise UserError(f"max_tokens is {most}; this server answers with at most {self.answer_tokens}")
        room = self.engine.context - len(ids)
        own: Any = self.target.model.generation_config
        options = asked.options(most or max(min(self.answer_tokens, room), 1), own.top_k)
        answer = AnswerText(self.decoder, asked.stops, asked.stop_token_ids or [])
        job = Streamed(torch.tensor(ids, dtype=torch.long), answer, asked.seed, **options)
        self.engine.submit(job)
        reply = Reply(self.name, job, chat)
        if asked.stream:
            first = await self._unless_gone(request, job.pieces.get(), job)
            self._require_sound(job)
            return Stream(job, _events(reply, job, first, asked.stream_options))
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

    def _require_sound(self, job: Job) -> None:
        if isinstance(job.error, UserError):
            raise job.error
        if job.error is not None:
            raise HTTPException(500, f"{type(job.error).__name__} while the prompt was read or answered")
        if job.reason == "cancelled":
            raise HTTPException(503, "the server is shutting down")

    def _require_key(self, request: Request) -> None:
        if self.key is None:
            return
        scheme, _, key = request.headers.get("authorization", "").partition(" ")
        if scheme.lower() != "bearer" or not hmac.compare_digest(key.encode(), self.key.encode()):
            raise HTTPException(401, "a key is needed: send Authorization: Bearer KEY")

    async def _refusal(self, request: Request, error: Any) -> JSONResponse:
        """The error in OpenAI's format."""
        if isinstance(error, UserError):
            status, message = 429 if isinstance(error, Busy) else 400, one_line(error, 2000)
        elif isinstance(error, HTTPException):
            status, message = error.status_code, str(error.detail)
        else:
            status, message = 500, f"{type(error).__name__} in the server"
        self.refused[status] = self.refused.get(status, 0) + 1
        kind = STATUS.get(status, "invalid_request_error" if status < 500 else "server_error")
        body = {"error": {"message": message, "type": kind, "param": None, "code": status}}
        headers = {"retry-after": "1"} if status == 429 else {"www-authenticate": "Bearer"} if status == 401 else None
        return JSONResponse(body, status, headers)

    async def metrics(self) -> PlainTextResponse:
        """`/metrics`, in Prometheus' text format."""
        return PlainTextResponse("".join(f"{line}\n" for line in self._metric_lines()), media_type="text/plain")

    def _metric_lines(self) -> Iterator[str]:
        totals, (running, waiting) = self.engine.totals, self.engine.load
        for name, value in {"running": running, "waiting": waiting, "kv_bytes": self.engine.kv_bytes}.items():
            yield from _metric(name, "gauge", {"": value})
        yield from _metric("requests_total", "counter", _labelled("reason", totals.ended))
        yield from _metric("refused_total", "counter", _labelled("status", self.refused))
        names = ("prompt_tokens", "kept_entries", "generated_tokens", "decode_steps", "decode_seconds")
        for name in (*names, "prefill_seconds"):
            yield from _metric(f"{name}_total", "counter", {"": round(getattr(totals, name), 6)})
        below = [sum(totals.first_token[: place + 1]) for place in range(len(BUCKETS) + 1)]
        bounds = [*map(str, BUCKETS), "+Inf"]
        values: dict[str, float] = {f'_bucket{{le="{le}"}}': count for le, count in zip(bounds, below, strict=True)}
        values |= {"_sum": round(totals.first_token_seconds, 6), "_count": below[-1]}
        yield from _metric("time_to_first_token_seconds", "histogram", values)


def _metric(name: str, kind: str, values: dict[str, float]) -> Iterator[str]:
    yield f"# TYPE keepsight_{name} {kind}"
    for label, value in values.items():
        yield f"keepsight_{name}{label} {value}"


def _labelled(label: str, values: dict[Any, int]) -> dict[str, float]:
    return {f'{{{label}="{key}"}}': value for key, value in values.items()}


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


async def _events(reply: Reply, job: Streamed, first: str | None, options: StreamOptions | None) -> AsyncIterator[str]:
    if reply.chat:
        yield _event(reply.chunk("", first=True))
    if first is not None:
        yield _event(reply.chunk(first))
        async for piece in job:
            yield _event(reply.chunk(piece))
    if job.error is not None or job.reason == "cancelled":
        said = f"{type(job.error).__name__} while answering" if job.error else "the server is shutting down"
        yield _event({"error": {"message": said, "type": "server_error", "param": None, "code": 500}})
    else:
        yield _event(reply.chunk("", job.reason))
        if options is not None and options.include_usage:
            yield _event({**reply.chunk(""), "choices": [], "usage": reply.usage()})
    yield "data: [DONE]\n\n"


def _event(body: dict[str, Any]) -> str:
    return f"data: {json.dumps(body)}\n\n"


async def _all(job: Streamed) -> None:
    async for _ in job:
        pass


async def _left(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
