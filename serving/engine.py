"""Batched decoding with continuous admission: many requests, each evicted by one method, in one batch of states.

A request is read and evicted from alone, in chunks between decoding steps of the others. Its state then joins the
batch, and leaves it when the answer ends or nobody waits for it. A prompt that nobody waits for is read no further than
the decoder layer it is in. Up to rounding, an answer has the tokens of `generate(model, ids, method, **options)`:
transformers makes the logits processors and stopping criteria from the options. Several answers to one prompt are
decoded from one prefill.
"""

import logging
import threading
import time
from bisect import bisect_left
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from transformers import LogitsProcessor, LogitsProcessorList, PreTrainedModel
from transformers.cache_utils import Cache
from transformers.generation import EosTokenCriteria, StoppingCriteriaList
from typing_extensions import override

from keepsight.errors import UserError
from keepsight.models.decoder import context_of, decoder_layers
from keepsight.models.lora import hooked
from keepsight.runtime.batch_slots import BatchSlots
from keepsight.runtime.generate import CustomGenerate, Decoded, GenerateRequest, Method, end_ids, generate
from keepsight.runtime.join import can_join, join, take_rows
from keepsight.runtime.running_answers import RunningAnswers, can_read_together
from keepsight.runtime.state import State, must_restart, read
from keepsight.runtime.static_batch import StaticBatch
from keepsight.serving.pace import CHUNK, Pace
from keepsight.serving.sampling import TokenLogprob, token_logprob
from keepsight.serving.sessions import Session, Sessions

_PROBE_TOKENS = 512
"""Tokens read at the start, to see whether states of the method can be joined."""
_UNBOUNDED = 1 << 60
"""A context in which every prompt fits."""
_WAIT_BOUNDS = (0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
_GAP_BOUNDS = (0.01, 0.025, 0.05, 0.1, 0.15, 0.2, 0.3, 0.5, 0.75, 1.0, 2.5, 5.0, 10.0)
"""Upper bounds of histograms, in seconds: of waits before the first token, and of times between tokens."""

logger = logging.getLogger(__name__)


class Busy(UserError):
    """Raised where too many requests wait."""


class Closed(UserError):
    """Raised where the engine takes no more requests: it is shutting down, or its thread has ended."""


class TooLong(UserError):
    """Raised where a prompt and its answer exceed the context, or a prompt the longest that is read."""


class _Cancelled(Exception):
    """Raised within a prefill whose request was cancelled."""


class Job:
    """One request. `took` and `ended` are called by the engine's thread, and may be overridden.

    Args:
        ids: [N] int64, the prompt.
        seed: Seeds sampling; None for a random one.
        method: Evicts from the prompt; None for the engine's own. Others are of `Engine.admit`.
        processors: Logits processors that come before those of the options.
        tenant: Whose request it is; it goes on from no session of another.
        top_logprobs: Number of most likely tokens to record with each token's log-probability; None to record none.
        ignore_end: Whether end tokens do not end the answer.
        options: Options of `model.generate`, such as `max_new_tokens` and `temperature`.

    Attributes:
        siblings: Further requests with the same prompt, method and options, which are answered from one prefill with
            this one. They are not submitted themselves.
        logprobs: Log-probabilities of the answer's tokens, if they are recorded.
        tokens: The answer so far, with its end token.
        kept: Entries that each KV head keeps of the prompt, on average.
        cached: Tokens of the prompt that were not read, as a session had read them.
        reason: `stop` (an end token, or `took` asked for it), `length`, `cancelled` or `failed`; None before the end.
        error: The exception of a failed request.
        first: Seconds from submission to the first token; None before.
        latest: When the latest token was chosen, as `time.perf_counter` tells it.
    """

    def __init__(
        self,
        ids: Tensor,
        *,
        seed: int | None = None,
        method: Method | None = None,
        processors: Sequence[LogitsProcessor] = (),
        tenant: str = "",
        top_logprobs: int | None = None,
        ignore_end: bool = False,
        **options: Any,
    ) -> None:
        self.ids = ids
        self.seed = seed
        self.method = method
        self.processors = processors
        self.tenant = tenant
        self.top_logprobs = top_logprobs
        self.ignore_end = ignore_end
        self.options = options
        self.siblings: Sequence[Job] = ()
        self.tokens: list[int] = []
        self.logprobs: list[TokenLogprob] = []
        self.kept = 0.0
        self.cached = 0
        self.reason: str | None = None
        self.error: Exception | None = None
        self.first: float | None = None
        self.submitted = time.perf_counter()
        self.latest = self.submitted
        self.cancelled = False
        self.done = threading.Event()

    @property
    def group(self) -> tuple["Job", ...]:
        """This request and its siblings."""
        return (self, *self.siblings)

    def cancel(self) -> None:
        """Cancel the request: it leaves the batch before the next step, and its prompt is read no further."""
        self.cancelled = True

    def took(self, token: int) -> bool:
        """Take a token of the answer; returns whether the answer ends with it."""
        return False

    def ended(self) -> None:
        """Called after the last token, when `reason` is set."""

    def result(self, timeout: float | None = None) -> list[int]:
        """The whole answer, once it has ended.

        Raises:
            Exception: `error`.
            TimeoutError: it has not ended in time.
        """
        if not self.done.wait(timeout):
            raise TimeoutError(f"the answer has {len(self.tokens)} tokens after {timeout} s")
        if self.error is not None:
            raise self.error
        return self.tokens


@dataclass
class Histogram:
    """Counts of values by upper bounds, the last count of those above all bounds; `sum` is of the values."""

    bounds: tuple[float, ...]
    counts: list[int] = field(init=False)
    sum: float = 0.0

    def __post_init__(self) -> None:
        self.counts = [0] * (len(self.bounds) + 1)

    def observe(self, value: float) -> None:
        """Count a value."""
        self.counts[bisect_left(self.bounds, value)] += 1
        self.sum += value


@dataclass
class Totals:
    """Counters of an engine, as `/metrics` shows them."""

    ended: dict[str, int] = field(default_factory=lambda: dict.fromkeys(("stop", "length", "cancelled", "failed"), 0))
    prompt_tokens: int = 0
    cached_tokens: int = 0
    kept_entries: float = 0.0
    generated_tokens: int = 0
    decode_steps: int = 0
    decode_seconds: float = 0.0
    prefill_seconds: float = 0.0
    queue: Histogram = field(default_factory=lambda: Histogram(_WAIT_BOUNDS))
    first_token: Histogram = field(default_factory=lambda: Histogram(_WAIT_BOUNDS))
    between_tokens: Histogram = field(default_factory=lambda: Histogram(_GAP_BOUNDS))


class _OptionsReader(CustomGenerate):
    """Lets transformers turn a request's options into processors and criteria, without an answer."""

    request: GenerateRequest

    @override
    def answer(self, model: PreTrainedModel, request: GenerateRequest) -> Decoded:
        self.request = request
        return Decoded(request.input_ids, None)  # type: ignore[arg-type]  # nobody reads the state


@dataclass
class _Row:
    """A request in the batch.

    Attributes:
        job: The request.
        decoding: Arguments of `decode`.
        ids: [1, N + T] int64, its prompt and its answer so far.
        generator: Samples; None for the global one.
        session: Keeps its prompt's state for later turns; None where none is kept.
        error: Its exception.
    """

    job: Job
    decoding: dict[str, Any]
    ids: Tensor
    generator: torch.Generator | None
    session: Session | None = None
    error: Exception | None = None

    def next_token(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """The next token [1] for logits [1, V], and whether it ends the answer [1], as `decode` does."""
        try:
            scores: Any = self.decoding["logits_processor"](self.ids, logits)
            if self.decoding["do_sample"]:
                token = torch.multinomial(scores.softmax(-1), 1, generator=self.generator)[:, 0]
            else:
                token = scores.argmax(dim=-1)
            if self.job.top_logprobs is not None:
                self.job.logprobs.append(token_logprob(logits, token, self.job.top_logprobs))
            self.ids = torch.cat([self.ids, token[:, None]], dim=1)
            return token, self.decoding["stopping_criteria"](self.ids, scores)
        except Exception as error:  # such as probabilities that are not finite: others in the batch go on
            self.error = error
            token = logits.argmax(dim=-1)
            return token, torch.ones_like(token, dtype=torch.bool)


class _Others(RunningAnswers):
    """The running answers of an engine, and short prompts that wait, while the prompt of a job is read in chunks.

    `unread` tokens of the prompt are to be read; `admits` says whether short prompts are read meanwhile.
    """

    def __init__(self, engine: "Engine", job: Job, unread: int, admits: bool) -> None:
        self._engine = engine
        self._job = job
        self._unread = unread
        self._admits = admits
        self._tokens = torch.empty(0)
        self._size = 0
        self._begun: float | None = None  # when the pass under way began

    @override
    def pass_tokens(self) -> int:
        self.end_pass()
        self._size = min(self._engine.chunk_tokens(), self._unread)
        self._unread -= self._size
        self._begun = time.perf_counter()
        return self._size

    @override
    def __call__(self) -> None:
        if self._admits:
            self._engine.admit_short(self._job)
        self._engine.decode_batch()
        self._begun = time.perf_counter()

    @override
    def next_tokens(self, model: PreTrainedModel) -> tuple[Cache, Tensor, Tensor] | None:
        if self._admits:
            self._engine.admit_short(self._job)
        tokens = self._engine.begin_pass(self._job)
        state = self._engine.state
        if tokens is None or state is None:
            return None
        self._tokens = tokens
        self._begun = time.perf_counter()
        return state.cache, tokens[:, 0], state.lengths + state.rope_offset

    @override
    def take_logits(self, logits: Tensor) -> None:
        self.end_pass()
        self._engine.end_pass(self._job, self._tokens, logits)

    def end_pass(self) -> None:
        """Note the time of the pass under way, if there is one."""
        if self._begun is not None:
            self._engine.pace.passed(self._size, time.perf_counter() - self._begun)
            self._begun = None


class Engine:
    """Answers requests in one batch of at most `rows` answers, each evicted from by the method.

    At most `waiting` requests wait; prompts are no longer than `max_prompt_tokens`, by default the model's context. A
    `UserError` if states of this method cannot be decoded in a batch. Steps are a CUDA graph's where `generate`'s are;
    with `static` they are the same without a graph, on any device, for tests. While answers run, a prompt is read by
    `prefill_tokens` tokens at a time, with the next token of each answer; None chooses how many (see
    `keepsight.serving.pace`), and 0 reads whole prompts. States of answered prompts are kept in `session_bytes` bytes,
    for later turns and the same prompts; with `continues` later turns go on from evicted states too (see
    `keepsight.serving.sessions`).

    Attributes:
        context: The model's context in tokens.
        pace: Says how many tokens of a prompt are read at a time.
        sessions: The states that are kept.
        state: The states of the running answers; None for none.
        end_tokens: Tokens that end an answer.
        totals: Counters of what was done.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        method: Method,
        *,
        rows: int = 16,
        waiting: int = 64,
        max_prompt_tokens: int = 0,
        prefill_tokens: int | None = None,
        session_bytes: int = 0,
        continues: bool = False,
        static: bool = False,
    ) -> None:
        self.model = model
        self.method = method
        self.rows = rows
        self.waiting = waiting
        self.context = context_of(model)
        self.pace = Pace(prefill_tokens)
        self._reads_whole = prefill_tokens == 0
        self._short_tokens = prefill_tokens or CHUNK
        self.max_prompt_tokens = min(max_prompt_tokens or self.context, self.context)
        self.totals = Totals()
        self.sessions = Sessions(model, session_bytes, continues)
        self._queue: deque[Job] = deque()
        self._batch: list[_Row] = []
        self._prefilling = 0
        self._reading: Job | None = None  # whose prompt's pass is under way
        self._is_pass_of_both = False
        self.state: State | None = None
        self._slots = BatchSlots(rows)
        self._static = StaticBatch(model, without_graph=static)
        self._wake = threading.Condition()
        self._is_closed = False
        self._refusal: str | None = None  # why no more requests are taken
        self._thread: threading.Thread | None = None
        end_tokens = end_ids(model)
        if not isinstance(end_tokens, list):
            end_tokens = [] if end_tokens is None else [end_tokens]
        self.end_tokens = frozenset(end_tokens)
        self.admit(method)

    # For other threads

    def submit(self, job: Job) -> None:
        """Let a request wait for its turn.

        Raises:
            Busy: too many wait.
            Closed: the engine takes no more requests.
            TooLong: the prompt and the answer do not fit.
            UserError: the prompt has no token, or the method cannot work on it.
        """
        if len(job.group) > self.rows:
            raise UserError(
                f"{len(job.group)} answers to a prompt are too many; at most {self.rows} are decoded at once",
                field="n",
                code="range",
            )
        self._check_length(job.method or self.method, len(job.ids), int(job.options.get("max_new_tokens") or 1))
        with self._wake:
            self._drop_cancelled()
            self._require_room(0)
            for member in job.group:
                member.submitted = time.perf_counter()
            self._queue.append(job)
            self._wake.notify()

    def require_room(self, preparing: int = 0) -> None:
        """Check that another request may wait, beside `preparing` ones that will be submitted.

        Raises:
            Busy: too many wait.
            Closed: the engine takes no more requests.
        """
        with self._wake:
            self._drop_cancelled()
            self._require_room(preparing)

    def _require_room(self, preparing: int) -> None:
        if self._refusal is not None:
            raise Closed(self._refusal, code="service")
        waiting = len(self._queue) + preparing
        if waiting >= self.waiting:
            raise Busy(f"{waiting} requests are waiting, the most allowed; try again later", code="service")

    def _check_length(self, method: Method, length: int, answer_tokens: int) -> None:
        if not length:
            raise UserError("the prompt has 0 tokens; send at least one", field="prompt", code="range")
        if length > self.max_prompt_tokens:
            raise TooLong(self.too_long(f"{length} tokens"), field="prompt", code="range")
        if length + answer_tokens > self.context:
            raise TooLong(
                f"this model's maximum context length is {self.context} tokens; the prompt is too long, with {length} "
                f"tokens beside {answer_tokens} of the answer; shorten it, or lower max_tokens",
                field="prompt",
                code="range",
            )
        try:
            method.check(length, self.context)
        except UserError:
            method.check(length, _UNBOUNDED)  # raises what is not about the context
            raise TooLong(
                f"this model's maximum context length is {self.context} tokens; the prompt has {length} and "
                f"{type(method).__name__} reads observing tokens after it; shorten it",
                field="prompt",
                code="range",
            ) from None

    def too_long(self, length: str) -> str:
        """The message about a prompt that is longer than this engine reads; `length` says how long it is.

        LangChain looks for "prompt is too long", LiteLLM and others for "maximum context length".
        """
        if self.max_prompt_tokens < self.context:
            limit = f"this server's maximum context length is {self.max_prompt_tokens} tokens (max_prompt_tokens=)"
        else:
            limit = f"this model's maximum context length is {self.context} tokens"
        return f"{limit}; the prompt is too long, with {length}; shorten it"

    def drain(self) -> None:
        """Take no more requests, and end those that wait as cancelled; running ones go on."""
        with self._wake:
            self._refuse("the server is shutting down")

    def _refuse(self, why: str, error: Exception | None = None) -> None:
        """Take no more requests, and end those that wait; the caller holds the lock."""
        if self._refusal is None:
            self._refusal = why
        reason = "failed" if error else "cancelled"
        while self._queue:
            self._end_group(self._queue.popleft(), reason, error)

    def close(self) -> None:
        """End all answers as cancelled, within a decoder layer or a decoding step, and the thread."""
        with self._wake:
            self._is_closed = True
            self._refuse("the server is shutting down")
            self._wake.notify()

    @property
    def alive(self) -> bool:
        """Whether its thread runs."""
        return self._thread is not None and self._thread.is_alive()

    @property
    def load(self) -> tuple[int, int]:
        """Numbers of running requests, with the one whose prompt is being read, and of waiting ones."""
        with self._wake:
            return len(self._batch) + self._prefilling, len(self._queue)

    @property
    def kv_bytes(self) -> int:
        """Bytes of the batch's keys and values, with their padding if there is any."""
        state = self.state  # the engine's thread may set it to None meanwhile
        return 0 if state is None else state.kv_bytes + self._static.nbytes

    def __enter__(self) -> "Engine":
        self._thread = threading.Thread(target=self._serve, name="keepsight-engine", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        """End all answers as cancelled, and the thread."""
        self.close()
        if self._thread is not None:
            self._thread.join()

    # In the engine's thread

    def _serve(self) -> None:
        error: Exception | None = None
        try:
            while self._wait_for_work():
                self.step()
        except BaseException as fault:  # nobody waits for an engine that has ended
            logger.critical("the engine's thread has ended", exc_info=True)
            error = fault if isinstance(fault, Exception) else RuntimeError(f"{type(fault).__name__} in the engine")

        with self._wake:
            self._refuse("the server's engine has ended; restart it", error)
        reason = "failed" if error else "cancelled"
        self._end_batch(reason, error)
        self.sessions.clear()

    def _wait_for_work(self) -> bool:
        """Wait until there is something to do; returns False once the engine is closed."""
        with self._wake:
            while not (self._is_closed or self._batch or self._queue):
                self._wake.wait()
            return not self._is_closed

    @torch.no_grad()
    def step(self) -> bool:
        """Admit the next request if there is room, and decode a token of every answer; returns whether work is left.

        An error while a prompt is read or joins the batch fails its request alone; an error while the batch is decoded
        fails all of its requests.
        """
        try:
            self._drop_cancelled_rows()
        except Exception as error:
            self._end_batch("failed", error)
        self._admit()
        self.decode_batch()
        return bool(self._batch or self._queue)

    def decode_batch(self) -> None:
        """Decode a token of every answer; an error fails all of them."""
        reading = self._reading
        self._reading = None
        try:
            self._drop_cancelled_rows()
            if self._batch:
                self._decode()
        except Exception as error:
            self._end_batch("failed", error)
        finally:
            self._reading = reading

    def _end_batch(self, reason: str, error: Exception | None) -> None:
        for row in self._batch:
            self._end(row.job, reason, error)
        self._batch = []
        self.state = None
        self._static.drop()

    def _admit(self) -> None:
        """Read the prompt of the next request, and let it join the batch."""
        with self._wake:
            self._drop_cancelled()
            if not self._queue or len(self._batch) + len(self._queue[0].group) > self.rows:
                return
            job = self._queue.popleft()
            self._prefilling += 1
        self._let_join(job)

    def admit_short(self, reading: Job) -> None:
        """Let the first short prompt that waits join, while a long one is being read."""
        with self._wake:
            self._drop_cancelled()
            room = self.rows - len(self._batch) - len(reading.group)
            short_jobs = [job for job in self._queue if len(job.ids) <= self._short_tokens and len(job.group) <= room]
            if not short_jobs:
                return
            self._queue.remove(short_jobs[0])
            self._prefilling += 1
        self._let_join(short_jobs[0], admits=False)
        self._reading = reading

    def chunk_tokens(self) -> int:
        """How many tokens of a prompt the next pass reads."""
        with self._wake:
            others_wait = bool(self._queue)
        return self.pace.tokens(others_wait=others_wait)

    def _let_join(self, job: Job, *, admits: bool = True) -> None:
        """Read the prompt of a request, and let it join the batch; `admits` says whether short ones may join before."""
        self.totals.queue.observe(time.perf_counter() - job.submitted)
        try:
            rows, state = self._prefill(job, admits)
            if self._static.takes(state):
                states = [state] * len(rows)
                if self.state is not None:
                    states.insert(0, self._static.settled(self.state))
                self.state = join(states)
            else:
                self.state = self._slots.join(self.state, state, len(rows))
            self._batch += rows
        except _Cancelled:
            self._end_group(job, "cancelled")
        except Exception as error:  # such as a lack of memory: the others go on
            self._end_group(job, "failed", error)
            if self._is_pass_of_both:  # whose caches may have grown in some of their layers
                self._end_batch("failed", error)
        finally:
            self._is_pass_of_both = False
            self._prefilling -= 1

    def begin_pass(self, job: Job) -> Tensor | None:
        """The next tokens of the running answers, [B, 1], to be read in a pass over a job's prompt; None for none.

        Such a pass is not broken off where the job is cancelled, but before it.
        """
        self._stop_if_cancelled(job)
        tokens = None
        try:
            self._drop_cancelled_rows()
            state = self.state
            if state is None or self._static.takes(state) or not can_read_together(self.model, state.cache):
                return None
            tokens = self._choose()
        except Exception as error:
            self._end_batch("failed", error)
        if tokens is not None:
            self._reading = None
            self._is_pass_of_both = True
        return tokens

    def end_pass(self, job: Job, tokens: Tensor, logits: Tensor) -> None:
        """Take the logits [B, V] after the tokens of `begin_pass`."""
        assert self.state is not None
        read_tokens = torch.cat([self.state.tokens, tokens], dim=1)
        self.state = replace(self.state, logits=logits, tokens=read_tokens, lengths=self.state.lengths + 1)
        self.totals.decode_steps += 1
        self._reading = job
        self._is_pass_of_both = False

    def _stop_if_cancelled(self, job: Job) -> None:
        """Raise `_Cancelled` where nobody waits for a job."""
        if self._is_closed or all(member.cancelled for member in job.group):
            raise _Cancelled

    def _drop_cancelled(self) -> None:
        """End the requests that were cancelled while they waited; the caller holds the lock."""
        for job in [*self._queue]:
            if all(member.cancelled for member in job.group):
                self._queue.remove(job)
                self._end_group(job, "cancelled")

    def _prefill(self, job: Job, admits: bool) -> tuple[list[_Row], State]:
        """Read a prompt and evict from it; returns a row of the batch for each answer to it, and its state.

        What a session has read of it is not read again.
        """
        start = time.perf_counter()
        others_seconds_before = self.totals.decode_seconds + self.totals.prefill_seconds
        ids = job.ids[None].to(self.model.device)
        rows = [self._row(member, ids) for member in job.group]

        def stop_if_cancelled(*_: Any) -> None:
            if self._reading is job:  # else it is a pass of others, through the same layers
                self._stop_if_cancelled(job)

        method = job.method or self.method
        after = self.sessions.find(job.tenant, method, job.ids)
        cached = 0 if after is None else after.count
        between = None
        if self._batch and not self._reads_whole and method.reads_chunks():
            between = _Others(self, job, len(job.ids) - cached, admits)
        self._reading = job
        with hooked((layer, stop_if_cancelled) for layer in decoder_layers(self.model)):
            if after is None:
                state = method.start(self.model, ids, between=between)
            elif after.count == len(job.ids):
                state = after.state
            else:
                state = method.resume(self.model, after.state, ids[:, after.count :], between=between)
        if between is not None:
            between.end_pass()

        session = self.sessions.add(job.tenant, method, state, job.ids, after)
        for row in rows:
            row.session = session
        kept = state.mean_entries()
        for member in job.group:
            member.kept = kept
            member.cached = cached
        others_seconds = self.totals.decode_seconds + self.totals.prefill_seconds - others_seconds_before
        self.totals.prefill_seconds += time.perf_counter() - start - others_seconds
        self.totals.prompt_tokens += ids.shape[1] - cached
        self.totals.cached_tokens += cached
        self.totals.kept_entries += kept
        return rows, state

    def _row(self, job: Job, ids: Tensor) -> _Row:
        """The row of the batch for an answer to a prompt [1, N]."""
        reader = _OptionsReader()
        generate(self.model, ids, reader, **job.options, return_dict_in_generate=False)
        decoding = reader.request.decoding
        decoding["logits_processor"] = LogitsProcessorList([*job.processors, *decoding["logits_processor"]])
        if job.ignore_end:
            criteria = StoppingCriteriaList()
            for criterion in decoding["stopping_criteria"]:
                if not isinstance(criterion, EosTokenCriteria):
                    criteria.append(criterion)
            decoding["stopping_criteria"] = criteria
        generator = None
        if job.seed is not None:
            generator = torch.Generator(self.model.device).manual_seed(job.seed)
        return _Row(job, decoding, ids, generator)

    def _decode(self) -> None:
        """Choose the next token of every answer, and read the tokens of those that go on."""
        start = time.perf_counter()
        tokens = self._choose()
        if tokens is not None and self.state is not None:
            self.state = self._read(self.state, tokens)
            seconds = time.perf_counter() - start
            self.totals.decode_steps += 1
            self.totals.decode_seconds += seconds
            self.pace.stepped(seconds)

    def _choose(self) -> Tensor | None:
        """Choose the next token of every answer; returns those of the answers that go on, [B, 1], or None for none."""
        assert self.state is not None
        row_tokens = []
        row_ends = []
        for index, row in enumerate(self._batch):
            token, is_last = row.next_token(self.state.logits[index : index + 1])
            row_tokens.append(token)
            row_ends.append(is_last)
        next_tokens = torch.cat(row_tokens)

        # Moved to the CPU at once, not row by row.
        token_ids = next_tokens.tolist()
        are_last = torch.cat(row_ends).tolist()
        remaining_rows = []
        for index, (row, token, is_last) in enumerate(zip(self._batch, token_ids, are_last, strict=True)):
            has_enough = row.error is None and self._give(row, token)
            if row.error is not None:
                self._end(row.job, "failed", row.error)
            elif has_enough or (is_last and token in self.end_tokens and not row.job.ignore_end):
                self._keep_answer(index)
                self._end(row.job, "stop")
            elif is_last:
                self._keep_answer(index)
                self._end(row.job, "length")
            else:
                remaining_rows.append(index)

        order = self._keep(remaining_rows)
        return next_tokens[order][:, None] if order else None

    def _keep_answer(self, index: int) -> None:
        """Let a row's session keep the tokens of its answer that were read: all but the last."""
        row = self._batch[index]
        tokens = row.job.tokens[:-1]
        if row.session is None or not tokens or not self.sessions.wants_answer(row.session):
            return
        assert self.state is not None
        entries = self._static.last_entries(self.state, index, len(tokens))
        self.sessions.add_answer(row.session, torch.tensor(tokens), entries)

    def _read(self, state: State, tokens: Tensor) -> State | None:
        """The batch after one more token [B, 1] of each row; rows whose cache the model drops are read again alone.

        Where that fails, the request fails alone, and leaves the batch. None where none is left.
        """
        if self._static.is_full:
            state = self._static.settled(state)
        after = self._static.read(state, tokens)
        if after is not None:
            return after
        if not must_restart(self.model, state, 1):
            return read(self.model, state, tokens)[0]

        remaining_rows = []
        states = []
        for index, row in enumerate(self._batch):
            row_state = take_rows(state, [index])
            token = tokens[index : index + 1]
            try:
                restarted = None
                if must_restart(self.model, row_state, 1):
                    restarted = (row.job.method or self.method).restart(self.model, row_state, token)
            except Exception as error:
                self._end(row.job, "failed", error)
                continue
            if restarted is None:
                restarted, _ = read(self.model, row_state, token)
            remaining_rows.append(row)
            states.append(restarted)
        self._batch = remaining_rows
        return join(states) if states else None

    def _give(self, row: _Row, token: int) -> bool:
        """Give the job a token; returns whether it wants no more. An error in its text fails the job alone."""
        job = row.job
        job.tokens.append(token)
        self.totals.generated_tokens += 1
        now = time.perf_counter()
        if job.first is None:
            job.first = now - job.submitted
            self.totals.first_token.observe(job.first)
        else:
            self.totals.between_tokens.observe(now - job.latest)
        job.latest = now
        try:
            return job.took(token)
        except Exception as error:
            row.error = error
            return False

    def _drop_cancelled_rows(self) -> None:
        remaining_rows = []
        for index, row in enumerate(self._batch):
            if row.job.cancelled:
                self._end(row.job, "cancelled")
            else:
                remaining_rows.append(index)
        self._keep(remaining_rows)

    def _keep(self, rows: list[int]) -> list[int]:
        """Keep the rows of these indices, and remove the others, whose requests have ended; returns their new order."""
        if len(rows) == len(self._batch):
            return rows
        state = self.state
        order = rows
        if not rows or state is None:
            self.state = None
            self._static.drop()
        elif self._static.takes(state):
            self.state = self._static.keep(state, rows) or take_rows(state, rows)
        elif self._slots.has(state):
            self.state, order = self._slots.keep(state, rows)
        else:
            self.state = take_rows(state, rows)
        self._batch = [self._batch[index] for index in order]
        return order

    def _end_group(self, job: Job, reason: str, error: Exception | None = None) -> None:
        for member in job.group:
            self._end(member, reason, error)

    def _end(self, job: Job, reason: str, error: Exception | None = None) -> None:
        if job.reason is not None:
            return
        job.reason = reason
        job.error = error
        self.totals.ended[reason] += 1
        job.done.set()
        with suppress(Exception):  # in its text: other requests go on
            job.ended()

    def admit(self, method: Method) -> None:
        """Read a short prompt with a method, which jobs may have then with any budget, before the thread runs.

        Raises:
            UserError: its states cannot be joined with those of others.
        """
        name = type(method).__name__
        state = None
        reads_alone = method.reader(self.model) is not self.model
        if not reads_alone and method.periodic_eviction(self.model) is None:
            length = min(_PROBE_TOKENS, self.context // 2)
            try:
                method.check(length, self.context)
            except UserError:
                return  # too short for this budget: longer prompts are read
            state = method.start(self.model, torch.full((1, length), 3, device=self.model.device))
        if state is None or not can_join(state):
            raise UserError(
                f"{name} cannot answer in a batch (it reads entries in its own form, evicts while decoding, or the "
                "model has recurrent layers); serve a method that evicts once, such as lookaheadkv or snapkv",
                field="method",
                code="model",
            )
