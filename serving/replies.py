"""Answers on their way to a client: their text piece by piece, and the bodies of replies in OpenAI's format."""

import asyncio
import time
import uuid
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from typing import Any

import anyio
import torch
from typing_extensions import override

from keepsight.models.answer_text import AnswerText
from keepsight.serving.engine import Job


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
        text: Text that no stop can take back any more.
        logprobs: Of the tokens chosen since the piece before, if they are wanted.
        is_last: Whether the answer has ended.
    """

    index: int
    text: str
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
        options: See `Job`.
    """

    def __init__(
        self,
        ids: torch.Tensor,
        answers: Answers,
        answer: AnswerText,
        token_text: Callable[[int], str],
        **options: Any,
    ) -> None:
        super().__init__(ids, **options)
        self.index = len(answers.jobs)
        self.named_logprobs: list[NamedLogprob] = []
        answers.jobs.append(self)
        self._answers = answers
        self._answer = answer
        self._token_text = token_text
        self._sent_characters = 0
        self._sent_logprobs = 0

    @property
    def text(self) -> str:
        """The answer so far."""
        return self._answer.text

    @override
    def took(self, token: int) -> bool:
        has_stopped = self._answer.add(token)
        if self.top_logprobs is not None:
            self.named_logprobs.append(self._latest_logprob())
        if self._answer.settled > self._sent_characters:
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
        finally:
            self._send(len(self.text), is_last=True)

    def _send(self, stop: int, is_last: bool = False) -> None:
        """Send the text up to a character, with the log-probabilities that were not sent yet."""
        text = self.text[self._sent_characters : stop]
        logprobs = self.named_logprobs[self._sent_logprobs :]
        self._sent_characters = max(self._sent_characters, stop)
        self._sent_logprobs = len(self.named_logprobs)
        self._answers.put(Piece(self.index, text, logprobs, is_last))


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

    def usage(self) -> dict[str, Any]:
        """Tokens of prompts and answers, and the entries that a KV head keeps of the prompts."""
        of_each_prompt = self.jobs[:: self.answers_a_prompt]
        prompt_tokens = sum(len(job.ids) for job in of_each_prompt)
        kept_entries = sum(round(job.kept) for job in of_each_prompt)
        completion_tokens = sum(len(job.tokens) for job in self.jobs)
        return {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": completion_tokens,
            "total_tokens": prompt_tokens + completion_tokens,
            "prompt_tokens_details": {"cached_tokens": 0, "kept_entries": kept_entries},
        }

    def completion(self) -> dict[str, Any]:
        """The body of a reply that is not streamed."""
        choices = []
        for job in self.jobs:
            choice: dict[str, Any] = {"index": job.index}
            if self.chat:
                choice["message"] = {"role": "assistant", "content": job.text}
            else:
                choice["text"] = job.text
            choice["logprobs"] = self._logprobs(job, job.named_logprobs)
            choice["finish_reason"] = job.reason
            choices.append(choice)
        body = self._body("chat.completion" if self.chat else "text_completion", choices)
        body["usage"] = self.usage()
        return body

    def first_chunk(self, job: StreamedJob) -> dict[str, Any]:
        """The chunk before the text of a chat's answer."""
        return self._chunk({"index": job.index, "delta": {"role": "assistant", "content": ""}, "logprobs": None})

    def text_chunk(self, piece: Piece) -> dict[str, Any]:
        """The chunk of a piece."""
        choice: dict[str, Any] = {"index": piece.index}
        if self.chat:
            choice["delta"] = {"content": piece.text}
        else:
            choice["text"] = piece.text
        choice["logprobs"] = self._logprobs(self.jobs[piece.index], piece.logprobs)
        return self._chunk(choice)

    def last_chunk(self, job: StreamedJob) -> dict[str, Any]:
        """The chunk that says why an answer has ended."""
        choice: dict[str, Any] = {"index": job.index}
        if self.chat:
            choice["delta"] = {}
        else:
            choice["text"] = ""
        choice["logprobs"] = None
        return self._chunk(choice, job.reason)

    def usage_chunk(self) -> dict[str, Any]:
        """The last chunk of a stream whose client wants to know its usage."""
        body = self._body("chat.completion.chunk" if self.chat else "text_completion", [])
        body["usage"] = self.usage()
        return body

    def _chunk(self, choice: dict[str, Any], reason: str | None = None) -> dict[str, Any]:
        choice["finish_reason"] = reason
        return self._body("chat.completion.chunk" if self.chat else "text_completion", [choice])

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


def _chat_logprob(logprob: NamedLogprob) -> dict[str, Any]:
    entry = _chat_token(logprob.token, logprob.logprob)
    entry["top_logprobs"] = [_chat_token(token, value) for token, value in logprob.top]
    return entry


def _chat_token(token: str, logprob: float) -> dict[str, Any]:
    return {"token": token, "logprob": logprob, "bytes": [*token.encode(errors="replace")]}
