"""Answers of many variants in one batch, with the full cache's answer as everyone's first guess.

Scoring the full cache's answer under a variant tells at each token what the variant itself would have said. Up to the
first token where it would have said something else, its own greedy answer is therefore known; only what comes after
is decoded. Under greedy decoding this is exact up to rounding: in bfloat16, where two tokens are often equally likely,
one pass over many tokens and one token at a time can choose differently (in 2 of 30 answers of a tiny random model).
"""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import psutil
import torch
from torch import Tensor
from torch.nn import functional
from transformers import PreTrainedModel

from keepsight.runtime.batch import forget_last, join
from keepsight.runtime.decode import Reapply, decode, score_answer, stop_after
from keepsight.runtime.prefill import read
from keepsight.runtime.state import State, Trace

_SHARE_OF_FREE_MEMORY = 0.25


@dataclass(frozen=True)
class Answered:
    """What one variant says.

    Attributes:
        ids: [T] int64, its own greedy answer.
        nll: [T'] float32, negative log-likelihood of the full cache's answer in nats.
        hits: [T'] bool, whether each token of the full cache's answer is the arg-max.
        tokens_per_second: Tokens of its whole batch for each second of decoding one by one; None where none had to be.
        rows: Answers in that batch, at its start.
        question: Seconds until its batch had read the question.
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
        max_new_tokens: Of an answer.
        end_tokens: Ids that end one.
        batch_tokens: KV entries a head over all rows of a batch, answers included.
    """

    max_new_tokens: int
    end_tokens: list[int]
    batch_tokens: int


def default_batch_tokens(model: PreTrainedModel) -> int:
    """As many entries as fill a quarter of the memory that is free now."""
    config = model.config.get_text_config()
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    entry = 2 * config.num_hidden_layers * config.num_key_value_heads * head_dim * model.dtype.itemsize
    if model.device.type == "cuda":
        free = torch.cuda.mem_get_info(model.device)[0]
    else:
        free = psutil.virtual_memory().available
    return max(int(free * _SHARE_OF_FREE_MEMORY / entry), 1)


def answer_full(model: PreTrainedModel, state: State, question: Tensor, limits: Limits) -> tuple[Tensor, Answered]:
    """The full cache's greedy answer [1, T] int64, and the same with its likelihood; arguments as for `answer_all`."""
    start = time.perf_counter()
    state = _after(model, replace(state.copy(), trace=Trace()), question)
    asking, start = time.perf_counter() - start, time.perf_counter()
    criteria = stop_after(limits.max_new_tokens, limits.end_tokens)
    answer = decode(model, state.copy(), criteria, pad_token=limits.end_tokens[0]).ids
    speed = answer.shape[1] / (time.perf_counter() - start)
    nll, hits = score_answer(model, state, answer)
    return answer, Answered(answer[0], nll[0], hits[0], speed, question=asking)


def answer_all(
    model: PreTrainedModel, states: Sequence[State], question: Tensor, answer: Tensor, limits: Limits
) -> list[Answered]:
    """Every variant's answer and what it thinks of the full cache's.

    Args:
        model: The target.
        states: Of one row each; they stay as they are.
        question: [1, q] int64, what is read before the answer; empty when the states have read it.
        answer: [1, T] int64, the full cache's greedy answer under the same limits.
        limits: See `Limits`.
    """
    order = sorted(range(len(states)), key=lambda index: states[index].length)
    sizes = [state.length + question.shape[1] + limits.max_new_tokens for state in states]
    answered: dict[int, Answered] = {}
    for batch in _batches(order, sizes, limits.batch_tokens):
        results = _answer_batch(model, [states[index] for index in batch], question, answer, limits)
        answered.update(zip(batch, results, strict=True))
    return [answered[index] for index in range(len(states))]


def _batches(order: Sequence[int], sizes: Sequence[int], most: int) -> Iterator[list[int]]:
    """Consecutive states whose padded sizes stay within `most`; one alone may exceed it. `order` is by size."""
    batch: list[int] = []
    for index in order:
        if batch and (len(batch) + 1) * sizes[index] > most:
            yield batch
            batch = []
        batch.append(index)
    if batch:
        yield batch


def _after(model: PreTrainedModel, state: State, question: Tensor) -> State:
    """The state once it has read the question; its cache grows."""
    return read(model, state, question.expand(len(state.logits), -1))[0] if question.shape[1] else state


def _answer_batch(
    model: PreTrainedModel, states: list[State], question: Tensor, answer: Tensor, limits: Limits
) -> list[Answered]:
    start = time.perf_counter()
    before = _after(model, join(states), question)
    asking, speed = time.perf_counter() - start, None
    answers = answer.expand(len(states), -1)
    logits, after = before.logits[:, None], before
    if answer.shape[1] > 1:
        after, rest = read(model, before, answers[:, :-1])
        logits = torch.cat([logits, rest], dim=1)
    nll = functional.cross_entropy(logits.transpose(1, 2), answers, reduction="none")
    own = logits.argmax(dim=-1)
    hits = own == answers
    agreed = hits.long().cumprod(dim=1).sum(dim=1)
    ids = [_own_start(*row) for row in zip(answers, own, agreed.tolist(), strict=True)]
    open_rows = [row for row, each in enumerate(ids) if not _ended(each, answer.shape[1], int(agreed[row]), limits)]
    if open_rows:
        rows = torch.tensor(open_rows, device=answer.device)
        known = agreed[rows]
        state = forget_last(after, rows, answer.shape[1] - 1 - known, logits[rows, known])
        start = time.perf_counter()
        rests = _finish(model, state, limits, known.tolist())
        speed = sum(map(len, rests)) / (time.perf_counter() - start)
        for row, rest in zip(open_rows, rests, strict=True):
            ids[row] = torch.cat([ids[row][:-1], rest])
    return [Answered(*row, speed, len(open_rows), asking) for row in zip(ids, nll, hits, strict=True)]


def _own_start(answer: Tensor, own: Tensor, agreed: int) -> Tensor:
    """What a row says as far as it is known: the tokens it shares with the full cache, then its first other one."""
    return torch.cat([answer[:agreed], own[agreed : agreed + 1]])


def _ended(ids: Tensor, length: int, agreed: int, limits: Limits) -> bool:
    return agreed == length or int(ids[-1]) in limits.end_tokens or len(ids) >= limits.max_new_tokens


def _finish(model: PreTrainedModel, state: State, limits: Limits, known: list[int]) -> list[Tensor]:
    """Greedy continuations [T] of rows of which `known` tokens are known; rows that have ended leave the batch."""
    written: list[list[int]] = [[] for _ in known]
    rows = list(range(len(known)))
    while True:
        tokens = state.logits.argmax(dim=-1)
        for row, token in zip(rows, tokens.tolist(), strict=True):
            written[row].append(token)
        stay = [
            place
            for place, row in enumerate(rows)
            if written[row][-1] not in limits.end_tokens and known[row] + len(written[row]) < limits.max_new_tokens
        ]
        if not stay:
            return [torch.tensor(each, device=tokens.device) for each in written]
        if len(stay) < len(rows):
            kept = torch.tensor(stay, device=tokens.device)
            state = forget_last(state, kept, torch.zeros_like(kept), state.logits[kept])
            rows, tokens = [rows[place] for place in stay], tokens[kept]
        state, _ = read(model, state, tokens[:, None])


def answer_alone(
    model: PreTrainedModel, state: State, question: Tensor, answer: Tensor, limits: Limits, reapply: Reapply | None
) -> Answered:
    """The same for one variant that no batch can hold: it evicts while it decodes, or its cache has a form of its own.

    Args:
        model: What reads the state: the target, or the method's reader.
        state: Of one row; it stays as it is.
        question: As for `answer_all`.
        answer: As for `answer_all`.
        limits: See `Limits`.
        reapply: The method's eviction while decoding; the answer is scored between evictions.
    """
    start = time.perf_counter()
    state = _after(model, state.copy(), question)
    if reapply is not None and question.shape[1]:
        state = reapply.compress(state)  # the question has filled what was spared for generated tokens
    asking, start = time.perf_counter() - start, time.perf_counter()
    criteria = stop_after(limits.max_new_tokens, limits.end_tokens)
    ids = decode(model, state.copy(), criteria, pad_token=limits.end_tokens[0], reapply=reapply).ids[0]
    speed = len(ids) / (time.perf_counter() - start)
    logits = [state.logits[:, None]]
    every = reapply.every if reapply is not None else answer.shape[1]
    for first in range(0, answer.shape[1] - 1, every):
        if first and reapply is not None:
            state = reapply.compress(state)
        state, block = read(model, state, answer[:, first : min(first + every, answer.shape[1] - 1)])
        logits.append(block)
    joined = torch.cat(logits, dim=1)
    nll = functional.cross_entropy(joined.transpose(1, 2), answer, reduction="none")
    return Answered(ids, nll[0], joined.argmax(dim=-1)[0] == answer[0], speed, question=asking)
