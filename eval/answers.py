"""Answers of many variants in one batch, with the full cache's answer as the first guess of each.

Scoring the full cache's answer under a variant tells at each token what the variant itself would have said. Up to the
first token where it would have said something else, its own greedy answer is therefore known; only what comes after
is written, with guesses again (`keepsight.eval.guesses`). Under greedy decoding this is exact up to rounding: in
bfloat16, where two tokens are often equally likely, one pass over many tokens and one token at a time can choose
differently (in 2 of 30 answers of a tiny random model).
"""

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

import psutil
import torch
from torch import Tensor
from torch.nn import functional
from transformers import PreTrainedModel

from keepsight.eval.guesses import Guesses, Writing, write
from keepsight.models.decoder import head_width
from keepsight.runtime.state import State
from keepsight.runtime.together import Rows

Item = TypeVar("Item")
_SHARE_OF_FREE_MEMORY = 0.25
_TOKENS_AT_ONCE = 64
"""Bounds the logits of a scoring pass to rows x 64 x V float32."""


@dataclass(frozen=True)
class Answered:
    """The answer of one variant.

    Attributes:
        ids: [T] int64, its own greedy answer.
        nll: [T'] float32, negative log-likelihood of the full cache's answer in nats.
        hits: [T'] bool, whether each token of the full cache's answer is the arg-max.
        tokens_per_second: Decoding speed of its whole batch, from where the answers leave the full cache's; None where
            nothing was left to write.
        rows: Number of answers that were decoded together.
        question: Seconds that its batch took to read the question.
    """

    ids: Tensor
    nll: Tensor
    hits: Tensor
    tokens_per_second: float | None
    rows: int = 1
    question: float = 0.0


@dataclass(frozen=True)
class Limits:
    """What ends an answer, and how large a batch may be.

    Attributes:
        max_new_tokens: Maximum length of an answer in tokens.
        end_tokens: Token ids that end an answer.
        batch_tokens: Maximum KV entries per head in a batch, over all its states and their answers.
    """

    max_new_tokens: int
    end_tokens: list[int]
    batch_tokens: int


def default_batch_tokens(model: PreTrainedModel) -> int:
    """KV entries per head that fill a quarter of the free memory."""
    config = model.config.get_text_config()
    entry = 2 * config.num_hidden_layers * config.num_key_value_heads * head_width(config) * model.dtype.itemsize
    if model.device.type == "cuda":
        free = torch.cuda.mem_get_info(model.device)[0]
    else:
        free = psutil.virtual_memory().available
    return max(int(free * _SHARE_OF_FREE_MEMORY / entry), 1)


def answer_full(
    model: PreTrainedModel, state: State, question: Tensor, limits: Limits, guesses: Guesses | None = None
) -> tuple[Tensor, Answered]:
    """The full cache's greedy answer [1, T] int64, and the same with its likelihood; arguments as for `answer_all`.

    The likelihood is read once more, all tokens together: how many were read at a time while the answer was written
    depends on the guesses, and so on which samples came before; the rounding would too.
    """
    start = time.perf_counter()
    rows = Rows(model, [state], question.shape[1] + limits.max_new_tokens)
    first = read_each(rows, [state], [question])
    asking, start = time.perf_counter() - start, time.perf_counter()
    writing = Writing(0, first[0].argmax(dim=-1).tolist())
    write(rows, [writing], guesses or Guesses(), limits.max_new_tokens, limits.end_tokens)
    speed = len(writing.ids) / (time.perf_counter() - start)
    ids = torch.tensor(writing.ids, device=question.device)
    rows.forget(0, len(ids) - 1)
    (likelihood,) = _score(rows, first, ids[None])[1]
    return ids[None], Answered(ids, likelihood, torch.ones_like(ids, dtype=torch.bool), speed, question=asking)


def answer_all(
    model: PreTrainedModel,
    states: Sequence[State],
    question: Tensor,
    answer: Tensor,
    limits: Limits,
    guesses: Guesses | None = None,
) -> list[Answered]:
    """Every variant's answer, and its likelihood of the full cache's.

    Args:
        model: The target.
        states: One-row states; they are not changed.
        question: [1, q] int64, what is read before the answer; empty when the states have read it.
        answer: [1, T] int64, the full cache's greedy answer under the same limits.
        limits: See `Limits`.
        guesses: Texts that answers may resemble, to which these are added; they change the speed, and rounding.
    """
    answered, guesses = list[Answered](), guesses or Guesses()
    guesses.learn(answer[0].tolist())
    more = question.shape[1] + limits.max_new_tokens
    for batch in batched_by_entries(states, lambda state: state.length + more, limits.batch_tokens):
        answered += _answer_batch(model, batch, question, answer, guesses, limits)
    return answered


def batched_by_entries(items: Iterable[Item], entries: Callable[[Item], int], most: int) -> Iterator[list[Item]]:
    """Consecutive items that together hold at most `most` entries per head; a single item may exceed it.

    Args:
        items: States, or what becomes states.
        entries: Entries per head that an item holds.
        most: Entries per head of a batch.
    """
    batch: list[Item] = []
    held = 0
    for item in items:
        size = entries(item)
        if batch and held + size > most:
            yield batch
            batch, held = [], 0
        batch.append(item)
        held += size
    if batch:
        yield batch


def read_each(rows: Rows, states: Sequence[State], questions: Sequence[Tensor]) -> list[Tensor]:
    """Read a question [1, q] after each of the states that became the rows; q may be 0.

    Returns:
        For each state, the logits [1, V] float32 of its last token.
    """
    last = [state.logits for state in states]
    for start in range(0, max(question.shape[1] for question in questions), _TOKENS_AT_ONCE):
        blocks = rows.read([question[0, start : start + _TOKENS_AT_ONCE] for question in questions])
        last = [block[-1:] if len(block) else before for block, before in zip(blocks, last, strict=True)]
    return last


def _answer_batch(
    model: PreTrainedModel, states: list[State], question: Tensor, answer: Tensor, guesses: Guesses, limits: Limits
) -> list[Answered]:
    start = time.perf_counter()
    rows = Rows(model, states, question.shape[1] + limits.max_new_tokens)
    first = read_each(rows, states, [question] * len(states))
    asking = time.perf_counter() - start
    own, nll = _score(rows, first, answer)
    hits = own == answer
    agreed = hits.long().cumprod(dim=1).sum(dim=1).tolist()
    writings = [Writing(row, own[row, : count + 1].tolist()) for row, count in enumerate(agreed)]
    for writing, count in zip(writings, agreed, strict=True):
        rows.forget(writing.row, max(answer.shape[1] - 1 - count, 0))
    known, start = [len(each.ids) for each in writings], time.perf_counter()
    write(rows, writings, guesses, limits.max_new_tokens, limits.end_tokens)
    seconds = time.perf_counter() - start
    grown = [len(each.ids) - before for each, before in zip(writings, known, strict=True)]
    wrote = sum(map(bool, grown))
    speed = sum(grown) / seconds if wrote else None
    ids = [torch.tensor(each.ids, device=answer.device) for each in writings]
    return [Answered(*row, speed, wrote, asking) for row in zip(ids, nll, hits, strict=True)]


def _score(rows: Rows, first: Sequence[Tensor], answer: Tensor) -> tuple[Tensor, Tensor]:
    """What each of R rows would say in place of every token of an answer [1, T], and the answer's likelihood.

    Afterwards the rows have read all of the answer but its last token.

    Args:
        rows: What reads.
        first: For each row, the logits [1, V] of the answer's first token.
        answer: The answer.

    Returns:
        The rows' own choices [R, T] int64, and the answer's negative log-likelihood [R, T] float32 in nats.
    """
    own, nll = [], []

    def judge(logits: Sequence[Tensor], tokens: Tensor) -> None:
        # Row by row, so that what is between logits and likelihood is never held for all rows.
        own.append(torch.stack([row.max(dim=-1).indices for row in logits]))
        nll.append(torch.stack([functional.cross_entropy(row, tokens, reduction="none") for row in logits]))

    judge(first, answer[0, :1])
    for start in range(0, answer.shape[1] - 1, _TOKENS_AT_ONCE):
        end = min(start + _TOKENS_AT_ONCE, answer.shape[1] - 1)
        judge(rows.read([answer[0, start:end]] * len(first)), answer[0, start + 1 : end + 1])
    return torch.cat(own, dim=1), torch.cat(nll, dim=1)


def first_difference(ids: Tensor, others: Tensor) -> int | None:
    """Index of the first token in which two answers [T] and [T'] differ, where one ends first too; None if equal."""
    if ids.tolist() == others.tolist():
        return None
    common = min(len(ids), len(others))
    return int((ids[:common] == others[:common]).long().cumprod(dim=0).sum())
