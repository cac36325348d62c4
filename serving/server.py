"""An OpenAI server over the engine: chat completions and completions, streamed or whole, from evicted caches.

Requests are checked before the model runs. Options that cannot be honoured are refused with HTTP 4xx and one line that
says why, in OpenAI's error format. A text that no prompt can be as long as is refused before it is tokenized, and a
request for which there is no room before that.
"""

import asyncio
import copy
import hashlib
import json
import logging
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, TypeVar

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

from keepsight import __version__
from keepsight.errors import UserError, one_line, printable
from keepsight.models.answer_text import AnswerText, token_text
from keepsight.models.chat import encode
from keepsight.models.targets import Target
from keepsight.runtime.evict import Evict
from keepsight.runtime.generate import Method
from keepsight.serving.choices import Choice, Choices, chosen_by
from keepsight.serving.engine import Busy, Closed, Engine, Job, TooLong
from keepsight.serving.guard import PROBES, Guard
from keepsight.serving.metrics import registry_of
from keepsight.serving.prefix import ID, PREFIX_HEADER, split_named
from keepsight.serving.replies import Answers, Reply, StreamedJob
from keepsight.serving.requests import (
    ChatRequest,
    CommonFields,
    CompletionRequest,
    DetokenizeRequest,
    Message,
    StreamOptions,
    TokenizeRequest,
    first_fault,
    prompt_of,
    unknown_fields,
)
from keepsight.serving.structured import FollowGrammar, JsonGrammars
from keepsight.serving.tools import AnswerParser, response_template_of

logger = logging.getLogger(__name__)

STATUS = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error", 500: "server_error"}
"""Types of errors by status; all others are `invalid_request_error`."""
COMPLETION_TOKENS = 16
"""Default of `max_tokens` for completions, as in OpenAI's interface."""
_PING = 15.0
"""Seconds after which a stream without text gets a byte, since proxies close silent connections after 60."""
_EMPTY_LINE = "\n"
"""It is no event, as a comment is none. vLLM's client (`vllm bench serve`) joins a comment to the event after it."""
_LONG_TEXT = 1 << 15
"""Characters from which a text is tokenized behind other long ones, in some milliseconds or more."""
_TOKENIZED_AT_A_TIME = 2
"""Texts that are tokenized at a time: as many long ones, and as many short ones."""
_MOST_UNKNOWN = 1000
"""Names of unknown fields that are logged."""
Result = TypeVar("Result")


@dataclass(frozen=True)
class Asked:
    """A request whose prompts are tokens.

    Attributes:
        fields: The request.
        prompts: Token ids of each prompt.
        max_tokens: Longest answer.
        chat: The text of a chat's prompt; None for completions.
        tools: Tools that the answer may call.
        most_calls: Number of calls that are given back; None for all.
    """

    fields: CommonFields
    prompts: list[list[int]]
    max_tokens: int
    chat: str | None = None
    tools: Sequence[dict[str, Any]] = ()
    most_calls: int | None = None


class Service:
    """The endpoints over an engine that is running.

    Args:
        engine: Answers the requests.
        target: The model's tokenizer and vocabulary.
        name: Name of the model in requests.
        key: The key that requests must send; None where none is needed.
        answer_tokens: Longest answer in tokens.
        max_budget: Largest budget that a request may choose; None for that of the engine's method.
        adapters: Methods with other adapters that a request may choose, by name; the engine has admitted them.
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
        max_budget: int | float | None = None,
        adapters: Mapping[str, Evict] | None = None,
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
        self.adapters = adapters or {}
        if max_budget is None and isinstance(engine.method, Evict):
            max_budget = engine.method.budget
        self.choices = Choices(max_budget, [*self.adapters])
        self.max_bytes = max_bytes
        self.read_timeout = read_timeout
        self.hosts = hosts
        self.origins = origins
        self.open_paths: Sequence[str] = PROBES
        if open_metrics:
            self.open_paths = (*PROBES, "/metrics")
        self.started = int(time.time())
        self.refused: dict[int, int] = {}
        self.unknown_fields: set[str] = set()
        self.registry = registry_of(engine, self.refused)
        self.decoder = copy.deepcopy(target.tokenizer)  # the engine's thread decodes while others encode
        self.most_characters = engine.max_prompt_tokens * max(map(len, target.tokenizer.get_vocab()))
        self.preparing = 0
        self.response_template = response_template_of(target.tokenizer, target.model)
        self.grammars = JsonGrammars(target.tokenizer, target.vocabulary, [*engine.end_tokens])
        self._short_texts = CapacityLimiter(_TOKENIZED_AT_A_TIME)
        self._long_texts = CapacityLimiter(_TOKENIZED_AT_A_TIME)

    def app(self) -> FastAPI:
        """The FastAPI application."""
        app = FastAPI(title="keepsight", docs_url=None, redoc_url=None, openapi_url=None)
        app.add_api_route("/v1/chat/completions", self.chat, methods=["POST"])
        app.add_api_route("/v1/completions", self.complete, methods=["POST"])
        app.add_api_route("/v1/models", self.models)
        app.add_api_route("/v1/models/{name:path}", self.model)
        app.add_api_route("/tokenize", self.tokenize, methods=["POST"])
        app.add_api_route("/detokenize", self.detokenize, methods=["POST"])
        app.add_api_route("/version", self.version)
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
        status = 200 if self.engine.alive else 503
        return Response(status_code=status)

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
            "keepsight": asdict(self.choices),
        }

    def _require_served(self, name: str) -> None:
        if name != self.name:
            raise HTTPException(404, f"the model {name[:200]!r} does not exist; this server has {self.name!r}")

    async def version(self) -> JSONResponse:
        """`/version`: that of keepsight."""
        return JSONResponse({"version": __version__})

    async def tokenize(self, request: Request) -> JSONResponse:
        """`/tokenize`: the tokens of a text or a chat."""
        asked = await self._read(request, TokenizeRequest)
        if asked.messages is not None:
            _, ids = await self._chat_prompt(asked.messages, asked.template_arguments())
        else:
            (ids,) = await self._prompts([asked.prompt], special=asked.add_special_tokens is not False)
        body = {"count": len(ids), "max_model_len": self.engine.context, "tokens": ids}
        if asked.return_token_strs:
            body["token_strs"] = await run_sync(self._token_texts, ids, limiter=self._long_texts)
        return JSONResponse(body)

    def _token_texts(self, ids: list[int]) -> list[str]:
        return [token_text(self.target.tokenizer, token) for token in ids]

    async def detokenize(self, request: Request) -> JSONResponse:
        """`/detokenize`: the text of tokens."""
        asked = await self._read(request, DetokenizeRequest)
        self._check_ids(asked.tokens, "tokens")
        tokenizer = self.target.tokenizer
        return JSONResponse({"prompt": await run_sync(tokenizer.decode, asked.tokens, limiter=self._long_texts)})

    async def chat(self, request: Request) -> Response:
        """`/v1/chat/completions`."""
        asked = await self._read(request, ChatRequest)
        _require_no_prefix(request, asked, [message.text for message in asked.messages if message.may_name_prefix])
        tools = asked.offered_tools
        if tools and self.response_template is None:
            kind = self.target.model.config.model_type
            raise UserError(
                f"tools: are not supported, as transformers cannot read the calls of {kind}; leave them out",
                field="tools",
                code="model",
            )
        text, ids = await self._chat_prompt(asked.messages, asked.template_arguments())
        max_tokens = asked.max_completion_tokens or asked.max_tokens
        if max_tokens is None:
            room = self.engine.context - len(ids)
            max_tokens = max(min(self.answer_tokens, room), 1)
        most_calls = 1 if asked.parallel_tool_calls is False else None
        return await self._answer(request, Asked(asked, [ids], max_tokens, text, tools, most_calls))

    async def complete(self, request: Request) -> Response:
        """`/v1/completions`."""
        asked = await self._read(request, CompletionRequest)
        if len(asked.prompt) > self.engine.waiting:
            raise UserError(
                f"prompt: holds {len(asked.prompt)} prompts; at most {self.engine.waiting} requests wait (waiting=)",
                field="prompt",
                code="range",
            )
        _require_no_prefix(request, asked, [prompt for prompt in asked.prompt if isinstance(prompt, str)])
        prompts = await self._prompts(asked.prompt, special=asked.add_special_tokens is not False)
        max_tokens = asked.max_tokens or asked.max_completion_tokens or min(COMPLETION_TOKENS, self.answer_tokens)
        return await self._answer(request, Asked(asked, prompts, max_tokens))

    def _check_ids(self, ids: list[int], field: str) -> None:
        """Refuse ids that are too many for a prompt, or no tokens."""
        if len(ids) > self.engine.max_prompt_tokens:
            raise TooLong(self.engine.too_long(f"{len(ids)} tokens"), field="prompt", code="range")
        vocabulary = self.target.vocabulary
        for token in ids:
            if not 0 <= token < vocabulary:
                raise UserError(
                    f"{field}: {token} is not a token id; the vocabulary has {vocabulary}", field=field, code="range"
                )

    async def _chat_prompt(self, messages: Sequence[Message], arguments: dict[str, Any]) -> tuple[str, list[int]]:
        """The text of a chat and its tokens; see `_in_thread`."""
        if len(messages) > self.engine.max_prompt_tokens:
            raise TooLong(self.engine.too_long(f"{len(messages)} messages"), field="prompt", code="range")

        characters = sum(len(message.text) for message in messages)
        self._check_characters(characters)

        def text_and_ids() -> tuple[str, list[int]]:
            text = prompt_of(messages, self.target.tokenizer, arguments)
            self._check_characters(len(text))
            return text, encode(self.target.tokenizer, [text], special=False)[0]

        return await self._in_thread(text_and_ids, characters, prompts=1)

    async def _prompts(self, prompts: Sequence[str | list[int]], *, special: bool) -> list[list[int]]:
        """The tokens of prompts, of which some may be tokens already; see `_in_thread`."""
        characters = 0
        for prompt in prompts:
            if isinstance(prompt, str):
                self._check_characters(len(prompt))
                characters += len(prompt)
            else:
                self._check_ids(prompt, "prompt")

        def all_ids() -> list[list[int]]:
            encoded = []
            for prompt in prompts:
                if isinstance(prompt, str):
                    (prompt,) = encode(self.target.tokenizer, [prompt], special=special)
                encoded.append(prompt)
            return encoded

        return await self._in_thread(all_ids, characters, prompts=len(prompts))

    async def _in_thread(self, tokenized: Callable[[], Result], characters: int, prompts: int) -> Result:
        """The tokens of a request's prompts, of so many characters in all, which are made in a thread.

        Raises:
            TooLong: a prompt has more characters than the tokens of the longest have.
            Busy, Closed: the engine would not take the request.
        """
        self.engine.require_room(self.preparing + prompts - 1)
        self.preparing += prompts
        try:
            limiter = self._long_texts if characters > _LONG_TEXT else self._short_texts
            return await run_sync(tokenized, limiter=limiter)
        finally:
            self.preparing -= prompts

    def _check_characters(self, characters: int) -> None:
        if characters > self.most_characters:
            length = f"{characters} characters, more than so many tokens hold"
            raise TooLong(self.engine.too_long(length), field="prompt", code="range")

    async def _read(self, request: Request, kind: Any) -> Any:
        """The request in a body.

        Raises:
            HTTPException: the body is too large or too slow, or the client has left; the model is another.
            UserError: a field cannot be honoured.
        """
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
            raise first_fault(error) from None
        for name in unknown_fields(asked.model_extra):
            self._note_unknown(name)
        if asked.model is not None:
            self._require_served(asked.model)
        return asked

    def _note_unknown(self, name: str) -> None:
        """Log once that a field is ignored."""
        if name not in self.unknown_fields and len(self.unknown_fields) < _MOST_UNKNOWN:
            self.unknown_fields.add(name)
            logger.warning("requests have a field that this server does not know and ignores: %s", printable(name[:64]))

    async def _answer(self, request: Request, asked: Asked) -> Response:
        """Answer each prompt `n` times."""
        self._check_answers(asked)
        grammar = None
        schema = asked.fields.schema_of_answer
        if schema is not None:
            grammar = await run_sync(self.grammars.grammar, schema, limiter=self._long_texts)

        answers = Answers()
        tenant = _tenant_of(request, asked.fields)
        try:
            for ids in asked.prompts:
                self.engine.submit(self._job(asked, ids, answers, grammar, tenant))
        except Exception:
            answers.cancel()
            raise
        reply = Reply(self.name, answers.jobs, asked.fields.n or 1, chat=asked.chat is not None)
        if asked.fields.stream:
            return Stream(answers, self._events(request, answers, reply, asked.fields.stream_options))
        await self._unless_gone(request, answers)
        for job in answers.jobs:
            self._require_sound(job)
        return JSONResponse(reply.completion())

    def _check_answers(self, asked: Asked) -> None:
        """Refuse answers that this server does not give."""
        fields = asked.fields
        if asked.max_tokens > self.answer_tokens:
            raise UserError(
                f"max_tokens is {asked.max_tokens}; this server answers with at most {self.answer_tokens}, which its "
                "option max_new_tokens= raises",
                field="max_tokens",
                code="range",
            )
        if (fields.n or 1) > self.engine.rows:
            raise UserError(
                f"n is {fields.n}; this server gives at most {self.engine.rows} answers to a prompt (rows=)",
                field="n",
                code="range",
            )
        if (fields.min_tokens or 0) > asked.max_tokens:
            raise UserError(
                f"min_tokens is {fields.min_tokens}, above the {asked.max_tokens} of max_tokens",
                field="min_tokens",
                code="range",
            )
        if fields.min_tokens and fields.schema_of_answer is not None:
            raise UserError(
                "min_tokens: is not supported for JSON, which ends where it is complete; leave it out",
                field="min_tokens",
                code="conflict",
            )
        vocabulary = self.target.vocabulary
        for token in fields.logit_bias or {}:
            if int(token) >= vocabulary:
                raise UserError(
                    f"logit_bias: {token} is not a token id; the vocabulary has {vocabulary}",
                    field="logit_bias",
                    code="range",
                )

    def _job(self, asked: Asked, ids: list[int], answers: Answers, grammar: Any, tenant: str) -> StreamedJob:
        """The request to the engine for the `n` answers to a prompt, the first with the others as siblings."""
        fields = asked.fields
        generation_config: Any = self.target.model.generation_config
        options = fields.options(asked.max_tokens, generation_config.top_k)
        method = self._method(fields, len(ids))
        jobs = []
        for number in range(fields.n or 1):
            processors = fields.processors(len(ids), str(self.target.model.device))
            if grammar is not None:
                processors.append(FollowGrammar(grammar, len(ids)))
            parser = None
            if asked.tools and asked.chat is not None and self.response_template is not None:
                parser = AnswerParser(self.response_template, asked.chat, asked.tools, asked.most_calls)
            seed = None if fields.seed is None else fields.seed + number
            job = StreamedJob(
                torch.tensor(ids, dtype=torch.long),
                answers,
                AnswerText(self.decoder, fields.stops, fields.stop_token_ids or [], fields.min_tokens or 0),
                partial(token_text, self.decoder),
                parser=parser,
                seed=seed,
                method=method,
                processors=processors,
                tenant=tenant,
                top_logprobs=fields.wanted_logprobs,
                ignore_end=bool(fields.ignore_eos),
                **options,
            )
            jobs.append(job)
        jobs[0].siblings = jobs[1:]
        return jobs[0]

    def _method(self, fields: CommonFields, prompt_tokens: int) -> Method | None:
        """The method with the adapter and the budget that a request chooses; None for the engine's own."""
        choice = Choice() if fields.keepsight is None else fields.keepsight.choice
        self.choices.check(choice, prompt_tokens)
        method = self.engine.method if choice.adapter is None else self.adapters[choice.adapter]
        return chosen_by(choice, method) if isinstance(method, Evict) else None

    async def _unless_gone(self, request: Request, answers: Answers) -> None:
        """Wait until the answers have ended; once the client has left, they are cancelled instead."""
        answered = asyncio.ensure_future(answers.wait())
        gone = asyncio.ensure_future(_disconnected(request))
        try:
            await asyncio.wait({answered, gone}, return_when=asyncio.FIRST_COMPLETED)
            if not answered.done():
                raise HTTPException(499, "the client has left")
        except BaseException:
            answers.cancel()
            raise
        finally:
            answered.cancel()
            gone.cancel()

    async def _events(
        self, request: Request, answers: Answers, reply: Reply, options: StreamOptions | None
    ) -> AsyncIterator[str]:
        """The events of streamed answers; empty lines keep the connection open while there is no text.

        A chat's first chunk, without text, comes with the first piece: clients take its time for the first token's.
        """
        yield _EMPTY_LINE
        begun: set[int] = set()
        error: Exception | None = None
        async for piece in answers.pieces(_PING):
            if piece is None:
                yield _EMPTY_LINE
                continue
            if reply.chat and piece.index not in begun:
                begun.add(piece.index)
                yield _event(reply.first_chunk(answers.jobs[piece.index]))
            for chunk in reply.chunks(piece):
                yield _event(chunk)
            if piece.is_last:
                job = answers.jobs[piece.index]
                try:
                    self._require_sound(job)
                except (UserError, HTTPException) as fault:
                    error = fault
                else:
                    yield _event(reply.last_chunk(job))

        if error is not None:
            yield _event(self._error_body(request, error))
        elif options is not None and options.include_usage:
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
        path = printable(request.scope["path"][:200])
        if isinstance(error, UserError):
            message = one_line(error, 2000)
        elif isinstance(error, HTTPException) and error.detail == "Not Found":  # Starlette's, for unknown paths
            message = f"this server has no {path}; ask /v1/chat/completions or /v1/completions"
        elif isinstance(error, HTTPException):
            message = str(error.detail)
        else:
            message = f"{type(error).__name__} in the server"
        if status >= 500:
            logger.error("%s %s: %d, %s", printable(request.method), path, status, _cause_of(error))
        kind = STATUS.get(status)
        if kind is None:
            kind = "invalid_request_error" if status < 500 else "server_error"
        code = "context_length_exceeded" if isinstance(error, TooLong) else status
        field = error.field if isinstance(error, UserError) else ""
        return {"error": {"message": message, "type": kind, "param": field or None, "code": code}}

    async def metrics(self) -> PlainTextResponse:
        """`/metrics`, in Prometheus' text format."""
        return PlainTextResponse(generate_latest(self.registry), media_type=CONTENT_TYPE_LATEST)


def _require_no_prefix(request: Request, fields: CommonFields, texts: Sequence[str]) -> None:
    """Refuse a prefix, which would be left out: in a field, in a header, or named by the first words of a text."""
    named = [split[0] for split in map(split_named, texts) if split is not None]
    has_field = fields.keepsight is not None and fields.keepsight.prefix is not None
    if has_field or PREFIX_HEADER in request.headers or any(map(ID.fullmatch, named)):
        raise UserError(
            "keepsight.prefix: this server has no prefixes, those of `keepsight prefix` are for vLLM's (vllm=true); "
            "leave it out",
            field="keepsight.prefix",
            code="conflict",
        )


def _tenant_of(request: Request, fields: CommonFields) -> str:
    """Whose request it is: who sends the same key and the same `cache_salt`. The key itself is not in it."""
    sent = f"{request.headers.get('authorization', '')}\n{fields.cache_salt or ''}"
    return hashlib.sha256(sent.encode(errors="surrogateescape")).hexdigest()


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


class Stream(StreamingResponse):
    """Server-sent events; the request is cancelled when the client leaves, even before the first event."""

    def __init__(self, answers: Answers, events: AsyncIterator[str]) -> None:
        super().__init__(events, media_type="text/event-stream")
        self.answers = answers

    @override
    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self.answers.cancel()


def _event(body: dict[str, Any]) -> str:
    return f"data: {json.dumps(body)}\n\n"


async def _disconnected(request: Request) -> None:
    """Wait until the client has left."""
    while (await request.receive())["type"] != "http.disconnect":
        pass
