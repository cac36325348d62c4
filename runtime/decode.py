"""Decode: answer from the entries that were kept, at the positions the full cache would have used."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional
from transformers import PreTrainedModel
from transformers.cache_utils import Cache
from transformers.generation import EosTokenCriteria, LogitsProcessorList, MaxLengthCriteria, StoppingCriteriaList
from transformers.generation.streamers import BaseStreamer

from keepsight.runtime.cache import entries, share, stack


@dataclass(frozen=True)
class Kept:
    """Where decoding starts from. Decoding appends to the cache.

    Attributes:
        cache: C entries a layer and KV head, of a prompt of N >= C positions.
        mask: [B, C] bool, False for padding; None when no entry is padding.
        logits: [B, V], of the last prompt token.
        lengths: [B] int64: the position of each row's next token.
    """

    cache: Cache
    mask: Tensor | None
    logits: Tensor
    lengths: Tensor

    @property
    def size(self) -> int:
        """C, the physical length."""
        return int(entries(self.cache)[0][0].shape[2])

    def copy(self) -> "Kept":
        """The same state with a cache of its own to append to."""
        return replace(self, cache=share(self.cache))

    def attention_mask(self, appended: int) -> Tensor | None:
        """[B, positions seen + appended] as transformers wants it; only the last columns stand for entries."""
        if self.mask is None:
            return None
        return functional.pad(functional.pad(self.mask, (self.evicted, 0)), (0, appended), value=True)

    @property
    def evicted(self) -> int:
        """How many positions have no entry any more; decoding does not change it."""
        return self.cache.get_seq_length() - self.size


def join(states: list[Kept]) -> Kept:
    """Several states of prompts with one length (such as one prompt under several methods) as one batch."""
    cache, padding = stack([state.cache for state in states])
    longest = max(state.size for state in states)
    masks = [state.mask for state in states]
    mask = padding
    if any(each is not None for each in masks):
        mask = torch.cat([_padded(state, longest) for state in states])
    return Kept(
        cache, mask, torch.cat([state.logits for state in states]), torch.cat([state.lengths for state in states])
    )


def _padded(state: Kept, longest: int) -> Tensor:
    mask = state.mask
    if mask is None:
        mask = torch.ones(len(state.logits), state.size, dtype=torch.bool, device=state.logits.device)
    return functional.pad(mask, (longest - state.size, 0))


def stop_after(max_new_tokens: int, end_tokens: list[int] | int | None, prompt_length: int = 0) -> StoppingCriteriaList:
    """Stop a row at an end token, and all rows after `max_new_tokens`."""
    criteria = StoppingCriteriaList([MaxLengthCriteria(prompt_length + max_new_tokens)])
    if end_tokens is not None:
        criteria.append(EosTokenCriteria(end_tokens))
    return criteria


@torch.no_grad()
def decode(
    model: PreTrainedModel,
    kept: Kept,
    stopping_criteria: StoppingCriteriaList,
    *,
    pad_token: int,
    prompt_ids: Tensor | None = None,
    logits_processor: LogitsProcessorList | None = None,
    do_sample: bool = False,
    streamer: BaseStreamer | None = None,
) -> Tensor:
    """Generate an answer for each row.

    Args:
        model: The target, without adapters.
        kept: Where to start from; its cache grows.
        stopping_criteria: As transformers defines them, over prompt and answer together.
        pad_token: Fills the rows that have ended.
        prompt_ids: [B, N], for processors and criteria that look at the prompt; an empty prompt by default.
        logits_processor: As transformers defines it.
        do_sample: Sample from the processed logits instead of taking the arg-max.
        streamer: Gets each token as it comes.

    Returns:
        [B, N + T] int64: the prompt ids given, then the answers with their end tokens, padded on the right.
    """
    ids = prompt_ids if prompt_ids is not None else kept.lengths.new_empty(len(kept.logits), 0)
    unfinished = torch.ones(len(ids), dtype=torch.bool, device=ids.device)
    logits, appended = kept.logits, 0
    while True:
        scores = logits_processor(ids, logits) if logits_processor else logits  # type: ignore[arg-type]
        token = torch.multinomial(scores.softmax(-1), 1)[:, 0] if do_sample else scores.argmax(dim=-1)
        token = torch.where(unfinished, token, pad_token)
        ids = torch.cat([ids, token[:, None]], dim=1)
        if streamer is not None:
            streamer.put(token.cpu())
        unfinished = unfinished & ~stopping_criteria(ids, scores)
        if not unfinished.any():
            break
        logits = _forward(model, kept, token[:, None], appended)[:, -1].float()
        appended += 1
    if streamer is not None:
        streamer.end()
    return ids


@torch.no_grad()
def score_answer(model: PreTrainedModel, kept: Kept, answer: Tensor) -> tuple[Tensor, Tensor]:
    """How likely an answer is when it is read from the kept entries, teacher-forced in one forward pass.

    Args:
        model: The target, without adapters.
        kept: Its cache grows by T - 1 entries.
        answer: [B, T] int64, the same number of tokens in every row.

    Returns:
        Negative log-likelihood [B, T] float32 in nats, and whether each token is the arg-max, [B, T] bool. The first
        token comes from the prompt's own logits, which no eviction changes.
    """
    logits = kept.logits[:, None]
    if answer.shape[1] > 1:
        logits = torch.cat([logits, _forward(model, kept, answer[:, :-1], 0).float()], dim=1)
    nll = functional.cross_entropy(logits.transpose(1, 2), answer, reduction="none")
    return nll, logits.argmax(dim=-1) == answer


def _forward(model: PreTrainedModel, kept: Kept, tokens: Tensor, appended: int) -> Tensor:
    """Logits [B, q, V] of q tokens that come after `appended` others."""
    steps = torch.arange(tokens.shape[1], device=tokens.device)
    output = model(
        input_ids=tokens,
        attention_mask=kept.attention_mask(appended + tokens.shape[1]),
        position_ids=kept.lengths[:, None] + appended + steps,
        past_key_values=kept.cache,
        use_cache=True,
    )
    return output.logits
