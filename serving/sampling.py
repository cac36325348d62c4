"""What a request may want of the choice of tokens beyond transformers' options: penalties, log-probabilities."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import LogitsProcessor
from typing_extensions import override


class AnswerPenalties(LogitsProcessor):
    """The penalties of OpenAI's protocol: they lower the scores of tokens that the answer has, not of the prompt's.

    Args:
        prompt_tokens: Number of the prompt's tokens, which the ids begin with.
        presence: What is subtracted once from the score of a token that the answer has.
        frequency: What is subtracted for each time that it has it.
    """

    def __init__(self, prompt_tokens: int, presence: float, frequency: float) -> None:
        self.prompt_tokens = prompt_tokens
        self.presence = presence
        self.frequency = frequency

    @override
    def __call__(self, input_ids: Tensor, scores: Tensor) -> Any:
        answer = input_ids[:, self.prompt_tokens :]
        counts = torch.zeros_like(scores).scatter_add_(1, answer, torch.ones_like(answer, dtype=scores.dtype))
        return scores - self.frequency * counts - self.presence * (counts > 0)


@dataclass(frozen=True)
class TokenLogprob:
    """A token of an answer and its log-probability, in nats, in the model's own distribution, before all options.

    `top` are the most likely tokens at its place with theirs, the most likely first.
    """

    token: int
    logprob: float
    top: list[tuple[int, float]]


def token_logprob(logits: Tensor, token: Tensor, top: int) -> TokenLogprob:
    """The log-probability of a token [1] by logits [1, V], and those of the `top` most likely tokens."""
    logprobs = logits[0].float().log_softmax(-1)
    values, ids = logprobs.topk(min(top, len(logprobs)))
    return TokenLogprob(int(token), float(logprobs[token]), [*zip(ids.tolist(), values.tolist(), strict=True)])
