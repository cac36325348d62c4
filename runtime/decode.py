"""Decode: answer from the kept entries, at the positions that a full cache would use."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.generation import EosTokenCriteria, LogitsProcessorList, MaxLengthCriteria, StoppingCriteriaList
from transformers.generation.streamers import BaseStreamer

from keepsight.runtime.attention import Reader
from keepsight.runtime.prefill import read
from keepsight.runtime.state import State


@dataclass(frozen=True)
class Reapply:
    """Eviction while decoding.

    Attributes:
        every: Number of generated tokens between two evictions.
        compress: Compresses the current state.
    """

    every: int
    compress: Callable[[State], State]


@dataclass(frozen=True)
class Decoded:
    """Answers, and the state they leave behind.

    Attributes:
        ids: [B, N + T] int64: the given prompt ids, then the answers with their end tokens, padded on the right.
        state: State after all tokens of the answers but the last, which no forward pass has read yet.
    """

    ids: Tensor
    state: State


def end_ids(model: PreTrainedModel) -> int | list[int] | None:
    """The tokens that end an answer, as the model's generation configuration has them; None where it names none."""
    config = model.generation_config
    return None if config is None else config.eos_token_id


def stop_after(max_new_tokens: int, end_tokens: list[int] | int | None) -> StoppingCriteriaList:
    """Stop a row at an end token, and all rows after `max_new_tokens`."""
    criteria = StoppingCriteriaList([MaxLengthCriteria(max_new_tokens)])
    if end_tokens is not None:
        criteria.append(EosTokenCriteria(end_tokens))
    return criteria


@torch.no_grad()
def decode(
    model: Reader,
    state: State,
    stopping_criteria: StoppingCriteriaList,
    *,
    pad_token: int,
    prompt_ids: Tensor | None = None,
    logits_processor: LogitsProcessorList | None = None,
    do_sample: bool = False,
    streamer: BaseStreamer | None = None,
    reapply: Reapply | None = None,
) -> Decoded:
    """Generate an answer for each row.

    Args:
        model: What reads the state: the target without adapters, or the method's reader.
        state: State to start from; its cache grows.
        stopping_criteria: As transformers defines them, over prompt and answer together.
        pad_token: Fills the rows that have ended.
        prompt_ids: [B, N], for processors and criteria that see the prompt; an empty prompt by default.
        logits_processor: As transformers defines it.
        do_sample: Sample from the processed logits instead of taking the arg-max.
        streamer: Receives each token.
        reapply: Evicts while decoding.
    """
    ids = prompt_ids if prompt_ids is not None else state.lengths.new_empty(len(state.logits), 0)
    unfinished = torch.ones(len(ids), dtype=torch.bool, device=ids.device)
    since_eviction = 0
    while True:
        scores = logits_processor(ids, state.logits) if logits_processor else state.logits  # type: ignore[arg-type]
        token = torch.multinomial(scores.softmax(-1), 1)[:, 0] if do_sample else scores.argmax(dim=-1)
        token = torch.where(unfinished, token, pad_token)
        ids = torch.cat([ids, token[:, None]], dim=1)
        if streamer is not None:
            streamer.put(token.cpu())
        unfinished = unfinished & ~stopping_criteria(ids, scores)
        if not unfinished.any():
            break
        if reapply is not None and since_eviction == reapply.every:
            state, since_eviction = reapply.compress(state), 0
        state, _ = read(model, state, token[:, None])
        since_eviction += 1
    if streamer is not None:
        streamer.end()
    return Decoded(ids, state)
