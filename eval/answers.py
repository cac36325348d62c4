"""Answers from many states of one prompt, in batches, by the loop that `generate` runs.

Scoring the full cache's answer from a state in one pass tells at each token what the state would have generated.
A state that agrees with all of it answers the same; the others are decoded from where the first of them disagrees.
States that cannot be joined, and methods that evict while decoding, are decoded one by one, and so are sampled answers,
which have the draws of the full cache's. Under greedy decoding this is exact up to rounding: in bfloat16, where two
tokens are often equally likely, one pass over many tokens and one token at a time can choose differently.
"""

import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import psutil
import torch
from torch import Tensor
from torch.nn import functional
from transformers import LogitsProcessor, LogitsProcessorList, PreTrainedModel
from typing_extensions import override

from keepsight.models.decoder import cached_kv_heads, head_width
from keepsight.runtime.attention import Reader
from keepsight.runtime.generate import PeriodicEviction, decode, stop_after, up_to_end
from keepsight.runtime.join import join, joins_unpadded
from keepsight.runtime.rope_length import length_limit
from keepsight.runtime.sampling import seeded_draws, warpers
from keepsight.runtime.state import State, read, read_one_by_one

Item = TypeVar("Item")
_SHARE_OF_FREE_MEMORY = 0.25
_TOKENS_AT_ONCE = 64
"""Bounds the logits of a scoring pass to rows x 64 x V float32."""


@dataclass(frozen=True)
class Answered:
    """The answer of one variant.

    Attributes:
        ids: [T] int64, its own answer.
        nll: [T'] float32, negative log-likelihood of the full cache's answer in nats.
        hits: [T'] bool, whether each token of the full cache's answer is the arg-max.
        tokens_per_second: Decoding speed of its batch of `rows`; None where its answer is the full cache's.
        rows: Number of answers that were decoded in the batch.
        question: Seconds that its batch took to read the question.
    """

    ids: Tensor
    nll: Tensor
    hits: Tensor
    tokens_per_second: float | None
    rows: int = 1
    question: float = 0.0


@dataclass(frozen=True)
class Sampling:
    """How answers are decoded: temperature 0 is greedy; draws depend on the seed and on the tokens read before."""

    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0


GREEDY = Sampling()


@dataclass(frozen=True)
class Limits:
    """What ends an answer (a number of tokens, or an end token), and how large a batch may be.

    `batch_tokens` bounds the KV entries per head of a batch, over all its states and their answers, padding included.
    """

    max_new_tokens: int
    end_tokens: list[int]
    batch_tokens: int
    sampling: Sampling = GREEDY

    def decode(self, model: Reader, state: State, **options: Any) -> Tensor:
        """The answer of each row [B, T] int64, with options of `decode`; the state's cache grows."""
        criteria = stop_after(self.max_new_tokens, self.end_tokens)
        return decode(model, state, criteria, pad_token=self.end_tokens[0], **options).ids

    def sample(self, model: Reader, state: State, eviction: PeriodicEviction | None = None) -> Tensor:
        """A sampled answer [1, T] int64; the state's cache grows. The draws depend on the seed and the prompt alone."""
        processors = warpers(self.sampling.temperature, self.sampling.top_p)
        with seeded_draws(self.sampling.seed, state):
            return self.decode(model, state, logits_processor=processors, do_sample=True, eviction=eviction)


@dataclass(frozen=True)
class _Written:
    """An answer [T] int64, and the speed and number of rows of the batch in which it was decoded."""

    ids: Tensor
    tokens_per_second: float | None
    rows: int


@dataclass(frozen=True)
class _Scored:
    """The full cache's answer under another state: negative log-likelihood [T] and hits [T], as in `Answered`."""

    nll: Tensor
    hits: Tensor
    question_seconds: float

    def agreeing_tokens(self) -> int:
        """How many tokens the state would generate like the full cache before it would generate another."""
        return int(self.hits.long().cumprod(dim=0).sum())


def default_batch_tokens(model: PreTrainedModel) -> int:
    """KV entries per head that fill a quarter of the free memory."""
    return max(int(free_tokens(model) * _SHARE_OF_FREE_MEMORY), 1)


def free_tokens(model: PreTrainedModel) -> int:
    """How many tokens' KV entries fill the free memory."""
    if model.device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(model.device)
    else:
        free = psutil.virtual_memory().available
    return int(free / entry_bytes(model))


def answer_full(model: PreTrainedModel, state: State, question: Tensor, limits: Limits) -> tuple[Tensor, Answered]:
    """The full cache's answer [1, T] int64, and the same with its likelihood; arguments as for `answer_all`."""
    start = time.perf_counter()
    state = _read_blocks(model, state.copy(), question)
    question_seconds = time.perf_counter() - start

    start = time.perf_counter()
    if limits.sampling.temperature:
        ids = limits.sample(model, state.copy())
        speed = ids.shape[1] / (time.perf_counter() - start)
        nll_of_rows, hits_of_rows = answer_likelihood(model, state, ids)
        nll = nll_of_rows[0]
        hits = hits_of_rows[0]
    else:
        likelihood = _Likelihood()
        ids = limits.decode(model, state, logits_processor=LogitsProcessorList([likelihood]))
        speed = ids.shape[1] / (time.perf_counter() - start)
        nll = torch.cat(likelihood.nll)
        hits = torch.ones_like(ids[0], dtype=torch.bool)
    return ids, Answered(ids[0], nll, hits, speed, question=question_seconds)


def answer_all(
    model: PreTrainedModel, states: Sequence[State], question: Tensor, answer: Tensor, limits: Limits
) -> list[Answered]:
    """Every state's answer, and its likelihood of the full cache's.

    The one-row states can be joined, and are not changed. `question` [1, q] int64 is read before the answer; empty when
    the states have read it. `answer` [1, T] int64 is the full cache's under the same limits.
    """
    further_tokens = question.shape[1] + limits.max_new_tokens
    scored: dict[int, _Scored] = {}
    for batch in joined_by_length(model, states, further_tokens, limits.batch_tokens):
        start = time.perf_counter()
        state = _read_blocks(model, join([states[index] for index in batch]), question)
        question_seconds = time.perf_counter() - start
        for index, nll, hits in zip(batch, *answer_likelihood(model, state, answer), strict=True):
            scored[index] = _Scored(nll, hits, question_seconds)

    is_sampled = limits.sampling.temperature > 0
    agreeing: dict[int, int] = {}  # of each state that may answer otherwise, how many first tokens are the same
    for index in range(len(states)):
        tokens = 0 if is_sampled else scored[index].agreeing_tokens()
        if is_sampled or tokens < answer.shape[1]:
            agreeing[index] = tokens

    differing = list(agreeing)
    written: dict[int, _Written] = {}
    batch_tokens = 0 if is_sampled else limits.batch_tokens
    for batch in joined_by_length(model, [states[index] for index in differing], further_tokens, batch_tokens):
        rows = [differing[position] for position in batch]
        shared_answer = answer[:, : min(agreeing[row] for row in rows)]
        state = join([states[row] for row in rows])
        if length_limit(model.config) is None:
            state = _read_blocks(model, state, torch.cat([question, shared_answer], dim=1))
        else:  # an answer's tokens were generated one by one
            state = _read_blocks(model, state, question)
            for block in _blocks(shared_answer):
                state, _ = read_one_by_one(model, state, block.expand(len(rows), -1))
        written.update(zip(rows, _write(model, state, shared_answer, limits), strict=True))

    answers = []
    for index in range(len(states)):
        answer_written = written.get(index, _Written(answer[0], None, 0))
        answers.append(
            Answered(
                ids=answer_written.ids,
                nll=scored[index].nll,
                hits=scored[index].hits,
                tokens_per_second=answer_written.tokens_per_second,
                rows=answer_written.rows,
                question=scored[index].question_seconds,
            )
        )
    return answers


def answer_each(model: PreTrainedModel, states: Sequence[State], limits: Limits) -> list[Tensor]:
    """The answer [T] int64 of each state, of prompts of their own; arguments as for `answer_all`."""
    answers: dict[int, Tensor] = {}
    batch_tokens = 0 if limits.sampling.temperature else limits.batch_tokens
    for batch in joined_by_length(model, states, limits.max_new_tokens, batch_tokens):
        state = join([states[index] for index in batch])
        nothing = state.tokens[:1, :0]
        for index, written in zip(batch, _write(model, state, nothing, limits), strict=True):
            answers[index] = written.ids
    return [answers[index] for index in range(len(states))]


def answer_alone(
    readers: tuple[Reader, Reader],
    state: State,
    question: Tensor,
    answer: Tensor,
    limits: Limits,
    eviction: PeriodicEviction | None,
) -> Answered:
    """`answer_all` for one state that cannot be joined, or whose method evicts while decoding.

    `readers` process the question and decode the answer: the base model, or the method's own. `eviction` is the
    method's eviction while decoding; the answer is scored between evictions.
    """
    question_reader, reader = readers
    start = time.perf_counter()
    state = state.copy()
    if question.shape[1]:
        state, _ = read(question_reader, state, question, logits_to_keep=1)
        if eviction is not None:  # the question has used the room reserved for generated tokens
            state = eviction.compress(state)
    question_seconds = time.perf_counter() - start
    (written,) = _write(reader, state.copy(), answer[:, :0], limits, eviction)
    nll, hits = answer_likelihood(reader, state, answer, eviction)
    return Answered(written.ids, nll[0], hits[0], written.tokens_per_second, question=question_seconds)


@torch.no_grad()
def answer_likelihood(
    model: Reader, state: State, answer: Tensor, eviction: PeriodicEviction | None = None
) -> tuple[Tensor, Tensor]:
    """Negative log-likelihood and arg-max hits of an answer [1, T] after each row of a state; the state changes.

    Returns:
        The negative log-likelihood of its tokens [B, T] float32 in nats, and whether each is the arg-max [B, T] bool.
    """
    nll_of_blocks: list[Tensor] = []
    hits_of_blocks: list[Tensor] = []

    def compare(logits: Tensor, tokens: Tensor) -> None:
        # Row by row: the intermediate tensors of all rows at once would take much memory.
        nll_of_blocks.append(torch.stack([functional.cross_entropy(row, tokens, reduction="none") for row in logits]))
        hits_of_blocks.append(logits.argmax(dim=-1) == tokens)

    compare(state.logits[:, None], answer[0, :1])
    block = _TOKENS_AT_ONCE if eviction is None else eviction.interval
    last = answer.shape[1] - 1
    for start in range(0, last, block):
        if start and eviction is not None:
            state = eviction.compress(state)
        end = min(start + block, last)
        state, logits = read_one_by_one(model, state, answer[:, start:end].expand(len(state.lengths), -1))
        compare(logits, answer[0, start + 1 : end + 1])
    return torch.cat(nll_of_blocks, dim=1), torch.cat(hits_of_blocks, dim=1)


# Batches


def joined_by_length(
    model: PreTrainedModel, states: Sequence[State], further_tokens: int, batch_tokens: int
) -> Iterator[list[int]]:
    """Indices of states that are read in one batch: dense ones of similar lengths, or ragged ones.

    A batch of dense states ends where its padding would take longer to read than the model's weights, which each batch
    reads again; ragged ones are not padded. After each state up to `further_tokens` are read, and a batch of several
    has at most `batch_tokens` KV entries per head, padding included.
    """
    max_padding = sum(weight.nbytes for weight in model.parameters()) / entry_bytes(model)
    ragged: list[int] = []
    dense: list[int] = []
    lengths = []
    for index, state in enumerate(states):
        if joins_unpadded(state):
            ragged.append(index)
            lengths.append(math.ceil(state.mean_entries()))
        else:
            dense.append(index)
            lengths.append(state.length)

    def entries_of(batch: Sequence[int]) -> int:
        return sum(lengths[index] for index in batch)

    def dense_fits(batch: Sequence[int]) -> bool:
        with_padding = lengths[batch[-1]] * len(batch)  # the last is the longest
        is_within = with_padding + further_tokens * len(batch) <= batch_tokens
        return is_within and with_padding - entries_of(batch) <= max_padding

    def ragged_fits(batch: Sequence[int]) -> bool:
        return entries_of(batch) + further_tokens * len(batch) <= batch_tokens

    yield from batches(sorted(dense, key=lengths.__getitem__), dense_fits)
    yield from batches(sorted(ragged, key=lengths.__getitem__), ragged_fits)


def batches(items: Iterable[Item], fits: Callable[[Sequence[Item]], bool]) -> Iterator[list[Item]]:
    """Consecutive items, as many in a batch as `fits` allows; a single item always fits."""
    batch: list[Item] = []
    for item in items:
        if batch and not fits([*batch, item]):
            yield batch
            batch = []
        batch.append(item)
    if batch:
        yield batch


# Reading and writing


def first_difference(ids: Tensor, others: Tensor) -> int | None:
    """Index of the first token in which two answers [T] and [T'] differ, where one ends first too; None if equal."""
    if ids.tolist() == others.tolist():
        return None
    common = min(len(ids), len(others))
    return int((ids[:common] == others[:common]).long().cumprod(dim=0).sum())


class _Likelihood(LogitsProcessor):
    """Records the negative log-likelihood [B] of each arg-max token, in nats, and leaves the logits as they are."""

    def __init__(self) -> None:
        self.nll: list[Tensor] = []

    @override
    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        self.nll.append(functional.cross_entropy(scores, scores.argmax(dim=-1), reduction="none"))
        return scores


def _read_blocks(model: PreTrainedModel, state: State, tokens: Tensor) -> State:
    """The state after the same tokens [1, q] in every row; q may be 0."""
    unread = tokens.shape[1]
    for block in _blocks(tokens):
        unread -= block.shape[1]
        state, _ = read(model, state, block.expand(len(state.lengths), -1), logits_to_keep=1, more=unread)
    return state


def _blocks(tokens: Tensor) -> Sequence[Tensor]:
    """Tokens [1, q] in parts of at most `_TOKENS_AT_ONCE`; none where q is 0."""
    return tokens.split(_TOKENS_AT_ONCE, dim=1) if tokens.shape[1] else ()


def _write(
    model: Reader, state: State, answer_so_far: Tensor, limits: Limits, eviction: PeriodicEviction | None = None
) -> list[_Written]:
    """The answer of each row, whose first tokens [1, t] the state has read; sampling takes a single row."""
    rows = len(state.lengths)
    start = time.perf_counter()
    if limits.sampling.temperature:
        ids = limits.sample(model, state, eviction)
    else:
        ids = limits.decode(model, state, prompt_ids=answer_so_far.expand(rows, -1), eviction=eviction)
    seconds = time.perf_counter() - start
    answers = [row[: len(up_to_end(row.tolist(), limits.end_tokens))] for row in ids]
    new_tokens = sum(map(len, answers)) - answer_so_far.numel() * rows
    return [_Written(answer, new_tokens / seconds, rows) for answer in answers]


def entry_bytes(model: PreTrainedModel) -> int:
    """Bytes of the keys and values of one token in all layers."""
    config = model.config.get_text_config()
    return 2 * config.num_hidden_layers * cached_kv_heads(model) * head_width(config) * model.dtype.itemsize
