"""Speculative decoding: a draft head guesses the next tokens, and the target reads all of them in one pass.

Leviathan et al. 2023 (arXiv 2211.17192), section 2, with chain drafts of an EAGLE-3 head (arXiv 2503.01840) and greedy
decoding: a guess is accepted where the target would have said the same, so that every token is the target's own choice,
from a full cache or an evicted one. A pass over several tokens sums in another order than one over a single token, so
that logits which are equal up to rounding may change places: hardly ever in float32, now and then in bfloat16.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.generation import LogitsProcessorList, StoppingCriteriaList
from transformers.generation.streamers import BaseStreamer

from keepsight.errors import UserError, require_whole
from keepsight.runtime.drafting.eagle import ChainDrafter, DraftingHead, unread_rows
from keepsight.runtime.generate import Decoded
from keepsight.runtime.state import Needs, State, context_of, read


@dataclass(frozen=True)
class Round:
    """One pass of the target over drafted tokens.

    Attributes:
        judged: Drafted tokens that the target accepted or rejected; where the answer ended within the draft, only
            those up to its end.
        accepted: Number of judged tokens that it accepted.
        emitted: Tokens of the answer that the pass gave.
    """

    judged: int
    accepted: int
    emitted: int


@dataclass(frozen=True)
class Speculated(Decoded):
    """An answer, the state it leaves behind (without a trace), and the outcome of each pass."""

    rounds: tuple[Round, ...]


def acceptance_length(rounds: Sequence[Round]) -> float:
    """Mean tokens per pass of the target after the prefill; 1 is plain decoding."""
    return sum(each.emitted for each in rounds) / max(len(rounds), 1)


def acceptance_by_position(rounds: Sequence[Round]) -> list[float]:
    """The share of drafts whose first i tokens were all accepted, for i = 1, 2, ..."""
    longest = max((each.judged for each in rounds), default=0)
    shares = []
    for place in range(longest):
        judged = [each for each in rounds if each.judged > place]
        shares.append(sum(each.accepted > place for each in judged) / len(judged))
    return shares


@torch.no_grad()
def decode_speculatively(
    model: PreTrainedModel,
    state: State,
    head: DraftingHead,
    stopping_criteria: StoppingCriteriaList,
    *,
    tokens: int = 5,
    prompt_ids: Tensor | None = None,
    logits_processor: LogitsProcessorList | None = None,
    streamer: BaseStreamer | None = None,
) -> Speculated:
    """The greedy answer that `decode` gives, in fewer passes of the target.

    Args:
        model: The target, without adapters.
        state: State of one prompt, evicted or not, with the head's features in its trace: prefill with
            `needs=Needs(features=head.layers_of(model))`. Its cache grows.
        head: Drafts for the target.
        stopping_criteria: See `decode`.
        tokens: Tokens per draft; fewer near the answer's maximum length and the end of the target's context.
        prompt_ids: See `decode`.
        logits_processor: See `decode`.
        streamer: See `decode`.

    Raises:
        UserError: a batch, packed entries, features that were not recorded, or `tokens` below 1.
    """
    require_single(state.tokens)
    require_whole("speculative decoding", 1, tokens=tokens)
    if not state.cache.is_croppable:
        raise UserError("speculative decoding: entries that are packed (kivi, specache) cannot forget a rejected draft")
    layers = head.layers_of(model)
    drafter = ChainDrafter(head, model, state.tokens_mask)
    answer = _Answer(state, prompt_ids, stopping_criteria, logits_processor, streamer)
    answer.add(state.logits)
    place, rounds = int(state.lengths), []
    while not answer.ended:
        newest = answer.ids[:, -1:]
        count = max(min(tokens, answer.room - 1, context_of(model) - place - 1), 0)
        drafted = newest[:, :0]
        if count:
            drafted = drafter.draft(*unread_rows(state, layers, newest), count)
        # Only the new tokens' features are recorded: the head has read the others.
        state = replace(state, needs=Needs(features=layers), features=())
        state, logits = read(model, state, torch.cat([newest, drafted], dim=1))
        each = _judge(answer, drafted, logits)
        state = state.crop(count + 1 - each.emitted, logits[:, each.emitted - 1])
        rounds.append(each)
        place += each.emitted
    answer.end()
    return Speculated(answer.ids, replace(state, needs=Needs(), features=()), tuple(rounds))


class _Answer:
    """An answer that grows token by token, as in `decode`."""

    def __init__(
        self,
        state: State,
        prompt_ids: Tensor | None,
        stopping_criteria: StoppingCriteriaList,
        logits_processor: LogitsProcessorList | None,
        streamer: BaseStreamer | None,
    ) -> None:
        self.ids = prompt_ids if prompt_ids is not None else state.tokens[:, :0]
        self.ended = False
        self._criteria, self._processor, self._streamer = stopping_criteria, logits_processor, streamer

    @property
    def room(self) -> int:
        """Maximum number of further tokens that the criteria allow."""
        longest = self._criteria.max_length
        return torch.iinfo(torch.long).max if longest is None else longest - self.ids.shape[1]

    def add(self, logits: Tensor) -> int:
        """Append the target's token, from its logits [1, V]."""
        scores = self._processor(self.ids, logits) if self._processor else logits  # type: ignore[arg-type]
        token = scores.argmax(dim=-1)
        self.ids = torch.cat([self.ids, token[:, None]], dim=1)
        if self._streamer is not None:
            self._streamer.put(token.cpu())
        self.ended = bool(self._criteria(self.ids, scores))  # pyright: ignore[reportArgumentType]
        return int(token)

    def end(self) -> None:
        if self._streamer is not None:
            self._streamer.end()


def _judge(answer: _Answer, drafted: Tensor, logits: Tensor) -> Round:
    """Extend the answer by the accepted tokens of a draft [1, n] and one more, from logits [1, n + 1, V]."""
    guesses = drafted[0].tolist()
    for place, guess in enumerate(guesses):
        if answer.add(logits[:, place]) != guess:
            return Round(len(guesses), place, place + 1)
        if answer.ended:
            return Round(place + 1, place + 1, place + 1)
    answer.add(logits[:, -1])
    return Round(len(guesses), len(guesses), len(guesses) + 1)


def require_single(ids: Tensor) -> None:
    """Refuse a batch.

    Raises:
        UserError: there are several prompts.
    """
    if len(ids) != 1:
        raise UserError(f"speculative decoding answers one prompt at a time, not {len(ids)}; give them one by one")
