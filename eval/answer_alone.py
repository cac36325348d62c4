"""Answers of variants that cannot be batched: they evict while they decode, or have a cache class of their own."""

import time

import torch
from torch import Tensor
from torch.nn import functional

from keepsight.eval.answers import Answered, Limits
from keepsight.runtime.attention import Reader
from keepsight.runtime.generate import Reapply, decode, stop_after
from keepsight.runtime.state import read
from keepsight.runtime.state import State


def answer_alone(
    readers: tuple[Reader, Reader],
    state: State,
    question: Tensor,
    answer: Tensor,
    limits: Limits,
    reapply: Reapply | None,
) -> Answered:
    """`answer_all` for a variant that cannot be batched: it evicts while it decodes, or has a cache class of its own.

    Args:
        readers: What reads the question after the state, and what decodes from it: the target, or the method's readers.
        state: One-row state; it is not changed.
        question: As for `answer_all`.
        answer: As for `answer_all`.
        limits: See `Limits`.
        reapply: The method's eviction while decoding; the answer is scored between evictions.
    """
    start = time.perf_counter()
    state, (asker, model) = state.copy(), readers
    if question.shape[1]:
        state, _ = read(asker, state, question, logits_to_keep=1)
        # The question has filled what was spared for generated tokens.
        state = reapply.compress(state) if reapply is not None else state
    asking, start = time.perf_counter() - start, time.perf_counter()
    criteria = stop_after(limits.max_new_tokens, limits.end_tokens)
    ids = decode(model, state.copy(), criteria, pad_token=limits.end_tokens[0], reapply=reapply).ids[0]
    speed = len(ids) / (time.perf_counter() - start)
    return Answered(ids, *score_alone(model, state, answer, reapply), speed, question=asking)


def score_alone(model: Reader, state: State, answer: Tensor, reapply: Reapply | None) -> tuple[Tensor, Tensor]:
    """How likely an answer [1, T] is after a one-row state, which is changed.

    Returns:
        The negative log-likelihood of its tokens [T] float32 in nats, and whether each is the arg-max [T] bool.
    """
    logits = [state.logits[:, None]]
    every = reapply.every if reapply is not None else answer.shape[1]
    for first in range(0, answer.shape[1] - 1, every):
        if first and reapply is not None:
            state = reapply.compress(state)
        state, block = read(model, state, answer[:, first : min(first + every, answer.shape[1] - 1)])
        logits.append(block)
    joined = torch.cat(logits, dim=1)[0]
    return functional.cross_entropy(joined, answer[0], reduction="none"), joined.argmax(dim=-1) == answer[0]
