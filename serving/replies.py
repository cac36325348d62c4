"""Answers on their way to a client: their text piece by piece, and the bodies of replies in OpenAI's format."""

import asyncio
import time
import uuid
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import anyio
import torch
from typing_extensions import override

from keepsight.models.answer_text import AnswerText
from keepsight.serving.engine import Job
from keepsight.serving.tools import AnswerParser, Parts, ToolCall


@dataclass(frozen=True)
class NamedLogprob:
    """A `TokenLogprob` with the tokens' texts."""

    token: str
    logprob: float
    top: list[tuple[str, float]]


@dataclass(frozen=True)
class Piece:
    """A piece of an answer.

    Attributes:
        index: Index of the answer among those to the request.
        parts: Text that no stop can take back any more, and tool calls in it.
        logprobs: Of the tokens chosen since the piece before, if they are wanted.
        is_last: Whether the answer has ended.
    """

    index: int
    parts: Parts
    logprobs: list[NamedLogprob]
    is_last: bool = False


class Answers:
    """The answers to one request, which grow at the same time. It is made in the event loop that reads the pieces."""

    def __init__(self) -> None:
        self.jobs: list[StreamedJob] = []
        self._loop = asyncio.get_running_loop()
        self._pieces: asyncio.Queue[Piece] = asyncio.Queue()

    def put(self, piece: Piece) -> None:
        """Hand over a piece, from any thread."""
        try:
            self._loop.call_soon_threadsafe(self._pieces.put_nowait, piece)
        except RuntimeError:  # the loop is closed: the server has ended
            self.cancel()

    async def pieces(self, silence: float | None = None) -> AsyncIterator[Piece | None]:
        """The pieces of all answers until they have ended, and None for every `silence` seconds without one."""
        remaining = len(self.jobs)
        while remaining:
            try:
                with anyio.fail_after(silence):
                    piece = await self._pieces.get()
            except TimeoutError:
                yield None
                continue
            if piece.is_last:
                remaining -= 1
            yield piece

    async def wait(self) -> None:
        """Wait until all answers have ended."""
        async for _ in self.pieces():
            pass

    def cancel(self) -> None:
        """Cancel all of them."""
        for job in self.jobs:
            job.cancel()


class StreamedJob(Job):
    """A request to the engine whose text goes to the event loop piece by piece. Text that may begin a stop waits.

    Args:
        ids: [N] int64, the prompt.
        answers: The answers among which this is the next.
        answer: Makes the text.
        token_text: Makes the text of a single token.
        parser: Finds tool calls in the text; None for text alone.
        options: See `Job`.

    Attributes:
        index: Index of the answer among those to the request.
        parts: The answer's content, reasoning and tool calls so far.
        named_logprobs: Log-probabilities of its tokens, if they are wanted.
    """

    def __init__(
        self,
        ids: torch.Tensor,
        answers: Answers,
        answer: AnswerText,
        token_text: Callable[[int], str],
        parser: AnswerParser | None = None,
        **options: Any,
    ) -> None:
        super().__init__(ids, **options)
        self.index = len(answers.jobs)
        self.parts = Parts()
        self.named_logprobs: list[NamedLogprob] = []
        answers.jobs.append(self)
        self._answers = answers
        self._answer = answer
        self._token_text = token_text
        self._parser = parser
        self._sent_characters = 0
        self._sent_specials = 0
        self._sent_logprobs = 0

    @property
    def finish_reason(self) -> str | None:
        """`reason`, or `tool_calls` for an answer that ends with some."""
        return "tool_calls" if self.parts.calls and self.reason == "stop" else self.reason

    @override
    def took(self, token: int) -> bool:
        has_stopped = self._answer.add(token)
        if self.top_logprobs is not None:
            self.named_logprobs.append(self._latest_logprob())
        self._send(self._answer.settled)
        return has_stopped

    def _latest_logprob(self) -> NamedLogprob:
        latest = self.logprobs[-1]
        top = [(self._token_text(token), logprob) for token, logprob in latest.top]
        return NamedLogprob(self._token_text(latest.token), latest.logprob, top)

    @override
    def ended(self) -> None:
        try:
            self._answer.finish()
            self._send(len(self._answer.text), is_last=True)
        finally:
            self._answers.put(Piece(self.index, Parts(), [], is_last=True))

    def _send(self, stop: int, is_last: bool = False) -> None:
        """Send the text up to a character, with the log-probabilities that were not sent yet."""
        start = self._sent_characters
        stop = max(stop, start)
        if self._parser is None:
            parts = Parts(content=self._answer.text[start:stop])
        else:
            text, self._sent_specials = self._answer.marked(start, stop, self._sent_specials)
            parts = self._parser.feed(text, is_last=is_last)
        self._sent_characters = stop
        self.parts.content += parts.content
        self.parts.reasoning += parts.reasoning
        self.parts.calls += parts.calls

        logprobs = self.named_logprobs[self._sent_logprobs :]
        has_text = bool(parts.content or parts.reasoning or parts.calls)
        if has_text or (is_last and logprobs):  # else log-probabilities wait for the next text
            self._sent_logprobs = len(self.named_logprobs)
            self._answers.put(Piece(self.index, parts, logprobs))


class Reply:
    """The bodies of a reply, whole and in chunks.

    Args:
        model: Name of the model.
        jobs: The answers, those to one prompt after another.
        answers_a_prompt: Number of answers to each prompt.
        chat: Whether the request is a chat.
    """

    def __init__(self, model: str, jobs: Sequence[StreamedJob], answers_a_prompt: int, chat: bool) -> None:
        self.model = model
        self.jobs = jobs
        self.answers_a_prompt = answers_a_prompt
        self.chat = chat
        self.id = f"{'chatcmpl' if chat else 'cmpl'}-{uuid.uuid4().hex}"
        self.created = int(time.time())
        self._sent_offsets = [0] * len(jobs)  # characters of the tokens whose log-probabilities were sent
        self._sent_calls = [0] * len(jobs)

    def usage(self) -> dict[str, Any]:
        """Tokens of prompts and answers, cached tokens of the prompt, and the entries that a KV head keeps."""
        of_each_prompt = self.jobs[:: self.answers_a_prompt]
        prompt_tokens = sum(len(job.ids) for job in of_each_prompt)
        cached_tokens = sum(job.cached for job in of_each_prompt)
        kept_entries = sum(round(job.kept) for job in of_each_prompt)
        completion_tokens = sum(len(job.tokens) for job in self.jobs)
        return {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": completion_tokens,
            "total_tokens": prompt_tokens + completion_tokens,
            "prompt_tokens_details": {"cached_tokens": cached_tokens, "kept_entries": kept_entries},
        }

    def completion(self) -> dict[str, Any]:
        """The body of a reply that is not streamed."""
        choices = []
        for job in self.jobs:
            choice: dict[str, Any] = {"index": job.index}
            if self.chat:
                choice["message"] = _message(job.parts)
            else:
                choice["text"] = job.parts.content
            choice["logprobs"] = self._logprobs(job, job.named_logprobs)
            choice["finish_reason"] = job.finish_reason
            choices.append(choice)
        kind = "chat.completion" if self.chat else "text_completion"
        body = self._body(kind, choices)
        body["usage"] = self.usage()
        return body

    def first_chunk(self, job: StreamedJob) -> dict[str, Any]:
        """The chunk before the text of a chat's answer."""
        return self._chunk({"index": job.index, "delta": {"role": "assistant", "content": ""}, "logprobs": None})

    def chunks(self, piece: Piece) -> Iterator[dict[str, Any]]:
        """The chunks of a piece: of its reasoning, its content and its calls, the first with the log-probabilities."""
        logprobs = self._logprobs(self.jobs[piece.index], piece.logprobs)
        if not self.chat:
            if piece.parts.content or piece.logprobs:
                yield self._chunk({"index": piece.index, "text": piece.parts.content, "logprobs": logprobs})
            return

        deltas: list[dict[str, Any]] = []
        if piece.parts.reasoning:
            deltas.append({"reasoning_content": piece.parts.reasoning})
        if piece.parts.content:
            deltas.append({"content": piece.parts.content})
        for call in piece.parts.calls:
            deltas.append({"tool_calls": [{"index": self._sent_calls[piece.index], **_call(call)}]})
            self._sent_calls[piece.index] += 1
        if piece.logprobs and not deltas:
            deltas.append({"content": ""})
        for delta in deltas:
            yield self._chunk({"index": piece.index, "delta": delta, "logprobs": logprobs})
            logprobs = None

    def last_chunk(self, job: StreamedJob) -> dict[str, Any]:
        """The chunk that says why an answer has ended."""
        choice: dict[str, Any] = {"index": job.index}
        if self.chat:
            choice["delta"] = {}
        else:
            choice["text"] = ""
        choice["logprobs"] = None
        return self._chunk(choice, job.finish_reason)

    def usage_chunk(self) -> dict[str, Any]:
        """The last chunk of a stream whose client wants to know its usage."""
        body = self._body(self._chunk_kind, [])
        body["usage"] = self.usage()
        return body

    def _chunk(self, choice: dict[str, Any], reason: str | None = None) -> dict[str, Any]:
        choice["finish_reason"] = reason
        return self._body(self._chunk_kind, [choice])

    @property
    def _chunk_kind(self) -> str:
        return "chat.completion.chunk" if self.chat else "text_completion"

    def _body(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model, "choices": choices}

    def _logprobs(self, job: StreamedJob, logprobs: Sequence[NamedLogprob]) -> dict[str, Any] | None:
        """The log-probabilities of an answer's next tokens; None where they are not wanted."""
        if job.top_logprobs is None:
            return None
        if self.chat:
            return {"content": [_chat_logprob(logprob) for logprob in logprobs], "refusal": None}

        offsets = []
        for logprob in logprobs:
            offsets.append(self._sent_offsets[job.index])
            self._sent_offsets[job.index] += len(logprob.token)
        top: list[dict[str, float] | None] = []
        for logprob in logprobs:
            top.append({logprob.token: logprob.logprob} | dict(logprob.top))
        return {
            "text_offset": offsets,
            "tokens": [logprob.token for logprob in logprobs],
            "token_logprobs": [logprob.logprob for logprob in logprobs],
            "top_logprobs": top if job.top_logprobs else None,
        }


def _message(parts: Parts) -> dict[str, Any]:
    """An assistant's message."""
    message: dict[str, Any] = {"role": "assistant", "content": parts.content}
    if parts.reasoning:
        message["reasoning_content"] = parts.reasoning
    if parts.calls:
        message["content"] = parts.content or None
        message["tool_calls"] = [_call(call) for call in parts.calls]
    return message


def _call(call: ToolCall) -> dict[str, Any]:
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


def _chat_logprob(logprob: NamedLogprob) -> dict[str, Any]:
    entry = _chat_token(logprob.token, logprob.logprob)
    entry["top_logprobs"] = [_chat_token(token, value) for token, value in logprob.top]
    return entry


def _chat_token(token: str, logprob: float) -> dict[str, Any]:
    return {"token": token, "logprob": logprob, "bytes": [*token.encode(errors="replace")]}
